"""The retained-live four-arm matrix (paper, section 3.3): what `experiments.matrix` runs and the benchmark times."""

from collections.abc import Sequence
from dataclasses import dataclass

from cache.boundary import Boundary
from cache.build import build_prefill, live_steps
from decode.greedy import Steps
from decode.state import State
from experiments.report.closing import closing_line
from experiments.run.experiment import ArmExperiment, Arms, gate
from experiments.run.progress import RowProgress
from experiments.run.records import Row, RowExtra, Summary
from experiments.run.saving import NOTHING_SAVED, Saving
from experiments.run.summary import pair_summary, run_summary
from experiments.run.tasks import Task, longest_row
from minimodel.decoder import Decoder
from stats.intervals import STREAMS


@dataclass(frozen=True)
class RetainedLive(ArmExperiment):
    """Generates the boundary once, then decodes four arms."""

    decoder: Decoder
    tasks: Sequence[Task]
    prompts: Sequence[State]  # of each task
    saving: Saving = NOTHING_SAVED

    arms = ("live", "live_replica", "prefill", "prefill_replica")
    pairs = (("live", "live_replica"), ("prefill", "prefill_replica"), ("live", "prefill"))

    @property
    def longest(self) -> int:
        return longest_row(self.prompts)

    def model(self, index: int) -> Decoder:
        return self.decoder

    def task(self, index: int) -> Task:
        return self.tasks[index]

    def boundaries(self, index: int, progress: RowProgress) -> Steps[tuple[Boundary, ...]]:
        row, saving = self.tasks[index].id, self.saving
        live = yield from live_steps(self.decoder, self.prompts[index], observe=saving.observe(row, "live"))
        progress.fed(len(live.state))
        prefill = build_prefill(self.decoder, live.state, observe=saving.observe(row, "prefill"))
        saving.write(row, "live", live)
        saving.write(row, "prefill", prefill)
        # a live boundary's replica is a copy; a prefill's is a second call of the model
        return live, live.replica(), prefill, prefill.replica()

    @gate
    def replica_live(self, made: Arms) -> bool:
        return made.replica_exact("live")

    @gate
    def replica_prefill(self, made: Arms) -> bool:
        return made.replica_exact("prefill")

    def extra(self, made: Arms) -> RowExtra:
        return {"prefix_margins": list(made["live"].boundary.margins)}

    def summarise(self, rows: Sequence[Row]) -> Summary:
        return matrix_summary(self.decoder.numeric.dtype, rows)

    def closing(self, summary: Summary) -> list[str]:
        return [closing_line(summary)]

    def notes(self) -> list[str]:
        return self.saving.notes([task.id for task in self.tasks], ("live", "prefill"))


def matrix_summary(dtype: str, rows: Sequence[Row]) -> Summary:
    """Returns the endpoints of live against prefill. Bootstrap streams of the paper's plan: BF16 0, all others FP32's,
    1.
    """
    stream = STREAMS["matched_bf16" if dtype == "bf16" else "matched_fp32"]
    return run_summary("matrix", dtype, rows, {**pair_summary(rows, "live", "prefill", stream)})
