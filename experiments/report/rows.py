"""One ledger row as blocks: its verdict, question, branches, suffixes, answers, drift, mask and donors; and one
divergence as a drawing."""

import html
import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from string import Template

from decode.text import LETTERS
from experiments.report.blocks import Alert, Block, Figure, Paragraph, RowEntry, Table, column_table, visible
from experiments.report.charts import ROLE_COLOURS
from experiments.report.runs import TRANSPLANTS, ArmPair, Run, at, compared, failure, follows, suffix_of
from experiments.report.texts import Texts
from experiments.report.values import number, scalar, words
from experiments.run.ledger import row_key
from experiments.run.records import ArmEntry, Row
from minimodel.errors import InputError
from minimodel.roles import ROLE_NAMES
from stats.donors import DONORS

DIVERGENCE = Path(__file__).with_name("divergence.svg")  # the drawing of a divergence, without its texts


def find_row(run: Run, name: str) -> Row:
    """Returns the row of that identity, or of that id if only one row has it. InputError lists what there is."""
    found = [row for row in run.rows if row_key(row) == name] or [row for row in run.rows if row["row"] == name]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(row_key(row) for row in (found or run.rows)[:8])
    more = " ..." if len(found or run.rows) > 8 else ""
    raise InputError(f"{run.path}: expected one row named {name!r}, found {len(found)}; rows: {shown}{more}")


def row_entries(runs: Sequence[Run]) -> list[RowEntry]:
    """Returns the rows of all runs, in order, for the page's row list."""
    return [row_entry(run, row, f"row-{run.anchor}-{k}") for run in runs for k, row in enumerate(run.rows)]


def row_entry(run: Run, row: Row, anchor: str) -> RowEntry:
    """Returns the row's line in the list, and its blocks."""
    pair = compared(run, row)
    order: dict[str, float] = {}
    facts = {_uncompared(row) if pair is None else "suffixes equal": ""}  # text: flag
    if pair is not None:
        if pair.first is not None:
            order["first"], facts = float(pair.first), {f"parts at token {pair.first}": "diverged"}
        if pair.margin is not None:
            order["margin"], ulp = pair.margin, "" if pair.ulp is None else f" ({scalar(pair.ulp)} ULP)"
            facts[f"margin {number(pair.margin)}{ulp}"] = ""
        if (drift := pair.entry.get("cache", {}).get("relative_l2")) is not None:
            facts[f"drift {number(drift)}"], order["drift"] = "", -drift  # the largest first
        if pair.answer_changed:
            facts["answer changed"] = "answer"
    if not row["passed"]:
        facts["gate failed"] = "gate"
    flags = frozenset(filter(None, facts.values()))
    return RowEntry(run.name, row_key(row), anchor, list(facts), flags, order, row_blocks(run, row, anchor))


def row_blocks(run: Run, row: Row, anchor: str) -> list[Block]:
    """Returns everything about one row."""
    pair, arms, texts = compared(run, row), row.get("arms", {}), run.texts
    blocks: list[Block] = [Alert(f"gates {text}")] if (text := failure(row)) else []
    blocks.append(Paragraph(_statement(row, pair, texts)))
    blocks += [Alert(text, "Note") for text in texts.missing if arms]
    if (task := texts.tasks.get(row["row"])) is not None:
        choices = [(f"choice {letter}", choice) for letter, choice in zip(LETTERS, task.choices)]
        parts = [("question", task.question), *choices, ("expected answer", task.answer)]
        blocks.append(Table("The task", ["part", "text"], parts))
    if tokens := row.get("prefix", {}).get("tokens"):
        blocks.append(texts.prefix(tokens))
    if arms:
        suffixes = {words(name): suffix_of(arm) for name, arm in arms.items()}
        blocks += [texts.suffixes(suffixes), _arms_table(arms, pair, texts)]
    if set(DONORS) <= set(arms):
        lines = [[f"{recipient} state", donor, follows(arms, arm)] for arm, (donor, recipient) in TRANSPLANTS.items()]
        blocks.append(Table("Whose suffix each cache gives", ["recipient", "cache of", "suffix of"], lines))
    if sites := row.get("sites"):
        found = [(words(way), {words(n): site["follows"] for n, site in one.items()}) for way, one in sites.items()]
        blocks.append(column_table("Whom each partial transplant follows", "site", found))
    if pair is not None and (layers := pair.entry.get("cache", {}).get("layers")):
        drifts = ([number(layer[tensor]["relative_l2"]) for tensor in ("key", "value")] for layer in layers)
        caption = "Drift of the boundary cache by layer, relative L2; 0 means equal in every bit"
        blocks.append(Table(caption, ["layer", "K", "V"], [[str(k), *drift] for k, drift in enumerate(drifts)]))
    if pair is not None and tokens and texts.contract is not None:
        lengths = [(role, len(members)) for role, members in texts.by_block([*tokens, *pair.suffixes[0]])]
        blocks.append(mask_figure(f"{anchor}-mask", lengths, run.manifest["visibility"], len(tokens)))
    gates = [[words(gate), "passed" if passed else "FAILED"] for gate, passed in row["gates"].items()]
    return [*blocks, Table("Gates of this row", ["gate", "verdict"], gates, folded=True)]


