"""Text and chat templates: whatever a user types stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from decode import State
from decode.contract import CLOSE, OPEN
from decode.text import CHAT_TEMPLATE, Chat, TextCodec
from tests.helpers import read_json, refused

START, END, ENDOFTEXT = 269, 270, 256  # of a stock tokenizer


@pytest.mark.parametrize("typed", ["<|endoftext|>", *OPEN, *CLOSE, "<|im_start|>", "<|im_end|>"])
def test_typed_delimiters_are_ordinary_text(contract, tiny_directory, typed):
    """google-deepmind/gemma 770, vllm-project/vllm 11691 (case 13)."""
    for question, choices in ((f"a {typed}b", ["c"]), ("a", ["c", f"{typed} d{typed}"]), (typed * 3, [])):
        inner = State.prompt(contract, question, choices).tokens[1:-1]
        assert not set(inner) & {*contract.open_ids, *contract.close_ids, 256}
        assert all(contract.is_ordinary(token) for token in inner)
        assert typed in contract.codec.decode(inner)
    plain = Tokenizer.from_file(str(tiny_directory / "tokenizer.json"))
    if plain.token_to_id(typed) is not None:
        assert plain.token_to_id(typed) in plain.encode(f"a {typed}b").ids, "the control: the library's own default"


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


def test_braces_stay_text_and_a_template_may_place_choices_first_or_leave_them_out(contract):
    for template, question, choices, text in (
        ("{question}\n\n{choices}", "why {choices}?", ["x"], "why {choices}?\n\nA. x"),
        ("{question}\n\n{choices}", "{question}?", ["{choices}", "{}"], "{question}?\n\nA. {choices}\nB. {}"),
        ("{question}\n\n{choices}", "{}{0}%s", [], "{}{0}%s\n\n"),
        ("{choices}|{question}!", "{choices}", ["x", "{question}"], "A. x\nB. {question}|{choices}!"),
        ("Q: {question}", "x", ["y"], "Q: x"),
    ):
        assert TextCodec(contract.codec.tokenizer, template).prompt(question, choices) == text
    assert contract.codec.prompt("{}", ["x"]) == "{}\n\nA. x"


def test_more_choices_than_letters_are_refused(contract):
    assert contract.codec.prompt("q", ["c"] * 26).endswith("\nZ. c")
    with refused("choices", "26", "27"):
        contract.codec.prompt("q", ["c"] * 27)


@pytest.mark.parametrize("choices", ["xy", "", [5], ["x", None]])
def test_choices_that_are_no_list_of_texts_are_refused(contract, choices):
    """A single text would be taken for the list of its letters."""
    assert contract.codec.prompt("q", ("x", "y")).endswith("A. x\nB. y")
    with refused("choices: expected a list of texts", repr(choices)):
        State.prompt(contract, "q", choices)


@pytest.mark.parametrize("question", [None, 5, b"q"])
def test_a_question_that_is_no_text_is_refused(contract, question):
    with refused("question: expected a text", repr(question)):
        State.prompt(contract, question, ["x"])


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
    tokenizer = read_json(tiny_directory / "tokenizer.json")
    tokenizer["model"]["vocab"] |= {"ab": 300, "abc": 301}

    def meaning(merges, **vocabulary):
        model = {**tokenizer["model"], "vocab": {**tokenizer["model"]["vocab"], **vocabulary}, "merges": merges}
        (tmp_path / "tokenizer.json").write_text(json.dumps({**tokenizer, "model": model}))
        return TextCodec.load(tmp_path / "tokenizer.json", "{question}").meaning()

    first, fewer = meaning([["a", "b"], ["ab", "c"]]), meaning([["a", "b"]])
    assert first == meaning(["a b", "ab c"]), "two spellings of one merge"
    assert first.keys() == {"vocabulary_sha256", "merges_sha256"}
    assert fewer == {**first, "merges_sha256": fewer["merges_sha256"]} != first
    assert meaning([["a", "b"], ["ab", "c"]], ab=301, abc=300)["vocabulary_sha256"] != first["vocabulary_sha256"]


@pytest.fixture(scope="module")
def codec(stock_directory):
    return TextCodec.load(stock_directory / "tokenizer.json", "{question}")


def test_special_tokens_of_a_chat_template_are_tokens_and_those_of_the_user_are_text(codec):
    chat = Chat.of(codec, CHAT_TEMPLATE, ("<|im_end|>", "<|endoftext|>"))
    assert chat.stop == (END, ENDOFTEXT)
    ids = chat.encode("Say <|im_end|> {choices} {question}", ["<|im_start|>", "b"])
    assert [token for token in ids if token >= 256] == [START, END, START, END, START]
    text = codec.decode([token for token in ids if token < 256])
    assert "user\nSay <|im_end|> {choices} {question}\n\nA. <|im_start|>\nB. b" in text, "filled in one pass"
    assert text.startswith("system\nYou are Qwen") and text.endswith("assistant\n")
    chat = Chat.of(codec, "<|im_start|>a {question} b<|im_end|>", ("<|im_end|>",))
    assert chat.encode("q", []) == [START, *codec.encode("a q b"), END], "pieces between them are encoded whole"


@pytest.mark.parametrize(
    ("template", "stop", "parts"),
    [
        ("none", ("<|im_end|>",), ("chat template", "{question} once")),
        ("{question}{question}", ("<|im_end|>",), ("chat template",)),
        ("{question}{choices}{choices}", ("<|im_end|>",), ("chat template",)),
        ("{question}", (), ("--eos", "at least one")),
        ("{question}", ("<|unknown|>",), ("--eos", "<|unknown|>", "special token")),
        ("{question}", ("a",), ("--eos", "'a'")),
    ],
)
def test_a_chat_template_that_does_not_fit_is_refused(codec, template, stop, parts):
    with refused(*parts):
        Chat.of(codec, template, stop)
