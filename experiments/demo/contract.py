"""The demo's decoding contract: the project's delimiters and visibility, its own caps and prompt template."""

from __future__ import annotations

from collections.abc import Sequence

from decode.contract import CLOSE, OPEN, SCHEMA
from decode.text import LETTERS
from minimodel.roles import NUM_ROLES, ROLE_OFFSET, VISIBILITY

ROLE_ROWS = ROLE_OFFSET + NUM_ROLES
CAPS = {"branch": 128, "merge": 128, "answer": 16}
TEMPLATE = "Problem: {question}\nChoices:\n{choices}"


def fill_template(question: str, choices: Sequence[str]) -> str:
    """The prompt block's text, as `decode.text.TextCodec.prompt` gives it; usable before a tokenizer exists."""
    lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices))
    head, tail = TEMPLATE.split("{question}")
    return head + question + tail.replace("{choices}", lines)


def contract_json() -> dict[str, object]:
    """The content of `contract.json`."""
    return {
        "schema": SCHEMA,
        "delimiters": {"open": list(OPEN), "close": list(CLOSE)},
        "caps": dict(CAPS),
        "role_offset": ROLE_OFFSET,
        "visibility": [list(row) for row in VISIBILITY],
        "prompt_template": TEMPLATE,
    }
