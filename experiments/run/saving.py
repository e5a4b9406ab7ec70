"""Traces and boundaries beside a ledger, which they never change: `--trace ROW`, `--save-boundaries`.

A trace holds every numeric step of one construction, under the names that `observe` gives, as one file. A step of a
one-call prefill and the same step of a token-by-token construction get one name and one shape: the calls of the latter
are joined along the token axis. So a live trace can be compared with a prefill trace, and either with one that
transformers' modules recorded through hooks. Copies must agree and only the first is kept.
"""

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from cache.boundary import Boundary
from cache.storage import Provenance, contract_record, write_tensors
from minimodel.bits import require_equal_copies
from minimodel.config import ModelConfig
from minimodel.decoder import Observe
from minimodel.errors import InputError, refuse
from minimodel.numerics import DTYPES

SCHEMA = "stage-replay-trace-v1"
FIRST_STEP = "embed"  # every call of the decoder begins with it
MAX_TRACE_BYTES = 4 << 30
BOUNDARIES, TRACES = "boundaries", "traces"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


class Trace:
    """Collects steps: pass `trace.observe` as `observe`, or call it from a hook, in forward order.

    `last`: keep only the last so many token slots (None: all of them). Memory: what is kept, on the CPU.
    """

    def __init__(self, last: int | None = None) -> None:
        self._last, self._length, self._largest = last, 0, 0
        self._calls: deque[tuple[int, dict[str, Tensor]]] = deque()  # (slots through this call, its steps)
        self.steps: list[str] = []  # names in forward order, each once

    def observe(self, name: str, tensor: Tensor) -> None:
        """Takes one step: [B, T, ...], or [B, H, T, D] after rotation. Logits may be of a call's last tokens alone."""
        require_equal_copies(tensor, name)
        if name == FIRST_STEP:
            self._length += tensor.shape[1]
            self._largest = max(self._largest, tensor.shape[1])
            self._calls.append((self._length, {}))
            while self._last is not None and self._calls[0][0] <= self._length - self._last:
                self._calls.popleft()  # no kept slot belongs to it
        assert self._calls and name not in self._calls[-1][1], f"step {name} out of order"
        self._calls[-1][1][name] = tensor[:1].detach().cpu().clone(memory_format=torch.contiguous_format)
        if name not in self.steps:
            self.steps.append(name)

    def tensors(self) -> dict[str, Tensor]:
        """Returns every step in forward order, its calls joined along the token axis: [1, T, ...] or [1, H, T, D]."""
        first = 0 if self._last is None else max(0, self._length - self._last)
        parts: dict[str, list[Tensor]] = {name: [] for name in self.steps}
        for stop, steps in self._calls:
            for name, tensor in steps.items():
                axis = token_axis(tensor)
                drop = max(0, first - (stop - tensor.shape[axis]))
                parts[name].append(tensor.narrow(axis, drop, tensor.shape[axis] - drop))
        return {name: torch.cat(found, dim=token_axis(found[0])) for name, found in parts.items()}

    def save(self, path: Path, boundary: Boundary, provenance: Provenance, row: str = "") -> None:
        """Writes the trace of `boundary`'s construction."""
        assert self._length == len(boundary.state), "the trace is not of this boundary"
        several = "one a token" if self._largest == 1 else f"one for {self._largest} tokens"
        header: dict[str, Any] = {
            "row": row,
            "construction": boundary.construction,
            "tokens": list(boundary.state.tokens),
            "functional_sha256": boundary.record.sha256(),
            "contract": contract_record(boundary.state.contract),
            # one call: step by step over all slots; more: slot by slot over all steps
            "calls": "one" if self._largest == self._length else several,
            "stop": self._length,  # the last token of every tensor is slot stop - 1
            "steps": self.steps,
        }
        write_tensors(path, SCHEMA, header, provenance, self.tensors())


def token_axis(tensor: Tensor) -> int:
    """Returns the axis of T: 2 in rotated queries and keys [B, H, T, D], 1 in everything else."""
    return 2 if tensor.ndim == 4 else 1


