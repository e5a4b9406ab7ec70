"""Makes a multi-branch checkpoint out of a public Qwen2.5 directory.

Writes config.json, model.safetensors, tokenizer.json, role_embedding.safetensors, contract.json and SHA256SUMS. Role
rows are zero by default, which leaves the base's function unchanged. The twelve delimiters start as copies of
<|im_start|> and <|im_end|>, so that blocks can close. They take spare rows of a padded vocabulary; if there are too
few, embedding and head grow. Weights are copied through a 16 MiB buffer and never held in memory.

Under a causal mask every hidden state, key and value has the base's bits. The logits have them too where the machine's
product keeps a column's bits when the head grows: it did with 151,936 rows, and did not in FP32 with 259 rows.

    python -m experiments.adapt --base Qwen2.5-0.5B-Instruct --out adapted
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from decode.contract import Contract, contract_document, delimiter_names
from experiments.adapt.roles import converted_table, neutral_table, normal_table, write_table
from experiments.adapt.stream import Planned, plan_bytes, with_rows, write_stream
from experiments.adapt.tokens import Delimiters, add_delimiters
from experiments.run.exits import DONE, run_command
from experiments.run.ledger import sha256_file
from minimodel.checkpoint import CONFIG, CONTRACT, ROLE_TABLE, SINGLE, TOKENIZER, Checkpoint, open_checkpoint
from minimodel.errors import InputError, refuse
from minimodel.files import inside, read_json_object
from minimodel.safetensors_file import FILE_DTYPES

SUMS = "SHA256SUMS"
# The opening delimiter copies <|im_start|>, so the prompt block reads like a chat turn of the base.
TEMPLATE = "user\n{question}\n\n{choices}\n\nThink it through, then answer with the letter of the right choice."
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Choices:
    """The options that decide the checkpoint's content."""

    role_table: Path | None  # a file to convert
    role_std: float  # 0: neutral rows
    role_seed: int
    open_like: str
    close_like: str
    template: str
    caps: dict[str, int]


