"""Why one row of two runs differs, arm by arm: from saved tensors where both sides have them, else from reruns."""

from typing import Any

from cache.digest import cache_sha256, tensor_sha256
from decode.greedy import greedy_suffix
from experiments.crosscheck.explain import LETTERS, Finding, functional_note, step_from_kernels
from experiments.crosscheck.files import common_prefix_step, compare_files
from experiments.crosscheck.rerun import ONE_CALL, TOKEN_BY_TOKEN, Rerun
from experiments.run.leaves import first_unequal
from experiments.run.reader import Run
from experiments.run.saving import BOUNDARIES, TRACES, file_name


def explain_row(left: Run, right: Run, row: str, rerun: Rerun | None) -> list[Finding]:
    """Returns a finding for every arm whose boundary or suffix differs in row `row`: from saved files where both sides
    have them, else computed again. A row that keeps no prefix tokens has none."""
    mine, theirs = left.rows[row], right.rows[row]
    if any("tokens" not in side.get("prefix", {}) for side in (mine, theirs)):
        return []
    at = first_unequal(mine["prefix"]["tokens"], theirs["prefix"]["tokens"])
    if at is not None:
        return [_prefix_finding(left, right, row, at)]
    findings = []
    for arm in (name for name in mine["arms"] if name in theirs["arms"] and not _repeats((mine, theirs), name)):
        sides = (mine["arms"][arm], theirs["arms"][arm])
        finding = Finding(arm)
        moved = any(sides[0][key] != sides[1][key] for key in ("cache_sha256", "logits_sha256"))
        saved = moved and _from_saved_files(finding, left, right, row, arm)
        finding.notes += _suffix_notes(*sides)
        if not moved and not finding.notes:
            continue
        if rerun is not None and arm in (*TOKEN_BY_TOKEN, *ONE_CALL):
            tokens = mine["prefix"]["tokens"]
            _match_arms(finding, sides, rerun, arm, tokens)
            if moved:
                step_from_kernels(finding, rerun, arm, tokens)
        if moved and not saved and finding.first is None:
            finding.notes.append(
                "no saved tensors on both sides; new runs with --save-boundaries --trace ROW name the step"
            )
        findings.append(finding)
    return findings


def _repeats(rows: tuple[dict[str, Any], dict[str, Any]], arm: str) -> bool:
    """A replica that is equal to its original on both sides would only say the original's findings again."""
    original = arm.removesuffix("_replica")
    keys = ("cache_sha256", "logits_sha256", "suffix", "margins")
    pairs = [(row["arms"][arm], row["arms"].get(original, {})) for row in rows]
    return original != arm and all(one[key] == two.get(key) for one, two in pairs for key in keys)


def _from_saved_files(finding: Finding, left: Run, right: Run, row: str, arm: str) -> bool:
    """Whether both sides saved anything of this arm; what it shows goes into the finding."""
    saved = False
    for folder in (TRACES, BOUNDARIES):
        paths = [run.path / folder / file_name(run.rows[row]["row"], arm) for run in (left, right)]
        if all(path.is_file() for path in paths):
            saved = True
            pair, _, _ = compare_files(*paths)
            finding.notes += functional_note(pair)
            if pair.first is not None:
                finding.first, finding.exact_step = pair.first, folder == TRACES
                break
    return saved


def _suffix_notes(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    notes = []
    for name, key in (("suffix", "suffix"), ("margins of the suffix", "margins")):
        at = first_unequal(mine[key], theirs[key])
        if at is not None:
            values = [side[key][at] if at < len(side[key]) else "nothing" for side in (mine, theirs)]
            notes.append(f"{name} first differ at token {at}: A {values[0]}, B {values[1]}")
    return notes


def _match_arms(
    finding: Finding, sides: tuple[dict[str, Any], dict[str, Any]], rerun: Rerun, arm: str, tokens: list[int]
) -> None:
    finding.kernels = {letter: [] for letter in LETTERS}
    for kernel, model, boundary in rerun.boundaries(arm, tokens):
        finding.tried.append(kernel)
        digests = {"cache_sha256": cache_sha256(boundary.cache), "logits_sha256": tensor_sha256(boundary.logits)}
        suffix = None
        for letter, side in zip(LETTERS, sides):
            if all(side[key] == digest for key, digest in digests.items()):
                suffix = suffix or greedy_suffix(model, boundary)
                if list(suffix.tokens) == side["suffix"] and list(suffix.margins) == side["margins"]:
                    finding.kernels[letter].append(kernel)


def _prefix_finding(left: Run, right: Run, row: str, at: int) -> Finding:
    """A live prefix that went another way: the token, its margins, and the first differing step before it."""
    finding = Finding("live")
    shown = []
    for run in (left, right):
        prefix, margins = run.rows[row]["prefix"]["tokens"], run.rows[row].get("prefix_margins", [])
        index = at - (len(prefix) - len(margins))
        margin = margins[index] if 0 <= index < len(margins) else None
        shown.append(f"{prefix[at] if at < len(prefix) else 'nothing'} (margin {margin})")
    finding.notes.append(f"the prefixes part at token {at}: A {shown[0]}, B {shown[1]}; arms are not comparable")
    mine, theirs = (run.path / TRACES / file_name(run.rows[row]["row"], "live") for run in (left, right))
    if mine.is_file() and theirs.is_file():
        finding.first = common_prefix_step(mine, theirs, at)
    return finding
