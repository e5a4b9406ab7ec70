"""The demo's caps and prompt template; the rest of its contract are the defaults."""

from collections.abc import Sequence

from decode.text import LETTERS

CAPS = {"branch": 128, "merge": 128, "answer": 16}
TEMPLATE = "Problem: {question}\nChoices:\n{choices}"


def fill_template(question: str, choices: Sequence[str]) -> str:
    """Returns the prompt block's text, as `decode.text.TextCodec.prompt` does, without a tokenizer."""
    lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices))
    head, tail = TEMPLATE.split("{question}")
    return head + question + tail.replace("{choices}", lines)
