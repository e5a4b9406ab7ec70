"""Paired statistics of two sets of per-item results: `python -m experiments.paired LEFT RIGHT`."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import click

from experiments.run.exits import DONE, as_command
from experiments.run.options import PATH
from experiments.run.tasks import read_records
from minimodel.errors import InputError
from stats.endpoints import compare_results
from stats.intervals import NO_INTERVAL, SEED

_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_ABSENT = object()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("left", type=PATH)
@click.argument("right", type=PATH)
@click.option("--id", "id_field", default="id", show_default=True, metavar="FIELD", help="Field that names the item.")
@click.option(
    "--correct",
    "correct_field",
    default="correct",
    show_default=True,
    metavar="FIELD",
    help="Field that says whether the item is correct: true/false, 1/0 or 1.0/0.0.",
)
@click.option("--seed", default=SEED, show_default=True, type=click.IntRange(min=0), help="Seed of the bootstrap.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the lines.")
@as_command("experiments.paired")
def main(left: Path, right: Path, id_field: str, correct_field: str, seed: int, as_json: bool) -> int:
    """Compare the per-item results LEFT and RIGHT, joined by id and never by order.

    A file is JSONL, or CSV where its name ends in .csv. Prints both accuracies with Wilson 95 % intervals, the paired
    difference (right - left) with its bootstrap 95 % interval, the exact two-sided McNemar test, and the ids on which
    only one side is correct. A field may be a path into nested objects ("scores.exact"); ids are compared as text, so
    that a JSON 7 and a CSV 7 are one item.

    Exit code 2: a file is malformed, an id is missing or repeated, or the two sides have different ids.
    """
    sides = [read_labels(path, id_field, correct_field) for path in (left, right)]
    result = compare_results(sides[0], sides[1], seed=seed)
    if as_json:
        click.echo(json.dumps(result, indent=2, allow_nan=False))
    else:
        _print_lines(result)
    return DONE


def read_labels(path: Path, id_field: str, correct_field: str) -> dict[str, bool]:
    """Returns {id: correct} of a JSONL or CSV file. InputError or StatsInputError names a bad line or a repeated id."""
    labels: dict[str, bool] = {}
    for line, record in read_records(path):
        where = f"{path} line {line}"
        if isinstance(record, str):
            raise InputError(f"{where}: {record}")
        item_id = _item_id(where, id_field, _field(record, id_field))
        if item_id in labels:
            raise InputError(f"{path}: expected each id once, found {item_id!r} again")
        labels[item_id] = _label(where, correct_field, _field(record, correct_field))
    return labels


def _field(record: dict[str, Any], name: str) -> object:
    """Returns the value under `name`, or at `name` read as a dotted path; `_ABSENT` where there is none."""
    if name in record:
        return record[name]
    value: object = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _item_id(where: str, field: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise InputError(f"{where}: expected an id (text or a whole number) in field {field!r}, found {_shown(value)}")
    return str(value)


def _label(where: str, field: str, value: object) -> bool:
    label = _LABELS.get(str(value).strip().lower()) if isinstance(value, (bool, int, Decimal, str)) else None
    if label is None:
        raise InputError(f"{where}: expected true/false or 1/0 in field {field!r}, found {_shown(value)}")
    return label


def _shown(value: object) -> str:
    return "nothing" if value is _ABSENT else str(value)[:80] if isinstance(value, Decimal) else repr(value)[:80]


def _print_lines(result: dict[str, Any]) -> None:
    for side in ("left", "right"):
        accuracy = "{count}/{n} = {rate:.2%}, Wilson 95 % [{0:.2%}, {1:.2%}]"
        shown = accuracy.format(*result[side]["wilson_95"], **result[side])
        click.echo(f"{side + ' accuracy':<18} {shown}")
    shown = NO_INTERVAL.get(result["bootstrap_note"], "bootstrap 95 % [{:+.2f}, {:+.2f}]")
    shown = shown.format(*result["bootstrap_95"] or ())
    click.echo(f"{'right - left':<18} {result['difference_points']:+.2f} points, {shown}")
    discordant = f"{result['left_only']} only left, {result['right_only']} only right"
    click.echo(f"{'McNemar exact':<18} p = {result['mcnemar_p']:.6g}; {discordant}")
    for side in ("left", "right"):
        ids = result[f"{side}_only_ids"]
        shown = " ".join(one if one.isprintable() and " " not in one else repr(one) for one in ids)
        click.echo(f"{'only ' + side:<18} {shown or '-'}")


if __name__ == "__main__":
    main(prog_name="python -m experiments.paired")
