"""contract.json: absent keys take the paper's values, everything odd is refused by its key."""

import pytest

from decode import Contract, contract
from decode.contract import CLOSE, OPEN
from minimodel.checkpoint import open_checkpoint
from minimodel.roles import VISIBILITY
from tests.helpers import read_json, refused


def read(tiny_directory, raw, vocab_size=288):
    return Contract.from_parts(raw, tiny_directory / "tokenizer.json", vocab_size, "contract.json")


def test_absent_keys_take_the_papers_values(tiny_directory):
    """Paper, section 3.1: 768 content tokens per branch, 512 for merge, 64 for the answer."""
    contract = read(tiny_directory, {})
    assert contract.caps == (None, 768, 768, 768, 512, 64)
    assert contract.rules.role_offset == 8 and contract.rules.visibility == VISIBILITY
    assert contract.open_ids == tuple(range(257, 263)) and contract.close_ids == tuple(range(263, 269))
    assert contract.suffix_limit() == 512 + 1 + 1 + 64 + 1
    assert contract.prefix_limit(100) == 100 + 3 * (768 + 2) + 1
    assert contract == read(tiny_directory, {"schema": "stage-replay-contract-v1", "caps": {}, "delimiters": {}})


def test_eligibility_rows(tiny_directory):
    contract = read(tiny_directory, {})
    assert contract.ordinary.nonzero().flatten().tolist() == list(range(256)), "<|endoftext|>, 256, is special"
    for role in range(6):
        row = contract.eligible[role].nonzero().flatten().tolist()
        assert row == [*range(256), contract.close_ids[role]]
    changed = read(tiny_directory, {"ineligible_ids": [7, 200]})  # takes the place of the other special tokens
    assert changed.is_ordinary(256) and not changed.is_ordinary(7) and not changed.is_ordinary(200)
    assert not any(changed.is_ordinary(token) for token in (*changed.open_ids, *changed.close_ids, 269, 287, 288, -1))
    assert read(tiny_directory, {"ineligible_ids": None}) == contract


def test_given_caps_replace_only_themselves_and_delimiters_may_have_other_names(tiny_directory):
    assert read(tiny_directory, {"caps": {"merge": 3}}).caps == (None, 768, 768, 768, 3, 64)
    swapped = read(tiny_directory, {"delimiters": {"open": list(CLOSE), "close": list(OPEN)}})
    assert swapped.open_ids == tuple(range(263, 269))


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ({"cap": {}}, ("keys", "'cap'")),
        ({"schema": "stage-replay-contract-v2"}, ("schema", "v2")),
        ({"schema": None}, ("schema", "None")),
        ({"caps": {"branch": 0}}, ("caps.branch", "0")),
        ({"caps": {"merge": -5}}, ("caps.merge", "-5")),
        ({"caps": {"answer": 2.0}}, ("caps.answer", "2.0")),
        ({"caps": {"answer": True}}, ("caps.answer", "True")),
        ({"caps": {"branches": 4}}, ("caps", "branches")),
        ({"caps": [1]}, ("caps", "[1]")),
        ({"delimiters": {"open": list(OPEN[:5])}}, ("delimiters.open", "six names")),
        ({"delimiters": {"open": ["", *OPEN[1:]]}}, ("delimiters.open", "six names")),
        ({"delimiters": {"open": [OPEN[1], *OPEN[1:]]}}, ("delimiters", "twelve different")),
        ({"delimiters": {"close": [OPEN[0], *CLOSE[1:]]}}, ("delimiters", "twelve different")),
        ({"delimiters": {"middle": []}}, ("delimiters", "middle")),
        ({"delimiters": []}, ("delimiters", "[]")),
        ({"delimiters": {"open": ["<|none|>", *OPEN[1:]]}}, ("<|none|>", "special token")),
        ({"delimiters": {"open": ["a", *OPEN[1:]]}}, ("delimiter 'a'", "special token")),
        ({"prompt_template": "no place"}, ("prompt_template", "{question}")),
        ({"prompt_template": "{question} {question}"}, ("prompt_template", "once")),
        ({"prompt_template": "{question}{choices}{choices}"}, ("prompt_template", "at most once")),
        ({"prompt_template": 5}, ("prompt_template", "5")),
        ({"ineligible_ids": [1.0]}, ("ineligible_ids", "1.0")),
        ({"ineligible_ids": [True]}, ("ineligible_ids", "True")),
        ({"ineligible_ids": [288]}, ("ineligible_ids", "288")),
        ({"ineligible_ids": "all"}, ("ineligible_ids", "all")),
        ({"ineligible_ids": [*range(269)]}, ("at least one ordinary token", "none")),
        ({"role_offset": "8"}, ("role_offset", "'8'")),
        ({"visibility": [[1] * 6]}, ("visibility", "six rows")),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(tiny_directory, raw, parts):
    with refused("contract.json", *parts):
        read(tiny_directory, raw)


def test_delimiters_beyond_the_output_head_are_refused(tiny_directory):
    with refused("delimiter ids", "260", "268"):
        read(tiny_directory, {}, vocab_size=260)


def test_ids_beyond_the_tokenizer_are_never_ordinary(tiny_directory):
    """QwenLM/Qwen3 1247 (case 14)."""
    contract = read(tiny_directory, {}, vocab_size=151936)
    assert contract.ordinary.shape == (151936,) and not contract.eligible[:, 269:].any()


def test_a_stock_directory_names_the_command_that_adapts_it_and_a_missing_one_does_not(stock_directory, tmp_path):
    with refused("contract.json", "stock checkpoint", "python -m experiments.adapt"):
        Contract.load(stock_directory)
    with refused("missing", "expected a checkpoint directory, found nothing"):
        Contract.load(tmp_path / "missing")


def test_an_opened_checkpoint_gives_the_contract_of_its_directory_without_reading_again(tiny_directory, monkeypatch):
    opened, expected = open_checkpoint(tiny_directory), Contract.load(str(tiny_directory))
    assert expected == read(tiny_directory, read_json(tiny_directory / "contract.json")) and expected.caps == (
        None,
        10,
        10,
        10,
        12,
        6,
    )
    with refused("expected contract.json, found none", "experiments.adapt"):
        Contract.load(open_checkpoint(tiny_directory, stock=True))
    monkeypatch.setattr(contract, "read_json_object", None)
    found = Contract.load(opened)
    assert found == expected and found.rules == opened.rules
    with pytest.raises(TypeError):  # the control: a directory is read
        Contract.load(tiny_directory)
