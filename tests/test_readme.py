"""The README is followed: its Python block runs and prints what it says, and every command in it is one that exists."""

import importlib.util
import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import click
import pytest
from click.core import ParameterSource

from tests.experiments.runs import command_module

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = r"python -m ((?:experiments|tests\.hf)\.[\w.]+)"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def commands():
    """(module, arguments) of every `python -m` line of the shell blocks, continued lines joined."""
    found = []
    for block in blocks("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.search(MODULES, line)
            if match:
                found.append((match.group(1), shlex.split(line[match.end() :], comments=True)))
    return found


def accepted(module, arguments):
    """Parses the arguments with the module's command, without running it, and returns those that it read.
    click.UsageError where it does not take them."""
    context = command_module(module).main.make_context(module, list(arguments))
    return {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def test_the_library_block_runs_and_prints_what_its_comment_says(monkeypatch):
    (block,) = blocks("python")
    monkeypatch.chdir(ROOT)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, "README.md", "exec"), {})
    wanted = re.search(r"print\(compare.*# (.*)$", block, flags=re.MULTILINE)
    assert wanted is not None and printed.getvalue().splitlines() == [wanted.group(1), "True"]


@pytest.mark.parametrize(("module", "arguments"), commands(), ids=lambda value: str(value)[:60])
def test_every_shell_command_is_accepted_by_its_module(module, arguments):
    read = accepted(module, arguments)
    options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert len(read) >= len(options) and bool(read) == bool(arguments), "every option and argument has its parameter"


def test_an_option_that_does_not_exist_would_be_noticed():
    with pytest.raises(click.UsageError, match="--dtypes"):
        accepted("experiments.matrix", ["--dtypes", "bf16"])


def test_every_module_named_in_the_text_exists():
    named = set(re.findall(r"`(?:python -m )?(experiments(?:\.\w+)+)", README))
    assert named
    for module in named:
        assert importlib.util.find_spec(module) is not None, module


def test_every_file_named_in_the_text_exists():
    named = set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|json|jsonl|toml))`", README))
    assert named
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []
