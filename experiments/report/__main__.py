"""The report of any runs: Markdown, and one self-contained HTML page that works from a file and on paper.

The paper's tables for each run, every number with its interval and the run it comes from, gates, environment and
provenance, and a drawing beside each group of tables. Without RUN, all runs under runs/.

Exit code 0; 2 when a run is damaged or contradicts itself; 3 when a run on the page is unfinished or failed a gate: the
page is then written all the same, and says so first.

    python -m experiments.report runs/matrix-bf16 runs/fixed_prefix-bf16-fp32
"""

from pathlib import Path

import click

from experiments.report.page import write_report
from experiments.report.runs import find_runs, matched_matrices, read_runs
from experiments.report.sections import build_report
from experiments.run.exits import DONE, GATE_FAILED, as_command, say
from experiments.run.options import PATH, PathOption

OUT = PathOption(path_type=Path, file_okay=False)


@click.command(help=__doc__)
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=PATH)
@click.option("--out", type=OUT, default=Path("runs") / "report", show_default=True, metavar="DIR",
              help="Where report.md and report.html go.")  # fmt: skip
@as_command("experiments.report")
def main(runs: tuple[Path, ...], out: Path) -> int:
    read = read_runs(runs or find_runs(Path("runs")))
    page = write_report(build_report(read), out)
    faults = [fault for run in read for fault in run.faults()]
    for fault in faults:
        say(f"FAILED: {fault}")
    for _, _, block in matched_matrices(read):
        say(f"matrices: {block['reading']}")
    say(f"report: {page}")
    return GATE_FAILED if faults else DONE


if __name__ == "__main__":
    main()
