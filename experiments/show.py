"""One row of a run on the terminal: question, branches, suffixes with the first differing token marked, margins,
answers, drift by layer and, for transplants, the donor that each arm follows.

ROW is the row's name in the run's ledger: its id, led by its dtype or cell in a run of several (bf16/demo-003). Text
comes from the run's checkpoint and task file; where they are not there, token ids are shown.

    python -m experiments.show runs/matrix-bf16 demo-003
"""

from pathlib import Path

import click

from experiments.report.charts import standalone
from experiments.report.plain import render_text
from experiments.report.rows import divergence_drawing, find_row, row_blocks
from experiments.report.runs import read_runs
from experiments.run.exits import DONE, as_command, say
from experiments.run.ledger import row_key, write_whole
from experiments.run.options import PATH, PathOption

FILE = PathOption(path_type=Path, dir_okay=False)


@click.command(help=__doc__)
@click.argument("run", metavar="RUN", type=PATH)
@click.argument("row", metavar="ROW")
@click.option("--svg", type=FILE, metavar="FILE", help="Also draw where the row's suffixes part, as an SVG file.")
@as_command("experiments.show")
def main(run: Path, row: str, svg: Path | None) -> int:
    [read] = read_runs([run])
    found = find_row(read, row)
    if svg is not None:
        write_whole(svg, standalone(divergence_drawing(read, found)))
    say(f"{read.name}, row {row_key(found)!r}\n")
    say(render_text(row_blocks(read, found, "row")).removesuffix("\n"))
    return DONE


if __name__ == "__main__":
    main()
