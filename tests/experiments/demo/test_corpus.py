"""Training rows: roles, weights, planted slips, batches; and the tokenizer they are made with."""

import random

import pytest
import torch

from decode.contract import CLOSE, OPEN
from decode.text import TextCodec
from experiments.demo import wordings as w
from experiments.demo.contract import CAPS, TEMPLATE, fill_template
from experiments.demo.corpus import (
    LENGTH_MULTIPLE,
    POOL_BATCHES,
    collate,
    encode_block,
    held_out_tasks,
    training_pool,
    training_row,
)
from experiments.demo.problems import Piece, branch_pieces, draw_problem
from experiments.demo.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(0, count=400)


@pytest.fixture(scope="module")
def rows(tokenizer):
    rng = random.Random(1)
    return [training_row(rng, tokenizer, draw_problem(rng)) for _ in range(100)]


def test_every_number_is_one_token(tokenizer):
    assert all(len(tokenizer.encode(f" {number}").ids) == 1 for number in range(w.LARGEST + 1))


def test_delimiters_are_special_tokens(tokenizer):
    for name in OPEN + CLOSE:
        assert tokenizer.encode(name).ids == [tokenizer.token_to_id(name)]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    assert special == set(OPEN + CLOSE)


def test_prompt_text_is_the_one_that_decoding_uses(tokenizer):
    task = held_out_tasks(1, 1)[0]
    question, choices = str(task["question"]), list(task["choices"])  # type: ignore[call-overload]
    assert fill_template(question, choices) == TextCodec(tokenizer, TEMPLATE).prompt(question, choices)


def test_a_row_is_six_blocks_with_their_delimiters_and_roles(tokenizer, rows):
    opening, closing = ([tokenizer.token_to_id(name) for name in names] for names in (OPEN, CLOSE))
    for row in rows:
        assert len(row.ids) == len(row.roles) == len(row.weights)
        assert list(row.roles) == sorted(row.roles) and set(row.roles) == set(range(6))
        for role in range(6):
            block = [token for token, of in zip(row.ids, row.roles, strict=True) if of == role]
            assert block[0] == opening[role] and block[-1] == closing[role]
            assert not set(block[1:-1]) & set(opening + closing)


def test_no_training_block_reaches_its_cap(rows):
    caps = {1: CAPS["branch"], 2: CAPS["branch"], 3: CAPS["branch"], 4: CAPS["merge"], 5: CAPS["answer"]}
    for row in rows:
        assert all(row.roles.count(role) - 2 < cap for role, cap in caps.items())


def test_forced_tokens_weigh_nothing_and_closing_delimiters_weigh_something(tokenizer, rows):
    opening = {tokenizer.token_to_id(name) for name in OPEN}
    closing = {tokenizer.token_to_id(name) for name in CLOSE[1:]}
    for row in rows:
        for token, weight in zip(row.ids, row.weights, strict=True):
            assert weight == 0 if token in opening else weight > 0 or token not in closing


def test_a_planted_number_weighs_nothing_and_its_neighbours_something(tokenizer):
    row = encode_block(tokenizer, [Piece("so 4 + 5 ="), Piece(" 8", planted=True), Piece(".")], role=1)
    words = [tokenizer.decode([token], skip_special_tokens=False) for token in row.ids]
    assert row.weights[words.index(" 8")] == 0
    assert min(row.weights[words.index(word)] for word in (" 4", " 5", " =", ".")) > 0
    plain = encode_block(tokenizer, [Piece("so 4 + 5 ="), Piece(" 9"), Piece(".")], role=1)
    assert min(plain.weights[1:]) > 0


def test_some_rows_slip_and_most_do_not(tokenizer):
    problem = draw_problem(random.Random(0))
    _, right = branch_pieces(random.Random(0), problem, "told")
    assert right == problem.result
    planted = 0
    for seed in range(200):
        row = training_row(random.Random(seed), tokenizer, problem)
        planted += any(
            weight == 0 and 1 <= role <= 3 and tokenizer.decode([token]).strip().isdigit()
            for token, role, weight in zip(row.ids, row.roles, row.weights, strict=True)
        )
    assert 40 < planted < 100


def test_pools_are_reproducible_and_differ(tokenizer):
    first = training_pool(1, 0, 2, 1.0, tokenizer)
    assert first == training_pool(1, 0, 2, 1.0, tokenizer)
    assert first != training_pool(1, 1, 2, 1.0, tokenizer) and first != training_pool(2, 0, 2, 1.0, tokenizer)
    assert len(first) == POOL_BATCHES and all(len(batch) == 2 for batch in first)


def test_padding_is_marked_and_weighs_nothing(rows):
    batch = collate(rows[:5])
    assert batch.ids.shape == batch.roles.shape == batch.weights.shape == batch.valid.shape
    assert batch.ids.shape[1] % LENGTH_MULTIPLE == 0
    assert batch.valid.sum(dim=1).tolist() == [len(row.ids) for row in rows[:5]]
    assert not batch.weights[~batch.valid].any()
    assert torch.equal(batch.ids[0][batch.valid[0]], torch.tensor(rows[0].ids))
