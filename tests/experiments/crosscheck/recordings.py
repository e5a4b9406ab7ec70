"""Recordings of one prefix: genuine, from an altered checkpoint, or by a decoder that is tampered with."""

import shutil
from dataclasses import replace

from cache import build_incremental, build_prefill
from decode import Contract, State
from experiments.run.saving import Trace
from minimodel import load_model
from tests.conftest import numeric
from tests.experiments.crosschecks import checked

BUILD = {"incremental": build_incremental, "prefill": build_prefill}


class Tampered:
    """A decoder whose calls go through `tamper(model, arguments)`; everything else is the decoder's own."""

    def __init__(self, model, tamper):
        self._model, self._tamper = model, tamper

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, *arguments):
        return self._tamper(self._model, *arguments)


def record(folder, model, state, claimed, construction, provenance):
    """Writes boundary and trace of `state` under `model`, as a recorder that believes in the state `claimed` would."""
    trace = Trace()
    boundary = BUILD[construction](model, state, observe=trace.observe)
    boundary = replace(boundary, state=claimed)
    files = {f"{construction} {kind}": folder / f"{construction}-{kind}.safetensors" for kind in ("boundary", "trace")}
    boundary.save(files[f"{construction} boundary"], provenance, "r")
    trace.save(files[f"{construction} trace"], boundary, provenance, "r")
    return files


def first(left, right):
    (finding,) = checked(left, right)["findings"]["r"]
    return finding["first"]


def altered(tiny_directory, folder, change):
    directory = folder / "checkpoint"
    shutil.copytree(tiny_directory, directory)
    change(directory)
    return directory


def from_directory(directory, folder, state, construction, provenance):
    """Recorded from another directory's weights and contract, under the first one's name."""
    own = State.from_tokens(Contract.load(directory), state.tokens)
    return record(folder, load_model(directory, numeric("bf16")), own, state, construction, provenance)
