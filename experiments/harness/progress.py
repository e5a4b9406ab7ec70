"""Progress on stderr: one rewritten line on a terminal, plain lines elsewhere."""

import sys
import time

import click

from experiments.harness.exits import one_line, say

PLAIN_SECONDS = 10.0
TERMINAL_SECONDS = 0.1


class Progress:
    """Rows done of total, the row and arm at hand, tokens per second, and the time left at this run's pace.

    ranks: processes that share the rows; rows are then counted over all of them, row, arm and tokens are this one's.
    """

    def __init__(self, total: int, done: int, quiet: bool, ranks: int = 1) -> None:
        self.total, self.done, self.quiet, self.ranks = total, done, quiet, ranks
        self.tokens = 0
        self.arms: dict[str, float] = {}
        self._start = self._shown = self._arm_start = time.monotonic()
        self._first = done
        self._row = self._arm = ""
        self._terminal = sys.stderr.isatty()

    def row(self, name: str) -> None:
        """A row begins."""
        self._row, self.arms = one_line(name)[:60], {}  # an id may hold a terminal's control sequences

    def arm(self, name: str) -> None:
        """An arm of the row begins."""
        now = time.monotonic()
        if self._arm:
            self.arms[self._arm] = self.arms.get(self._arm, 0.0) + now - self._arm_start
        self._arm, self._arm_start = name, now
        self._show(TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS)

    def fed(self, tokens: int) -> None:
        """Tokens that went through the decoder."""
        self.tokens += tokens

    def row_done(self) -> None:
        self.arm("")
        self.counted(self.done - self._first + 1)

    def counted(self, rows: int) -> None:
        """So many rows were done since this run or job began, whoever decoded them."""
        last = self.done < self.total == self._first + rows
        self.done = self._first + rows
        self._show(0.0 if last else TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS)

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            if self._terminal:
                click.echo("\r\033[K", nl=False, err=True)
            say(text, err=True)

    def close(self) -> None:
        if self._terminal and not self.quiet:
            click.echo("", err=True)

    def _show(self, every: float) -> None:
        now = time.monotonic()
        if self.quiet or now - self._shown < every:
            return
        self._shown = now
        spent = max(now - self._start, 1e-9)
        made = self.done - self._first
        eta = f"{spent / made * (self.total - self.done):.0f} s left" if made else "time left unknown"
        where = f" on {self.ranks} ranks; here" if self.ranks > 1 else ","
        pace = f"{self.tokens / spent:.0f} tokens/s"
        place = f"{self._row} {self._arm}".rstrip()
        line = f"{self.done}/{self.total} rows{where} {place}, {pace}, {eta}"
        click.echo(f"\r\033[K{line}" if self._terminal else line, nl=not self._terminal, err=True)
