"""Who may import whom, and who is tested: read from the source of every module, and checked by importing them."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {  # of the project's own packages
    "minimodel": {"minimodel"},
    "decode": {"decode", "minimodel"},
    "cache": {"cache", "decode", "minimodel"},
    "stats": {"stats"},
    "experiments": {"experiments", "stats", "cache", "decode", "minimodel"},
}
NO_TOOLS = {"transformers", "tests", "click", "scipy", "matplotlib"}
NOT_FOR = {  # libraries that a package must do without
    **{"minimodel": NO_TOOLS, "decode": NO_TOOLS, "cache": NO_TOOLS, "experiments": {"transformers", "tests"}},
    "stats": {"transformers", "tests", "click", "torch", "safetensors", "tokenizers"},
}


def imported(source, module=""):
    """Every module named by an import anywhere in the source, relative ones resolved; also import_module("name")."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def violations(source, package):
    """Top-level packages that a module of `package` imports and may not."""
    tops = {name.split(".")[0] for name in imported(source, f"{package}.x")}
    return (tops & set(MAY_IMPORT)) - MAY_IMPORT[package] | tops & NOT_FOR[package]


def modules(folder):
    """Dotted name to path of every module under a folder; a package stands under its own name."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


PRODUCT = {name: path for package in MAY_IMPORT for name, path in modules(package).items()}
SOURCES = {name: path.read_text(encoding="utf-8") for name, path in {**PRODUCT, **modules("tests")}.items()}


def test_a_module_imports_only_what_its_package_may():
    found = {name: violations(SOURCES[name], name.split(".")[0]) for name in PRODUCT}
    assert len(found) > 30 and {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("source", "package", "found"),
    [
        ("import decode.state", "minimodel", {"decode"}),
        ("def f():\n    from cache import kv", "decode", {"cache"}),
        ("from experiments import matrix as m", "cache", {"experiments"}),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", "stats", {"torch"}),
        ("from minimodel.errors import InputError", "stats", {"minimodel"}),
        ("import importlib\nimportlib.import_module('transformers.models')", "experiments", {"transformers"}),
        ("__import__('tests.tiny')", "experiments", {"tests"}),
        ("from . import y\nfrom .z import w\nimport torch, math", "minimodel", set()),
        ("from minimodel import errors\n# import cache\ntext = 'import cache'", "decode", set()),
    ],
)
def test_the_check_itself_sees_violations(source, package, found):
    assert violations(source, package) == found


def test_every_folder_of_source_is_a_package_or_tests():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py") if not path.parent.name.startswith(".")}
    assert folders == {*MAY_IMPORT, "tests"}


def test_only_the_transformers_tests_import_transformers():
    users = {name for name in SOURCES if any(u.split(".")[0] == "transformers" for u in imported(SOURCES[name], name))}
    assert users and all(name.startswith("tests.hf") for name in users)


def graph(names):
    """Module to the modules of ours that it imports: `from a.b import c` is a.b.c where that is a module, else a.b."""
    edges = {}
    for name, path in names.items():
        found = imported(SOURCES[name], f"{name}.__init__" if path.name == "__init__.py" else name)
        edges[name] = {used if used in names else used.rpartition(".")[0] for used in found} & set(names)
    return edges


def test_no_module_imports_itself_in_a_circle():
    edges = graph(PRODUCT)
    assert sum(map(len, edges.values())) > 100
    list(TopologicalSorter(edges).static_order())
    with pytest.raises(CycleError):  # the control
        list(TopologicalSorter({**edges, "minimodel.errors": {"cache.build"}}).static_order())


def test_nothing_imports_a_command():
    """What two commands share stands in another module, so that each command can change alone."""
    commands = {name for name in PRODUCT if re.search(r"^def main\(", SOURCES[name], flags=re.MULTILINE)}
    assert len(commands) > 15 and {"experiments.matrix", "experiments.causes.__main__"} <= commands
    assert {name: used & commands for name, used in graph(PRODUCT).items() if used & commands} == {}
    # the control: a test that imports one
    name = "tests.experiments.test_bridge"
    assert graph({**PRODUCT, name: modules("tests")[name]})[name] & commands


def untested(tests):
    """Modules that no test imports, and that belong to no command which tests call and no folder that has tests."""
    edges = graph({**PRODUCT, **tests})
    used = {name for test in tests for name in edges[test]}
    named = set(re.findall(r'[".](\w+)"', "".join(SOURCES[test] for test in tests)))
    named |= {part for test in tests for part in test.split(".")[:-1]}
    places = {name: {*name.split(".")[1:]} - {"run"} for name in PRODUCT if name not in used}
    return {name for name, place in places.items() if place and not place & named}


def test_a_module_is_imported_by_a_test_or_belongs_to_a_command_or_folder_that_has_tests():
    """The rule in place of a test file per module."""
    tests = modules("tests")
    assert untested(tests) == set()
    readers = [name for name in tests if "safetensors_file" in SOURCES[name]]
    others = {name: path for name, path in tests.items() if name not in readers}
    assert len(readers) > 2 and untested(others) == {"minimodel.safetensors_file"}, "the control"


def stem(name):
    """Returns a name without its ending: cause, causes and causing are one stem."""
    return re.sub(r"(n?ing|er|es|e|s)$", "", name)


def test_no_two_packages_or_commands_have_one_stem():
    assert stem("causes") == stem("causing") == stem("cause") and stem("plan") == stem("planning")
    names = [path.stem for path in (ROOT / "experiments").iterdir() if path.is_dir() or path.suffix == ".py"]
    names = [name for name in names if not name.startswith("_")]
    assert len(names) > 15 and len({stem(name) for name in names}) == len(names)


COMPILER = {"torch._inductor", "scipy.stats"}  # they would double the start of a command; imported where they are used


@pytest.mark.parametrize(
    ("package", "after", "wanted", "unwanted"),
    [
        (
            "",
            "minimodel.NumericContract('bf16').apply()",
            {"torch", "safetensors", "tokenizers", *MAY_IMPORT},
            {"transformers", "tests", "huggingface_hub", *COMPILER},
        ),
        ("stats", "", {"stats"}, {"torch", "transformers", "minimodel", "decode", "cache", "experiments"}),
    ],
)
def test_importing_loads_no_transformers_no_compiler_and_for_the_statistics_no_torch(package, after, wanted, unwanted):
    names = [name for name in PRODUCT if name.startswith(package) and not name.endswith("__main__")]
    script = f"import sys, {', '.join(names)}\n{after}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert wanted <= loaded and not loaded & unwanted
