"""Progress on stderr: one rewritten line on a terminal, plain lines elsewhere."""

import sys
import time

import click

from experiments.harness.exits import one_line

PLAIN_SECONDS = 10.0
TERMINAL_SECONDS = 0.1


class Progress:
    """Rows done of total, the row and arm at hand, tokens per second, and the time left at this run's pace."""

    def __init__(self, total: int, done: int, quiet: bool) -> None:
        self.total, self.done, self.quiet = total, done, quiet
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
        self.done += 1
        self._show(0.0 if self.done == self.total else TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS)

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            click.echo(("\r\033[K" if self._terminal else "") + text, err=True)

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
        line = f"{self.done}/{self.total} rows, {self._row} {self._arm}, {self.tokens / spent:.0f} tokens/s, {eta}"
        click.echo(f"\r\033[K{line}" if self._terminal else line, nl=not self._terminal, err=True)
