"""Two precisions joined by row: what the change of precision does to each disagreement on fixed prefixes (paper,
section 3.4), and how many prefixes two matrices share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.harness.ledger import row_key
from experiments.harness.records import Comparison, Row
from stats.endpoints import compare_labels, difference_of_differences
from stats.intervals import STREAMS, Z_MATRIX, wilson

DIFFERS: dict[str, tuple[str, Callable[[Comparison], bool]]] = {
    "suffix_disagreement": ("cross_suffix", lambda pair: not pair["suffix"]["exact"]),
    "answer_disagreement": ("cross_answer", lambda pair: not pair["answer_equal"]),
    "answer_tokens_disagreement": ("cross_answer", lambda pair: not pair["answer_tokens_equal"]),
    "correctness_disagreement": ("cross_correctness", lambda pair: not pair["correct_equal"]),
    "logits_disagreement": ("cross_logits", lambda pair: not pair["logits"]["exact"]),
}


def cross_precision(rows: Sequence[Row], left: str, right: str, arms: tuple[str, str]) -> dict[str, Any]:
    """Returns the block `cross_precision`: right minus left in points, paired by row, for the disagreement of `arms`.

    left, right: dtypes; the paper's are bf16 and fp32. Rows that failed closed in either precision are left out, and
    `rows` says how many remain. `prefix_identity` counts rows with one integer prefix in both precisions;
    `functional_state_identity` those whose arms were all given the same tokens, roles, positions and mask rows.
    """
    sides = [{row["row"]: row for row in rows if row["dtype"] == dtype and row["arms"]} for dtype in (left, right)]
    joined = [(sides[0][name], sides[1][name]) for name in sides[0] if name in sides[1]]
    if not joined:
        return {"left": left, "right": right, "comparison": ":".join(arms), "rows": 0}
    same = [a["prefix"] == b["prefix"] for a, b in joined]
    states = [{row["arms"][arm]["boundary_state_sha256"] for row in pair for arm in arms} for pair in joined]
    name = ":".join(arms)
    labels = [[[row["arms"][arm]["correct"] for row in side] for arm in arms] for side in zip(*joined)]
    effect = difference_of_differences(
        (labels[0][0], labels[0][1]), (labels[1][0], labels[1][1]), STREAMS["accuracy_difference_of_differences"]
    )
    reductions = {
        key: compare_labels(
            [differs(a["comparisons"][name]) for a, _ in joined],
            [differs(b["comparisons"][name]) for _, b in joined],
            STREAMS[stream],
        ).reduction_dict(left, right)
        for key, (stream, differs) in DIFFERS.items()
    }
    return {
        "left": left,
        "right": right,
        "comparison": name,
        "rows": len(joined),
        "prefix_identity": wilson(sum(same), len(same), Z_MATRIX).as_dict(),
        "functional_state_identity": wilson(sum(len(one) == 1 for one in states), len(states), Z_MATRIX).as_dict(),
        **reductions,
        "accuracy_difference_of_differences": effect.as_dict(),
    }


def matched_prefixes(
    left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]], dtypes: tuple[str, str]
) -> dict[str, Any]:
    """Joins two matrices by row and counts the rows whose boundary prefixes are identical (paper, section 3.3).

    left, right: the rows of a matrix in each of `dtypes`; rows that failed closed are left out, `rows` says how many
    remain. `reading`: what a difference between the endpoints of the two may be called.
    """
    sides = [{row_key(row): row["prefix"] for row in rows if "prefix" in row} for rows in (left, right)]
    joined = [key for key in sides[0] if key in sides[1]]
    same = sum(sides[0][key] == sides[1][key] for key in joined)
    identity = f"{dtypes[0]} and {dtypes[1]} reached one integer prefix on {same} of {len(joined)} rows"
    reading = (
        f"{identity}: the difference of their endpoints is a fixed-prefix precision effect."
        if joined and same == len(joined)
        else f"{identity}: the difference of their endpoints is a precision-surface comparison and not a fixed-prefix "
        "precision effect."
    )
    return {
        "left": dtypes[0],
        "right": dtypes[1],
        "rows": len(joined),
        "prefix_identity": wilson(same, len(joined), Z_MATRIX).as_dict(),
        "reading": reading,
    }
