"""Boundary and trace of one prefix, written as a run writes them."""

from dataclasses import replace

from cache import build_incremental, build_prefill
from experiments.run.saving import Trace

BUILD = {"incremental": build_incremental, "prefill": build_prefill}


def record(folder, model, state, claimed, construction, provenance):
    """Writes boundary and trace of `state` under `model`, as a recorder that believes in the state `claimed` would."""
    trace = Trace()
    boundary = BUILD[construction](model, state, observe=trace.observe)
    boundary = replace(boundary, state=claimed)
    files = {f"{construction} {kind}": folder / f"{construction}-{kind}.safetensors" for kind in ("boundary", "trace")}
    boundary.save(files[f"{construction} boundary"], provenance, "r")
    trace.save(files[f"{construction} trace"], boundary, provenance, "r")
    return files
