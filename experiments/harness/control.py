"""One copy of an input against two copies of it: the three generations of a row, their comparison and endpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from decode.greedy import Steps
from decode.state import token_digest
from experiments.harness.options import RunOptions
from experiments.harness.panel import panel_counts, panel_record, shortfall
from experiments.harness.progress import RowProgress
from experiments.harness.rowloop import Plan
from experiments.harness.summary import run_summary
from experiments.harness.tasks import RowName
from experiments.harness.whole import Generation
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


@dataclass(frozen=True)
class Input:
    """One input of the control: what is generated from it, and what must then have entered the decoder."""

    row: str
    tokens: tuple[int, ...]
    generate: Callable[[int], Steps[Generation]]  # in so many physical copies
    derived: Callable[[tuple[int, ...]], str | None]  # the functional record's digest, from tokens and output alone

    def name(self) -> dict[str, Any]:
        """What a manifest's panel keeps of it."""
        return {"row": self.row, "length": len(self.tokens), "sha256": token_digest(self.tokens)}


def control_row(given: Input, index: int, progress: RowProgress) -> Steps[dict[str, Any]]:
    """Generates one input three times and compares."""
    made: dict[str, Generation] = {}
    for name, copies in ARMS.items():
        progress.arm(name)
        made[name] = yield from given.generate(copies)
        progress.fed(len(given.tokens) + len(made[name].tokens))
    gates = {
        "replica_pair": made["pair"] == made["pair_replica"],  # tokens, margins, logprobs and functional state
        "functional_state": all(one.functional_sha256 == given.derived(one.tokens) for one in made.values()),
        "copies_synchronised": all(one.synchronised for one in made.values()),
        "argmax": all(generation.chosen_by_logits for generation in made.values()),
    }
    return {
        "row": given.row,
        "index": index,
        "input": {"length": len(given.tokens), "sha256": token_digest(given.tokens)},
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


def control_summary(experiment: str, dtype: str, panel: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
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
    return run_summary(experiment, dtype, rows, endpoints)


def closing_lines(summary: dict[str, Any]) -> list[str]:
    line = (
        f"{outcome(summary)}; one copy against two: "
        f"tokens differ {rate(summary['token_disagreement'])}, "
        f"log-probabilities differ {rate(summary['logprob_disagreement'])}"
    )
    return [text for text in (line, shortfall(summary["panel"])) if text]


def select(inputs: Sequence[Input], limit: int | None) -> tuple[list[Input], dict[str, Any]]:
    """The frozen rows in selection order, and their panel; `limit` keeps the first of them."""
    found = length_spread([(len(one.tokens), one.row) for one in inputs], min(WANTED, len(inputs)))[:limit]
    chosen = [inputs[i] for i in found]
    return chosen, panel_record(RULE, {"rows": WANTED}, {"rows": len(inputs)}, [one.name() for one in chosen])


def control_plan(
    manifest: dict[str, Any], chosen: Sequence[Input], options: RunOptions, model: Decoder, longest: int
) -> Plan:
    """The plan over the rows that `select` froze into the manifest's panel. longest: the most tokens of a row."""
    experiment, dtype, panel = manifest["experiment"], manifest["numeric"][0]["dtype"], manifest["panel"]
    return Plan(
        manifest={**manifest, "row_order": [one.row for one in chosen]},
        preflight=options.preflight,
        gates=GATES,
        task=lambda index: RowName(chosen[index].row),
        decode=lambda i, progress: control_row(chosen[i], i, progress),
        model=lambda index: model,
        longest=longest,
        batch_size=options.batch_size,
        summarise=lambda found: control_summary(experiment, dtype, panel, found),
        closing=closing_lines,
    )