def _uncompared(row: Row) -> str:
    """Returns what a row without compared arms says: an audit's leaves, or nothing."""
    return f"{row['differing_leaves']} leaves differ" if "differing_leaves" in row else "nothing compared"


def _statement(row: Row, pair: ArmPair | None, texts: Texts) -> str:
    """Returns what happened on this row, in one to three sentences."""
    if pair is None:
        return f"No suffixes on this row: {_uncompared(row)}."
    (left, right), first, arms = map(words, pair.arms), pair.first, row["arms"]
    if first is None:
        return f"{left} and {right} continue with the same {len(pair.suffixes[0])} tokens."
    a, b = (texts.token(at(suffix, first)) for suffix in pair.suffixes)
    text = f"{left} and {right} part at token {first} after the boundary: {left} takes {a}, {right} takes {b}."
    if pair.margin is not None:
        drift = f"up to {number(pair.drift)}, {number(pair.entry['logits']['mean_abs'])} on average"
        text += f" The smaller margin of the two choices is {margin_text(pair.margin, pair.ulp)}; "
        text += f"the boundary logits of the two differ by {drift}."
    moved = [(cell, follows(arms, arm)) for arm, cell in DONORS.items() if arm in arms]
    followed = "; ".join(f"the {donor} cache in the {recipient} state follows {to}" for (donor, recipient), to in moved)
    return text + (f" Transplants: {followed}." if followed else "")


def margin_text(margin: float | None, ulp: float | None) -> str:
    """Returns '0.0625 (1 ULP)'; 'forced' where the arm had no choice or its suffix had ended."""
    if margin is None:
        return "forced"
    return f"{number(margin)} (a tie)" if not margin else number(margin) + ("" if ulp is None else f" ({ulp:g} ULP)")


def _arms_table(arms: dict[str, ArmEntry], pair: ArmPair | None, texts: Texts) -> Table:
    """Returns each arm's choice at the first divergence with its margin, and its answer with its score."""
    columns: dict[str, list[str]] = {"arm": list(map(words, arms))}
    columns["tokens"] = [str(len(suffix_of(arm))) for arm in arms.values()]
    if pair is not None and pair.first is not None:
        ulps = dict(zip(pair.arms, pair.ulps))
        margins = [at(arm.get("margins", []), pair.first) for arm in arms.values()]
        columns["token at the divergence"] = [texts.token(at(suffix_of(arm), pair.first)) for arm in arms.values()]
        columns["margin there"] = ["forced or not recorded" if m is None else number(m) for m in margins]
        columns["in ULP"] = ["" if ulps.get(arm) is None else scalar(ulps[arm]) for arm in arms]
    if any("answer_text" in arm for arm in arms.values()):
        columns["answer block"] = [str(arm.get("answer_text", "")) for arm in arms.values()]
    if any("scored" in arm for arm in arms.values()):
        columns["read as"] = [scalar(arm.get("scored")) for arm in arms.values()]
        columns["correct"] = [scalar(arm.get("correct")) for arm in arms.values()]
    return Table("The arms", list(columns), list(zip(*columns.values())))


