"""Numbers in answers as exact rationals: decimals, fractions, percents and their usual LaTeX spellings.

No float is involved, so 35%, 0.35 and 7/20 are one value. Text is bounded before any pattern meets it, and values are
bounded in digits, so the cost is bounded whatever the input.
"""

import re
from fractions import Fraction

MAX_TEXT = 1_000
"""A longer text is no number."""

MAX_BITS = 1_000
"""A value whose numerator or denominator has more bits (about 300 digits) is no number."""

_DECIMAL_PLACES = 30
_DECIMAL = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_EXPONENT = r"[eE](?P<e1>[+-]?[0-9]{1,3})|\s?(?:\\times|\\cdot|×|x|\*)\s?10\s?\^\s?\{?(?P<e2>[+-]?[0-9]{1,3})\}?"
_LATEX_FRACTION = r"\\[dtc]?frac\s?(?:\{\s?(?P<n2>[^{}]+)\}|(?P<n3>[0-9]))\s?(?:\{\s?(?P<d2>[^{}]+)\}|(?P<d3>[0-9]))"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s?(?:[$£€¥]\s?)?(?:"
    rf"(?P<decimal>{_DECIMAL})(?:{_EXPONENT})?"
    rf"|(?P<n1>{_DECIMAL})\s?/\s?(?P<d1>{_DECIMAL})"
    rf"|(?P<whole>[0-9]+)\s(?P<n0>[0-9]+)/(?P<d0>[0-9]+)"
    rf"|(?P<whole2>[0-9]+)?\s?{_LATEX_FRACTION}"
    rf")\s?(?P<percent>%|percent|per\scent)?",
    re.IGNORECASE,
)
_GROUPED = re.compile(r"(?<=[0-9])(?:\\,|\{,\})(?=[0-9])")
_SPACING = re.compile(r"\\(?:left|right|displaystyle|[,!])")
_SPACE = re.compile(r"\\[;: ]")
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|mathsf|bm)\s?(?=\{)")
_DEGREES = re.compile(r"\s?(?:°|\^\s?\{?\\circ\}?)$")
_PAIRS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("{", "}"), ("(", ")"), ("**", "**"), ("*", "*"))


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of `text` if the whole of it is one number, else None.

    Accepts signs, thousands separators in groups of three (`6,400`, `7{,}250`), decimals, `a/b`, `\\frac{a}{b}`, mixed
    numbers (`3 1/2`), exponents (`1.5e3`, `1.5 \\times 10^{3}`), percents (`35%` is 7/20), a currency sign before, a
    degree sign or closing punctuation after, and math delimiters or Markdown stars around. Refuses `1,23`, `1/0`,
    `nan`, `inf`, digits that are not ASCII, and values of more than about 300 digits.
    """
    if len(text) > MAX_TEXT:
        return None
    match = _NUMBER.fullmatch(_bare(text))
    if match is None:
        return None
    value = _value(match)
    if value is None or max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > MAX_BITS:
        return None
    return value


def format_number(value: Fraction) -> str:
    """Return the one spelling of a value: an integer, an exact decimal of up to 30 places, or `p/q` in lowest terms."""
    if value.denominator == 1:
        return str(value.numerator)
    for places in range(1, _DECIMAL_PLACES + 1):
        if 10**places % value.denominator == 0:
            digits = str(abs(value.numerator) * (10**places // value.denominator)).zfill(places + 1)
            return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return f"{value.numerator}/{value.denominator}"


def _bare(text: str) -> str:
    """Return `text` without LaTeX spacing and wrappers, delimiters around it and punctuation after it."""
    text = _SPACE.sub(" ", _SPACING.sub("", _GROUPED.sub(",", text)))
    text = _WRAPPER.sub("", text).replace("\\%", "%").replace("\\$", "$")
    text = " ".join(text.split())
    before = None
    while text != before:
        before = text
        text = _DEGREES.sub("", text.rstrip(" .,;:!?`").lstrip(" `"))
        for opening, closing in _PAIRS:
            inner = text[len(opening) : len(text) - len(closing)]
            if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
                text = inner
                break
    return text


def _value(match: re.Match[str]) -> Fraction | None:
    groups = match.groupdict()
    if groups["decimal"] is not None:
        value = _decimal(groups["decimal"])
        exponent = groups["e1"] or groups["e2"]
        if exponent is not None:
            value *= Fraction(10) ** int(exponent)
    else:
        whole = Fraction(int(groups["whole"] or groups["whole2"] or "0"))
        numerator = parse_number(next(groups[f"n{i}"] for i in range(4) if groups[f"n{i}"] is not None))
        denominator = parse_number(next(groups[f"d{i}"] for i in range(4) if groups[f"d{i}"] is not None))
        if numerator is None or not denominator:
            return None
        value = whole + numerator / denominator
    if groups["percent"]:
        value /= 100
    return -value if groups["sign"] == "-" else value


def _decimal(text: str) -> Fraction:
    whole, _, places = text.replace(",", "").partition(".")
    return Fraction(int((whole or "0") + places), 10 ** len(places))
