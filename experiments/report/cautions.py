"""What stands around a run's numbers: what it was made with, whether its gates passed, and the paper's cautions."""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.report.blocks import Alert, Block, Paragraph, Verdict
from experiments.report.values import words

NUMERIC = ("dtype", "device", "attention", "linear", "threads")  # what a report says of a numeric contract
ENVIRONMENT = ("python", "platform", "machine", "torch", "cpu", "cpu_capability", "accelerator")  # the rest: manifest
NOVEL = "exact_control_novel_trajectory"
MCNEMAR = (
    "A McNemar test describes the direction of the discordant rows. A large p does not establish that the two arms are "
    "equivalent."
)
PANEL = (
    "The rows are a panel that was frozen by its selection rule before any was decoded. Their rates hold for these "
    "rows and do not estimate how often the effect occurs among all tasks or models."
)


def cautions(summaries: Sequence[dict[str, Any]]) -> list[Block]:
    """The paper's cautions that apply to any of the summaries, each once."""
    found: dict[str, None] = {}
    for summary in summaries:
        if any(key == "mcnemar_p" for key, _ in _items(summary)):
            found[MCNEMAR] = None
        novel = (summary.get("endpoints") or {}).get(NOVEL)
        if novel:
            found[_control(novel)] = None
        if "panel" in summary:
            found[PANEL] = None
    return [Alert(text, "Note") for text in found]


def _control(novel: dict[str, Any]) -> str:
    bound = "no bound at all" if novel["rate"] is None else f"{100 * novel['wilson_95'][1]:.1f} % as its upper bound"
    return (
        f"{novel['count']} of {novel['n']} exact rows left the shared trajectory after a transplant. So small a "
        f"control stratum has {bound}: it does not establish a low artifact rate."
    )


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from _items(inner)


def head_blocks(manifest: dict[str, Any], summary: dict[str, Any]) -> list[Block]:
    """Rows, numeric contract, environment, digests, and whether every gate passed."""
    recorded = manifest["environment"]
    environment = ", ".join(f"{words(key)} {recorded[key]}" for key in ENVIRONMENT if key in recorded)
    weights, tasks = manifest["checkpoint"].get("model.safetensors"), manifest.get("tasks_sha256")
    failed = summary["failed_rows"]
    verdict: Block = Verdict("Every gate passed on every row.")
    if not summary["passed"]:
        names = f": {', '.join(failed[:20])}" if failed else ""
        verdict = Alert(
            f"gates failed on {len(failed)} of {summary['rows']} rows{names}. The numbers below are no result."
        )
    return [
        Paragraph(
            f"{summary['rows']} rows. Numeric contract: {numeric_text(manifest['numeric'])}. "
            f"Environment: {environment}."
        ),
        Paragraph(
            f"Checkpoint weights {f'SHA-256 {weights}' if weights else 'sharded, their digests in the manifest'}; "
            f"tasks {f'SHA-256 {tasks}' if tasks else 'not read'}."
        ),
        verdict,
    ]


def numeric_text(contracts: list[dict[str, Any]]) -> str:
    """The numeric contracts of a run one by one; where there are many, the values that each part takes."""
    if len(contracts) > 3:
        names = {key: dict.fromkeys(str(one[key]) for one in contracts) for key in NUMERIC}
        dtypes, devices, attention, linear, threads = (", ".join(names[key]) for key in NUMERIC)
        return (
            f"{len(contracts)} of them, {dtypes} on {devices}, attention {attention}, linear {linear}, "
            f"{threads} threads; one by one in the manifest"
        )
    return "; ".join(
        f"{one['dtype']} on {one['device']}, attention {one['attention']}, linear {one['linear']}, "
        f"{one['threads']} threads"
        for one in contracts
    )
