"""What makes the constructions differ: one kernel at a time, on one frozen bank (beyond the paper).

The same fixed prefixes are built incrementally and by prefill under every cell of linear kernel x attention kernel x
dtype, and both are continued. The four cells of {repeat_kv, blocked} x {plain, tiled} decide, by a fixed rule and per
dtype, which kernel is necessary and which is sufficient for divergence on this device; the other attention kernels
change one thing at a time. Where both kernels are batch-invariant, no tensor may differ: that is a gate. Beside the
cells: the drift of prefill in chunks, the distance of every arm to the same prefix in FP64, and how often an attention
kernel gives a query other bits alone than among others.

    python -m experiments.causes
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from cache.boundary import Boundary
from cache.build import build_prefill, incremental_steps
from cache.drift import compare
from decode.greedy import Steps
from decode.state import State
from experiments.causes.measures import fp64_oracle, oracle_entry, rows_alone
from experiments.causes.rules import FACTORS, causes_summary
from experiments.run import inputs
from experiments.run.experiment import Arms, Crossed, gate
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, dtypes_option, source_option
from experiments.run.progress import RowProgress
from experiments.run.records import Panel, Row, RowExtra, Summary
from minimodel.bits import bits
from minimodel.checkpoint import open_checkpoint
from minimodel.decoder import Decoder
from minimodel.numerics import KERNELS, NumericContract

VARIANTS = ["packed_gqa", "eager", "sdpa_fp32", "eager_softmax_model_dtype"]  # with the plain linear kernel
CELLS = [*FACTORS, *(f"{attention}/plain" for attention in VARIANTS)]  # attention kernel / linear kernel
CHUNKED = ["/".join(KERNELS[name]) for name in ("repeat_kv", "invariant")]  # cells that measure chunked prefill too
DTYPES = ("bf16", "fp16", "fp32")
CHUNKS = (1, 2, 3, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class WithChunks(Arms):
    """The arms of a row of one of the CHUNKED cells."""

    chunks: dict[str, Any]  # of `chunk_curve`


@dataclass(frozen=True)
class Causes(Crossed):
    """Both constructions of every prefix under every cell, their suffixes, their drift, and their distance to FP64."""

    oracle: Callable[[State], Boundary]  # `fp64_oracle`
    panel: Panel

    factor = "cell"
    arms = ("incremental", "prefill")
    pairs = (("incremental", "prefill"),)

    def boundaries(self, index: int, progress: RowProgress) -> Steps[tuple[Boundary, ...]]:
        model, state = self.model(index), self.state(index)
        progress.arm("oracle")  # made once per prefix, in whichever cell meets it first: no part of that cell's cost
        self.oracle(state)
        progress.arm("boundary")
        incremental = yield from incremental_steps(model, state)
        prefill = build_prefill(model, state)
        progress.fed(2 * len(state))
        return incremental, prefill

    def decode(self, index: int, progress: RowProgress) -> Steps[Arms]:
        made = yield from super().decode(index, progress)
        progress.arm("chunks")  # no part of the last suffix's cost
        if self.part(index).partition("/")[2] not in CHUNKED:
            return made
        curve = yield from chunk_curve(self.model(index), made["incremental"].boundary, made.state)
        return WithChunks(made.index, made.arms, curve)

    @gate
    def invariant_exact(self, made: Arms) -> bool:
        """Where both kernels are batch-invariant, no bit of the caches or suffixes differs."""
        left, right = made.all
        exact = compare(left.boundary.cache, right.boundary.cache).exact and left.suffix == right.suffix
        return exact or not invariant(self.models.numeric[self.part(made.index)])

    flip_caught = gate(lambda self, made: flip_is_caught(made["prefill"].boundary))

    def extra(self, made: Arms) -> RowExtra:
        built = {name: arm.boundary for name, arm in made.arms.items()}
        extra: RowExtra = {"cell": self.part(made.index), "oracle": oracle_entry(built, self.oracle(made.state))}
        if isinstance(made, WithChunks):
            extra["chunks"] = made.chunks
        return extra

    def summarise(self, rows: Sequence[Row]) -> Summary:
        contracts, alone = list(self.models.numeric.values()), {}
        for dtype in dict.fromkeys(one.dtype for one in contracts):
            mine = [one for one in contracts if one.dtype == dtype]
            kernels = list(dict.fromkeys(one.attention for one in mine))
            alone[dtype] = rows_alone(self.models.checkpoint.config, mine[0], kernels)
        return causes_summary(rows, list(self.models.numeric), self.panel, alone)

    def closing(self, summary: Summary) -> list[str]:
        """Returns the head, the cells that were left out, and one line per dtype and endpoint."""
        gates = "all passed" if summary["passed"] else f"FAILED on {len(summary['failed_rows'])} rows"
        lines = [f"causes: {summary['rows']} cell rows, gates {gates}"]
        lines += [f"left out: {cell}: {reason}" for cell, reason in summary["left_out"].items()]
        for dtype, endpoints in summary["verdicts"].items():
            for endpoint, found in endpoints.items():
                causes = []
                for factor in ("attention", "linear"):
                    words = [word if found[factor][word] else f"not {word}" for word in ("necessary", "sufficient")]
                    causes.append(f"{factor} {', '.join(words)}")
                lines.append(
                    f"{dtype} {endpoint}: {found['default_differs']} rows differ by default, "
                    f"{found['invariant_differs']} with both kernels invariant; {'; '.join(causes)}"
                )
        return lines


def invariant(numeric: NumericContract) -> bool:
    """Whether both kernels are batch-invariant."""
    return (numeric.attention, numeric.linear) == KERNELS["invariant"]


def flip_is_caught(boundary: Boundary) -> bool:
    """Whether one bit flipped in one V entry makes two caches differ there: the control of every exactness verdict."""
    changed = boundary.cache.copy()
    layer, slot = changed.layers - 1, len(changed) // 2
    bits(changed.values(layer))[:, 0, slot, 0] ^= 1
    drift = compare(boundary.cache, changed)
    wanted = {"layer": layer, "tensor": "value", "position": slot}
    return drift.first_difference == wanted and drift.layers[layer][1].differing == boundary.cache.batch


def chunk_curve(model: Decoder, incremental: Boundary, state: State) -> Steps[dict[str, Any]]:
    """Compares prefill in calls of c tokens with incremental. Returns by c whether they are exact, the share of
    elements that differ, and the relative L2.

    Calls of one token are yielded as steps, which rows take together: nearly half of all calls.
    """
    curve = {}
    for chunk in [c for c in CHUNKS if c < len(state)] + [len(state)]:
        if chunk == 1:
            built = yield from incremental_steps(model, state)
        else:
            built = build_prefill(model, state, chunk=chunk)
        entry = compare(incremental.cache, built.cache).as_dict()
        curve["one_call" if chunk == len(state) else str(chunk)] = {
            "exact": entry["exact"],
            "share": entry["differing"] / entry["elements"],
            "relative_l2": entry["relative_l2"],
        }
    return curve


@click.command(help=__doc__)
@dtypes_option(DTYPES, DTYPES, "May be repeated.")
@click.option(
    "--cell",
    "named",
    multiple=True,
    type=click.Choice(CELLS),
    metavar="ATTENTION/LINEAR",
    help=f"Only these kernels; may be repeated. Of {', '.join(CELLS)}. [default: all]",
)
@click.option("--rows", default=12, show_default=True, type=click.IntRange(min=1), help="Prefixes, by length spread.")
@source_option("matrix", "matrix-bf16")
@common_options("causes")
def main(options: RunOptions, dtypes: tuple[str, ...], named: tuple[str, ...], rows: int, source: Path) -> int:
    bank, chosen = inputs.open_bank(source), [cell for cell in CELLS if cell in (named or CELLS)]
    numeric = {f"{d}/{cell}": replace(options.numeric(d), kernels=cell) for d in dtypes for cell in chosen}
    without = inputs.left_out(numeric, open_checkpoint(options.checkpoint).config, "experiments.causes", CHUNKS)
    crossed = {name: one for name, one in numeric.items() if name not in without}
    session = inputs.open_session("causes", options, crossed, bank)
    wanted = rows if options.limit is None else min(rows, options.limit)
    prefixes = inputs.select_spread(bank.prefixes, wanted)
    tasks, _, data = session.bank_tasks(prefixes)
    oracle = fp64_oracle(session.models.checkpoint, options.device, options.threads)
    panel = inputs.spread_record(inputs.SPREAD, prefixes, wanted, len(bank.prefixes))
    panel |= {"cells": list(crossed), "left_out": without}
    causes = Causes(session.models, tasks, session.states(prefixes), oracle, panel)
    return run(causes, session.manifest(causes.order(), panel, data), options, options.directory("causes"))


if __name__ == "__main__":
    main()
