"""Numbers in answers as exact rationals: decimals, fractions, percents and their usual LaTeX spellings, alone or as the
one number of a statement: "17 coins", "x = 5", "3 + 4 = 7", "7 (2+5)", "5°C", "1.5 million".

No float is involved, so 35%, 0.35 and 7/20 are one value. Text is bounded before any pattern meets it, and values are
bounded in digits, so the cost is bounded whatever the input.
"""

import re
import string
from fractions import Fraction

from stats.answers.text import MAX_SENTENCE, before_reason, words

MAX_TEXT = 1_000  # characters; a longer text is no number
MAX_BITS = 1_000  # of numerator and denominator, about 300 digits; a value with more is no number

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
_DEGREE_END = re.compile(r"\s?(?:°|\^\s?\{?\\circ\}?)$")
_PAIRS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("{", "}"), ("(", ")"), ("**", "**"), ("*", "*"))

# -- statements -------------------------------------------------------------------------------------------------------
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_CHANGE = words(  # words that change the value of a number near them, so that the number alone is not what is stated
    "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh eighth ninth tenth "
    "tenths hundredth hundredths thousandth thousandths double twice triple thrice squared cubed square cube root "
    "sqrt factorial power exponent log ln exp sin cos tan pi minus plus times divided multiplied negative mod modulo "
    "not never neither nor cannot wrong incorrect dozens hundreds thousands millions billions"
).union(SCALES)
_OPERATORS = frozenset("+*/^×·÷<>≤≥±√")
_FACTORS = _OPERATORS | frozenset("xyznkreibcπθ")  # operators and variables
_NUMBERED = words(  # the number after such a word names something ("question 5") and is not a quantity
    "question problem part step page chapter section figure equation table line row item case option choice no day "
    "year level version room type -"
)
_COPULA = re.compile(r"\W{0,6}(?:is|was|are|must be|would be|should be|comes to|equals)\b(?=[\s*:])", re.IGNORECASE)
_LATEX_UNIT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s?\{([^{}0-9]*)\}(?:\s?\^\s?\{?-?[0-9]\}?)?")
_LATEX_SPACING = re.compile(r"\\(?:[()\[\],;:! ]|quad\b)|~")
_PERCENT = re.compile(r"(?<=[0-9])\s{1,3}(?:%|\\%|percent\b|per\scent\b)", re.IGNORECASE)
_DEGREES = re.compile(r"(?<=[0-9])\s?(?:°|\^\s?\{?\\circ\}?)\s?[CFK]?(?![\w^])")
_EQUALS = re.compile(r"=|≈|\\approx\b")
_REMARK = re.compile(r"(?<=[^\s(])\s{1,3}\(([^()]*)\)")
_DIGIT = re.compile(r"[0-9]")
_ARITHMETIC = re.compile(r"[-+*/^×·÷√A-Za-z]")
_AND = re.compile(r"[,;]\s|\b(?:and|or|but)\b", re.IGNORECASE)
_BOUND = re.compile(r"\b(?:than|at\s(?:least|most)|between|up\sto|under|above|below|exceeds?|out\sof)\b|n't\b", re.I)
_WORD = re.compile(r"-?[0-9]+\s[0-9]+/[0-9]+(?!\S)|\S+")  # "3 1/2" is one word
_OPENING, _CLOSING = "\"'`*_([{", ".,:;!?\"'`*_)]}"


def parse_number(text: str) -> Fraction | None:
    """Returns the exact value of `text` if the whole of it is one number, else None.

    Accepts signs, thousands separators in groups of three (`6,400`, `7{,}250`), decimals, `a/b`, `\\frac{a}{b}`, mixed
    numbers (`3 1/2`), exponents (`1.5e3`, `1.5 \\times 10^{3}`), percents (`35%` is 7/20), a currency sign before, a
    degree sign or closing punctuation after, and math delimiters or Markdown stars around. Refuses `1,23`, `1/0`,
    `nan`, `inf`, digits that are not ASCII, and values of more than about 300 digits.
    """
    match = _NUMBER.fullmatch(_bare(text)) if len(text) <= MAX_TEXT else None
    if match is None:
        return None
    found = {name.rstrip(string.digits): part for name, part in match.groupdict().items() if part is not None}
    if "decimal" in found:
        digits, _, places = found["decimal"].replace(",", "").partition(".")
        value = Fraction(int(digits + places), 10 ** len(places)) * Fraction(10) ** int(found.get("e", 0))
    else:
        numerator, denominator = parse_number(found["n"]), parse_number(found["d"])
        if numerator is None or not denominator:
            return None
        value = int(found.get("whole", 0)) + numerator / denominator
    value *= Fraction(-1 if found["sign"] == "-" else 1, 100 if "percent" in found else 1)
    return value if max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS else None


