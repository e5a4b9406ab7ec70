"""Text to tokens and back. Text from a user never becomes a special token."""

import hashlib
import json
import re
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from minimodel.errors import InputError, refuse
from minimodel.files import read_bytes

LETTERS = string.ascii_uppercase  # of the choices, in order
MAX_TOKENIZER_BYTES = 32 * 1024 * 1024  # the largest public Qwen2.5 tokenizer.json is 11 MB
# The parts that a byte-level BPE tokenizer, Qwen2.5's kind, may have, by place. Others can turn a short text into
# gigabytes (a chain of Replace), stop the process, or lose characters.
PARTS = {
    "normalizer": {"NFC", "NFD"},  # NFKC and NFKD turn x² into x2
    "pre_tokenizer": {"ByteLevel", "Split", "Digits"},
    "post_processor": {"ByteLevel", "TemplateProcessing"},
    "decoder": {"ByteLevel"},
}
CHAT_TEMPLATE = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{question}\n\n{choices}<|im_end|>\n<|im_start|>assistant\n"
)
FIELD = re.compile(r"\{question\}|\{choices\}")
LISTS = ("normalizers", "pretokenizers", "processors", "decoders")  # keys under which a Sequence lists its members


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a byte-level BPE tokenizer.json. InputError for another kind, and for a file that the library refuses."""
    data = read_bytes(path, MAX_TOKENIZER_BYTES)
    with _library(f"{path}: not a tokenizer"):
        tokenizer = Tokenizer.from_buffer(data)
    if (model := type(tokenizer.model).__name__) != "BPE":
        raise refuse(f"{path}: model", "BPE", model)
    if tokenizer.model.dropout:
        raise refuse(f"{path}: model dropout", "none: the same text must give the same tokens", tokenizer.model.dropout)
    for place, known in PARTS.items():
        part = getattr(tokenizer, place)
        for kind in [] if part is None else _kinds(json.loads(part.__getstate__())):
            if kind not in known:
                raise refuse(f"{path}: {place}", "a part of byte-level BPE: " + " ".join(sorted(known)), kind)
    return tokenizer


def _kinds(part: dict[str, Any]) -> list[str]:
    """Returns the type of a part, or the types of the members of a Sequence."""
    members = [member for key in LISTS for member in part.get(key, [])]
    return [kind for member in members for kind in _kinds(member)] if part["type"] == "Sequence" else [part["type"]]


def json_sha256(value: Any) -> str:
    """Returns the SHA-256 of a value's ASCII JSON."""
    return hashlib.sha256(json.dumps(value).encode("ascii")).hexdigest()