def adapt(base: Path, out: Path, choices: Choices) -> list[str]:
    """Writes the adapted checkpoint and returns lines that describe it. InputError where the input does not fit.

    The directory gets its name once it is complete.
    """
    out = out.resolve()
    if Path.cwd().is_relative_to(out):
        raise InputError(f"{out}: expected a new directory, found the working directory or one above it")
    checkpoint = open_checkpoint(base, stock=True)
    _refuse_unknown_dtypes(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: expected a new or empty directory, found something in it")
    contract = _contract(base, choices)
    names = delimiter_names(contract, str(base / CONTRACT))
    likes = choices.open_like, choices.close_like
    added = add_delimiters(inside(base, TOKENIZER), checkpoint.config.vocab_size, names, likes)
    dtype = checkpoint.tensors[EMBEDDINGS[0]].dtype
    table = _role_table(choices, checkpoint.config.hidden_size, dtype)
    plan = _plan(checkpoint, added)
    part = out.with_name(out.name + ".part")
    _make_room(part, plan_bytes(plan))
    try:
        config = {**read_json_object(inside(base, CONFIG)), "vocab_size": added.rows}
        _write_json(part / CONFIG, config)
        added.tokenizer.save(str(part / TOKENIZER))
        write_table(part / ROLE_TABLE, table)
        _write_json(part / CONTRACT, contract)
        Contract.load(part)  # a bad option is refused before the long copy
        sums = {SINGLE: write_stream(part / SINGLE, plan)}
        sums |= {name: sha256_file(part / name) for name in (CONFIG, TOKENIZER, ROLE_TABLE, CONTRACT)}
        (part / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))
        checkpoint.require_unchanged()
        open_checkpoint(part)
        if out.exists():
            out.rmdir()
        os.replace(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return [*_said(checkpoint, added, choices, dtype), *(f"{sums[name]}  {name}" for name in sorted(sums))]


def _plan(checkpoint: Checkpoint, added: Delimiters) -> dict[str, Planned]:
    """Returns every tensor of the new file, in the base's order. Only embedding and head change."""
    return {
        name: with_rows(entry, added.rows, added.sources) if name in EMBEDDINGS else Planned.copied(entry)
        for name, entry in checkpoint.tensors.items()
    }


def _role_table(choices: Choices, hidden_size: int, dtype: str) -> Any:
    if choices.role_table is not None:
        return converted_table(choices.role_table, hidden_size)
    if choices.role_std:
        return normal_table(hidden_size, dtype, choices.role_std, choices.role_seed)
    return neutral_table(hidden_size, dtype)


def _contract(base: Path, choices: Choices) -> dict[str, Any]:
    """Returns the base's contract.json where a role table is converted, else a new one."""
    path = inside(base, CONTRACT)
    if path.exists():
        if choices.role_table is None:
            raise InputError(f"{base}: expected a base without {CONTRACT}, found an adapted checkpoint")
        return read_json_object(path)
    return contract_document(choices.caps, choices.template)


def _refuse_unknown_dtypes(checkpoint: Checkpoint) -> None:
    for name, entry in checkpoint.tensors.items():
        if entry.dtype not in FILE_DTYPES:
            raise refuse(f"{entry.path}: dtype of {name}", "BF16, F16, F32 or F64", entry.dtype)


def _make_room(part: Path, size: int) -> None:
    if part.exists():
        raise InputError(f"{part}: expected nothing there, found the rest of an interrupted command; delete it")
    part.mkdir(parents=True)
    free = shutil.disk_usage(part).free
    if free < size:
        part.rmdir()
        raise InputError(f"{part.parent}: expected {size} bytes of free space, found {free}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=True) + "\n", encoding="ascii")


def _said(checkpoint: Checkpoint, added: Delimiters, choices: Choices, dtype: str) -> list[str]:
    before = checkpoint.config.vocab_size
    if added.rows > before:
        head = "embedding and head" if EMBEDDINGS[1] in checkpoint.tensors else "the embedding, which is also the head,"
        grown = f"{head} grew from {before} to {added.rows} rows"
    else:
        grown = f"spare rows were used, {before} as before"
    kept = f"; already there and kept: {' '.join(added.kept)}" if added.kept else ""
    source = "converted" if choices.role_table else f"normal, std {choices.role_std:g}, seed {choices.role_seed}"
    if not choices.role_table and not choices.role_std:
        source = "zeros (negative, so that adding one changes no bit)"
    ids = sorted(added.ids.values())
    return [
        f"delimiters: ids {ids[0]} to {ids[-1]}; {grown}{kept}",
        f"role table: {source}, {dtype}",
        *(f"note: {line}" for line in checkpoint.warnings),
    ]


@click.command(help=__doc__)
@click.option(
    "--base", required=True, type=click.Path(path_type=Path), metavar="DIR", help="A public Qwen2.5 directory."
)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="A new directory.")
@click.option(
    "--role-table",
    type=click.Path(path_type=Path),
    default=None,
    metavar="FILE",
    help="Convert this table (.pt, read with weights-only loading, or .safetensors) instead of making one.",
)
@click.option(
    "--role-std", default=0.0, show_default=True, type=click.FloatRange(0, 1e6), help="Normal role rows; 0: zeros."
)
@click.option("--role-seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of normal role rows.")
@click.option("--open-like", default="<|im_start|>", show_default=True, help="Token whose rows the opening ones copy.")
@click.option("--close-like", default="<|im_end|>", show_default=True, help="Token whose rows the closing ones copy.")
@click.option(
    "--template", default=TEMPLATE, help="Prompt template with {question} and {choices}. [default: a user turn]"
)
@click.option(
    "--branch-cap",
    default=768,
    show_default=True,
    type=click.IntRange(1, 1 << 20),
    help="Content tokens that each branch may hold.",
)
@click.option(
    "--merge-cap",
    default=512,
    show_default=True,
    type=click.IntRange(1, 1 << 20),
    help="Content tokens that merge may hold.",
)
@click.option(
    "--answer-cap",
    default=64,
    show_default=True,
    type=click.IntRange(1, 1 << 20),
    help="Content tokens that the answer may hold.",
)
def main(
    base: Path,
    out: Path,
    role_table: Path | None,
    role_std: float,
    role_seed: int,
    open_like: str,
    close_like: str,
    template: str,
    branch_cap: int,
    merge_cap: int,
    answer_cap: int,
) -> None:
    def body() -> int:
        if role_table is not None and role_std:
            raise InputError("--role-table: expected no --role-std beside it, found one")
        caps = {"branch": branch_cap, "merge": merge_cap, "answer": answer_cap}
        for line in adapt(base, out, Choices(role_table, role_std, role_seed, open_like, close_like, template, caps)):
            click.echo(line)
        click.echo(f"adapted: {out}")
        return DONE

    run_command(body, "experiments.adapt", resumes=False)


if __name__ == "__main__":
    main()
