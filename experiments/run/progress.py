"""Progress on stderr: one rewritten line on a terminal, plain lines elsewhere."""

import sys
import time

import click

from experiments.run.exits import one_line, say

PLAIN_SECONDS = 10.0
TERMINAL_SECONDS = 0.1


class Progress:
    """Counts the rows of one run and shows rows done of total, the row and arm worked on, tokens/s and the time left.

    ranks: processes that share the rows; rows are then counted over all of them, row, arm and tokens are this one's.
    """

    def __init__(self, total: int, done: int, quiet: bool, ranks: int = 1) -> None:
        self.total, self.done, self.quiet, self.ranks = total, done, quiet, ranks
        self.tokens = 0
        self.flying = 0  # rows begun and not done
        self.place = ""  # the row and arm worked on last
        self._first, self._start = done, time.monotonic()
        self._shown, self._terminal = self._start, sys.stderr.isatty()

    def row(self, name: str) -> "RowProgress":
        """Begins a row."""
        self.flying += 1
        return RowProgress(self, one_line(name)[:60])  # an id may hold a terminal's control sequences

    def row_done(self) -> None:
        """Ends a row."""
        self.flying -= 1

    def counted(self, rows: int) -> None:
        """Takes the number of rows done since this run or job began, by any rank."""
        last = self.done < self.total == self._first + rows
        self.done = self._first + rows
        self.show(at_once=last)

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        if not self.quiet:
            if self._terminal:
                click.echo("\r\033[K", nl=False, err=True)
            say(text, err=True)

    def close(self) -> None:
        if self._terminal and not self.quiet:
            click.echo("", err=True)

    def show(self, at_once: bool = False) -> None:
        """Shows the state now, unless it was shown a moment ago."""
        now, every = time.monotonic(), TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS
        if self.quiet or (now - self._shown < every and not at_once):
            return
        self._shown = now
        spent = max(now - self._start, 1e-9)
        made = self.done - self._first
        eta = f"{spent / made * (self.total - self.done):.0f} s left" if made else "time left unknown"
        where = f" on {self.ranks} ranks; here" if self.ranks > 1 else ","
        others = f" and {self.flying - 1} more" if self.flying > 1 else ""
        pace = f"{self.tokens / spent:.0f} tokens/s"
        line = f"{self.done}/{self.total} rows{where} {self.place}{others}, {pace}, {eta}"
        click.echo(f"\r\033[K{line}" if self._terminal else line, nl=not self._terminal, err=True)


class RowProgress:
    """Counts one row's time, by arm: its own work between `start` and `stop`, and its share of steps that rows took
    together. So the seconds of all rows of a process add up to its time.
    """

    def __init__(self, run: Progress, name: str) -> None:
        self.run, self.name = run, name
        self.arms: dict[str, float] = {}
        self.seconds = 0.0  # of all arms, and before the first
        self._arm, self._since = "", time.monotonic()

    def arm(self, name: str) -> None:
        """Begins an arm of the row."""
        self.stop()
        self._arm = name
        self.start()
        self.run.place = f"{self.name} {name}"
        self.run.show()

    def fed(self, tokens: int) -> None:
        """Counts tokens that went through the decoder."""
        self.run.tokens += tokens

    def start(self) -> None:
        """Begins a piece of the row's own work."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """Ends a piece of the row's own work."""
        self.share(time.monotonic() - self._since)

    def share(self, seconds: float) -> None:
        """Counts time for the arm under way."""
        self.seconds += seconds
        if self._arm:
            self.arms[self._arm] = self.arms.get(self._arm, 0.0) + seconds
