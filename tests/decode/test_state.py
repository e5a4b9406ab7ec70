"""Discrete state: roles and digests follow from the tokens, and what does not fit is refused at its token."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from decode import State, token_digest
from decode.state import content_of
from tests.helpers import refused

# prompt "ab", branches of 1, 0 and 2 tokens, boundary, merge of 2, answer of 1
PREFIX = [257, 10, 11, 263, 258, 12, 264, 259, 265, 260, 13, 14, 266, 261]
SUFFIX = [15, 16, 267, 262, 17, 268]


def test_roles_follow_from_the_tokens_and_delimiters_belong_to_their_block(contract):
    state = State.from_tokens(contract, PREFIX + SUFFIX)
    assert state.roles == (0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5)
    assert state.structure.done and len(state) == 20
    assert State.from_tokens(contract, PREFIX).structure.at_boundary
    assert not State.from_tokens(contract, PREFIX + SUFFIX[:1]).structure.at_boundary


def test_a_state_comes_back_from_its_own_tokens(contract):
    for length in range(len(PREFIX + SUFFIX) + 1):
        state = State.from_tokens(contract, (PREFIX + SUFFIX)[:length])
        again = State.from_tokens(contract, state.tokens)
        assert again == state and again.sha256() == state.sha256()


def test_the_first_token_that_does_not_fit_is_named(contract):
    with refused("token 0", "prompt", "only token 257", "10"):
        State.from_tokens(contract, [10])
    with refused("token 4", "branch_1", "only token 258", "259"):
        State.from_tokens(contract, [*PREFIX[:4], 259])
    with refused("token 5", "branch_1", "264", "265"):
        State.from_tokens(contract, [*PREFIX[:5], 265])
    with refused("token 5", "256"):
        State.from_tokens(contract, [*PREFIX[:5], 256])
    with refused("token 20", "closed answer"):
        State.from_tokens(contract, [*PREFIX, *SUFFIX, 1])
    for outside in (-1, 288, 1 << 40):
        with refused("token 1", str(outside)):
            State.from_tokens(contract, [257, outside])


def test_digest_of_the_canonical_list():
    assert token_digest([1, 22, 333]) == hashlib.sha256(b"[1,22,333]").hexdigest()
    assert token_digest((1, 22, 333)) == token_digest([1, 22, 333])
    assert token_digest([]) == hashlib.sha256(b"[]").hexdigest()
    assert len({token_digest(t) for t in ([1, 23], [12, 3], [123], [1, 2, 3], [1, 23, 0])}) == 5


@given(left=st.lists(st.integers(0, 300), max_size=6), right=st.lists(st.integers(0, 300), max_size=6))
def test_digests_are_equal_exactly_for_equal_tokens(left, right):
    assert (token_digest(left) == token_digest(right)) == (left == right)


def test_content_of_a_block_leaves_its_delimiters_out(contract):
    assert content_of(contract, SUFFIX, 4, first_open=True) == (15, 16)
    assert content_of(contract, SUFFIX, 5, first_open=False) == (17,)
    assert content_of(contract, PREFIX, 2, first_open=False) == ()
    assert content_of(contract, PREFIX, 3, first_open=False) == (13, 14)


def test_content_of_a_block_that_does_not_occur_is_empty(contract):
    assert content_of(contract, PREFIX, 5, first_open=False) == ()
    assert content_of(contract, [], 5, first_open=False) == ()
    assert content_of(contract, [262, 17], 5, first_open=False) == (17,)


def test_a_prompt_state_is_the_template_between_the_prompts_delimiters(contract):
    state = State.prompt(contract, "Q?", ["one", "two"])
    assert state.tokens[0] == 257 and state.tokens[-1] == 263 and set(state.roles) == {0}
    assert contract.codec.decode(state.tokens[1:-1]) == "Q?\n\nA. one\nB. two"
    assert state.structure.block == 1 and not state.structure.open
