"""`python -m experiments`: every command listed and explained, and what is settled before torch loads."""

from pathlib import Path

import click
import pytest

from experiments.__main__ import commands, one_line
from tests.experiments.commands import ROOT, python
from tests.experiments.runs import command_module

LISTING = (
    "import sys, runpy; sys.modules['torch'] = sys.modules['numpy'] = None; sys.argv = ['experiments']\n"
    "runpy.run_module('experiments', run_name='__main__')"
)
POLICY = (
    "import os, sys, experiments\n"
    "print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
)


def test_every_command_is_listed_with_one_line():
    done = python("-c", LISTING)
    assert done.returncode == 0, done.stderr
    listed = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[2:])
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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("One thing. Another.", "One thing."),
        ("Is it\nso? Yes.", "Is it so?"),
        ("Short: and long " + "word " * 30, "Short."),
    ],
)
def test_a_line_is_the_first_sentence_or_what_stands_before_its_colon(text, line):
    assert one_line(text) == line


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, "passive None False"),
        ({"OMP_WAIT_POLICY": "active"}, "active None False"),
        ({"GOMP_SPINCOUNT": "10000"}, "None 10000 False"),
    ],
)
def test_waiting_threads_yield_unless_the_user_chose(chosen, expected):
    done = python("-c", POLICY, **{"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": None, **chosen})
    assert done.stdout.strip() == expected, done.stderr
