"""What holds on this machine: for each dtype and kernel the checks that a command makes at load, and two speeds.

Copies equal: whether two equal copies of a request keep equal bits. Rows together: up to how many rows of one step, two
per request, each row keeps the bits it has alone. Packed = plain: the row counts at which oneDNN's prepacked product
has F.linear's bits. Prefill = incremental: whether random tokens get the same bits alone, in chunks and in one call.
Writes machine.json, which the report of runs in the same directory shows. Run this first where a command is refused.

    python -m experiments.machine
"""

import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from cache.kv import KVCache
from decode.contract import Contract
from decode.independence import together_here
from decode.stepper import Stepper
from experiments.report.plain import render_text
from experiments.report.sections import MACHINE_SCHEMA, machine_blocks
from experiments.run.costs import StreamingRead
from experiments.run.exits import DONE, as_command, one_line
from experiments.run.ledger import write_whole
from experiments.run.options import DEVICE, PATH, THREADS, checkpoint_option
from minimodel.checkpoint import Checkpoint, file_digests, open_checkpoint
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from minimodel.load import decoder_from
from minimodel.machine import machine_record
from minimodel.numerics import DTYPES, NumericContract
from minimodel.packed import ROW_COUNTS, equal_counts, why_not_packed
from minimodel.selfcheck import copies_fault, invariance_fault

KERNELS = ("repeat_kv", "packed_gqa", "eager/plain", "repeat_kv/packed", "invariant")
MOST = 32  # requests of one step that are tried: 64 rows
STEPS, UNTIMED = 24, 8
BUFFER = 256 << 20  # bytes of the streaming read
OUT = Path("runs") / "machine.json"


def machine(checkpoint: Checkpoint, device: str, threads: int) -> dict[str, Any]:
    """Returns machine.json's object: record of the machine, read bandwidth, and a row per dtype and kernels."""
    first = NumericContract("fp32", device, threads=threads)
    first.apply()
    read = StreamingRead(first.torch_device, BUFFER)
    speed = 1e-9 / min(read() for _ in range(3))
    rows = [row(checkpoint, NumericContract(d, device, k, threads=threads)) for d in DTYPES for k in KERNELS]
    return {
        "schema": MACHINE_SCHEMA,
        "environment": machine_record(),
        "device": device,
        "threads": threads,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "read_gigabytes_per_second": speed,
        "checkpoint": file_digests(checkpoint),
        "rows": rows,
    }


def row(checkpoint: Checkpoint, numeric: NumericContract) -> dict[str, Any]:
    """Returns what holds for one dtype and pair of kernels, or under `refused` why nothing can be run."""
    found: dict[str, Any] = {"dtype": numeric.dtype, "attention": numeric.attention, "linear": numeric.linear}
    numeric.apply()
    try:
        copies = copies_fault(numeric, checkpoint.config)
        model = decoder_from(checkpoint, numeric)
        together = together_here(model, MOST)
        invariance = invariance_fault(numeric, checkpoint.config)
        counts = packed_counts(checkpoint.config, numeric) if numeric.linear == "packed" else None
        seconds = step_seconds(model, Contract.load(checkpoint))
    except InputError as error:
        return {**found, "refused": one_line(error)}
    return {
        **found,
        "copies_equal": not copies,
        "rows_together": 2 * together.size,
        "rows_tried": 2 * MOST,
        "packed_equals_plain_at": counts,
        "packed_tried_at": None if counts is None else list(ROW_COUNTS),
        "invariant": not invariance,
        "step_seconds": seconds,
        "reasons": [text for text in (copies, together.limit, invariance) if text],
    }


def packed_counts(config: ModelConfig, numeric: NumericContract) -> list[int]:
    """Returns the row counts at which every packed weight of a layer has F.linear's bits; none in FP32."""
    if numeric.dtype == "fp32" or why_not_packed(numeric.torch_dtype, numeric.torch_device):
        return []
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    empty = partial(torch.empty, dtype=numeric.torch_dtype, device=numeric.torch_device)
    shapes = [((query, kv, kv), hidden), ((hidden,), query), ((inner, inner), hidden), ((hidden,), inner)]
    found = (equal_counts(empty(sum(widths), width), None, widths) for widths, width in shapes)
    return sorted(set(ROW_COUNTS).intersection(*found))


@torch.inference_mode()
def step_seconds(model: Decoder, contract: Contract) -> float:
    """Returns the median time of a decode step of two copies over few keys, head included."""
    stepper = Stepper(model, KVCache.for_model(model, batch=2, capacity=STEPS), 2, STEPS)
    token, times = int(contract.ordinary.nonzero()[0]), []
    for _ in range(STEPS):
        start = time.perf_counter()
        float(model.logits(stepper.feed(token, 0))[0, 0, 0])  # waits for the device
        times.append(time.perf_counter() - start)
    return statistics.median(times[UNTIMED:])


@click.command(help=__doc__)
@checkpoint_option()
@DEVICE
@THREADS
@click.option("--json", "as_json", is_flag=True, help="Print machine.json's object instead of the table.")
@click.option("--out", type=PATH, default=OUT, show_default=True, metavar="FILE", help="File to write or overwrite.")
@as_command("experiments.machine")
def main(checkpoint: Path, device: str, threads: int, as_json: bool, out: Path) -> int:
    opened = open_checkpoint(checkpoint)
    out.parent.mkdir(parents=True, exist_ok=True)
    document = machine(opened, device, threads)
    text = json.dumps(document, indent=1, allow_nan=False)
    write_whole(out, text + "\n")
    click.echo(text if as_json else f"{render_text(machine_blocks(document))}machine: {out}")
    return DONE


if __name__ == "__main__":
    main()
