"""Load time and peak memory of one arm, in a process of its own: `python -m experiments.benchmark.child JSON`.

The peak is that of the process image (VmHWM), which begins anew with it; the one that getrusage tells of is inherited
from the parent and would show the parent's.
"""

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minimodel.errors import InputError

STATUS = Path("/proc/self/status")
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Job:
    """column: a name of `COLUMNS`, or None for the arm that `reference` names. length: tokens of the work after the
    load, one call of all but the last 8, and these one by one.
    """

    checkpoint: str
    dtype: str
    device: str
    threads: int
    column: str | None
    reference: str | None
    length: int


STEPS = 8


def in_child(job: Job) -> dict[str, Any]:
    """Runs the job in a fresh process: `seconds` of the load; `imports`, `loaded` and `peak`, bytes of memory at most
    until then. InputError with the child's last line when it failed.
    """
    command = [sys.executable, "-m", "experiments.benchmark.child", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise InputError(f"measuring in a child process failed: {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _environment() -> dict[str, str]:
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in path if part)}


def peak_bytes() -> int:
    """The most memory this process has had in use so far."""
    if STATUS.exists():
        for line in STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _run(job: Job) -> dict[str, Any]:
    """Imports, loads, works; the high-water mark after each."""
    import importlib

    import torch

    from decode.contract import Contract
    from decode.stepper import Stepper
    from experiments.benchmark.arms import Arm, open_ours, open_reference
    from experiments.benchmark.bench import prefilled
    from experiments.benchmark.workload import Workload
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
        [arm] = open_ours(directory, numeric, (job.column,))
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