def format_number(value: Fraction) -> str:
    """Returns the one spelling of a value: an integer, a decimal of up to 30 places, or `p/q` in lowest terms."""
    digits, rest = divmod(abs(value.numerator) * 10**_DECIMAL_PLACES, value.denominator)
    if rest:
        return str(value)
    whole, places = divmod(digits, 10**_DECIMAL_PLACES)
    return f"{'-' if value < 0 else ''}{whole}.{places:0{_DECIMAL_PLACES}}".rstrip("0").rstrip(".")


def only_number(text: str) -> str | None:
    """Returns the number that is the whole of `text`, in its one spelling, or None."""
    value = parse_number(text)
    return None if value is None else format_number(value)


def stated_number(statement: str) -> str | None:
    """Returns the number that `statement` states, in its one spelling; None where there is none, more than one, or a
    malformed one.

    A statement is parts joined by "=" or "≈". A part states a number if it holds exactly one number, no operator and no
    word that changes a number's value. Beside another part, arithmetic ("3 + 4") states nothing. All parts that state a
    number must state the same one. Anything else is no number, since a wrong number is worse than none.
    """
    if len(statement) > MAX_SENTENCE:
        return None
    values = {parse_number(statement)}
    if None in values:
        parts = _EQUALS.split(_readable(statement))
        values = {
            _part(part)
            for part in parts
            if _DIGIT.search(part) and not (len(parts) > 1 and _part(part) is None and _is_arithmetic(part))
        }
    value = values.pop() if len(values) == 1 else None
    return None if value is None else format_number(value)


def stated_alone(line: str) -> str | None:
    """Returns the number that `line` states if the line has no words: "3+4=7", "x = 5", but not "17 coins"."""
    found = re.findall(r"(?<!\\)\b[^\W\d_]{2,}", line) if len(line) <= MAX_SENTENCE else [""]
    return stated_number(line) if all(word.lower() in SCALES for word in found) else None


def _bare(text: str) -> str:
    """Returns `text` without LaTeX spacing and wrappers, delimiters around it and punctuation after it."""
    text = _SPACE.sub(" ", _SPACING.sub("", _GROUPED.sub(",", text)))
    text = _WRAPPER.sub("", text).replace("\\%", "%").replace("\\$", "$")
    text, before = " ".join(text.split()), ""
    while text != before:
        before = text
        text = _DEGREE_END.sub("", text.rstrip(" .,;:!?`").lstrip(" `"))
        for opening, closing in _PAIRS:
            if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)]
                break
    return text


def _readable(statement: str) -> str:
    """Returns the statement without its copula, its reason, LaTeX units and degree signs."""
    copula = _COPULA.match(statement)
    rest = before_reason(statement[copula.end() :] if copula else statement, _DIGIT)
    return _PERCENT.sub("%", _DEGREES.sub(" ", _LATEX_SPACING.sub(" ", _LATEX_UNIT.sub(r" \1 ", rest))))


def _is_arithmetic(part: str) -> bool:
    """Whether `part` is an expression such as "3 + 4" or "2x", and one expression only."""
    return _AND.search(part) is None and any(
        word in _OPERATORS or (_DIGIT.search(word) and _ARITHMETIC.search(word)) for word in part.split()
    )


def _part(part: str) -> Fraction | None:
    """Returns the one number of a part. A remark, as in "7 (2+5)", must not state another number."""
    whole = parse_number(part)
    if whole is not None:
        return whole
    value = _number_among_words(_REMARK.sub(" ", part))
    return value if {_number_among_words(remark) for remark in _REMARK.findall(part)} <= {value, None} else None


def _number_among_words(part: str) -> Fraction | None:
    """Returns the one number of a part; None for two, for a bound ("more than 5"), beside a word that changes it."""
    if _BOUND.search(part):
        return None
    raw = _WORD.findall(part)
    found = [word.lstrip(_OPENING).rstrip(_CLOSING) or word for word in raw]
    values, i = set(), 0
    while i < len(found):
        word = found[i]
        if _DIGIT.search(word):
            whole = parse_number(raw[i])
            value = whole if whole is not None else parse_number(word)
            if value is None or (i > 0 and found[i - 1].lower() in _NUMBERED):
                return None
            while i + 1 < len(found) and found[i + 1].lower() in SCALES:
                i += 1
                value *= SCALES[found[i].lower()]
            values.add(value)
        elif word.lower() in _CHANGE or word in _FACTORS or "\\" in word or "√" in word:
            return None
        i += 1
    return values.pop() if len(values) == 1 else None
