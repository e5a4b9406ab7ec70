r"""Finds the explicit statements of an answer: `\boxed{72}`, "Answer: 72", `#### 72`, `<answer>72</answer>`,
`{"answer": 72}`.

Every function is linear in its text: patterns repeat only what one character class bounds, and repetitions that could
be entered at every position have an upper count.
"""

import json
import re
from dataclasses import dataclass

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
_DIGIT = re.compile(r"[0-9]")


@dataclass(frozen=True)
class Explicit:
    """An explicit statement."""

    start: int  # its position in the text
    end: int  # the position after it
    content: str | None  # what it states, None where it is ambiguous or cut off


def last_explicit(text: str, choices: int) -> Explicit | None:
    r"""Return the last explicit statement of `text`. One that is cut off counts only if no complete one precedes it."""
    found = [last_box(text), _last_answer_line(text), _last_tag(text), _hashes(text, choices)]
    complete = [explicit for explicit in found if explicit is not None]
    if complete:
        return max(complete, key=lambda explicit: explicit.start)
    return Explicit(0, len(text), None) if opens_box(text) or _TAG.search(text) else None


def last_box(text: str) -> Explicit | None:
    r"""Return the last complete, balanced `\boxed{...}`; the inner one of nested boxes."""
    open_braces: list[tuple[bool, int, int]] = []
    best: tuple[int, int, int] | None = None
    for part in _BOX_PART.finditer(text):
        if part["box"] or part[0] == "{":
            open_braces.append((part["box"] is not None, part.start(), part.end()))
        elif part[0] == "}" and open_braces:
            is_box, start, inside = open_braces.pop()
            if is_box and (best is None or start > best[0]):
                best = (start, inside, part.start())
    return None if best is None else Explicit(best[0], best[2] + 1, text[best[1] : best[2]])


def opens_box(text: str) -> bool:
    """Return whether `text` opens a box at all, complete or cut off."""
    return any(part["box"] for part in _BOX_PART.finditer(text))


def unmarked(line: str) -> str | None:
    """Return `line` without its list, heading or quotation mark: "- 72", "1. 72" and "# 72" are 72.

    "1. 72 apples" could be item 1 or the number 1, and is None. "1. Just one" keeps its number.
    """
    line = _BULLET.sub("", line, count=1)
    item = _FIRST_ITEM.match(line)
    rest = line[item.end() :] if item else ""
    if parse_number(rest) is not None or lone_letter(rest, MAX_CHOICES):
        return rest
    return None if _DIGIT.search(rest) else line


def _last_answer_line(text: str) -> Explicit | None:
    """Return the last "Answer:" with the rest of its line, or the next line that is not blank."""
    match = max(_ANSWER_LINE.finditer(text), key=lambda found: found.start(), default=None)
    if match is None:
        return None
    if '"' in match["mark"] and text[match.start() - 1 : match.start()] == '"':
        return _json(text, match)
    rest = text[match.end() :]
    following = lines(rest)
    if not following:
        return Explicit(match.start(), len(text), "")
    line = following[0]
    start = match.end() + rest.index(line)
    first = sentences(line)[0]
    end = start + first.start + len(first.text)
    content: str | None = line
    if rest[: rest.index(line)].strip(" *_\"'"):  # the content is on a line below
        items = [item for item in following[:2] if _ITEM.match(item)]
        content = None if len(items) == 2 else unmarked(line)
    if content is not None and _two_numbers(content):
        content = None
    return Explicit(match.start(), end, content)


def _two_numbers(line: str) -> bool:
    """Whether "2. 72" leaves open which of the two is the answer."""
    head, dot, rest = line.partition(". ")
    return bool(dot) and parse_number(head) is not None and parse_number(rest) is not None


def _json(text: str, key: re.Match[str]) -> Explicit:
    """Return the value of the key "answer" of a JSON object, None unless it is complete."""
    value = _JSON_VALUE.match(text, key.end())
    if value is None or (value["end"] == "" and "{" in text[max(0, key.start() - 200) : key.start()]):
        return Explicit(key.start(), key.end(), None)
    content = value["value"]
    if content.startswith('"'):
        try:
            content = json.loads(content, strict=False)
        except ValueError:
            return Explicit(key.start(), value.end(), None)
    return Explicit(key.start(), value.end(), content)


def _last_tag(text: str) -> Explicit | None:
    found = None
    for match in _TAG.finditer(text):
        if match["end"]:
            found = Explicit(match.start(), match.end(), match["content"])
    return found


def _hashes(text: str, choices: int) -> Explicit | None:
    """Return the `#### 72` line; headings such as `#### Step 1` are none, and two lines that differ are ambiguous."""
    found = [
        match
        for match in _HASHES.finditer(text)
        if parse_number(match["content"]) is not None or lone_letter(match["content"], choices)
    ]
    if not found:
        return None
    last = found[-1]
    same = {match["content"].strip() for match in found} == {last["content"].strip()}
    return Explicit(last.start(), last.end(), last["content"] if same else None)
