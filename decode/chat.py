"""A chat template as plain text: special tokens by name, `{question}` and `{choices}` as ordinary text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from decode.text import LETTERS, TextCodec
from minimodel.errors import InputError, refuse

TEMPLATE = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{question}\n\n{choices}<|im_end|>\n<|im_start|>assistant\n"
)
FIELD = re.compile(r"\{question\}|\{choices\}")


@dataclass(frozen=True)
class Chat:
    """Text of a stock checkpoint."""

    codec: TextCodec
    template: str  # holds {question} once and {choices} at most once
    stop: tuple[int, ...]  # special tokens that end a generation

    @classmethod
    def of(cls, codec: TextCodec, template: str, stop: Sequence[str]) -> "Chat":
        """InputError for a template without exactly one `{question}`, and for a stop that is no special token."""
        if template.count("{question}") != 1 or template.count("{choices}") > 1:
            raise refuse("chat template", "text with {question} once and {choices} at most once", template)
        if not stop:
            raise InputError("--eos: expected at least one special token that ends a generation, found none")
        return cls(codec, template, tuple(codec.special_id(name, "--eos") for name in stop))

    def encode(self, question: str, choices: Sequence[str]) -> list[int]:
        """Returns the ids of the filled template.

        A special token's name is that token in the template, and text in a question or choice. Between special tokens
        the filled text is encoded as one piece, as a chat template's output is.
        """
        if len(choices) > len(LETTERS):
            raise refuse("choices", f"at most {len(LETTERS)}, one letter each", len(choices))
        lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices))
        values = {"{question}": question, "{choices}": lines}
        names = self._special_names()
        pieces = re.split("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")", self.template)
        ids: list[int] = []
        for piece in pieces:
            if piece in names:
                ids.append(names[piece])
            elif piece:
                ids += self.codec.encode(FIELD.sub(lambda match: values[match[0]], piece))
        return ids

    def _special_names(self) -> dict[str, int]:
        added = self.codec.tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}
