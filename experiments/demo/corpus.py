"""Training rows: token ids, raw roles and loss weights of all six blocks, in batches given by (seed, step) alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from decode.contract import CLOSE, OPEN
from experiments.demo import wordings as w
from experiments.demo.contract import fill_template
from experiments.demo.problems import (
    BRANCHES,
    MOST_EVENTS,
    MOST_FILLERS,
    Piece,
    Problem,
    answer_pieces,
    branch_pieces,
    draw_problem,
    merge_pieces,
)

SLIP_SHARE = 0.35  # rows in which at least one branch carries a planted slip, so that merge meets real disagreement
LENGTH_MULTIPLE = 32  # the CPU library prepares a kernel for every new shape
POOL_BATCHES = 16  # batches sorted by length together
MERGE_QUOTES = 4  # the first numbers in merge: three results and the one it keeps
COPIED = frozenset(w.NAMES + w.OBJECTS)
VERBS = frozenset(w.GAIN_VERBS + w.LOSS_VERBS)
VERDICTS = frozenset(w.OTHER + w.SAME)


@dataclass(frozen=True)
class Row:
    """One training row: ids [T], raw roles [T], and weights [T] of each token as a *target*."""

    ids: tuple[int, ...]
    roles: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Batch:
    """Right-padded rows: ids and roles int64 [B,T], weights float32 [B,T], valid bool [B,T]."""

    ids: torch.Tensor
    roles: torch.Tensor
    weights: torch.Tensor
    valid: torch.Tensor


def target_weight(word: str, before: str, role: int, numbers: int) -> float:
    """The loss weight of one target, from its text, the token before, its role, and the count of numbers before it.

    What a small model learns late weighs most: copying, the event that comes next out of order, the results that merge
    quotes, whether a choice fits.
    """
    bare = word.strip()
    if role == 0:
        return 1.0 if bare in COPIED else 0.0
    if bare.isdigit():
        return 6.0 if role == 4 and numbers < MERGE_QUOTES else 5.0 if role == 3 else 4.0 if role == 2 else 3.0
    if bare in COPIED:
        return 8.0 if role < 4 else 3.0
    if bare in w.LETTERS and word.startswith(" "):
        return 6.0
    if role == 4 and bare in VERDICTS:
        return 8.0
    if role < 4 and bare in VERBS:
        return 6.0 if role == 1 else 9.0
    return 2.0 if before in (".", "\n") else 1.0


def encode_block(tokenizer: Tokenizer, pieces: Sequence[Piece], role: int) -> Row:
    """One block with its delimiters. The opening one, forced in decoding, weighs nothing; so do planted slips."""
    encoding = tokenizer.encode("".join(piece.text for piece in pieces), add_special_tokens=False)
    planted, at = [], 0
    for piece in pieces:
        planted += [(at, at + len(piece.text))] if piece.planted else []
        at += len(piece.text)
    weights, numbers, before = [0.0], 0, ""
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        word = tokenizer.decode([token])
        hidden = any(start < last and end > first for first, last in planted)
        weights.append(0.0 if hidden else target_weight(word, before, role, numbers))
        numbers, before = numbers + word.strip().isdigit(), word
    opening, closing = (tokenizer.encode(name, add_special_tokens=False).ids for name in (OPEN[role], CLOSE[role]))
    ids = (*opening, *encoding.ids, *closing)
    return Row(ids, (role,) * len(ids), (*weights, 0.0 if role == 0 else 2.0))


def training_row(rng: random.Random, tokenizer: Tokenizer, problem: Problem) -> Row:
    """All six blocks of one problem; in about a third of the rows one to three branches slip."""
    slips: set[int] = set()
    if rng.random() < SLIP_SHARE:
        slips = set(rng.sample(range(3), rng.choices((1, 2, 3), (60, 25, 15))[0]))
    blocks, results = [[Piece(fill_template(problem.question, problem.choices))]], []
    for index, branch in enumerate(BRANCHES):
        pieces, result = branch_pieces(rng, problem, branch, slip=index in slips)
        blocks.append(pieces)
        results.append(result)
    pieces, letter = merge_pieces(rng, problem, (results[0], results[1], results[2]))
    blocks += [pieces, answer_pieces(rng, letter)]
    rows = [encode_block(tokenizer, block, role) for role, block in enumerate(blocks)]
    return Row(
        tuple(token for row in rows for token in row.ids),
        tuple(role for row in rows for role in row.roles),
        tuple(weight for row in rows for weight in row.weights),
    )


def curriculum(progress: float) -> tuple[int, int]:
    """The most events and fillers at `progress` in [0, 1]: 3 and 1 at first, one more of each every 8 % of the run."""
    grown = int(progress / 0.08)
    return min(MOST_EVENTS, 3 + grown), min(MOST_FILLERS, 1 + grown)


def training_pool(seed: int, pool: int, batch_size: int, progress: float, tokenizer: Tokenizer) -> list[list[Row]]:
    """The `pool`-th group of `POOL_BATCHES` batches: rows sorted by length, cut into batches, the batches shuffled."""
    rng = random.Random(f"corpus {seed} {pool}")
    rows = []
    for _ in range(batch_size * POOL_BATCHES):
        problem = draw_problem(rng, *curriculum(progress))
        rows.append(training_row(rng, tokenizer, problem))
    rows.sort(key=lambda row: len(row.ids))
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    rng.shuffle(batches)
    return batches


def collate(rows: Sequence[Row]) -> Batch:
    """Right-pads rows to the longest, rounded up so that shapes repeat; padding has role and weight 0, valid False."""
    length = -(-max(len(row.ids) for row in rows) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    pad = [length - len(row.ids) for row in rows]
    return Batch(
        torch.tensor([row.ids + (0,) * extra for row, extra in zip(rows, pad, strict=True)]),
        torch.tensor([row.roles + (0,) * extra for row, extra in zip(rows, pad, strict=True)]),
        torch.tensor([row.weights + (0.0,) * extra for row, extra in zip(rows, pad, strict=True)]),
        torch.tensor([[True] * len(row.ids) + [False] * extra for row, extra in zip(rows, pad, strict=True)]),
    )


def held_out_tasks(seed: int, count: int) -> list[dict[str, object]]:
    """`count` tasks from the held-out sixteenth of problems, no two with the same arithmetic, in the order drawn."""
    rng = random.Random(f"tasks {seed}")
    tasks: list[dict[str, object]] = []
    seen: set[tuple[int, tuple[int, ...]]] = set()
    while len(tasks) < count:
        problem = draw_problem(rng, holdout=True)
        if (problem.start, problem.amounts) not in seen:
            seen.add((problem.start, problem.amounts))
            row = {"id": f"demo-{len(tasks):03d}", "question": problem.question, "choices": list(problem.choices)}
            tasks.append({**row, "answer": problem.answer})
    return tasks
