"""One ledger row as blocks: its verdict, question, branches, suffixes, answers, drift, mask and donors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decode.text import LETTERS, TextCodec
from experiments.report.blocks import Alert, Block, Paragraph, Passage, Passages, RowEntry, Span, Table, table
from experiments.report.pictures import mask_figure
from experiments.report.plots import TRANSPLANTS, follows
from experiments.report.runs import Run, failure
from experiments.report.style import ROLE_COLOURS, SERIES
from experiments.report.texts import Texts, by_block, read_texts, spans, token_text
from experiments.report.values import number, scalar, words
from experiments.report.why import Divergence, at, divergence
from experiments.run.ledger import row_key
from minimodel.errors import InputError
from minimodel.roles import ROLE_NAMES
from stats.endpoints import first_divergence

# the arms that an experiment compares, the first pair that a row holds
COMPARED = (("live", "prefill"), ("incremental", "prefill"), ("live", "incremental"), ("singleton", "pair"))
TRANSPLANTED = {arm: cell for cell, arm in TRANSPLANTS.items() if cell[0] != cell[1]}  # arm: (recipient, donor)


@dataclass(frozen=True)
class View:
    """One row with what its blocks are made of."""

    run: Run
    key: str
    row: dict[str, Any]
    texts: Texts
    arms: tuple[str, str] | None  # the compared pair; None where the row failed closed or decodes nothing

    @property
    def dtype(self) -> str:
        return str(self.row.get("dtype") or self.row.get("cell", self.run.dtypes[0] if self.run.dtypes else ""))

    @property
    def pair(self) -> dict[str, Any]:
        """The comparison's entry; empty where the ledger holds none."""
        found: dict[str, Any] = self.row["comparisons"].get(":".join(self.arms), {}) if self.arms else {}
        return found

    @property
    def first(self) -> int | None:
        """The first differing token of the compared arms, counted from the boundary."""
        if self.arms is None:
            return None
        left, right = (suffix_of(self.row["arms"][arm]) for arm in self.arms)
        return first_divergence(left, right)

    @property
    def answer_changed(self) -> bool:
        """Whether the compared arms state different answers; by their answers' tokens where no answer is scored."""
        if self.arms is None:
            return False
        left, right = (self.row["arms"][arm].get("answer") for arm in self.arms)
        return not self.pair.get("answer_equal", left == right)

    @property
    def divergence(self) -> Divergence | None:
        """The first divergence with its margins, where the ledger holds them."""
        if self.arms is None or "logits" not in self.pair:
            return None
        return divergence(self.row, self.key, ":".join(self.arms), self.dtype.split("/")[0])


def suffix_of(arm: dict[str, Any]) -> list[int]:
    """What an arm decoded: its suffix, or all tokens after the prompt in a batch control."""
    tokens: list[int] = arm.get("suffix", arm.get("tokens", []))
    return tokens


def view(run: Run, row: dict[str, Any], texts: Texts) -> View:
    """The row with the pair of arms that its experiment compares."""
    arms = next((pair for pair in COMPARED if set(pair) <= set(row.get("arms", ()))), None)
    return View(run, row_key(row), row, texts, arms)


def find_row(run: Run, name: str) -> dict[str, Any]:
    """The row of that identity, or of that id where only one row has it. InputError lists what there is."""
    exact = [row for row in run.rows if row_key(row) == name]
    found = exact or [row for row in run.rows if row["row"] == name]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(row_key(row) for row in (found or run.rows)[:8])
    more = " ..." if len(found or run.rows) > 8 else ""
    raise InputError(f"{run.path}: expected one row named {name!r}, found {len(found)}; rows: {shown}{more}")


def row_entries(runs: Sequence[Run]) -> tuple[RowEntry, ...]:
    """The rows of all runs, in order, for the page's row list."""
    found = []
    for run in runs:
        texts = read_texts(run.manifest)
        found += [row_entry(view(run, row, texts), f"row-{run.anchor}-{k}") for k, row in enumerate(run.rows)]
    return tuple(found)


