"""The English words that the answer matcher reads."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BEFORE_LETTER = _words(
    "is was are were be isn't wasn't it it's its that that's this the a an answer answers letter option options "
    "choice choices one so therefore thus hence then also again not never neither nor either or and but than to on "
    "for with as pick picks picked choose chooses chose choosing select selects selected take takes leaves say says "
    "think believe conclude must would should might may could cannot can't couldn't i we i'd i'm i'll we'd only just "
    "still well rather indeed both of between equals final correct right because since if when wait no yes actually"
)
"""May stand right before a letter that names a choice; after another word the letter is part of a name."""

AFTER_LETTER = _words(
    "is was fits matches has it because since as with and or but not seems looks must would should can cannot could "
    "gives says wins holds works for by so then to which that here isn does doesn remains being alone in from we "
    "fails the might may too ruled"
)
"""May stand right after a letter that names a choice. Before any other lower-case word, A is read as an article and
another letter as part of a name."""

AFTER_I = _words("is fits matches because")
"""The same for the letter I, which is read as a pronoun before any other word."""

FILLERS = _words("be the a an letter option choice answer")
"""Skipped between a negation and its letter."""

SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
"""Multiply the number before them."""

CHANGE_NUMBER = _words(
    "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh eighth ninth tenth "
    "tenths hundredth hundredths thousandth thousandths double twice triple thrice squared cubed square cube root "
    "sqrt factorial power exponent log ln exp sin cos tan pi minus plus times divided multiplied negative mod modulo "
    "not never neither nor cannot wrong incorrect dozens hundreds thousands millions billions"
) | set(SCALES)
"""Change the value of a number near them, so that the number alone is not what is stated."""

VARIABLES = frozenset("xyznkreibcπθ")
"""Single letters that are factors after a number."""

NUMBERED = _words(
    "question problem part step page chapter section figure equation table line row item case option choice no day "
    "year level version room type"
)
"""Are named by the number after them, as in "question 5": that number is not a quantity."""
