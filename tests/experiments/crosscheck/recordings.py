"""Recordings of one prefix: genuine, from an altered checkpoint, or by a decoder that is tampered with."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cache import build_incremental, build_prefill
from cache.storage import Provenance
from decode import Contract, State
from experiments.run.saving import Trace
from minimodel import Decoder, load_model
from tests.conftest import numeric
from tests.experiments.crosschecks import checked

BUILD = {"incremental": build_incremental, "prefill": build_prefill}


class Tampered:
    """A decoder whose calls go through `tamper(model, arguments)`; everything else is the decoder's own."""

    def __init__(self, model: Decoder, tamper: Callable[..., torch.Tensor]) -> None:
        self._model, self._tamper = model, tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        return self._tamper(self._model, *arguments)


def record(
    folder: Path, model: Any, state: State, claimed: State, construction: str, provenance: Provenance
) -> dict[str, Path]:
    """Writes boundary and trace of `state` under `model`, as a recorder that believes in the state `claimed` would."""
    trace = Trace()
    boundary = BUILD[construction](model, state, observe=trace.observe)
    boundary = replace(boundary, state=claimed)
    files = {f"{construction} {kind}": folder / f"{construction}-{kind}.safetensors" for kind in ("boundary", "trace")}
    boundary.save(files[f"{construction} boundary"], provenance, "r")
    trace.save(files[f"{construction} trace"], boundary, provenance, "r")
    return files


def first(left: Path, right: Path) -> dict[str, Any]:
    (finding,) = checked(left, right)["findings"]["r"]
    return finding["first"]


def altered(tiny_directory: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    directory = folder / "checkpoint"
    shutil.copytree(tiny_directory, directory)
    change(directory)
    return directory


def from_directory(
    directory: Path, folder: Path, state: State, construction: str, provenance: Provenance
) -> dict[str, Path]:
    """Recorded from another directory's weights and contract, under the first one's name."""
    own = State.from_tokens(Contract.load(directory), state.tokens)
    return record(folder, load_model(directory, numeric("bf16")), own, state, construction, provenance)
