"""Recomputes every published claim from the released ledgers, and the panels: `python -m experiments.published DIR`."""

import json
from pathlib import Path

import click

from experiments.published.export import CLAIMS, PLAN, export_runs
from experiments.run.exits import DONE, GATE_FAILED, as_command
from experiments.run.options import PATH
from minimodel.files import read_json_object
from stats.published.claims import Claim, recompute
from stats.published.selection import PanelCheck, rederive_panels


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("directory", metavar="DIR", type=PATH)
@click.option(
    "--export",
    "runs",
    multiple=True,
    metavar="RUN",
    type=PATH,
    help="Write this finished run to DIR in the release's form instead; may be repeated.",
)
@click.option("--quiet", is_flag=True, help="Print only what differs, and the closing lines.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@as_command("experiments.published")
def main(directory: Path, runs: tuple[Path, ...], quiet: bool, as_json: bool) -> int:
    """Recompute every number of DIR/paper_claims.json from DIR/data/*.csv, and derive the published panels again.

    One line per claim: equal or DIFFERS, name, published, recomputed. Equal means the same value of the same type,
    floats to the last bit. A panel passes where our rule selects its lengths and its rows. Among rows of one length,
    which the release ordered by withheld ids, differences are counted.

    With --export, nothing is checked: matrix, fixed_prefix, bridge, audit, transplant, replication and stock_control
    runs are written as the release's CSV files, the precisions of one experiment together in one file. From one of
    each, the matrix in BF16 and FP32, the claims and the plan are written too, and DIR is checked like the release.

    Exit code 0: all agree. 2: DIR cannot be read, is malformed or contradicts itself. 3: a claim or a panel differs.
    """
    return _export(runs, directory) if runs else _check(directory, quiet, as_json)


def _check(directory: Path, quiet: bool, as_json: bool) -> int:
    claims = recompute(read_json_object(directory / CLAIMS), read_json_object(directory / PLAN), directory / "data")
    panels = rederive_panels(directory / "data")
    if as_json:
        parts = ("published", "derived", "lengths_equal", "tied", "passed")
        found = {
            "claims": [dict(zip(("claim", "published", "recomputed"), one), equal=one.equal) for one in claims],
            "panels": [{"panel": one.name, **{part: getattr(one, part) for part in parts}} for one in panels],
        }
        click.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        _print_table(claims, panels, quiet)
    agree = all(claim.equal for claim in claims) and all(panel.passed for panel in panels)
    return DONE if agree else GATE_FAILED


def _export(runs: tuple[Path, ...], directory: Path) -> int:
    files, missing = export_runs(runs, directory)
    for path, rows in files:
        click.echo(f"{path}: {rows} rows")
    if missing:
        click.echo(f"no {CLAIMS} and no {PLAN}: they need all of the study's runs, found none of {' '.join(missing)}")
    else:
        click.echo(f"{directory / CLAIMS}, {directory / PLAN}: check with python -m experiments.published {directory}")
    return DONE


def _print_table(claims: list[Claim], panels: list[PanelCheck], quiet: bool) -> None:
    width = max((len(claim.name) for claim in claims), default=0)
    for claim in claims:
        if not (quiet and claim.equal):
            verdict = "equal  " if claim.equal else "DIFFERS"
            values = f"published {_shown(claim.published)}  recomputed {_shown(claim.recomputed)}"
            click.echo(f"{verdict}  {claim.name:<{width}}  {values}")
    for panel in panels:
        lengths = "equal" if panel.lengths_equal else "DIFFER"
        rows = f"{len(panel.published) - len(panel.differing)} of {len(panel.published)} equal"
        tied = f", {len(panel.tied)} within ties of length" if panel.tied else ""
        click.echo(
            f"panel {panel.name}: lengths {lengths}, rows {rows}{tied}: {'passed' if panel.passed else 'DIFFERS'}"
        )
    click.echo(f"claims equal: {sum(claim.equal for claim in claims)} of {len(claims)}")
    click.echo(f"panels passed: {sum(panel.passed for panel in panels)} of {len(panels)}")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    main(prog_name="python -m experiments.published")