@contextmanager
def _library(where: str) -> Iterator[None]:
    """Turns what the tokenizers library raises into InputError: Exception for a defect of the file, and BaseException
    for a panic of its Rust part.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise InputError(f"{where} ({' '.join(str(error).split())[:160]})") from None


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer (the `tokenizers` library, `tokenizer.json`) and the prompt template."""

    tokenizer: Tokenizer
    template: str

    @classmethod
    def load(cls, path: Path, template: str) -> "TextCodec":
        """Reads tokenizer.json. InputError when the library does not accept it."""
        tokenizer = load_tokenizer(path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # special tokens in the text stay text: typed delimiters are data, never structure
        tokenizer.encode_special_tokens = True
        return cls(tokenizer, template)

    def special_id(self, name: str, where: str) -> int:
        """Returns the id of a delimiter. InputError unless the tokenizer defines it as a special token."""
        with _library(f"{where}: delimiter {name!r}: no text"):
            token = self.tokenizer.token_to_id(name)
        if token is None or token not in self.special_ids():
            raise refuse(f"{where}: delimiter {name!r}", "a special token of tokenizer.json", token)
        return token

    def special_ids(self) -> set[int]:
        """Returns the ids of all added tokens marked special: delimiters and the base model's own."""
        return {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}

    def defined_ids(self) -> list[int]:
        """Returns every id that the tokenizer defines, in order; a padded vocabulary has more rows than this."""
        return sorted(set(self.tokenizer.get_vocab(with_added_tokens=True).values()))

    def meaning(self) -> dict[str, str]:
        """Returns the SHA-256 of the vocabulary and of the merges in order.

        Two tokenizer.json files that differ only in spelling, such as a merge "a b" or ["a", "b"], give the same.
        """
        vocabulary = sorted((i, text) for text, i in self.tokenizer.get_vocab(with_added_tokens=True).items())
        merges = json.loads(self.tokenizer.to_str())["model"]["merges"]
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        return {"vocabulary_sha256": json_sha256(vocabulary), "merges_sha256": json_sha256(pairs)}

    def encode(self, text: str) -> list[int]:
        """Returns the ordinary ids of `text`. InputError for a lone surrogate, and for a tokenizer that loses text."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"text: expected Unicode, found a lone surrogate at character {error.start}") from None
        with _library("text: the tokenizer cannot encode it"):
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if special := self.special_ids().intersection(ids):
            raise InputError(f"text: expected ordinary tokens only, found special token {min(special)}")
        # decoding must give the text back, as the tokenizer normalises it (Qwen2.5's NFC)
        normalizer, decoded = self.tokenizer.normalizer, self.decode(ids)
        whole = text if normalizer is None else normalizer.normalize_str(text)
        if decoded not in (whole, f" {whole}"):  # a byte-level pre-tokenizer may put a space before the first word
            at = next((i for i, (a, b) in enumerate(zip(whole, decoded)) if a != b), min(len(whole), len(decoded)))
            raise InputError(
                f"text: expected a tokenizer that keeps every character, found {decoded[at : at + 20]!r} "
                f"instead of {whole[at : at + 20]!r} at character {at}; check pre_tokenizer, decoder and vocabulary"
            )
        return ids

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """Returns the text of ids; bytes that are no UTF-8 become U+FFFD."""
        with _library("tokens: the tokenizer cannot decode them"):
            return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def prompt(self, question: str, choices: Sequence[str]) -> str:
        """Returns the filled template. InputError for more choices than there are letters."""
        return filled(self.template, question, choices)


def filled(template: str, question: str, choices: Sequence[str]) -> str:
    """Returns the text with its fields filled in one pass: a field's name in a question or choice stays text."""
    if not isinstance(question, str):  # `sub` takes None for an empty text
        raise refuse("question", "a text", question)
    values = {"{question}": question, "{choices}": lettered(choices)}
    return FIELD.sub(lambda match: values[match[0]], template)


def lettered(choices: Sequence[str]) -> str:
    """Returns one line per choice, each after its letter. InputError for what is no list of texts, or too long."""
    # a single text would be taken for its letters
    if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
        raise refuse("choices", "a list of texts", choices)
    if len(choices) > len(LETTERS):
        raise refuse("choices", f"at most {len(LETTERS)}, one per letter", len(choices))
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices))


def check_template(raw: Any, where: str) -> str:
    """Returns a prompt template. InputError unless it holds {question} once and {choices} at most once."""
    if not isinstance(raw, str) or raw.count("{question}") != 1 or raw.count("{choices}") > 1:
        raise refuse(where, "text with {question} once and {choices} at most once", raw)
    return raw


@dataclass(frozen=True)
class Chat:
    """The chat template of a stock checkpoint: special tokens by name, and two fields for ordinary text."""

    codec: TextCodec
    template: str  # holds {question} once and {choices} at most once
    stop: tuple[int, ...]  # special tokens that end a generation

    @classmethod
    def of(cls, codec: TextCodec, template: str, stop: Sequence[str]) -> "Chat":
        """Checks both. InputError for a template without exactly one `{question}`, and unless stops are special."""
        if not stop:
            raise InputError("--eos: expected at least one special token that ends a generation, found none")
        template = check_template(template, "chat template")
        return cls(codec, template, tuple(codec.special_id(name, "--eos") for name in stop))

    def encode(self, question: str, choices: Sequence[str]) -> list[int]:
        """Returns the ids of the filled template.

        A special token's name is that token where the template has it, and text in a question or choice. The filled
        text between two special tokens is encoded as one piece, as in a chat template's output.
        """
        added = self.codec.tokenizer.get_added_tokens_decoder()
        names = {token.content: i for i, token in added.items() if token.special}
        pieces = re.split("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")", self.template)
        ids: list[int] = []
        for piece in pieces:
            if piece in names:
                ids.append(names[piece])
            elif piece:
                ids += self.codec.encode(filled(piece, question, choices))
        return ids
