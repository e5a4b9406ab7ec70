"""`python -m experiments` tells of every command, without loading what the commands need."""

import subprocess
import sys
from pathlib import Path

import click

from experiments.__main__ import commands, one_line
from tests.experiments.commands import ROOT, environment
from tests.experiments.runs import command_module

BLOCKED = (
    "import sys, runpy; sys.modules['torch'] = sys.modules['numpy'] = None; sys.argv = ['experiments']\n"
    "runpy.run_module('experiments', run_name='__main__')"
)


def test_every_command_is_listed_with_one_line():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()[2:]}
    files = [p for p in Path(ROOT, "experiments").rglob("*.py") if "\n@click.command(" in p.read_text()]
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for p in files}
    wanted = names - {"experiments"}
    assert set(listed) == wanted and len(wanted) >= 12
    assert all(20 < len(text) <= 140 and text[0].isupper() and text[-1] in ".?)" for text in listed.values()), listed
    assert list(listed) == sorted(listed) == [name for name, _ in commands()]


def test_every_option_says_what_it_does():
    """Three words at least, and none that only means something beside another option's text."""
    for name, _ in commands():
        for option in command_module(name).main.params:
            if isinstance(option, click.Option):
                text = (option.help or "").split("[default")[0]
                assert len(text.split()) >= 3, (name, option.name, text)


def test_a_line_is_the_first_sentence_or_what_stands_before_its_colon():
    assert one_line("One thing. Another.") == "One thing."
    assert one_line("is it\nso? Yes.") == "Is it so?"
    assert one_line("`python -m x.y DIR`: does a thing.") == "Does a thing."
    assert one_line("Short: and long " + "word " * 30) == "Short."
