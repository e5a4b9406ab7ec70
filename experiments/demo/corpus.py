"""The demo's texts as tokens: contract, tokenizer, training rows in batches given by (seed, step), held-out tasks."""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from decode.contract import CLOSE, OPEN
from decode.text import TextCodec
from experiments.demo import problems
from experiments.demo.problems import PHRASES, Piece, Problem, draw_problem

CAPS = {"branch": 128, "merge": 128, "answer": 16}  # the rest of the contract are the defaults
TEMPLATE = "Problem: {question}\nChoices:\n{choices}"
ORDINARY_TOKENS = 1400
# GPT-2's split into words, numbers and punctuation, with the label of a choice ("A." at a line's start) as one word
WORDS = r"(?<=\n)[A-D]\.(?= )|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SLIP_SHARE = 0.35  # rows in which at least one branch carries a planted slip, so that merge meets real disagreement
LENGTH_MULTIPLE = 32  # the CPU library prepares a kernel for every new shape
POOL_BATCHES = 16  # batches sorted by length together
MERGE_QUOTES = 4  # the first numbers in merge: three results and the one it keeps
COPIED = frozenset(problems.NAMES + PHRASES["objects"])
VERBS = frozenset(PHRASES["gain_verbs"] + PHRASES["loss_verbs"])
VERDICTS = frozenset(PHRASES["other"] + PHRASES["same"])


class Row(NamedTuple):
    """One training row, or one block of it."""

    ids: tuple[int, ...]  # tokens
    roles: tuple[int, ...]  # raw role of each
    weights: tuple[float, ...]  # of each as a *target*


class Batch(NamedTuple):
    """Right-padded rows, each [B, T]."""

    ids: Tensor  # int64
    roles: Tensor  # int64
    weights: Tensor  # float32
    valid: Tensor  # bool


def block_pieces(rng: random.Random, problem: Problem, slips: Iterable[bool]) -> list[list[Piece]]:
    """Draws the texts of all six blocks. slips: whether each branch carries a slip, drawn when it is reached."""
    prompt = TextCodec(Tokenizer(models.BPE()), TEMPLATE).prompt(problem.question, problem.choices)
    blocks, results = [[Piece(prompt)]], []
    for branch, slip in zip(problems.BRANCHES, slips):
        pieces, result = problems.branch_pieces(rng, problem, branch, slip)
        blocks.append(pieces)
        results.append(result)
    pieces, letter = problems.merge_pieces(rng, problem, results)
    return [*blocks, pieces, [Piece(problems.phrase(rng, "answers", s=letter))]]


def sample_texts(seed: int, count: int) -> Iterator[str]:
    """Yields texts of `count` training problems, and lists of numbers so that every number becomes one token."""
    yield from [" ".join(["", *map(str, range(problems.LARGEST + 1))])] * 200
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(count):
        *blocks, merge, answer = block_pieces(rng, draw_problem(rng), (rng.random() < 0.4 for _ in problems.BRANCHES))
        yield from ("".join(piece.text for piece in pieces) for pieces in (*blocks, merge + answer))


def train_tokenizer(seed: int, count: int = 3000) -> Tokenizer:
    """Returns a byte-level BPE of at most `ORDINARY_TOKENS` ordinary tokens, then the delimiters in block order."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ORDINARY_TOKENS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(sample_texts(seed, count), trainer)
    names = chain.from_iterable(zip(OPEN, CLOSE, strict=True))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def target_weight(word: str, before: str, role: int, numbers: int) -> float:
    """Returns the loss weight of one target, from its text, the token before, its role, and the numbers before it.

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
    if bare in problems.LETTERS and word.startswith(" "):
        return 6.0
    if role == 4 and bare in VERDICTS:
        return 8.0
    if role < 4 and bare in VERBS:
        return 6.0 if role == 1 else 9.0
    return 2.0 if before in (".", "\n") else 1.0


def encode_block(tokenizer: Tokenizer, pieces: Sequence[Piece], role: int) -> Row:
    """Encodes one block with its delimiters. The opening one, forced in decoding, weighs 0; so do planted slips."""
    encoding = tokenizer.encode("".join(piece.text for piece in pieces), add_special_tokens=False)
    planted = [piece.planted for piece in pieces for _ in piece.text]  # per character
    weights, numbers, before = [0.0], 0, ""
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        word = tokenizer.decode([token])
        weights.append(0.0 if any(planted[start:end]) else target_weight(word, before, role, numbers))
        numbers, before = numbers + word.strip().isdigit(), word
    opening, closing = (tokenizer.encode(name, add_special_tokens=False).ids for name in (OPEN[role], CLOSE[role]))
    ids = (*opening, *encoding.ids, *closing)
    return Row(ids, (role,) * len(ids), (*weights, 0.0 if role == 0 else 2.0))


def training_row(rng: random.Random, tokenizer: Tokenizer, problem: Problem) -> Row:
    """Draws and encodes all six blocks of a problem; in about a third of the rows one to three branches slip."""
    slips: list[int] = []
    if rng.random() < SLIP_SHARE:
        slips = rng.sample(range(3), rng.choices((1, 2, 3), (60, 25, 15))[0])
    blocks = block_pieces(rng, problem, [index in slips for index in range(3)])
    rows = [encode_block(tokenizer, pieces, role) for role, pieces in enumerate(blocks)]
    return Row(*(tuple(chain.from_iterable(parts)) for parts in zip(*rows)))


def curriculum(progress: float) -> tuple[int, int]:
    """Returns the most events and fillers at `progress` in [0, 1]: 3 and 1, one more of each every 8 % of the run."""
    grown = int(progress / 0.08)
    return min(problems.MOST_EVENTS, 3 + grown), min(problems.MOST_FILLERS, 1 + grown)


def training_pool(seed: int, pool: int, batch_size: int, progress: float, tokenizer: Tokenizer) -> list[list[Row]]:
    """Returns the `pool`-th group of `POOL_BATCHES` batches: rows sorted by length, cut, the batches shuffled."""
    rng = random.Random(f"corpus {seed} {pool}")
    limits, count = curriculum(progress), batch_size * POOL_BATCHES
    rows = [training_row(rng, tokenizer, draw_problem(rng, *limits)) for _ in range(count)]
    rows.sort(key=lambda row: len(row.ids))
    batches = [rows[start : start + batch_size] for start in range(0, count, batch_size)]
    rng.shuffle(batches)
    return batches


def collate(rows: Sequence[Row]) -> Batch:
    """Right-pads rows to the longest, rounded up so that shapes repeat; padding has role and weight 0, valid False."""
    length = -(-max(len(row.ids) for row in rows) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE

    def padded(values: Iterable[tuple[Any, ...]], fill: float) -> Tensor:
        return torch.tensor([one + (fill,) * (length - len(one)) for one in values])

    ids, roles, weights = zip(*rows)
    return Batch(padded(ids, 0), padded(roles, 0), padded(weights, 0.0), padded([(True,) * len(i) for i in ids], False))


def held_out_tasks(seed: int, count: int) -> list[dict[str, object]]:
    """Draws `count` tasks from the held-out sixteenth of problems, no two with the same arithmetic."""
    rng, found = random.Random(f"tasks {seed}"), dict[tuple[int, tuple[int, ...]], Problem]()
    while len(found) < count:
        problem = draw_problem(rng, holdout=True)
        found.setdefault((problem.start, problem.amounts), problem)
    return [
        {"id": f"demo-{i:03d}", "question": one.question, "choices": list(one.choices), "answer": one.answer}
        for i, one in enumerate(found.values())
    ]
