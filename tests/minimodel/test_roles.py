"""Roles: the visibility table and the attention mask, against double loops."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimodel.checkpoint import open_checkpoint
from minimodel.roles import (
    NUM_ROLES,
    ROLE_NAMES,
    ROLE_OFFSET,
    VISIBILITY,
    RoleRules,
    attention_mask,
    check_mask,
    position_ids,
)
from tests.helpers import edit_json, refused
from tests.tiny import write_checkpoint


def test_visibility_table_in_words():
    """Paper, section 3.1: answer sees no branch. Branches see the prompt and themselves; merge sees all before it."""
    sees = {ROLE_NAMES[q]: {ROLE_NAMES[k] for k in range(NUM_ROLES) if VISIBILITY[q][k]} for q in range(NUM_ROLES)}
    assert sees == {
        "prompt": {"prompt"},
        "branch_1": {"prompt", "branch_1"},
        "branch_2": {"prompt", "branch_2"},
        "branch_3": {"prompt", "branch_3"},
        "merge": {"prompt", "branch_1", "branch_2", "branch_3", "merge"},
        "answer": {"prompt", "merge", "answer"},
    }
    assert ROLE_OFFSET == 8


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    batch, keys = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    queries = draw(st.integers(1, keys))
    roles = [[draw(st.integers(0, 5)) for _ in range(keys)] for _ in range(batch)]
    valid = draw(st.none() | st.just([[draw(st.booleans()) for _ in range(keys)] for _ in range(batch)]))
    table = draw(st.none() | st.just([[draw(st.integers(0, 1)) for _ in range(6)] for _ in range(6)]))
    return {"roles": roles, "queries": queries, "valid": valid, "table": table}


def brute_force(roles: list[list[int]], queries: int, valid: Any, table: Any) -> list[list[list[bool]]]:
    keys = len(roles[0])
    result = []
    for b, row in enumerate(roles):
        rows = []
        for t in range(keys - queries, keys):
            allowed = []
            for s in range(keys):
                ok = s <= t
                ok = ok and (valid is None or (valid[b][s] and valid[b][t]))
                ok = ok and (table is None or table[row[t]][row[s]] == 1)
                allowed.append(ok)
            rows.append(allowed)
        result.append(rows)
    return result


@given(batches())
def test_mask_is_causal_and_padding_and_visibility(case):
    roles, queries, table = torch.tensor(case["roles"]), case["queries"], case["table"]
    valid = None if case["valid"] is None else torch.tensor(case["valid"])
    mask = attention_mask(
        roles[:, -queries:],
        roles,
        None if valid is None else valid[:, -queries:],
        valid,
        None if table is None else tuple(map(tuple, table)),
    )
    assert mask.dtype == torch.bool and mask.shape == (len(roles), 1, queries, roles.shape[1])
    assert mask[:, 0].tolist() == brute_force(case["roles"], queries, case["valid"], table)


def test_each_factor_of_the_mask_counts():
    """The control: leave one factor out, and the mask is another."""
    roles = torch.tensor([[0, 1, 2, 4, 5, 5]])
    valid = torch.tensor([[True, False, True, True, True, True]])
    whole = attention_mask(roles, roles, valid, valid)
    assert not torch.equal(whole, attention_mask(roles, roles))
    assert not torch.equal(whole, attention_mask(roles, roles, valid, valid, visibility=None))
    assert not torch.equal(whole, attention_mask(roles, roles, None, valid))
    assert not torch.equal(whole, attention_mask(roles, roles, valid, None))
    assert not whole[0, 0].triu(1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.uint8])
def test_masks_of_another_dtype_are_refused_by_name(dtype):
    """pytorch/pytorch 103963: 0/1 numbers could mean 'add' as well as 'may attend' (case 5)."""
    roles = torch.tensor([[0, 1, 4]])
    mask = attention_mask(roles, roles)
    check_mask(mask, 1, 3, 3)
    with refused("torch.bool", str(dtype)):
        check_mask(mask.to(dtype), 1, 3, 3)


def test_masks_of_another_shape_are_refused():
    with refused("[2, 1, 3, 4]", "[2, 1, 4, 3]"):
        check_mask(torch.ones(2, 1, 4, 3, dtype=torch.bool), 2, 3, 4)
    with refused("[2, 1, 3, 4]"):
        check_mask(torch.ones(3, 4, dtype=torch.bool), 2, 3, 4)


def test_positions_of_a_left_padded_row_count_its_own_tokens():
    """unslothai/unsloth 3795 (case 6): rows of 3 and 8 tokens padded to 8."""
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[0, :5] = False
    ids = position_ids(valid)
    assert ids[0, 5:].tolist() == [0, 1, 2]
    assert ids[1].tolist() == list(range(8))
    assert int(ids.min()) == 0


def test_absent_keys_take_the_papers_rules():
    assert RoleRules.from_contract({}) == RoleRules() == RoleRules(8, VISIBILITY)


@pytest.mark.parametrize("role", range(NUM_ROLES))
def test_a_visibility_table_with_a_zero_on_its_diagonal_is_refused(tmp_path, role):
    """pytorch/pytorch 103749 (case 4): a row that may not even see itself could see nothing at all."""
    table = [list(row) for row in VISIBILITY]
    table[role][role] = 0
    with refused("contract.json", f"visibility row {role} ({ROLE_NAMES[role]})", "diagonal"):
        RoleRules.from_contract({"visibility": table})
    directory = write_checkpoint(tmp_path / "zero", contract={"visibility": table})
    with refused(str(directory / "contract.json"), "diagonal"):
        open_checkpoint(directory)
    edit_json(directory / "contract.json", visibility=[list(row) for row in VISIBILITY])
    open_checkpoint(directory)


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        ({"role_offset": -1}, "role_offset"),
        ({"role_offset": 8.0}, "role_offset"),
        ({"role_offset": True}, "role_offset"),
        ({"visibility": None}, "six rows"),
        ({"visibility": [[1] * 6] * 5}, "six rows"),
        ({"visibility": [[1] * 5] * 6}, "six entries"),
        ({"visibility": [[1, 2, 0, 0, 0, 0]] + [[1] * 6] * 5}, "0 or 1"),
        ({"visibility": [[1, -1, 0, 0, 0, 0]] + [[1] * 6] * 5}, "0 or 1"),
        ({"visibility": [[1, True, 0, 0, 0, 0]] + [[1] * 6] * 5}, "0 or 1"),
        ({"visibility": [[1.0] * 6] * 6}, "0 or 1"),
    ],
)
def test_role_rules_of_wrong_type_or_range_are_refused(raw, part):
    with refused("contract.json", part):
        RoleRules.from_contract(json.loads(json.dumps(raw)))


@pytest.mark.parametrize("role", [-1, 6])
def test_a_mask_of_roles_that_do_not_exist_is_refused(role):
    """-1 would be read as the answer's row."""
    roles = torch.tensor([[0, 1, 5]])
    attention_mask(roles, roles)
    for query, key in ((torch.tensor([[0, 1, role]]), roles), (roles, torch.tensor([[role, 1, 5]]))):
        with refused(f"roles: expected integers from 0 to 5, found {role}"):
            attention_mask(query, key)
