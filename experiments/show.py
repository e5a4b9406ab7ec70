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
from experiments.report.rows import divergence_drawing, find_row, row_blocks, view
from experiments.report.runs import read_runs
from experiments.report.texts import read_texts
from experiments.run.exits import DONE, run_command, say
from experiments.run.ledger import row_key, write_whole


@click.command(help=__doc__)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("row", metavar="ROW")
@click.option(
    "--svg",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also draw where the row's suffixes part, as an SVG file.",
)
def main(run: Path, row: str, svg: Path | None) -> None:
    def body() -> int:
        [read] = read_runs([run])
        one = view(read, find_row(read, row), read_texts(read.manifest))
        if svg is not None:
            write_whole(svg, standalone(divergence_drawing(one)))
        say(f"{read.name}, row {row_key(one.row)!r}\n")
        say(render_text(row_blocks(one, "row")).removesuffix("\n"))
        return DONE

    run_command(body, "experiments.show", resumes=False)


if __name__ == "__main__":
    main()
