"""Load time and peak memory of one arm in a fresh process: `python -m experiments.benchmark.child JSON`.

The peak is VmHWM, which starts at zero with the process image; getrusage's ru_maxrss is inherited from the parent.
"""

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict, cast

from minimodel.errors import InputError

STATUS = Path("/proc/self/status")
ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 8


@dataclass(frozen=True)
class Job:
    """One arm to load and run."""

    checkpoint: str
    dtype: str
    device: str
    threads: int
    column: str | None  # a name of `arms.COLUMNS`; None: the arm of `reference`
    reference: str | None
    length: int  # tokens to run: one call of all but the last `STEPS`, then these one by one


class Peak(TypedDict):
    """What a child measured."""

    seconds: float  # of the load
    imports: int  # most bytes in use until the imports were done
    loaded: int  # ... until the arm was loaded
    peak: int  # ... until the end


def in_child(job: Job) -> Peak:
    """Runs the job in a fresh process. InputError, with the child's last line, where it fails."""
    command = [sys.executable, "-m", "experiments.benchmark.child", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise InputError(f"measuring in a child process failed: {lines[-1]}")
    return cast(Peak, json.loads(done.stdout.splitlines()[-1]))


def _environment() -> dict[str, str]:
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in path if part)}


def peak_bytes() -> int:
    """Returns the most bytes of memory that this process has had in use."""
    if STATUS.exists():
        for line in STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _run(job: Job) -> Peak:
    """Imports, loads and runs the arm; notes the peak after each."""
    import importlib

    import torch

    from decode.contract import Contract
    from decode.stepper import Stepper
    from experiments.benchmark.arms import Arm, Workload, open_ours, open_reference
    from experiments.benchmark.measures import prefilled
    from minimodel.bits import COPIES
    from minimodel.numerics import NumericContract

    numeric = NumericContract(dtype=job.dtype, device=job.device, threads=job.threads)
    numeric.apply()
    directory = Path(job.checkpoint)
    work = Workload.of(Contract.load(directory), job.length, numeric.torch_device)
    if job.column is None:
        importlib.import_module(str(job.reference))
    imports, start = peak_bytes(), time.perf_counter()
    arm: Arm
    if job.column is None:
        arm = open_reference(str(job.reference), directory, numeric)
    else:
        [arm] = open_ours(directory, numeric, (job.column,), copies=1)  # the parent has checked equal copies
    seconds, loaded = time.perf_counter() - start, peak_bytes()
    with torch.inference_mode():
        cache, _ = prefilled(arm, work, job.length - STEPS, job.length)
        stepper = Stepper(arm.model, cache, COPIES, job.length)
        stepper.resume(work.roles[:-STEPS], work.record(job.length - STEPS))
        for token, role in work.steps(job.length - STEPS, job.length):
            arm.model.logits(stepper.feed(token, role))
    return {"seconds": seconds, "imports": imports, "loaded": loaded, "peak": peak_bytes()}


if __name__ == "__main__":
    print(json.dumps(_run(Job(**json.loads(sys.argv[1])))))
