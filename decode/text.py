"""Text to tokens and back. Nothing a user typed ever becomes a special token."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from minimodel.errors import InputError, refuse
from minimodel.files import read_bytes

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer (the `tokenizers` library, `tokenizer.json`) and the prompt template."""

    tokenizer: Tokenizer
    template: str

    @classmethod
    def load(cls, path: Path, template: str) -> "TextCodec":
        """InputError when the file is not a tokenizer the library accepts."""
        data = read_bytes(path)
        try:
            tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain Exception for every defect of the file
            raise InputError(f"{path}: not a tokenizer ({' '.join(str(error).split())[:160]})") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # special tokens in the text stay text: typed delimiters are data, never structure
        tokenizer.encode_special_tokens = True
        return cls(tokenizer, template)

    def special_id(self, name: str, where: str) -> int:
        """The id of a delimiter; InputError unless the tokenizer defines it as a special token."""
        token = self.tokenizer.token_to_id(name)
        if token is None or token not in self.special_ids():
            raise refuse(f"{where}: delimiter {name!r}", "a special token of tokenizer.json", token)
        return token

    def special_ids(self) -> set[int]:
        """Ids of all added tokens marked special: delimiters and the base model's own."""
        return {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}

    def defined_ids(self) -> list[int]:
        """Every id the tokenizer defines, in order; a padded vocabulary has more rows than this."""
        return sorted(set(self.tokenizer.get_vocab(with_added_tokens=True).values()))

    def encode(self, text: str) -> list[int]:
        """Ordinary ids of `text`. InputError for text that is no Unicode (a lone surrogate)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"text: expected Unicode, found a lone surrogate at character {error.start}") from None
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        special = self.special_ids().intersection(ids)
        if special:
            raise InputError(f"text: expected ordinary tokens only, found special token {min(special)}")
        return ids

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def prompt(self, question: str, choices: list[str] | tuple[str, ...]) -> str:
        """The template filled in one pass, so that braces in a question or choice stay text.

        InputError for more choices than there are letters.
        """
        if len(choices) > len(LETTERS):
            raise refuse("choices", f"at most {len(LETTERS)}, one a letter", len(choices))
        lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices))
        head, tail = self.template.split("{question}")
        return head.replace("{choices}", lines) + question + tail.replace("{choices}", lines)
