"""One copy against two copies of one input: does the physical batch of two move tokens or log-probabilities?

Ten tasks, evenly spaced over prompt length, are each generated whole (branches, merge and answer) three times: as a
singleton, as a pair of identical copies, and as that pair again. The repeated pair is the floor and the gate; singleton
against pair is the comparison. A chosen token's log-probability is the log-softmax, in float64 over the whole
vocabulary, of the model-dtype logits that chose it; a forced token has none.

    python -m experiments.batch_control --dtype bf16
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from decode.record import derived_sha256
from decode.state import State, token_digest
from experiments.harness.exits import run_command
from experiments.harness.options import RunOptions, common_options, dtype_option
from experiments.harness.panel import panel_counts, panel_record, shortfall
from experiments.harness.progress import Progress
from experiments.harness.runner import Plan, run_plan
from experiments.harness.session import Session, open_session
from experiments.harness.summary import run_summary
from experiments.harness.whole import Generation, generate_whole
from experiments.report.closing import outcome
from experiments.report.values import rate
from minimodel.decoder import Decoder
from stats.endpoints import disagreement, divergence_spread, first_divergence
from stats.panels import length_spread

WANTED = 10
ARMS = {"singleton": 1, "pair": 2, "pair_replica": 2}  # physical copies
PAIRS = (("pair", "pair_replica"), ("singleton", "pair"))
GATES = ("replica_pair", "functional_state", "copies_synchronised", "argmax")
RULE = "evenly spaced order statistics after sorting by (prompt length, row id); no outcome and no answer is read"


def control_row(model: Decoder, row: str, prompt: State, index: int, progress: Progress) -> dict[str, Any]:
    """Generates one input three times and compares."""
    made: dict[str, Generation] = {}
    for name, copies in ARMS.items():
        progress.arm(name)
        made[name] = generate_whole(model, prompt, copies)
        progress.fed(len(prompt) + len(made[name].tokens))
    gates = {
        "replica_pair": made["pair"] == made["pair_replica"],  # tokens, margins, logprobs and functional state
        "functional_state": all(
            one.functional_sha256 == derived_sha256(prompt.contract, (*prompt.tokens, *one.tokens))
            for one in made.values()
        ),
        "copies_synchronised": all(one.synchronised for one in made.values()),
        "argmax": all(generation.chosen_by_logits for generation in made.values()),
    }
    return {
        "row": row,
        "index": index,
        "input": {"length": len(prompt), "sha256": prompt.sha256()},
        "arms": {name: arm_entry(made[name], copies) for name, copies in ARMS.items()},
        "comparisons": {f"{a}:{b}": comparison_entry(made[a], made[b]) for a, b in PAIRS},
        "gates": gates,
        "passed": all(gates.values()),
    }


def arm_entry(made: Generation, copies: int) -> dict[str, Any]:
    return {
        "copies": copies,
        "tokens": list(made.tokens),
        "tokens_sha256": token_digest(made.tokens),
        "logprobs": list(made.logprobs),
        "margins": list(made.margins),
        "state_sha256": made.functional_sha256,
    }


def comparison_entry(left: Generation, right: Generation) -> dict[str, Any]:
    """`tokens` and `logprobs`, each {exact, first_divergence}; log-probabilities are equal in every bit or not at all.

    `max_abs_aligned`: the largest difference over the positions at which both have a log-probability, of whatever token
    each chose there, as the paper's release has it; `max_abs_shared`: over those before the first differing token.
    """
    tokens = first_divergence(left.tokens, right.tokens)
    logprobs = first_divergence(_bits(left.logprobs), _bits(right.logprobs))
    return {
        "tokens": {"exact": tokens is None, "first_divergence": tokens},
        "logprobs": {
            "exact": logprobs is None,
            "first_divergence": logprobs,
            "max_abs_aligned": _largest(left.logprobs, right.logprobs),
            "max_abs_shared": _largest(left.logprobs[:tokens], right.logprobs[:tokens]),
        },
    }


def _bits(values: Sequence[float | None]) -> list[Any]:
    return [None if value is None else value.hex() for value in values]


def _largest(left: Sequence[float | None], right: Sequence[float | None]) -> float:
    return max((abs(a - b) for a, b in zip(left, right) if a is not None and b is not None), default=0.0)


def control_summary(dtype: str, panel: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The head and the gates; `panel`; for "singleton:pair" `token_disagreement` and `logprob_disagreement`, the spread
    of `first_token_divergence` and `first_logprob_divergence` (tokens after the prompt), the largest `max_abs_aligned`
    and `max_abs_shared`; `input_length`."""
    pairs = [row["comparisons"]["singleton:pair"] for row in rows if row["comparisons"]]
    lengths = [entry["length"] for entry in panel["rows"]]
    logprobs = [pair["logprobs"] for pair in pairs]
    endpoints: dict[str, Any] = {
        "panel": panel_counts(panel),
        "input_length": {"min": min(lengths), "max": max(lengths)},
        "comparison": "singleton:pair",
        "compared_rows": len(pairs),
        "token_disagreement": disagreement([pair["tokens"]["exact"] for pair in pairs]).as_dict(),
        "logprob_disagreement": disagreement([entry["exact"] for entry in logprobs]).as_dict(),
        "first_token_divergence": divergence_spread([pair["tokens"]["first_divergence"] for pair in pairs]).as_dict(),
        "first_logprob_divergence": divergence_spread([entry["first_divergence"] for entry in logprobs]).as_dict(),
        "max_abs_aligned": max((entry["max_abs_aligned"] for entry in logprobs), default=None),
        "max_abs_shared": max((entry["max_abs_shared"] for entry in logprobs), default=None),
    }
    return run_summary("batch_control", dtype, rows, endpoints)


def closing_lines(summary: dict[str, Any]) -> list[str]:
    line = (
        f"{outcome(summary)}; one copy against two: "
        f"tokens differ {rate(summary['token_disagreement'])}, "
        f"log-probabilities differ {rate(summary['logprob_disagreement'])}"
    )
    return [text for text in (line, shortfall(summary["panel"])) if text]


def control_plan(session: Session, limit: int | None) -> Plan:
    """The frozen rows in selection order; `--limit` keeps the first of them."""
    lengths = [(len(prompt), task.id) for task, prompt in zip(session.tasks, session.prompts)]
    chosen = length_spread(lengths, min(WANTED, len(lengths)))[:limit]
    rows: list[dict[str, Any]] = [
        {"row": lengths[i][1], "length": lengths[i][0], "sha256": session.prompts[i].sha256()} for i in chosen
    ]
    panel = panel_record(RULE, {"rows": WANTED}, {"rows": len(lengths)}, rows)
    dtype = session.numeric.dtype
    return Plan(
        manifest={**session.manifest(panel), "row_order": [entry["row"] for entry in rows]},
        preflight=session.options.preflight,
        gates=GATES,
        task=lambda index: session.tasks[chosen[index]],
        decode=lambda i, progress: control_row(
            session.model, lengths[chosen[i]][1], session.prompts[chosen[i]], i, progress
        ),
        summarise=lambda found: control_summary(dtype, panel, found),
        closing=closing_lines,
    )


@click.command(help=__doc__)
@dtype_option
@common_options(preflight=0)
def main(options: RunOptions, dtype: str) -> None:
    def body() -> int:
        session = open_session("batch_control", replace(options, limit=None), dtype)
        plan = control_plan(session, options.limit)
        return run_plan(plan, options.directory(f"batch_control-{dtype}"), options.fresh, options.quiet)

    run_command(body, "experiments.batch_control")


if __name__ == "__main__":
    main()