def row_entry(one: View, anchor: str) -> RowEntry:
    """The row's line in the list, and its blocks."""
    apart, drift = one.divergence, one.pair.get("cache", {}).get("relative_l2")
    order, flags, facts = {}, set(), []
    if one.first is None:
        facts.append("suffixes equal" if one.arms else _uncompared(one.row))
    else:
        flags.add("diverged")
        facts.append(f"parts at token {one.first}")
        order["first"] = float(one.first)
    if apart is not None and apart.margin is not None:
        facts.append(
            f"margin {number(apart.margin)}" + (f" ({scalar(apart.ulp)} ULP)" if apart.ulp is not None else "")
        )
        order["margin"] = apart.margin
    if drift is not None:
        facts.append(f"drift {number(drift)}")
        order["drift"] = drift
    if one.answer_changed:
        flags.add("answer")
        facts.append("answer changed")
    if not one.row["passed"]:
        flags.add("gate")
        facts.append("gate failed")
    return RowEntry(
        one.run.name, one.key, anchor, tuple(facts), frozenset(flags), order, tuple(row_blocks(one, anchor))
    )


def row_blocks(one: View, anchor: str) -> list[Block]:
    """Everything about one row."""
    arms = one.row.get("arms", {})
    failed = failure(one.row)
    blocks: list[Block] = [Alert(f"gates {failed}")] if failed else []
    blocks.append(Paragraph(_statement(one)))
    blocks += [Alert(text, "Note") for text in one.texts.missing if arms]
    blocks += _question(one)
    blocks += _prefix(one)
    if arms:
        blocks.append(_suffixes(one.texts.codec, arms))
        blocks.append(_arms_table(one))
    if set(TRANSPLANTED) <= set(arms):
        blocks.append(_donors(arms))
    return [*blocks, *_sites(one.row), *_cache(one, anchor), _gates(one.row)]


def _uncompared(row: dict[str, Any]) -> str:
    """What a row without compared arms says: an audit's leaves, or nothing."""
    differing = row.get("differing_leaves")
    return "nothing compared" if differing is None else f"{differing} leaves differ"


def _statement(one: View) -> str:
    """What happened on this row, in a sentence or three."""
    if one.arms is None:
        return f"No suffixes on this row: {_uncompared(one.row)}."
    left, right = map(words, one.arms)
    first, apart = one.first, one.divergence
    if first is None:
        length = len(suffix_of(one.row["arms"][one.arms[0]]))
        return f"{left} and {right} continue with the same {length} tokens."
    a, b = (at(suffix_of(one.row["arms"][arm]), first) for arm in one.arms)
    text = (
        f"{left} and {right} part at token {first} after the boundary: {left} takes {token_text(one.texts.codec, a)}, "
        f"{right} takes {token_text(one.texts.codec, b)}."
    )
    if apart is not None and apart.margin is not None:
        text += (
            f" The smaller margin of the two choices is {apart.shown(apart.margin, apart.ulp)}; the boundary logits of "
            f"the two differ by up to {number(apart.max_drift)}, {number(apart.mean_drift)} on average."
        )
    followed = [
        f"the {donor} cache in the {recipient} state follows {follows(one.row['arms'], arm)}"
        for arm, (recipient, donor) in TRANSPLANTED.items()
        if arm in one.row["arms"]
    ]
    return text + (f" Transplants: {'; '.join(followed)}." if followed else "")


def _question(one: View) -> list[Block]:
    task = one.texts.tasks.get(one.row["row"])
    if task is None:
        return []
    lines = [["question", task.question]]
    lines += [[f"choice {letter}", choice] for letter, choice in zip(LETTERS, task.choices)]
    return [table("The task", ["part", "text"], [*lines, ["expected answer", task.answer]])]


def _prefix(one: View) -> list[Block]:
    """The blocks up to the boundary as text in their colours; ids where there is no tokenizer."""
    tokens = one.row.get("prefix", {}).get("tokens")
    if not tokens:
        return []
    contract = one.texts.contract
    if contract is None:
        return [Passages("The prefix", (Passage(f"{len(tokens)} token ids", spans(None, tokens)),))]
    passages = [
        Passage(
            f"{words(ROLE_NAMES[role])}, {len(members)} tokens", spans(one.texts.codec, members), ROLE_COLOURS[role]
        )
        for role, members in by_block(contract, tokens)
    ]
    return [Passages("The prefix, block by block, through the boundary", tuple(passages))]


