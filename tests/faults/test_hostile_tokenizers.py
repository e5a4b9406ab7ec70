"""Hostile tokenizers and delimiters: refused by the part that is wrong."""

import pytest
from tokenizers import pre_tokenizers

from decode import Contract
from decode.text import load_tokenizer
from minimodel.files import parse_json
from tests.faults.test_disk import one_error
from tests.helpers import edit_json, refused

PARTS = {
    "a chain that makes gigabytes of one letter": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}] * 40,
            }
        },
        "normalizer: expected a part of byte-level BPE",
    ),
    "a part whose file panics the library": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "not a tokenizer (Precompiled",
    ),
    "a part that panics in use": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        # tokenizers before FixedLength cannot read the file at all
        "pre_tokenizer: expected" if hasattr(pre_tokenizers, "FixedLength") else "not a tokenizer (",
    ),
    "a part that loses text": ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer: expected"),
    "a decoder that panics": (
        {"decoder": {"type": "Strip", "content": "a", "start": 9, "stop": 9}},
        "decoder: expected",
    ),
    "a normalizer that changes exponents": ({"normalizer": {"type": "NFKC"}}, "normalizer: expected"),
    "another model": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "added_tokens": []},
        "model: expected BPE",
    ),
}


@pytest.mark.parametrize("kind", PARTS)
def test_tokenizers_of_another_kind_are_refused_by_their_part(small, tmp_path, kind):
    mine = small.copy(tmp_path)
    change, message = PARTS[kind]
    edit_json(mine.checkpoint / "tokenizer.json", **change)
    with refused("tokenizer.json", message):
        Contract.load(mine.checkpoint)


def test_a_tokenizer_that_drops_merges_at_random_is_refused(small, tmp_path):
    """BPE dropout would give one text other tokens on every run."""
    mine = small.copy(tmp_path)
    path = mine.checkpoint / "tokenizer.json"
    model = parse_json(path.read_bytes(), path)["model"]
    edit_json(path, model={**model, "dropout": 0.0})
    load_tokenizer(path)
    edit_json(path, model={**model, "dropout": 0.5})
    with refused("tokenizer.json: model dropout", "0.5"):
        Contract.load(mine.checkpoint)


def test_a_regular_expression_without_end_is_refused_per_row(small, tmp_path):
    """The library panics when its search gives up; that is one line too."""
    mine = small.copy(tmp_path)
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    edit_json(mine.checkpoint / "tokenizer.json", pre_tokenizer=split)
    codec = Contract.load(mine.checkpoint).codec
    with refused("text: the tokenizer cannot encode it", "retry-limit"):
        codec.encode("x" * 60)


def test_a_delimiter_that_is_no_text_is_refused(small, tmp_path):
    mine = small.copy(tmp_path)
    names = [f"<|{name}|>" for name in ("prompt", "branch_1", "branch_2", "branch_3", "merge")]
    edit_json(mine.checkpoint / "contract.json", delimiters={"open": ["\ud800", *names]})
    with refused("contract.json: delimiter '\\ud800'"):
        Contract.load(mine.checkpoint)


SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LOSSES = {
    "no pre-tokenizer": {"pre_tokenizer": None},
    "a split that removes spaces": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]}},
    "no decoder": {"decoder": None},
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_tokenizer_that_loses_text_is_refused_per_row(small, tmp_path, kind):
    mine = small.copy(tmp_path)
    Contract.load(mine.checkpoint).codec.encode("Which one is odd?")  # the control
    edit_json(mine.checkpoint / "tokenizer.json", **LOSSES[kind])
    with refused("text: expected a tokenizer that keeps every character", "at character"):
        Contract.load(mine.checkpoint).codec.encode("Which one is odd?")
    ended = mine.run(tmp_path / "run")
    one_error(ended, "rows refused", "keeps every character")
    assert not (tmp_path / "run").exists(), "nothing is written for refused input"


def test_a_vocabulary_without_a_byte_is_refused_where_the_byte_is_needed(small, tmp_path):
    mine = small.copy(tmp_path)
    path = mine.checkpoint / "tokenizer.json"
    model = parse_json(path.read_bytes(), path)["model"]
    vocabulary = {("<lost>" if token == "?" else token): i for token, i in model["vocab"].items()}
    merges = [merge for merge in model["merges"] if "?" not in "".join(merge)]
    edit_json(path, model={**model, "vocab": vocabulary, "merges": merges})
    codec = Contract.load(mine.checkpoint).codec
    assert codec.decode(codec.encode("Which one is odd")) == "Which one is odd"
    with refused("keeps every character", "'?'", "at character 16"):
        codec.encode("Which one is odd?")


def test_canonical_normalisation_and_a_leading_space_lose_nothing(small, tmp_path):
    mine = small.copy(tmp_path)
    edit_json(
        mine.checkpoint / "tokenizer.json",
        normalizer={"type": "NFC"},
        pre_tokenizer={**BYTES, "add_prefix_space": True},
    )
    codec = Contract.load(mine.checkpoint).codec
    assert codec.decode(codec.encode("e\u0301 \u212b?")) == " \xe9 \xc5?"
