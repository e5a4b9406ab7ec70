"""The structural machine against the contract's grammar, written as one regular expression."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode import Contract, State, Structure
from decode.structure import advance, forced
from minimodel.roles import NUM_ROLES
from tests.helpers import refused
from tests.tiny import CAPS, CONFIG

# One character a token: A-F open, a-f close, x ordinary, ! anything that no block may hold.
ORDINARY, OPENING, CLOSING = "x", "ABCDEF", "abcdef"
BLOCKS = [("A", "a", ""), *((o, c, CAPS["branch"]) for o, c in ("Bb", "Cc", "Dd")), ("E", "e", 12), ("F", "f", 6)]


def prefix_pattern() -> re.Pattern[str]:
    """Matches every prefix of: A x* a B x{0,10} b C x{0,10} c D x{0,10} d E x{0,12} e F x{0,6} f."""
    pattern = ""
    for opening, closing, cap in reversed(BLOCKS):
        pattern = f"(?:{opening}x{{0,{cap}}}(?:{closing}{pattern})?)?"
    return re.compile(pattern)


PREFIX = prefix_pattern()
SYMBOLS = "".join(["x" * 256, "!", OPENING, CLOSING, "!" * (CONFIG["vocab_size"] - 269)])  # symbol of every id


def eligible_by_grammar(word: str) -> set[str]:
    return {symbol for symbol in set(SYMBOLS) if PREFIX.fullmatch(word + symbol)}


def eligible_here(contract: Contract, structure: Structure) -> set[int]:
    only = forced(contract, structure)
    if only is not None:
        return {only}
    return set(contract.eligible[structure.block].nonzero().flatten().tolist())


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
        eligible, by_grammar = eligible_here(contract, structure), eligible_by_grammar(word)
        assert eligible == {token for token, symbol in enumerate(SYMBOLS) if symbol in by_grammar}
        contents = [token for token in eligible if SYMBOLS[token] == "x"]
        stay = contents and (structure.block > 0 or len(word) < 5) and chance.random() < greed
        token = chance.choice(contents if stay else sorted(eligible - set(contents)))
        other = chance.randint(-3, CONFIG["vocab_size"] + 3)
        if other not in eligible:
            with refused("block", str(other)):
                advance(contract, structure, other)
        structure, word = advance(contract, structure, token), word + SYMBOLS[token]
    assert PREFIX.fullmatch(word) and word.endswith("f") and not eligible_by_grammar(word)
    with refused("closed answer"):
        forced(contract, structure)
    with refused("closed answer"):
        advance(contract, structure, 7)


@given(tokens=st.lists(st.integers(0, CONFIG["vocab_size"] - 1), max_size=12), cut=st.integers(0, 60))
def test_any_list_of_tokens_is_a_state_exactly_when_the_grammar_says_so(contract, tokens, cut):
    whole = [
        257,
        1,
        2,
        263,
        *(token for b in (258, 259, 260) for token in (b, 3, b + 6)),
        261,
        *[4] * 12,
        267,
        262,
        268,
    ]
    for attempt in (tokens, whole[:cut] + tokens):
        word = "".join(SYMBOLS[token] for token in attempt)
        if PREFIX.fullmatch(word):
            assert State.from_tokens(contract, attempt).tokens == tuple(attempt)
        else:
            first = next(i for i in range(len(word)) if not PREFIX.fullmatch(word[: i + 1]))
            with refused(f"token {first}:"):
                State.from_tokens(contract, attempt)


@pytest.mark.parametrize("role", range(1, NUM_ROLES))
def test_at_the_cap_only_the_closing_delimiter_remains(contract, role):
    cap = contract.caps[role]
    assert cap is not None
    assert forced(contract, Structure(role, True, cap - 1)) is None
    assert forced(contract, Structure(role, True, cap)) == contract.close_ids[role]
    with refused("expected only token", str(contract.close_ids[role])):
        advance(contract, Structure(role, True, cap), 5)


def test_the_prompt_has_no_cap_and_the_boundary_is_one_place(contract):
    assert forced(contract, Structure(0, True, 1 << 30)) is None
    assert Structure(4, True, 0).at_boundary
    others = [Structure(4, False, 0), Structure(4, True, 1), Structure(3, True, 0), Structure(5, True, 0), Structure(6)]
    assert not any(structure.at_boundary for structure in others)
    assert Structure(6).done and not Structure(5).done
