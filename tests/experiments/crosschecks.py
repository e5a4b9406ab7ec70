"""The cross-check called as a user calls it."""

import json

from click.testing import CliRunner

from experiments.crosscheck import __main__ as crosscheck


def run(*arguments):
    return CliRunner().invoke(crosscheck.main, [str(a) for a in arguments])


def checked(left, right, *more):
    """The JSON report of two files or runs, which must be found different."""
    result = run(left, right, "--json", *more)
    assert result.exit_code == 3, result.output
    report = json.loads(result.stdout)
    assert not report["equal"]
    return report
