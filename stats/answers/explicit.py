r"""Finds the explicit statements of an answer: `\boxed{72}`, "Answer: 72", `#### 72`, `<answer>72</answer>`,
`{"answer": 72}`.

Every function is linear in its text: patterns repeat only what one character class bounds, and repetitions that could
be entered at every position have an upper count.
"""

import json
import re
from typing import NamedTuple

from stats.answers.letters import MAX_CHOICES, lone_letter
from stats.answers.numbers import parse_number
from stats.answers.text import lines, sentences

_BOX_PART = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"\b(?:final_)?answers?(?:\s{1,3}(?:is|was))?(?P<mark>[\s*_\"']{0,6})[:=]", re.IGNORECASE)
_JSON_VALUE = re.compile(
    r"\s{0,3}(?P<value>\"(?:[^\"\\]|\\.){0,4000}\"|[^\s\"{}\[\],]+)\s{0,3}(?P<end>\}|,\s{0,3}\"|\n|\Z)"
)
_TAG = re.compile(r"<(?:final_)?answer>(?P<content>[^<]*)(?P<end></(?:final_)?answer>)?", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]{0,3}####[ \t]*(?P<content>[^\n]*)$", re.MULTILINE)
_BULLET = re.compile(r"\A\s*(?:[-*+•]|#{1,6}|>)\s+(?=\S)")
_FIRST_ITEM = re.compile(r"\s*1[.)]\s+(?=\S)")
_ITEM = re.compile(r"\s*(?:[-*+•]|[0-9]{1,2}[.)])\s+\S")


class Explicit(NamedTuple):
    """An explicit statement."""

    start: int  # its position in the text, -1 for one that is cut off
    end: int  # the position after it
    content: str | None  # what it states, None where it is ambiguous or cut off


def last_explicit(text: str) -> Explicit | None:
    r"""Returns the last explicit statement of `text`; one that is cut off counts only where none is complete."""
    found = (last_box(text), _last_answer_line(text), _last_tag(text), _last_hashes(text))
    return max((one for one in found if one), key=lambda one: one.start, default=None)


def last_box(text: str) -> Explicit | None:
    r"""Returns the last complete, balanced `\boxed{...}`, the inner one of nested boxes; else one that is cut off."""
    open_braces: list[re.Match[str]] = []
    best: Explicit | None = None
    for part in _BOX_PART.finditer(text):
        if part["box"] or part[0] == "{":
            open_braces.append(part)
            best = best or (_cut_off(text) if part["box"] else None)
        elif part[0] == "}" and open_braces:
            opened = open_braces.pop()
            if opened["box"] and (best is None or opened.start() > best.start):
                best = Explicit(opened.start(), part.end(), text[opened.end() : part.start()])
    return best


def _cut_off(text: str) -> Explicit:
    """Returns a statement without content that any complete one outranks."""
    return Explicit(-1, len(text), None)


def unmarked(line: str) -> str | None:
    """Returns `line` without its list, heading or quotation mark: "- 72", "1. 72" and "# 72" are 72.

    "1. 72 apples" could be item 1 or the number 1, and is None. "1. Just one" keeps its number.
    """
    line = _BULLET.sub("", line, count=1)
    item = _FIRST_ITEM.match(line)
    rest = line[item.end() :] if item else ""
    if _is_answer(rest):
        return rest
    return None if re.search("[0-9]", rest) else line


def _is_answer(text: str) -> bool:
    """Whether the whole text is a number or a letter."""
    return parse_number(text) is not None or lone_letter(text, MAX_CHOICES) is not None


def _last_answer_line(text: str) -> Explicit | None:
    """Returns the last "Answer:" with the rest of its line, or the next line that is not blank."""
    found = [*_ANSWER_LINE.finditer(text)]
    if not found:
        return None
    match = found[-1]
    if '"' in match["mark"] and text[match.start() - 1 : match.start()] == '"':
        return _json(text, match)
    rest = text[match.end() :]
    following = lines(rest)
    if not following:
        return Explicit(match.start(), len(text), "")
    content: str | None = following[0]
    place = rest.index(following[0])
    first = sentences(following[0])[0]
    if rest[:place].strip(" *_\"'"):  # the content is on a line below
        content = None if sum(_ITEM.match(item) is not None for item in following[:2]) == 2 else unmarked(following[0])
    head, dot, tail = (content or "").partition(". ")
    if dot and parse_number(head) is not None and parse_number(tail) is not None:
        content = None  # "2. 72" leaves open which of the two is the answer
    return Explicit(match.start(), match.end() + place + first.start + len(first.text), content)


def _json(text: str, key: re.Match[str]) -> Explicit:
    """Returns the value of the key "answer" of a JSON object; its content is None where the value is not complete."""
    value = _JSON_VALUE.match(text, key.end())
    if value is None or (value["end"] == "" and "{" in text[max(0, key.start() - 200) : key.start()]):
        return Explicit(key.start(), key.end(), None)
    content = value["value"]
    if content.startswith('"'):
        try:
            content = json.loads(content, strict=False)
        except ValueError:
            content = None
    return Explicit(key.start(), value.end(), content)


def _last_tag(text: str) -> Explicit | None:
    """Returns the last `<answer>...</answer>`, else one that is cut off."""
    found = [Explicit(*m.span(), m["content"]) if m["end"] else _cut_off(text) for m in _TAG.finditer(text)]
    return max(found, key=lambda one: one.start, default=None)


def _last_hashes(text: str) -> Explicit | None:
    """Returns the `#### 72` line; headings such as `#### Step 1` are none, and two lines that differ are ambiguous."""
    found = [match for match in _HASHES.finditer(text) if _is_answer(match["content"])]
    if not found:
        return None
    same = len({match["content"].strip() for match in found}) == 1
    return Explicit(*found[-1].span(), found[-1]["content"] if same else None)
