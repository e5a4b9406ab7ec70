"""The claims of measured runs in one small file: counts and medians of each summary, beside the digest of its ledger.

python -m tests.results NAME=RUN ... > tests/results.json
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

COUNTS = (
    "suffix_disagreement",
    "merge_disagreement",
    "answer_disagreement",
    "answer_tokens_disagreement",
    "correctness_disagreement",
)
ENDPOINTS = ("baseline_divergence", "bidirectional_donor_recovery", "exact_control_novel_trajectory")


def claims_of(run: Path) -> dict[str, Any]:
    """What a finished run says, with the SHA-256 of its ledger: with the ledger every number can be checked."""
    manifest = json.loads((run / "manifest.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    ledger = (run / "rows.jsonl").read_bytes()
    return {
        "experiment": manifest["experiment"],
        "dtypes": [one["dtype"] for one in manifest["numeric"]],
        "kernels": sorted({f"{one['attention']}/{one['linear']}" for one in manifest["numeric"]}),
        "checkpoint": manifest["checkpoint"],
        "tasks_sha256": manifest["tasks_sha256"],
        "code_sha256": manifest["code_sha256"],
        "rows_sha256": hashlib.sha256(ledger).hexdigest(),
        "rows": summary["rows"],
        "passed": summary["passed"],
        **_numbers(summary),
    }


def _numbers(summary: dict[str, Any]) -> dict[str, Any]:
    """The endpoints of a summary and of each precision in it; what a summary does not have is left out."""
    found: dict[str, Any] = {name: summary[name] for name in COUNTS if name in summary}
    found |= {name: summary["endpoints"][name] for name in ENDPOINTS if name in summary.get("endpoints", {})}
    for name in ("first_divergence", "interpretation", "argmax_equal_rows"):
        if name in summary:
            found[name] = summary[name]
    if "cache" in summary:
        found["cache"] = {key: summary["cache"][key] for key in ("exact_rows", "relative_l2_median")}
    if "accuracy" in summary:
        found["correct"] = {arm: v["correct"] for arm, v in summary["accuracy"].items() if isinstance(v, dict)}
    for dtype, block in summary.get("precisions", {}).items():
        found[dtype] = _numbers(block)
    return found


def main() -> None:
    named = (argument.partition("=") for argument in sys.argv[1:])
    claims = {name: claims_of(Path(run)) for name, _, run in named}
    print(json.dumps(claims, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
