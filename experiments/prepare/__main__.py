"""Freezes questions into tasks: a GPQA-style CSV or any JSON lines, choices in an order by hash, a manifest.

Without SOURCE, 24 original science questions of this project. A CSV names its columns as GPQA does (Question, Correct
Answer, Incorrect Answer 1 to 3, Record ID); JSON lines hold id, question, correct and incorrect, or id, question,
choices and answer; options name other fields. An answer is a letter, an index from 0 or a text of the choices; a row
may say answer_index or answer_text instead, and must where these readings differ. Without choices it is a number. The
order of a row's choices follows from a hash of the row's id and the choice's text alone, so that adding, dropping or
moving rows moves no letter. Nothing but question and choices can reach a prompt.

Writes DIR/tasks.jsonl (the holdout, or all rows), DIR/rest.jsonl (what a holdout leaves) and DIR/manifest.json.

    python -m experiments.prepare gpqa_main.csv --holdout 200 --seed 20260728 --out tasks/gpqa
"""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import click

from experiments.prepare.questions import freeze, held_out, read_questions, task_line
from experiments.run.exits import DONE, run_command
from experiments.run.ledger import canonical, sha256_file, sha256_text, write_whole
from experiments.run.tasks import parse_tasks
from minimodel.errors import InputError

BUNDLED = Path(__file__).resolve().parent / "science.jsonl"
SCHEMA = "stage-replay-tasks-v1"
TASKS, REST, MANIFEST = "tasks.jsonl", "rest.jsonl", "manifest.json"


def prepare(source: Path, out: Path, fields: Any, holdout: int | None, seed: int, keep_order: bool) -> dict[str, Any]:
    """Writes the three files and returns the manifest. InputError lists every offending row; nothing is skipped."""
    records, used = read_questions(source, fields)
    frozen = freeze(records, keep_order, source)
    if holdout is not None and holdout > len(frozen):
        raise InputError(f"{source}: expected at least {holdout} rows to hold out, found {len(frozen)}")
    ids = [task.id for task in frozen]
    chosen = held_out(ids, holdout, seed)
    lines, rest = ("".join(task_line(task) for task in frozen if (task.id in chosen) == held) for held in (True, False))
    tasks = parse_tasks(lines.encode("ascii"), source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: expected a new or empty directory, found something in it")
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / TASKS, lines)
    write_whole(out / REST, rest)
    letters = Counter(task.answer if task.choices else "free" for task in tasks)
    manifest = {
        "schema": SCHEMA,
        "source": source.name,
        "source_sha256": sha256_file(source),
        "fields": used,
        "rows": len(frozen),
        "tasks": len(tasks),
        "seed": seed if holdout is not None else None,
        "choice_order": "as in the source" if keep_order else "SHA-256 of row id and choice text",
        "answers": dict(sorted(letters.items())),
        "ids_sha256": sha256_text(canonical(ids)),
        "tasks_sha256": sha256_file(out / TASKS),
        "rest_sha256": sha256_file(out / REST),
    }
    write_whole(out / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=True) + "\n")
    return manifest


field = partial(click.option, default="", metavar="FIELD")


@click.command(help=__doc__)
@click.argument("source", required=False, default=BUNDLED, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="A new directory.")
@click.option("--holdout", type=click.IntRange(min=1), default=None, metavar="N", help="Keep N rows, chosen by seed.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the holdout.")
@field("--id", help="The row's id. [default: Record ID or id]")
@field("--question", help="The question's text. [default: Question or question]")
@field("--correct", help="The right choice's text. [default: as above]")
@field("--incorrect", multiple=True, default=(), help="A wrong choice, or a list of them; may be repeated.")
@field("--choices", help="All choices as a list. [default: choices]")
@field("--answer", help="With choices: letter, index from 0, or text; else a number.")
@click.option("--keep-order", is_flag=True, help="Leave choices in the source's order (of --choices alone).")
def main(source: Path, out: Path, holdout: int | None, seed: int, keep_order: bool, **given: Any) -> None:
    def body() -> int:
        manifest = prepare(source, out, given, holdout, seed, keep_order)
        right = ", ".join(f"{letter} {count}" for letter, count in manifest["answers"].items())
        click.echo(f"{manifest['tasks']} of {manifest['rows']} rows frozen; right answers: {right}")
        click.echo(f"{manifest['tasks_sha256']}  {TASKS}")
        click.echo(f"tasks: {out / TASKS}")
        return DONE

    run_command(body, "experiments.prepare", resumes=False)


if __name__ == "__main__":
    main()
