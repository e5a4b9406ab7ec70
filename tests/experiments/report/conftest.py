"""The report of all runs, written once."""

import pytest

from tests.experiments.report.page import Page
from tests.experiments.runs import call


@pytest.fixture(scope="session")
def written(reported, tmp_path_factory):
    """The directory of the report of all runs. No test may write here."""
    out = tmp_path_factory.mktemp("page")
    done = call("report", *reported, "--out", out, cwd=out)
    assert done.exit_code == 0, done.output
    assert done.output.strip() == f"report: {out / 'report.html'}"
    return out


@pytest.fixture(scope="session")
def page(written):
    return Page((written / "report.html").read_text())


@pytest.fixture(scope="session")
def markdown(written):
    return (written / "report.md").read_text()
