"""The one exception that the statistics raise for bad input."""


class StatsInputError(ValueError):
    """Input that no statistic can be computed from: one line that says what, where, expected and found."""
