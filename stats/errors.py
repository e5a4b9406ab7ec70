"""The exception that the statistics raise for bad input."""


class StatsInputError(ValueError):
    """Input that no statistic can be computed from. The message is one line: what, where, expected, found."""