def slot_bytes(config: ModelConfig, dtype: str) -> int:
    """Returns the bytes of one token slot of a trace, logits apart."""
    q, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    layer = 5 * config.hidden_size + 3 * q + 3 * kv + 3 * config.intermediate_size
    return ((layer + config.hidden_size) * config.num_hidden_layers + 2 * config.hidden_size) * DTYPES[dtype].itemsize


def require_room(config: ModelConfig, dtype: str, slots: int) -> None:
    """Raises InputError, naming the number that fits, when so many slots would exceed MAX_TRACE_BYTES."""
    each = slot_bytes(config, dtype)
    if slots * each > MAX_TRACE_BYTES:
        raise InputError(
            f"trace: expected at most {MAX_TRACE_BYTES} bytes, found up to {slots * each} for {slots} token slots; "
            f"pass --trace-last {MAX_TRACE_BYTES // each} or less"
        )


def file_name(row: str, arm: str) -> str:
    """Returns ROW-ARM.safetensors. A row id that is no plain file name is replaced by the start of its SHA-256."""
    name = row if PLAIN_NAME.fullmatch(row) else "id-" + hashlib.sha256(row.encode("utf-8")).hexdigest()[:16]
    return f"{name}-{arm}.safetensors"


@dataclass(frozen=True)
class Saving:
    """What a run writes beside its ledger."""

    directory: Path = Path()  # the run's
    boundaries: bool = False  # of every row
    rows: frozenset[str] = frozenset()  # those that are traced
    last: int | None = None  # token slots that a trace keeps; None: all
    provenance: Provenance | None = None  # None where nothing is saved
    _traces: dict[tuple[str, str], Trace] = field(default_factory=dict, repr=False)

    @classmethod
    def chosen(
        cls,
        directory: Path,
        boundaries: bool,
        rows: Iterable[str],
        last: int | None,
        row_order: Iterable[str],
        provenance: Callable[[], Provenance],
    ) -> "Saving":
        """Returns what was chosen. InputError for a traced row that is not in `row_order`. `provenance` is called only
        if something is saved."""
        wanted = frozenset(rows)
        for row in sorted(wanted - set(row_order)):
            raise refuse("--trace", "an id of the tasks", row)
        return cls(directory, boundaries, wanted, last, provenance() if boundaries or wanted else None)

    def observe(self, row: str, arm: str) -> Observe | None:
        """Returns the observer of one construction, None where the row is not traced."""
        if row not in self.rows:
            return None
        self._traces[row, arm] = Trace(self.last)
        return self._traces[row, arm].observe

    def write(self, row: str, arm: str, boundary: Boundary) -> None:
        """Writes the chosen files of this construction."""
        if self.provenance is None:
            return
        if self.boundaries:
            boundary.save(self.directory / BOUNDARIES / file_name(row, arm), self.provenance, row)
        trace = self._traces.pop((row, arm), None)
        if trace is not None:
            trace.save(self.directory / TRACES / file_name(row, arm), boundary, self.provenance, row)

    def notes(self, rows: Iterable[str], arms: Iterable[str]) -> list[str]:
        """Returns a line for stderr where chosen files are missing: rows resumed from a run without these flags."""
        arms = list(arms)
        wanted = [Path(BOUNDARIES) / file_name(row, arm) for row in rows for arm in arms if self.boundaries]
        wanted += [Path(TRACES) / file_name(row, arm) for row in sorted(self.rows) for arm in arms]
        missing = [path for path in wanted if not (self.directory / path).exists()]
        if not missing:
            return []
        more = f" and {len(missing) - 1} more were" if len(missing) > 1 else " was"
        fix = "the rows being kept from before; use --fresh or another --out"
        return [f"{self.directory}: {missing[0]}{more} not written, {fix}"]


def saving_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --save-boundaries, --trace ROW (repeatable) and --trace-last N."""
    last = "Traces keep only the last N token slots. [default: all]"
    trace = "Write every numeric step of this row's constructions under traces/; may be repeated."
    boundaries = "Write K, V and logits of every row under boundaries/."
    command = click.option("--trace-last", type=click.IntRange(min=1), default=None, metavar="N", help=last)(command)
    command = click.option("--trace", "traced", multiple=True, metavar="ROW", help=trace)(command)
    return click.option("--save-boundaries", is_flag=True, help=boundaries)(command)
