"""One divergence as a drawing: the equal part of the suffixes, the two first differing tokens,
margins, donors and drift."""

import textwrap

from experiments.report.rows import TRANSPLANTED, View, suffix_of
from experiments.report.style import SERIES
from experiments.report.svg import Drawing, text_width
from experiments.report.texts import spans
from experiments.report.values import number, words
from minimodel.errors import InputError

WIDTH, HEIGHT, LANE, TAIL, REST = 860.0, 376.0, 118.0, 40, 62


def divergence_drawing(one: View) -> Drawing:
    """The drawing of a row whose compared arms part. InputError for another row, or where there is no text."""
    if one.first is None or one.arms is None or one.divergence is None:
        raise InputError(f"{one.run.path}: row {one.key!r}: expected suffixes that part, found none to draw")
    if one.texts.codec is None:
        raise InputError(f"{one.run.path}: row {one.key!r}: expected its tokenizer; {'; '.join(one.texts.missing)}")
    drawing = Drawing(HEIGHT, WIDTH)
    drawing.rect(0, 0, WIDTH, HEIGHT, "page")
    length = one.row["prefix"]["length"]
    drawing.text(20, 32, f"One prefix of {length} tokens, one greedy decoder, two caches", size=17, weight="600")
    names = " and ".join(map(words, one.arms))
    drawing.text(20, 54, f"Row {one.key}, {one.dtype}: {names} differ only in how the K/V cache was built.", size=13,
                 fill="muted")  # fmt: skip
    _common(drawing, one)
    for index in (0, 1):
        _lane(drawing, one, index, 76 + LANE * index)
    _drift(drawing, one)
    return drawing


def _text(one: View, tokens: list[int]) -> str:
    return " ".join("".join(span.text for span in spans(one.texts.codec, tokens)).split("\n"))


def _common(drawing: Drawing, one: View) -> None:
    """The box on the left: the end of the part that both suffixes share."""
    assert one.arms is not None and one.first is not None, "checked by the caller"
    shared = _text(one, suffix_of(one.row["arms"][one.arms[0]])[: one.first])
    drawing.frame(20, 112, 250, 120, "line")
    drawing.text(32, 132, f"equal for {one.first} tokens", size=12, fill="muted")
    shown = shared if len(shared) <= 3 * TAIL - 12 else "… " + shared[-(3 * TAIL - 14) :]
    for at, line in enumerate(textwrap.wrap(shown, 31)[-4:]):
        drawing.text(32, 156 + 19 * at, line, size=13)


def _lane(drawing: Drawing, one: View, index: int, top: float) -> None:
    """One arm: its token in a filled box, what follows, its margin, and the transplants that follow it."""
    assert one.arms is not None and one.first is not None and one.divergence is not None, "checked by the caller"
    arm, colour, apart = one.arms[index], SERIES[index], one.divergence
    tokens = suffix_of(one.row["arms"][arm])
    token, rest = _text(one, tokens[one.first : one.first + 1]), _text(one, tokens[one.first + 1 :])
    drawing.arrow(270, 172, 318, top + 46, colour)
    drawing.text(326, top + 22, f"{words(arm)} cache", size=13, fill=colour, weight="600")
    width = text_width(token.strip() or "(ended)", 15) + 20
    drawing.rect(326, top + 30, width, 30, colour)
    drawing.text(326 + width / 2, top + 50, token.strip() or "(ended)", "middle", 15, "page", weight="600")
    shown = rest if len(rest) <= REST else rest[: REST - 2] + " …"
    drawing.text(326 + width + 10, top + 50, shown, size=13)
    told = f"margin {apart.shown(apart.margins[index], apart.ulps[index])}"
    moved = [
        f"; moved into the {recipient} state it gives the same suffix"
        for name, (recipient, donor) in TRANSPLANTED.items()
        if donor == arm and name in one.row["arms"] and suffix_of(one.row["arms"][name]) == tokens
    ]
    answer = " ".join(str(one.row["arms"][arm].get("answer_text", "")).split())
    for line, text in enumerate((told + "".join(moved), f"answer: {answer[:REST]}")):
        drawing.text(326, top + 80 + 18 * line, text, fill="muted")


def _drift(drawing: Drawing, one: View) -> None:
    """How far the caches and the logits were apart at the boundary."""
    assert one.divergence is not None, "checked by the caller"
    apart, layers = one.divergence, one.pair["cache"]["layers"]
    notes = []
    for label, tensor in (("K", "key"), ("V", "value")):
        drift = [layer[tensor]["relative_l2"] for layer in layers]
        notes.append(
            f"{label} {number(drift[0])} in layer 0, at most {number(max(drift))}, in layer {drift.index(max(drift))}"
        )
    enough = apart.margin is not None and apart.margin <= apart.max_drift
    drawing.text(20, 330, f"Boundary caches apart, relative L2: {'; '.join(notes)}.", size=13)
    told = "at least" if enough else "less than"
    text = f"Boundary logits apart by up to {number(apart.max_drift)}, {told} the smaller margin of the choice."
    drawing.text(20, 352, text, size=13)
