"""Text: whatever a user types stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from decode import State
from decode.contract import CLOSE, OPEN
from decode.text import TextCodec
from tests.helpers import refused

TYPED = ["<|endoftext|>", *OPEN, *CLOSE, "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("typed", TYPED)
@pytest.mark.parametrize("place", ["question", "choice"])
def test_typed_delimiters_are_ordinary_text(contract, tiny_directory, typed, place):
    """google-deepmind/gemma 770, vllm-project/vllm 11691 (case 13)."""
    question, choices = (f"a {typed}b", ["c"]) if place == "question" else ("a", ["c", f"{typed} d{typed}"])
    state = State.prompt(contract, question, choices)
    inner = state.tokens[1:-1]
    assert not set(inner) & {*contract.open_ids, *contract.close_ids, 256}
    assert all(contract.is_ordinary(token) for token in inner)
    assert typed in contract.codec.decode(inner)
    plain = Tokenizer.from_file(str(tiny_directory / "tokenizer.json"))
    if plain.token_to_id(typed) is not None:
        assert plain.token_to_id(typed) in plain.encode(f"a {typed}b").ids, "the control: the library's own default"


def test_a_question_made_of_nothing_but_delimiters(contract):
    state = State.prompt(contract, "".join([*OPEN, *CLOSE, "<|endoftext|>"]), [])
    assert all(contract.is_ordinary(token) for token in state.tokens[1:-1])


@given(text=st.text(max_size=40))
def test_any_text_survives_and_holds_no_special_token(contract, text):
    ids = contract.codec.encode(text)
    assert contract.codec.decode(ids) == text
    assert not set(ids) & contract.codec.special_ids()


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_a_lone_surrogate_is_refused_with_its_place(contract, text):
    with refused("text", "surrogate", f"character {1 if text[0] == 'a' else 0}"):
        contract.codec.encode(text)
    with refused("surrogate"):
        State.prompt(contract, "q", [text])


def test_braces_in_questions_and_choices_stay_text(contract):
    prompt = contract.codec.prompt
    assert prompt("why {choices}?", ["x"]) == "why {choices}?\n\nA. x"
    assert prompt("why {question}?", ["{choices}", "{question}"]) == "why {question}?\n\nA. {choices}\nB. {question}"
    assert prompt("{}{0}%s", []) == "{}{0}%s\n\n"


def test_a_template_may_place_choices_first_or_leave_them_out(contract):
    first = TextCodec(contract.codec.tokenizer, "{choices}|{question}!")
    assert first.prompt("{choices}", ["x", "{question}"]) == "A. x\nB. {question}|{choices}!"
    assert TextCodec(contract.codec.tokenizer, "Q: {question}").prompt("x", ["y"]) == "Q: x"


def test_more_choices_than_letters_are_refused(contract):
    assert contract.codec.prompt("q", ["c"] * 26).endswith("\nZ. c")
    with refused("choices", "26", "27"):
        contract.codec.prompt("q", ["c"] * 27)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"model": 1}', b"\xff\xfe", b"[1"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, data):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with refused("tokenizer.json", "not a tokenizer"):
        TextCodec.load(tmp_path / "tokenizer.json", "{question}")


def test_saved_padding_and_truncation_are_switched_off(tiny_directory, tmp_path):
    tokenizer = Tokenizer.from_file(str(tiny_directory / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(TextCodec.load(tmp_path / "tokenizer.json", "{question}").encode("ten bytes.")) == 10


def test_the_meaning_of_a_tokenizer_is_that_of_its_entries_and_merges_and_not_of_its_bytes(tiny_directory, tmp_path):
    tokenizer = json.loads((tiny_directory / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"ab": 300, "abc": 301}

    def meaning(merges, **vocabulary):
        vocab = {**tokenizer["model"]["vocab"], **vocabulary}
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps({**tokenizer, "model": {**tokenizer["model"], "vocab": vocab, "merges": merges}}))
        return TextCodec.load(path, "{question}").meaning()

    first = meaning([["a", "b"], ["ab", "c"]])
    assert first == meaning(["a b", "ab c"]), "two spellings of one merge"
    assert first.keys() == {"vocabulary_sha256", "merges_sha256"}
    fewer = meaning([["a", "b"]])
    assert fewer["merges_sha256"] != first["merges_sha256"]
    assert fewer["vocabulary_sha256"] == first["vocabulary_sha256"]
    assert meaning([["a", "b"], ["ab", "c"]], ab=301, abc=300)["vocabulary_sha256"] != first["vocabulary_sha256"]
