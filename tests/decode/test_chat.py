"""Chat templates as text: special tokens by name, whatever a question holds stays text."""

import pytest

from decode.chat import TEMPLATE, Chat
from decode.text import TextCodec
from tests.helpers import refused

START, END, ENDOFTEXT = 269, 270, 256


@pytest.fixture(scope="module")
def codec(stock_directory):
    return TextCodec.load(stock_directory / "tokenizer.json", "{question}")


def test_special_tokens_of_the_template_are_tokens_and_those_of_the_user_are_text(codec):
    chat = Chat.of(codec, TEMPLATE, ("<|im_end|>", "<|endoftext|>"))
    assert chat.stop == (END, ENDOFTEXT)
    ids = chat.encode("Say <|im_end|> {choices} {question}", ["<|im_start|>", "b"])
    assert [token for token in ids if token >= 256] == [START, END, START, END, START]
    text = codec.decode([token for token in ids if token < 256])
    assert "user\nSay <|im_end|> {choices} {question}\n\nA. <|im_start|>\nB. b" in text, "filled in one pass"
    assert text.startswith("system\nYou are Qwen") and text.endswith("assistant\n")


def test_pieces_between_special_tokens_are_encoded_whole(codec):
    chat = Chat.of(codec, "<|im_start|>a {question} b<|im_end|>", ("<|im_end|>",))
    assert chat.encode("q", []) == [START, *codec.encode("a q b"), END]


@pytest.mark.parametrize(
    ("template", "stop", "parts"),
    [
        ("none", ("<|im_end|>",), ("chat template", "{question} once")),
        ("{question}{question}", ("<|im_end|>",), ("chat template",)),
        ("{question}{choices}{choices}", ("<|im_end|>",), ("chat template",)),
        ("{question}", (), ("--eos", "at least one")),
        ("{question}", ("<|nobody|>",), ("--eos", "<|nobody|>", "special token")),
        ("{question}", ("a",), ("--eos", "'a'")),
    ],
)
def test_what_does_not_fit_is_refused(codec, template, stop, parts):
    with refused(*parts):
        Chat.of(codec, template, stop)