def mask_figure(
    name: str, blocks: Sequence[tuple[int, int]], visibility: Sequence[Sequence[int]], boundary: int
) -> Figure:
    """Returns the attention mask of one row, to scale.

    blocks: (role, tokens) in order, delimiters included; boundary: tokens of the prefix, marked by a line.
    """
    *starts, total = itertools.accumulate((length for _, length in blocks), initial=0)
    names = [words(ROLE_NAMES[role]) for role, _ in blocks]
    edge = 14 + 6.7 * max(map(len, names))

    def place(key: float, query: float) -> tuple[float, float]:
        return edge + key / total * (428 - edge), 24 + query / total * 256

    def draw() -> str:
        parts = ['<svg viewBox="0 0 440 334">']
        for label, (query, height), top in zip(names, blocks, starts):
            for (key, width), left in zip(blocks, starts):
                if left <= top and visibility[query][key]:
                    down, across = top + height, left + width
                    corners = [place(left, top), place(left, down), place(across, down), place(across, top)]
                    shape, opacity = (corners[:3], 0.75) if left == top else (corners, 0.4)  # causal within one block
                    fill = f'fill="var(--{ROLE_COLOURS[key]})" fill-opacity="{opacity}"'
                    parts.append(f'<polygon points="{_points(shape)}" {fill}/>')
            size = f'x="{_n(place(top, 0)[0])}" y="10" width="{_n(place(height, 0)[0] - edge)}" height="9"'
            parts.append(f'<rect {size} fill="var(--{ROLE_COLOURS[query]})"/>')
            parts.append(_line([place(0, top), place(total, top)], 'stroke="var(--line)" stroke-width="0.7"'))
            parts.append(_text(edge - 7, place(0, top + height / 2)[1] + 4, label, "end"))
        x, dashed = place(boundary, 0)[0], 'stroke="var(--ink)" stroke-width="1.2" stroke-dasharray="4 3"'
        parts += [_line([(x, 10), place(boundary, total)], dashed), _text(x - 4, 36, "boundary", "end")]
        for position, anchor in ((0, "start"), (total // 2, "middle"), (total, "end")):
            parts.append(_text(place(position, 0)[0], 297, str(position), anchor))
        parts.append(_text(place(total / 2, 0)[0], 322, "key position, tokens", "middle", 12))
        return "\n".join([*parts, "</svg>"])

    lines = [[label, str(start), str(length)] for label, (_, length), start in zip(names, blocks, starts)]
    caption = (
        f"{total} tokens to scale: the strip on top is the token sequence; below it every query (down) and the keys it "
        "may attend to (across). The boundary lies one token into merge."
    )
    return Figure(name, caption, Table("The blocks of this row", ["block", "first position", "tokens"], lines), draw)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _line(points: Sequence[tuple[float, float]], stroke: str) -> str:
    return f'<polyline points="{_points(points)}" fill="none" {stroke}/>'


def _text(x: float, y: float, text: str, anchor: str, size: int = 11) -> str:
    place = f'x="{_n(x)}" y="{_n(y)}" font-size="{size}"'
    return f'<text {place} fill="var(--ink)" text-anchor="{anchor}">{text}</text>'


def divergence_drawing(run: Run, row: Row) -> str:
    """Returns the equal part of the compared suffixes, both continuations, margins, donors and drift as inline SVG.

    InputError for a row whose suffixes are equal, and where there is no text.
    """
    pair, texts, where = compared(run, row), run.texts, f"{run.path}: row {row_key(row)!r}"
    if pair is None or pair.first is None or "logits" not in pair.entry:
        raise InputError(f"{where}: expected suffixes that part, found none to draw")
    if texts.codec is None:
        raise InputError(f"{where}: expected its tokenizer; {'; '.join(texts.missing)}")
    shared = texts.line(pair.suffixes[0][: pair.first])
    shown = textwrap.wrap(shared if len(shared) <= 108 else f"… {shared[-106:]}", 31)[-4:]
    values = {f"shared_{line}": at(shown, line) or "" for line in range(4)}
    values |= {"length": str(row["prefix"]["length"]), "row": row_key(row), "dtype": pair.dtype}
    values |= {"first": str(pair.first), "drift": number(pair.drift)}
    values["size"] = "at least" if pair.margin is not None and pair.margin <= pair.drift else "less than"
    for tensor in ("key", "value"):
        drift = [layer[tensor]["relative_l2"] for layer in pair.entry["cache"]["layers"]]
        most = f"at most {number(max(drift))}, in layer {drift.index(max(drift))}"
        values[tensor] = f"{tensor[0].upper()} {number(drift[0])} in layer 0, {most}"
    for index in (0, 1):
        values |= {f"{name}_{index}": text for name, text in _lane(texts, pair, pair.first, index).items()}
    shape = Template(DIVERGENCE.read_text(encoding="utf-8").rstrip("\n"))
    return shape.substitute({name: html.escape(visible(text), quote=False) for name, text in values.items()})


def _lane(texts: Texts, pair: ArmPair, first: int, index: int) -> dict[str, str]:
    """Returns the texts of one arm: its token, what follows, its margin, and the transplants that follow it."""
    arms, arm, tokens = pair.row["arms"], pair.arms[index], pair.suffixes[index]
    token, rest = texts.line(tokens[first : first + 1]).strip() or "(ended)", texts.line(tokens[first + 1 :])
    width = 8.4 * len(token) + 20  # of the filled box around the token
    moved = "".join(
        f"; moved into the {recipient} state it gives the same suffix"
        for name, (donor, recipient) in DONORS.items()
        if donor == arm and name in arms and suffix_of(arms[name]) == tokens
    )
    return {
        **{"width": _n(width), "centre": _n(326 + width / 2), "after": _n(336 + width)},
        "arm": words(arm),
        "token": token,
        "rest": rest if len(rest) <= 62 else f"{rest[:60]} …",
        "margin": f"{margin_text(pair.margins[index], pair.ulps[index])}{moved}",
        "answer": " ".join(str(arms[arm].get("answer_text", "")).split())[:62],
    }
