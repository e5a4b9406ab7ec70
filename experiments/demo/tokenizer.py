"""The demo's tokenizer: a byte-level BPE trained on the demo's texts, and the twelve delimiters as special tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from decode.contract import CLOSE, OPEN
from experiments.demo import wordings as w
from experiments.demo.contract import fill_template
from experiments.demo.problems import BRANCHES, answer_pieces, branch_pieces, draw_problem, merge_pieces

ORDINARY_TOKENS = 1400
# GPT-2's split into words, numbers and punctuation, with the label of a choice ("A." at a line's start) as one word
WORDS = r"(?<=\n)[A-D]\.(?= )|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def sample_texts(seed: int, count: int) -> Iterator[str]:
    """Block texts of `count` training problems, and a few lists of numbers so that every number becomes one token."""
    for _ in range(200):
        yield " ".join(["", *map(str, range(w.LARGEST + 1))])
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(count):
        problem = draw_problem(rng)
        yield fill_template(problem.question, problem.choices)
        results = []
        for branch in BRANCHES:
            pieces, result = branch_pieces(rng, problem, branch, slip=rng.random() < 0.4)
            results.append(result)
            yield "".join(piece.text for piece in pieces)
        pieces, letter = merge_pieces(rng, problem, (results[0], results[1], results[2]))
        yield "".join(piece.text for piece in pieces + answer_pieces(rng, letter))


def train_tokenizer(seed: int, count: int = 3000) -> Tokenizer:
    """A byte-level BPE of at most `ORDINARY_TOKENS` ordinary tokens, then the delimiters in block order."""
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
    names = [name for pair in zip(OPEN, CLOSE, strict=True) for name in pair]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer
