"""Generated tokens and suffixes: forced tokens cost nothing, copies must agree, and what does not fit is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cache import build_live, build_prefill
from decode import Contract, RowFailure, State, greedy_suffix
from minimodel import load_model
from tests.conftest import numeric
from tests.helpers import flip_bit, refused
from tests.tiny import TASK, write_checkpoint


class Watched:
    """A model whose calls for logits are counted and kept; everything runs as before."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self.model = load_model(directory, numeric(dtype))
        self.rows: list[torch.Tensor] = []
        self._own = self.model.logits
        self.model.logits = self._logits

    def _logits(self, hidden: torch.Tensor, observe: object = None) -> torch.Tensor:
        out = self._own(hidden)
        self.rows.append(out[0, -1].clone())
        return out


def direct(contract: Contract, row: torch.Tensor, role: int) -> tuple[int, float]:
    """Token and margin from one row of logits, in numpy."""
    values = row.double().numpy().copy()
    allowed = [*range(256), contract.close_ids[role]]
    values[[token for token in range(len(values)) if token not in allowed]] = -np.inf
    second, first = np.sort(values)[-2:]
    return int(values.argmax()), float(first - second)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_forced_tokens_take_no_logits_and_margins_are_those_of_the_logits(tiny_directory, contract, prompt, dtype):
    watched = Watched(tiny_directory, dtype)
    live = build_live(watched.model, prompt)
    generated = list(zip(live.state.tokens[len(prompt) :], live.state.roles[len(prompt) :], live.margins))
    free = [(token, role, margin) for token, role, margin in generated if margin is not None]
    assert len(watched.rows) == len(free) + 1, "one row a choice, and the boundary's own"
    for (token, role, margin), row in zip(free, watched.rows):
        assert (token, margin) == direct(contract, row, role)
    for (token, role, margin), before in zip(generated[1:], generated):
        forced = token in contract.open_ids or before[0] in contract.close_ids
        assert (margin is None) == (forced or at_cap(contract, generated, token, role))

    watched.rows.clear()
    suffix = greedy_suffix(watched.model, live)
    choices = [(token, margin) for token, margin in zip(suffix.tokens, suffix.margins) if margin is not None]
    assert len(watched.rows) == len(choices) - 1, "the first choice reads the boundary's logits"
    rows = [live.logits[0], *watched.rows]
    roles = [4 if i <= suffix.tokens.index(contract.close_ids[4]) else 5 for i in range(len(suffix.tokens))]
    roles = [role for role, margin in zip(roles, suffix.margins) if margin is not None]
    assert choices == [direct(contract, row, role) for row, role in zip(rows, roles)]


def at_cap(contract: Contract, generated: list[tuple[int, int, float | None]], token: int, role: int) -> bool:
    """A closing delimiter that came because the block was full."""
    content = sum(1 for t, r, _ in generated if r == role and contract.is_ordinary(t))
    return token == contract.close_ids[role] and content == contract.caps[role]


def test_a_suffix_is_the_rest_of_the_contract(three, contract):
    suffix = greedy_suffix(three.model, three.live)
    whole = State.from_tokens(contract, three.live.state.tokens + suffix.tokens)
    assert whole.structure.done and len(suffix.margins) == len(suffix.tokens)
    assert suffix.tokens == (
        *suffix.merge,
        contract.close_ids[4],
        contract.open_ids[5],
        *suffix.answer,
        contract.close_ids[5],
    )
    assert suffix.blocks == {"merge": suffix.merge, "answer": suffix.answer}
    assert len(suffix.merge) <= 12 and len(suffix.answer) <= 6
    json.dumps(suffix.margins, allow_nan=False)


def test_the_same_boundary_gives_the_same_suffix(three):
    first, second = (greedy_suffix(three.model, three.live) for _ in range(2))
    assert first == second


def test_a_suffix_that_other_tokens_led_to_has_another_functional_digest(three):
    """The functional digest covers every token, role, position and mask row that was fed."""
    suffix = greedy_suffix(three.model, three.live)
    assert suffix.functional_sha256 == greedy_suffix(three.model, three.incremental).functional_sha256
    logits = three.live.logits.clone()
    logits[:, suffix.tokens[0]] -= 100
    other = greedy_suffix(three.model, replace(three.live, logits=logits))
    assert other.tokens[0] != suffix.tokens[0] and other.functional_sha256 != suffix.functional_sha256


@pytest.mark.parametrize("layer", [0, 2])
def test_cache_copies_that_differ_in_one_bit_fail_the_row(three, layer):
    cache = three.live.cache.copy()
    greedy_suffix(three.model, replace(three.live, cache=cache))
    flip_bit(cache.values(layer), (1, 0, 3, 5))
    with pytest.raises(RowFailure, match="copies differ"):
        greedy_suffix(three.model, replace(three.live, cache=cache))


def test_boundary_logits_that_differ_between_copies_fail_the_row(three):
    logits = three.live.logits.clone()
    flip_bit(logits, (1, 280))
    with pytest.raises(RowFailure, match="copies differ"):
        greedy_suffix(three.model, replace(three.live, logits=logits))


def test_another_checkpoints_role_rules_are_refused(three, tmp_path):
    other = Contract.load(write_checkpoint(tmp_path / "other", contract={"visibility": [[1] * 6] * 6}))
    state = State.from_tokens(other, three.live.state.tokens)
    with refused("role rules"):
        greedy_suffix(three.model, replace(three.live, state=state))
    with refused("role rules"):
        build_prefill(three.model, state)


def test_a_context_beyond_the_models_limit_is_refused(tmp_path):
    directory = write_checkpoint(tmp_path / "short", config={"max_position_embeddings": 80})
    model, contract = load_model(directory, numeric("bf16")), Contract.load(directory)
    with refused("max_position_embeddings", "80"):
        build_live(model, State.prompt(contract, TASK["question"], TASK["choices"]))
