"""Load time and peak memory. Every measurement of an arm is made in a fresh process."""

import importlib
import multiprocessing
import re
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decode.contract import Contract
from experiments.benchmark.arms import COLUMNS, Arm, Workload, open_ours, open_reference
from experiments.benchmark.measures import Bench, Entry, Run, prefilled, resumed
from experiments.run import costs
from experiments.run.costs import interleaved, ratios, spread
from experiments.run.exits import one_line
from minimodel.errors import InputError
from minimodel.numerics import NumericContract

STEPS = 8  # decode steps of the workload


def memory(bench: Bench, length: int) -> Entry:
    """Measures load time and peak memory of every arm over `length` tokens, in fresh processes, in turn."""
    found: dict[str, list[Entry]] = {arm.name: [] for arm in bench.arms}

    def sample(name: str) -> float:
        bench.note(f"fresh process: {name}")
        found[name].append(bench.fresh(name, partial(run_workload, length)))
        return found[name][-1]["seconds"]

    seconds = interleaved({name: partial(sample, name) for name in found}, bench.long_repeats, warm_up=0)
    columns = {
        name: {
            "samples": seconds[name],
            "speed": ratios(seconds[bench.baseline], seconds[name]),
            **{key: spread([one[key] for one in measured]) for key in ("seconds", "imports", "loaded", "peak")},
        }
        for name, measured in found.items()
    }
    table = bench.arms[0].model.role_embedding
    rows = 0 if table is None else table.shape[0]
    return {"weights": costs.weight_bytes(bench.config, bench.numeric.dtype, rows), "columns": columns}


def run_workload(length: int, arm: Arm, contract: Contract) -> None:
    """Runs `length` tokens: one call of all but the last `STEPS`, then these one by one."""
    work = Workload.of(contract, length, arm.model.numeric.torch_device)
    stepper = resumed(arm, prefilled(arm, work, length - STEPS, length)[0], work, length - STEPS, length)
    for token, role in work.steps(length - STEPS, length):
        arm.model.logits(stepper.feed(token, role))


def in_fresh_process(*arguments: Any) -> Entry:
    """Returns `peaks(*arguments)` of a new process. InputError where it fails."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(peaks, *arguments).result()
        except KeyboardInterrupt:  # SIGTERM reaches this process alone
            for child in multiprocessing.active_children():
                child.kill()
            raise
        except Exception as error:
            raise InputError(f"measuring in a child process failed: {one_line(error)}") from None


def peaks(directory: Path, numeric: NumericContract, reference: str | None, name: str, run: Run) -> Entry:
    """Loads the arm `name` and runs it. Returns the seconds of the load, the most bytes in use up to the end of the
    imports, of the load and of the run, and what the run returned."""
    numeric.apply()
    contract = Contract.load(directory)
    if name not in COLUMNS:
        importlib.import_module(str(reference))
    imports, start = peak_bytes(), time.perf_counter()
    if name in COLUMNS:
        [arm] = open_ours(directory, numeric, (name,), copies=1)  # the parent has checked equal copies
    else:
        arm = open_reference(str(reference), directory, numeric)
    seconds, loaded = time.perf_counter() - start, peak_bytes()
    with torch.inference_mode():
        found = run(arm, contract)
    return {"seconds": seconds, "imports": imports, "loaded": loaded, "peak": peak_bytes(), "found": found}


def peak_bytes() -> int:
    """Returns the most bytes of memory that this process has had in use.

    VmHWM starts at zero with the process image. getrusage's ru_maxrss, for systems without it, is inherited.
    """
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+)", status.read_text(encoding="ascii"))):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
