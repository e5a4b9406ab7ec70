"""Who may import whom: read from the source of every module, and proven by importing them."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("minimodel", "decode", "cache", "stats", "experiments")
MAY_IMPORT = {
    "minimodel": {"minimodel"},
    "decode": {"decode", "minimodel"},
    "cache": {"cache", "decode", "minimodel"},
    "stats": {"stats"},
    "experiments": {"experiments", "stats", "cache", "decode", "minimodel"},
}
NOT_FOR = {  # libraries that a room must do without
    "minimodel": {"transformers", "tests", "click", "scipy", "matplotlib"},
    "decode": {"transformers", "tests", "click", "scipy", "matplotlib"},
    "cache": {"transformers", "tests", "click", "scipy", "matplotlib"},
    "stats": {"transformers", "tests", "click", "torch", "safetensors", "tokenizers"},
    "experiments": {"transformers", "tests"},
}


def imported(source: str, module: str = "") -> Iterator[str]:
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


def violations(source: str, room: str) -> set[str]:
    """Top-level packages that a module of `room` imports and may not."""
    tops = {name.split(".")[0] for name in imported(source, f"{room}.x")}
    return (tops & set(ROOMS)) - MAY_IMPORT[room] | tops & NOT_FOR[room]


def modules(folder: str) -> dict[str, Path]:
    """Dotted name to path of every module under a folder; a package stands under its own name."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


PRODUCT = {name: path for room in ROOMS for name, path in modules(room).items()}


@pytest.mark.parametrize("name", PRODUCT)
def test_a_module_imports_only_what_its_room_may(name):
    assert violations(PRODUCT[name].read_text(encoding="utf-8"), name.split(".")[0]) == set()


@pytest.mark.parametrize(
    ("source", "room", "found"),
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
def test_the_check_itself_sees_violations(source, room, found):
    assert violations(source, room) == found


def test_every_folder_of_source_is_a_room_or_a_test():
    folders = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/**/*.py")}
    folders = {folder for folder in folders if not folder.startswith(".") and (ROOT / folder / "__init__.py").exists()}
    assert folders == {*ROOMS, "tests"}
    assert len(PRODUCT) > 30


def test_only_the_transformers_tests_import_transformers():
    users = {
        name
        for name, path in {**PRODUCT, **modules("tests")}.items()
        if any(used.split(".")[0] == "transformers" for used in imported(path.read_text(encoding="utf-8"), name))
    }
    assert users and all(name.startswith("tests.hf") for name in users)


def graph(names: dict[str, Path]) -> dict[str, set[str]]:
    """Module to the modules of ours that it imports: `from a.b import c` is a.b.c where that is a module, else a.b."""
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        module = f"{name}.__init__" if path.name == "__init__.py" else name
        edges[name] = set()
        for used in imported(path.read_text(encoding="utf-8"), module):
            target = used if used in names else used.rpartition(".")[0]
            if target in names:
                edges[name].add(target)
    return edges


def test_no_module_imports_itself_in_a_circle():
    edges = graph(PRODUCT)
    assert sum(map(len, edges.values())) > 100
    list(TopologicalSorter(edges).static_order())
    with pytest.raises(CycleError):  # the control
        list(TopologicalSorter({**edges, "minimodel.errors": {"cache.build"}}).static_order())


def is_command(path: Path) -> bool:
    """Returns whether a module is a command: it defines `main`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)


def test_nothing_imports_a_command():
    """What two commands share stands in a module of its own, so that each command can change alone."""
    commands = {name for name, path in PRODUCT.items() if is_command(path)}
    edges = graph(PRODUCT)
    assert len(commands) > 15 and {"experiments.matrix", "experiments.causes.__main__"} <= commands
    assert {name: used & commands for name, used in edges.items() if used & commands} == {}
    # the control: a test that imports one
    name = "tests.experiments.test_bridge"
    assert graph({**PRODUCT, name: modules("tests")[name]})[name] & commands


def stem(name: str) -> str:
    """Returns a name without its ending: cause, causes and causing are one stem."""
    return re.sub(r"(n?ing|er|es|e|s)$", "", name)


def test_no_two_packages_or_commands_have_one_stem():
    assert stem("causes") == stem("causing") == stem("cause") and stem("plan") == stem("planning")
    names = [path.stem for path in (ROOT / "experiments").iterdir() if path.is_dir() or path.suffix == ".py"]
    names = [name for name in names if not name.startswith("_")]
    assert len(names) > 15 and len({stem(name) for name in names}) == len(names)


def loaded_after(statement: str) -> set[str]:
    """Modules and packages in a fresh interpreter after a statement."""
    script = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_every_product_module_loads_no_transformers():
    """Nor what would double the start of a command, until it is used: torch's compiler and scipy's statistics."""
    names = [name for name in PRODUCT if not name.endswith("__main__")]
    loaded = loaded_after(f"import {', '.join(names)}\nminimodel.NumericContract('bf16').apply()")
    assert {"torch", "safetensors", "tokenizers", *ROOMS} <= loaded
    assert not loaded & {"transformers", "tests", "huggingface_hub", "torch._inductor", "scipy.stats"}


def test_importing_the_statistics_loads_no_torch():
    names = [name for name in PRODUCT if name.split(".")[0] == "stats"]
    loaded = loaded_after("import " + ", ".join(names))
    assert "stats" in loaded and not loaded & {"torch", "transformers", "minimodel", "decode", "cache", "experiments"}
