"""The structural machine and the discrete state against the contract's grammar, written as one regular expression."""

import hashlib
import random
import re

from hypothesis import given
from hypothesis import strategies as st

from decode import State, Structure, token_digest
from decode.state import advance, content_of, forced
from tests.helpers import refused
from tests.tiny import CAPS, CONFIG

# One character per token: A-F open, a-f close, x ordinary, ! anything that no block may hold.
BLOCKS = [("A", "a", ""), *((o, c, CAPS["branch"]) for o, c in ("Bb", "Cc", "Dd")), ("E", "e", 12), ("F", "f", 6)]
SYMBOLS = "".join(["x" * 256, "!", "ABCDEF", "abcdef", "!" * (CONFIG["vocab_size"] - 269)])  # symbol of every id
PATTERN = ""  # every prefix of: A x* a B x{0,10} b C x{0,10} c D x{0,10} d E x{0,12} e F x{0,6} f
for opening, closing, cap in reversed(BLOCKS):
    PATTERN = f"(?:{opening}x{{0,{cap}}}(?:{closing}{PATTERN})?)?"
PREFIX = re.compile(PATTERN)


def test_the_grammar_itself():
    assert PREFIX.fullmatch("AxxaBbCcDdEeFf") and PREFIX.fullmatch("") and PREFIX.fullmatch("Ax")
    for word in ("B", "AA", "AaC", "AaBc", "AaB" + "x" * 11, "AxxaBbCcDdEeFfx", "AaB!", "AaBbx"):
        assert not PREFIX.fullmatch(word), word


@given(seed=st.integers(0, 1 << 32), greed=st.sampled_from([0.3, 0.9, 1.0]))
def test_random_walks_meet_the_grammar_at_every_step(contract, seed, greed):
    """Also: at the caps only closing, between blocks only the next opening, after the answer nothing.

    `greed`: how often a walk stays inside a block that may go on; at 1.0 it runs into every cap.
    """
    structure, word, chance = Structure(), "", random.Random(seed)
    while not structure.done:
        only = forced(contract, structure)
        eligible = {only} if only is not None else set(contract.eligible[structure.block].nonzero().flatten().tolist())
        by_grammar = {symbol for symbol in set(SYMBOLS) if PREFIX.fullmatch(word + symbol)}
        assert eligible == {token for token, symbol in enumerate(SYMBOLS) if symbol in by_grammar}
        contents = [token for token in eligible if SYMBOLS[token] == "x"]
        stay = contents and (structure.block > 0 or len(word) < 5) and chance.random() < greed
        token = chance.choice(contents if stay else sorted(eligible - set(contents)))
        other = chance.randint(-3, CONFIG["vocab_size"] + 3)
        if other not in eligible:
            with refused("block", str(other)):
                advance(contract, structure, other)
        structure, word = advance(contract, structure, token), word + SYMBOLS[token]
        assert structure.at_boundary == word.endswith("E")
    assert PREFIX.fullmatch(word) and word.endswith("f")
    for step in (lambda: forced(contract, structure), lambda: advance(contract, structure, 7)):
        with refused("closed answer"):
            step()


# prompt "ab", branches of 1, 0 and 2 tokens, boundary, merge of 2, answer of 1
STATE = [257, 10, 11, 263, 258, 12, 264, 259, 265, 260, 13, 14, 266, 261]
SUFFIX = [15, 16, 267, 262, 17, 268]
FULL = [257, 1, 2, 263, *(token for b in (258, 259, 260) for token in (b, 3, b + 6)), 261, *[4] * 12, 267, 262, 268]


@given(tokens=st.lists(st.integers(0, CONFIG["vocab_size"] - 1), max_size=12), cut=st.integers(0, 60))
def test_any_list_of_tokens_is_a_state_exactly_when_the_grammar_says_so(contract, tokens, cut):
    for attempt in (tokens, FULL[:cut] + tokens):
        word = "".join(SYMBOLS[token] for token in attempt)
        if PREFIX.fullmatch(word):
            state = State.from_tokens(contract, attempt)
            assert state.tokens == tuple(attempt) and state.sha256() == State.from_tokens(contract, attempt).sha256()
        else:
            first = next(i for i in range(len(word)) if not PREFIX.fullmatch(word[: i + 1]))
            with refused(f"token {first}:"):
                State.from_tokens(contract, attempt)


def test_the_first_token_that_does_not_fit_is_named_with_its_block(contract):
    for tokens, parts in (
        ([10], "token 0|prompt|only token 257|10"),
        ([*STATE[:4], 259], "token 4|branch_1|only token 258|259"),
        ([*STATE[:5], 265], "token 5|branch_1|264|265"),
        ([*STATE, *SUFFIX, 1], "token 20|closed answer"),
        *(([257, outside], f"token 1|{outside}") for outside in (-1, 288, 1 << 40)),
    ):
        with refused(*parts.split("|")):
            State.from_tokens(contract, tokens)


def test_roles_follow_from_the_tokens_and_delimiters_belong_to_their_block(contract):
    state = State.from_tokens(contract, STATE + SUFFIX)
    assert state.roles == (0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5)
    assert state.structure.done and len(state) == 20
    assert State.from_tokens(contract, STATE).structure.at_boundary
    assert forced(contract, Structure(0, True, 1 << 30)) is None, "the prompt has no cap"


def test_digest_of_the_canonical_list():
    for tokens, text in (([1, 22, 333], b"[1,22,333]"), ((1, 22, 333), b"[1,22,333]"), ([], b"[]")):
        assert token_digest(tokens) == hashlib.sha256(text).hexdigest()
    assert len({token_digest(t) for t in ([1, 23], [12, 3], [123], [1, 2, 3], [1, 23, 0])}) == 5


def test_content_of_a_block_leaves_its_delimiters_out_and_is_empty_where_it_does_not_occur(contract):
    state = State.from_tokens(contract, STATE + SUFFIX)
    contents = [content_of(contract, state.tokens, state.roles, block) for block in range(6)]
    assert contents == [(10, 11), (12,), (), (13, 14), (15, 16), (17,)]
    assert content_of(contract, STATE, state.roles, 5) == ()


def test_a_prompt_state_is_the_template_between_the_prompts_delimiters(contract):
    state = State.prompt(contract, "Q?", ["one", "two"])
    assert state.tokens[0] == 257 and state.tokens[-1] == 263 and set(state.roles) == {0}
    assert contract.codec.decode(state.tokens[1:-1]) == "Q?\n\nA. one\nB. two"
    assert state.structure.block == 1 and not state.structure.open
