"""Roles: the visibility table and the attention mask, against double loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimodel.checkpoint import open_checkpoint
from minimodel.config_file import read_rules
from minimodel.roles import NUM_ROLES, ROLE_NAMES, VISIBILITY, RoleRules, attention_mask, check_mask, position_ids
from tests.helpers import edit_json, refused


def test_visibility_table_in_words():
    """Paper, section 3.1: answer sees no branch. Branches see the prompt and themselves; merge sees all before it."""
    sees = {ROLE_NAMES[q]: [ROLE_NAMES[k] for k in range(NUM_ROLES) if VISIBILITY[q][k]] for q in range(NUM_ROLES)}
    assert sees == {
        "prompt": ["prompt"],
        "branch_1": ["prompt", "branch_1"],
        "branch_2": ["prompt", "branch_2"],
        "branch_3": ["prompt", "branch_3"],
        "merge": ["prompt", "branch_1", "branch_2", "branch_3", "merge"],
        "answer": ["prompt", "merge", "answer"],
    }


@given(data=st.data(), batch=st.integers(1, 3), keys=st.integers(1, 9))
def test_mask_is_causal_and_padding_and_visibility(data, batch, keys):
    def matrix(rows, columns, entry):
        return st.lists(st.lists(entry, min_size=columns, max_size=columns), min_size=rows, max_size=rows)

    queries, roles = data.draw(st.integers(1, keys)), data.draw(matrix(batch, keys, st.integers(0, 5)))
    valid = data.draw(st.none() | matrix(batch, keys, st.booleans()))
    table = data.draw(st.none() | matrix(6, 6, st.integers(0, 1)))
    role_ids, flags = torch.tensor(roles), None if valid is None else torch.tensor(valid)
    visibility = None if table is None else tuple(map(tuple, table))
    last = slice(keys - queries, None)
    mask = attention_mask(role_ids[:, last], role_ids, flags if flags is None else flags[:, last], flags, visibility)
    assert mask.dtype == torch.bool and mask.shape == (batch, 1, queries, keys)
    for b in range(batch):
        for t in range(keys - queries, keys):
            for s in range(keys):
                padded = valid is not None and not (valid[b][s] and valid[b][t])
                hidden = table is not None and table[roles[b][t]][roles[b][s]] == 0
                assert bool(mask[b, 0, t - keys, s]) == (s <= t and not padded and not hidden)


def test_each_factor_of_the_mask_counts():
    """The control: leave one factor out, and the mask is another."""
    roles = torch.tensor([[0, 1, 2, 4, 5, 5]])
    valid = torch.tensor([[True, False, True, True, True, True]])
    whole = attention_mask(roles, roles, valid, valid)
    for other in ((), (None, valid), (valid, None), (valid, valid, None)):
        assert not torch.equal(whole, attention_mask(roles, roles, *other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.uint8])
def test_masks_of_another_dtype_are_refused_by_name(dtype):
    """pytorch/pytorch 103963 (case 5): 0/1 numbers could mean 'add' as well as 'may attend'."""
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    check_mask(mask, 1, 3, 3)
    with refused("torch.bool", str(dtype)):
        check_mask(mask.to(dtype), 1, 3, 3)
    for shape in ((1, 1, 4, 3), (3, 3)):
        with refused("[1, 1, 3, 3]", str(list(shape))):
            check_mask(torch.ones(shape, dtype=torch.bool), 1, 3, 3)


def test_positions_of_a_left_padded_row_count_its_own_tokens():
    """unslothai/unsloth 3795 (case 6): rows of 3 and 8 tokens padded to 8."""
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[0, :5] = False
    ids = position_ids(valid)
    assert ids[0, 5:].tolist() == [0, 1, 2] and ids[1].tolist() == list(range(8)) and int(ids.min()) == 0


def test_absent_keys_take_the_papers_rules():
    assert read_rules({}) == RoleRules() == RoleRules(8, VISIBILITY)


@pytest.mark.parametrize("role", range(NUM_ROLES))
def test_a_visibility_table_with_a_zero_on_its_diagonal_is_refused(directory, role):
    """pytorch/pytorch 103749 (case 4): a row that may not even see itself could see nothing at all."""
    table = [list(row) for row in VISIBILITY]
    table[role][role] = 0
    with refused("contract.json", f"visibility row {role} ({ROLE_NAMES[role]})", "diagonal"):
        read_rules({"visibility": table})
    edit_json(directory / "contract.json", visibility=table)
    with refused(str(directory / "contract.json"), "diagonal"):
        open_checkpoint(directory)
    edit_json(directory / "contract.json", visibility=[list(row) for row in VISIBILITY])
    open_checkpoint(directory)


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        *(({"role_offset": value}, "role_offset") for value in (-1, 8.0, True)),
        ({"visibility": None}, "six rows"),
        ({"visibility": [[1] * 6] * 5}, "six rows"),
        ({"visibility": [[1] * 5] * 6}, "six entries"),
        *(({"visibility": [[1, value, 0, 0, 0, 0]] + [[1] * 6] * 5}, "0 or 1") for value in (2, -1, True)),
        ({"visibility": [[1.0] * 6] * 6}, "0 or 1"),
    ],
)
def test_role_rules_of_wrong_type_or_range_are_refused(raw, part):
    with refused("contract.json", part):
        read_rules(raw)


@pytest.mark.parametrize("role", [-1, 6])
def test_a_mask_of_roles_that_do_not_exist_is_refused(role):
    """-1 would be read as the answer's row."""
    roles = torch.tensor([[0, 1, 5]])
    attention_mask(roles, roles)
    for query, key in ((torch.tensor([[0, 1, role]]), roles), (roles, torch.tensor([[role, 1, 5]]))):
        with refused(f"roles: expected integers from 0 to 5, found {role}"):
            attention_mask(query, key)
