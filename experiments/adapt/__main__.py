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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from decode.contract import Contract, contract_document, delimiter_names
from experiments.adapt.added import Delimiters, add_delimiters, converted_table, made_table
from experiments.adapt.stream import Planned, plan_bytes, with_rows, write_stream
from experiments.run.exits import DONE, as_command
from experiments.run.ledger import sha256_file
from experiments.run.options import PATH, FiniteRange
from minimodel.checkpoint import CONFIG, CONTRACT, ROLE_TABLE, SINGLE, TOKENIZER, Checkpoint, open_checkpoint
from minimodel.errors import InputError
from minimodel.files import inside, read_json_object
from minimodel.safetensors_file import save_tensors

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
    branch_cap: int
    merge_cap: int
    answer_cap: int

    def contract(self, base: Path) -> dict[str, Any]:
        """Returns the base's contract.json where a role table is converted, else a new one."""
        path = inside(base, CONTRACT)
        if not path.exists():
            caps = {"branch": self.branch_cap, "merge": self.merge_cap, "answer": self.answer_cap}
            return contract_document(caps, self.template)
        if self.role_table is None:
            raise InputError(f"{base}: expected a base without {CONTRACT}, found an adapted checkpoint")
        return read_json_object(path)


def adapt(base: Path, out: Path, choices: Choices) -> list[str]:
    """Writes the adapted checkpoint and returns lines that describe it. InputError where the input does not fit."""
    out = out.resolve()
    if Path.cwd().is_relative_to(out):
        raise InputError(f"{out}: expected a new directory, found the working directory or one above it")
    checkpoint = open_checkpoint(base, stock=True)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: expected a new or empty directory, found something in it")
    contract, before, width = choices.contract(base), checkpoint.config.vocab_size, checkpoint.config.hidden_size
    names = delimiter_names(contract, str(base / CONTRACT))
    added = add_delimiters(inside(base, TOKENIZER), before, names, (choices.open_like, choices.close_like))
    if choices.role_table is not None:
        table = converted_table(choices.role_table, width)
    else:
        table = made_table(width, checkpoint.tensors[EMBEDDINGS[0]].dtype, choices.role_std, choices.role_seed)
    plan = {  # every tensor of the new file, in the base's order
        name: with_rows(entry, added.rows, added.sources) if name in EMBEDDINGS else Planned.copied(entry)
        for name, entry in checkpoint.tensors.items()
    }
    with replacing(out, plan_bytes(plan)) as part:
        config = {**read_json_object(inside(base, CONFIG)), "vocab_size": added.rows}
        _write_json(part / CONFIG, config)
        (part / TOKENIZER).write_text(added.tokenizer.to_str(pretty=True), encoding="utf-8")
        save_tensors(part / ROLE_TABLE, {"weight": table.contiguous()}, {"format": "pt"})
        _write_json(part / CONTRACT, contract)
        Contract.load(part)  # a bad option is refused before the long copy
        sums = {SINGLE: write_stream(part / SINGLE, plan)}
        sums |= {name: sha256_file(part / name) for name in (CONFIG, TOKENIZER, ROLE_TABLE, CONTRACT)}
        lines = [f"{sums[name]}  {name}" for name in sorted(sums)]
        (part / SUMS).write_text("".join(f"{line}\n" for line in lines))
        checkpoint.require_unchanged()
        open_checkpoint(part)
    return [*_described(checkpoint, added, choices), *lines]


@contextmanager
def replacing(out: Path, size: int) -> Iterator[Path]:
    """Yields a new directory beside `out`, which gets its name once it is complete and is removed after an error.

    InputError unless its file system has `size` bytes free.
    """
    part = out.with_name(out.name + ".part")
    if part.exists():
        raise InputError(f"{part}: expected nothing there, found the rest of an interrupted command; delete it")
    part.mkdir(parents=True)
    try:
        free = shutil.disk_usage(part).free
        if free < size:
            raise InputError(f"{part.parent}: expected {size} bytes of free space, found {free}")
        yield part
        if out.exists():
            out.rmdir()
        os.replace(part, out)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):  # a failed write does not name its file
            raise OSError(error.errno, error.strerror, error.filename or str(part)) from None
        raise


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=True) + "\n", encoding="ascii")


def _described(checkpoint: Checkpoint, added: Delimiters, choices: Choices) -> list[str]:
    before, grown = checkpoint.config.vocab_size, f"spare rows were used, {checkpoint.config.vocab_size} as before"
    if added.rows > before:
        head = "embedding and head" if EMBEDDINGS[1] in checkpoint.tensors else "the embedding, which is also the head,"
        grown = f"{head} grew from {before} to {added.rows} rows"
    kept = f"; already there and kept: {' '.join(added.kept)}" if added.kept else ""
    source = "zeros (negative, so that adding one changes no bit)"
    if choices.role_table or choices.role_std:
        source = "converted" if choices.role_table else f"normal, std {choices.role_std:g}, seed {choices.role_seed}"
    ids = added.ids.values()
    return [
        f"delimiters: ids {min(ids)} to {max(ids)}; {grown}{kept}",
        f"role table: {source}, {checkpoint.tensors[EMBEDDINGS[0]].dtype}",
        *(f"note: {line}" for line in checkpoint.warnings),
    ]


path_option = partial(click.option, type=PATH, default=None)
shown_option = partial(click.option, show_default=True)
cap_option = partial(shown_option, type=click.IntRange(1, 1 << 20))


@click.command(help=__doc__)
@path_option("--base", required=True, metavar="DIR", help="A public Qwen2.5 directory.")
@path_option("--out", required=True, metavar="DIR", help="A new directory.")
@path_option(
    "--role-table",
    metavar="FILE",
    help="Convert this table (.pt, read with weights-only loading, or .safetensors) instead of making one.",
)
@shown_option("--role-std", default=0.0, type=FiniteRange(0, 1e6), help="Normal role rows; 0: zeros.")
@shown_option("--role-seed", default=0, type=click.IntRange(0), help="Seed of normal role rows.")
@shown_option("--open-like", default="<|im_start|>", help="Token whose rows the opening ones copy.")
@shown_option("--close-like", default="<|im_end|>", help="Token whose rows the closing ones copy.")
@click.option(
    "--template", default=TEMPLATE, help="Prompt template with {question} and {choices}. [default: a user turn]"
)
@cap_option("--branch-cap", default=768, help="Content tokens that each branch may hold.")
@cap_option("--merge-cap", default=512, help="Content tokens that merge may hold.")
@cap_option("--answer-cap", default=64, help="Content tokens that the answer may hold.")
@as_command("experiments.adapt")
def main(base: Path, out: Path, **given: Any) -> int:
    choices = Choices(**given)
    if choices.role_table is not None and choices.role_std:
        raise InputError("--role-table: expected no --role-std beside it, found one")
    for line in (*adapt(base, out, choices), f"adapted: {out}"):
        click.echo(line)
    return DONE


if __name__ == "__main__":
    main()
