"""Training rows: roles, weights, planted slips, batches; and the tokenizer they are made with."""

import random

import pytest
import torch

from decode.contract import CLOSE, OPEN
from experiments.demo.corpus import (
    CAPS,
    LENGTH_MULTIPLE,
    collate,
    encode_block,
    train_tokenizer,
    training_row,
)
from experiments.demo.problems import LARGEST, Piece, draw_problem


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(0, count=400)


@pytest.fixture(scope="module")
def rows(tokenizer):
    rng = random.Random(1)
    return [training_row(rng, tokenizer, draw_problem(rng)) for _ in range(100)]


def test_every_number_is_one_token_and_delimiters_are_special_ones(tokenizer):
    assert all(len(tokenizer.encode(f" {number}").ids) == 1 for number in range(LARGEST + 1))
    for name in OPEN + CLOSE:
        assert tokenizer.encode(name).ids == [tokenizer.token_to_id(name)]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    assert special == set(OPEN + CLOSE)


def test_a_row_is_six_blocks_below_their_caps_with_delimiters_roles_and_weights(tokenizer, rows):
    opening, closing = ([tokenizer.token_to_id(name) for name in names] for names in (OPEN, CLOSE))
    caps = [1000, CAPS["branch"], CAPS["branch"], CAPS["branch"], CAPS["merge"], CAPS["answer"]]
    for row in rows:
        assert len(row.ids) == len(row.roles) == len(row.weights)
        assert list(row.roles) == sorted(row.roles) and set(row.roles) == set(range(6))
        for role, cap in enumerate(caps):
            block = [(token, weight) for token, of, weight in zip(*row, strict=True) if of == role]
            inner = [token for token, _ in block[1:-1]]
            assert block[0] == (opening[role], 0), "a forced token weighs nothing"
            assert block[-1][0] == closing[role] and (block[-1][1] > 0 or role == 0)
            assert not set(inner) & set(opening + closing) and len(inner) < cap


def test_a_planted_number_weighs_nothing_and_its_neighbours_something(tokenizer):
    row = encode_block(tokenizer, [Piece("so 4 + 5 ="), Piece(" 8", planted=True), Piece(".")], role=1)
    words = [tokenizer.decode([token], skip_special_tokens=False) for token in row.ids]
    assert row.weights[words.index(" 8")] == 0
    assert min(row.weights[words.index(word)] for word in (" 4", " 5", " =", ".")) > 0
    plain = encode_block(tokenizer, [Piece("so 4 + 5 ="), Piece(" 9"), Piece(".")], role=1)
    assert min(plain.weights[1:]) > 0


def test_padding_is_marked_and_weighs_nothing(rows):
    batch = collate(rows[:5])
    assert batch.ids.shape == batch.roles.shape == batch.weights.shape == batch.valid.shape
    assert batch.ids.shape[1] % LENGTH_MULTIPLE == 0
    assert batch.valid.sum(dim=1).tolist() == [len(row.ids) for row in rows[:5]]
    assert not batch.weights[~batch.valid].any()
    assert torch.equal(batch.ids[0][batch.valid[0]], torch.tensor(rows[0].ids))
