"""Computes a construction again on this machine under each named kernel, to find those with recorded bits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.boundary import Boundary
from cache.build import build_incremental, build_prefill
from decode.contract import Contract
from decode.state import State
from experiments.run.inputs import left_out
from experiments.run.saving import Trace, require_room
from minimodel.attention import ATTENTION_KERNELS
from minimodel.checkpoint import file_digests, open_checkpoint
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from minimodel.load import load_model
from minimodel.numerics import DEFAULT_THREADS, KERNELS, NumericContract

TOKEN_BY_TOKEN = ("live", "live_replica", "incremental", "incremental_replica")
ONE_CALL = ("prefill", "prefill_replica")


@dataclass(frozen=True)
class Rerun:
    """A checkpoint on this machine."""

    directory: Path
    numeric: Mapping[str, Any]  # the recorded contract whose dtype, device and threads are used

    @classmethod
    def of(cls, directory: Path, checkpoint: Mapping[str, str], numeric: Mapping[str, Any]) -> "Rerun":
        """Opens a checkpoint. InputError unless its files have the recorded digests."""
        found = file_digests(directory)
        if found != dict(checkpoint):
            names = sorted(name for name in {*found, *checkpoint} if found.get(name) != checkpoint.get(name))
            raise InputError(f"{directory}: expected the recorded checkpoint, found another {', '.join(names)}")
        return cls(directory, numeric)

    def contracts(self) -> dict[str, NumericContract]:
        """Returns every attention kernel with the plain linear kernel, then the short forms with another linear kernel,
        without those that this machine cannot run."""
        given = {
            "dtype": self.numeric["dtype"],
            "device": self.numeric.get("device", "cpu"),
            "threads": self.numeric.get("threads", DEFAULT_THREADS),
            "reduced_precision": self.numeric.get("bf16_reduced_precision_reduction", True),
        }
        found = {name: NumericContract(**given, attention=name, linear="plain") for name in ATTENTION_KERNELS}
        for name, (_, linear) in KERNELS.items():
            if linear != "plain":
                found[name] = NumericContract(**given, kernels=name)
        without = left_out(found, open_checkpoint(self.directory).config, "experiments.crosscheck")
        return {name: one for name, one in found.items() if name not in without}

    def boundaries(self, construction: str, tokens: list[int]) -> Iterator[tuple[str, Decoder, Boundary]]:
        """Yields (kernel, model, the construction of these tokens), one model in memory at a time.

        A live cache is computed as incremental: the same calls, with the tokens given instead of chosen.
        """
        for name, numeric in self.contracts().items():
            model = load_model(self.directory, numeric)
            yield name, model, self._build(model, construction, tokens)

    def trace(self, construction: str, tokens: list[int], kernel: str, last: int | None = None) -> Trace:
        """Returns every numeric step of the construction under one kernel. InputError where memory is too small."""
        model = load_model(self.directory, self.contracts()[kernel])
        require_room(model.config, model.numeric.dtype, min(last or len(tokens), len(tokens)))
        trace = Trace(last)
        self._build(model, construction, tokens, observe=trace.observe)
        return trace

    def _build(self, model: Decoder, construction: str, tokens: list[int], **more: Any) -> Boundary:
        """InputError for a construction that needs more than tokens."""
        state = State.from_tokens(Contract.load(self.directory), tokens)
        if construction in TOKEN_BY_TOKEN:
            return build_incremental(model, state, **more)
        if construction in ONE_CALL:
            return build_prefill(model, state, **more)
        expected = "live, incremental or prefill to compute again"
        raise InputError(f"construction: expected {expected}, found {construction!r}")