def _suffixes(codec: TextCodec | None, arms: dict[str, Any]) -> Passages:
    """The equal part once, then one column per different continuation with its first differing token marked."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, arm in arms.items():
        groups.setdefault(tuple(suffix_of(arm)), []).append(words(name))
    suffixes = list(groups)
    if len(groups) == 1:
        label = f"all arms, {len(suffixes[0])} tokens"
        return Passages("The suffix", (Passage(label, spans(codec, suffixes[0]), "third"),))
    firsts = [first_divergence(suffixes[0], other) for other in suffixes[1:]]
    first = min(index for index in firsts if index is not None)
    common = Passage(f"equal in all arms, {first} tokens", spans(codec, suffixes[0][:first]), "line")
    columns = [
        Passage(
            ", ".join(names),
            (*_marked(codec, suffix[first : first + 1]), *spans(codec, suffix[first + 1 :])),
            SERIES[index % 4],
        )
        for index, (suffix, names) in enumerate(groups.items())
    ]
    return Passages("The suffixes after the boundary", (common, *columns), columns=True)


def _marked(codec: TextCodec | None, tokens: Sequence[int]) -> tuple[Span, ...]:
    shown = spans(codec, tokens)
    return (Span(shown[0].text, "mark"),) if shown else (Span("(ended)", "mark"),)


def _arms_table(one: View) -> Table:
    """Each arm's choice at the first divergence with its margin, and its answer with its score."""
    codec, first, apart = one.texts.codec, one.first, one.divergence
    header = ["arm", "tokens"]
    header += ["token at the divergence", "margin there", "in ULP"] if first is not None else []
    scored = any("scored" in arm for arm in one.row["arms"].values())
    answered = any("answer_text" in arm for arm in one.row["arms"].values())
    header += (["answer block"] if answered else []) + (["read as", "correct"] if scored else [])
    lines = []
    for name, arm in one.row["arms"].items():
        tokens = suffix_of(arm)
        line = [words(name), str(len(tokens))]
        if first is not None:
            margins = arm.get("margins", [])
            margin = at(margins, first)
            ulp = apart.ulps[one.arms.index(name)] if apart and one.arms and name in one.arms else None
            line += [token_text(codec, at(tokens, first))]
            line += [number(margin) if margin is not None else "forced or not recorded"]
            line += [scalar(ulp) if ulp is not None else ""]
        line += [str(arm.get("answer_text", ""))] if answered else []
        line += [scalar(arm.get("scored")), scalar(arm.get("correct"))] if scored else []
        lines.append(line)
    return table("The arms", header, lines)


def _donors(arms: dict[str, Any]) -> Table:
    lines = [
        [f"{recipient} state", donor, follows(arms, arm)]
        for (recipient, donor), arm in TRANSPLANTS.items()
        if arm in arms
    ]
    return table("Whose suffix each cache gives", ["recipient", "cache of", "suffix of"], lines)


def _sites(row: dict[str, Any]) -> list[Block]:
    """The partial transplants of a carrier row."""
    directions = row.get("sites") or {}
    names = list(dict.fromkeys(site for sites in directions.values() for site in sites))
    if not names:
        return []
    lines = [[words(n), *(s[n]["follows"] if n in s else "" for s in directions.values())] for n in names]
    return [table("Whom each partial transplant follows", ["site", *map(words, directions)], lines)]


def _cache(one: View, anchor: str) -> list[Block]:
    """Drift of the boundary cache by layer, and the attention mask."""
    layers = one.pair.get("cache", {}).get("layers")
    found: list[Block] = [_drift(layers)] if layers else []
    tokens, contract = one.row.get("prefix", {}).get("tokens"), one.texts.contract
    if tokens and contract is not None and one.arms is not None:
        whole = [*tokens, *suffix_of(one.row["arms"][one.arms[0]])]
        blocks = [(role, len(members)) for role, members in by_block(contract, whole)]
        found.append(mask_figure(f"{anchor}-mask", blocks, one.run.manifest["visibility"], len(tokens)))
    return found


def _drift(layers: Sequence[dict[str, Any]]) -> Table:
    tensors = {"K": "key", "V": "value"}
    lines = [
        [str(k), *(number(layer[one]["relative_l2"]) for one in tensors.values())] for k, layer in enumerate(layers)
    ]
    return table(
        "Drift of the boundary cache by layer, relative L2; 0 means equal in every bit", ["layer", *tensors], lines
    )


def _gates(row: dict[str, Any]) -> Table:
    lines = [[words(gate), "passed" if passed else "FAILED"] for gate, passed in row["gates"].items()]
    return table("Gates of this row", ["gate", "verdict"], lines, folded=True)
