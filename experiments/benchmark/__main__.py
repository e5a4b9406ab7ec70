"""Speed and memory of our kernels, beside another implementation and the least that this machine allows.

One process runs the arms in turn after a warm-up and reports medians with quartiles, and ratios of samples of the same
round. The columns are our kernels by name and, with --reference, another implementation, such as transformers with
DynamicCache and SDPA:

    python -m experiments.benchmark --dtype bf16 --reference tests.hf.bench_arm

Times are also shown over the arm's floor (its linear and SDPA calls alone, back to back) and over the time to read its
bytes at the bandwidth measured in the same rounds. The raw bits of the timed logits and K/V are compared too: exit code
3 where a column differs from one whose bits it must have. Load time and peak memory are measured in fresh processes.

--only batch measures rows decoded together against their number: rows per minute, tokens per second, bits and peak
memory, beside the reference at one row at a time and in a padded batch of the same size.

Writes benchmark.json, report.md and report.html with drawings.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from decode.contract import Contract
from experiments.benchmark import batch, measures, memory
from experiments.benchmark.arms import COLUMNS, available, open_ours, open_reference
from experiments.benchmark.measures import Bench, Entry
from experiments.benchmark.report import check, printed, write
from experiments.run import options
from experiments.run.costs import StreamingRead
from experiments.run.exits import DONE, GATE_FAILED, as_command
from experiments.run.tasks import load_tasks, prompt_states
from minimodel.checkpoint import file_digests, open_checkpoint
from minimodel.errors import InputError, refuse
from minimodel.machine import cpu_model, machine_record
from minimodel.numerics import DTYPES, NumericContract

SCHEMA = "stage-replay-benchmark-v1"
PARTS = ("decode", "prefill", "build", "row", "batch", "memory", "growth")
LENGTHS = {"context": (128, 512, 2048, 4096), "prefill": (512, 2000), "prefix": (2000,), "length": (8192,)}
USERS = {"context": {"decode"}, "prefill": {"prefill"}, "prefix": {"build", "memory"}, "length": {"growth"}}


def number(name: str, default: int | None, text: str, metavar: str | None = None) -> options.Decorator:
    """Returns an option for a number of at least 1."""
    least = click.IntRange(min=1)
    return click.option(name, type=least, default=default, show_default=default is not None, metavar=metavar, help=text)


def tokens(name: str, text: str) -> options.Decorator:
    """Returns an option for lengths in tokens."""
    default = ",".join(map(str, LENGTHS[name]))
    text = f"{text} [default: {default}, at most the model's context]"
    return click.option(f"--{name}", metavar="N,N" if "," in default else "N", help=text)


OPTIONS: list[options.Decorator] = [
    options.checkpoint_option(),
    options.TASKS,
    click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True,
                 help="Dtype of every column."),
    options.DEVICE,
    options.THREADS,
    click.option("--columns", default=",".join(COLUMNS), show_default=True, metavar="NAMES",
                 help="Kernels to measure, one column each. ATTENTION+packed: with prepacked linear weights."),
    click.option("--reference", metavar="MODULE",
                 help="Another implementation as one more column: a module with open_arm(directory, numeric), such as "
                 "tests.hf.bench_arm for transformers."),
    click.option("--only", metavar="PARTS", help=f"Parts to measure, of {','.join(PARTS)}. [default: all but growth]"),
    tokens("context", "decode: context lengths at which decode steps are timed."),
    tokens("prefill", "prefill: prompt lengths that are taken in one call."),
    tokens("prefix", "build, memory: length of the prefix that is built token by token, or loaded and run."),
    click.option("--growth", is_flag=True,
                 help="Also measure growth: build one long prefix; draw time and cache memory against its length."),
    tokens("length", "growth: length of that prefix."),
    number("--rows", batch.SIZES[-1], "batch: the first N tasks are decoded, 1, 2, 4, 8 and 16 at a time.", "N"),
    number("--generate", None, "batch: tokens generated per row. [default: to the end of the answer]", "N"),
    number("--repeats", 7, "Rounds of decode steps and prefills."),
    number("--long-repeats", 7, "Rounds of builds, matrix rows (the first task), batches and loads."),
    number("--steps", 24, "Decode steps per sample."),
    number("--block", 128, "Tokens of a build per sample."),
    number("--buffer", 1024, "Buffer whose reading gives the memory bandwidth; far beyond the CPU's caches.", "MIB"),
    click.option("--out", type=options.PATH, metavar="DIR",
                 help="Directory of benchmark.json and the report. [default: runs/benchmark-DTYPE]"),
    options.FRESH,
    options.QUIET,
]  # fmt: skip


def chosen(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of a comma-separated option in the order of `known`. InputError for any other name."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise refuse(option, f"names of {', '.join(known)}", name)
    return tuple(name for name in known if name in names)


def lengths(name: str, given: str | None, least: int, limit: int, omitted: list[str]) -> tuple[int, ...]:
    """Returns the lengths of an option. InputError for a given one outside least..limit; a default beyond `limit` is
    cut to it, and a sentence on that is added to `omitted`."""
    if given is None:
        omitted += [f"--{name} {n}: cut to max_position_embeddings {limit}" for n in LENGTHS[name] if n > limit]
        return tuple(dict.fromkeys(min(n, limit) for n in LENGTHS[name] if n >= least))
    try:
        found = tuple(int(part) for part in given.split(","))
    except ValueError:
        raise InputError(f"--{name}: expected whole numbers with commas between, found {given!r}") from None
    for length in found:
        if not least <= length <= limit:
            raise refuse(f"--{name}", f"{least} to max_position_embeddings {limit}", length)
    return found


def benchmark(given: Entry) -> Entry:
    """Returns benchmark.json's object. Bad input is refused before anything is measured."""
    parts = PARTS[:-1] if given["only"] is None else chosen("--only", given["only"], PARTS)
    parts += ("growth",) if given["growth"] and "growth" not in parts else ()
    numeric = NumericContract(given["dtype"], given["device"], threads=given["threads"])
    checkpoint = open_checkpoint(given["checkpoint"])
    contract, config = Contract.load(checkpoint), checkpoint.config
    least, context = max(given["steps"], memory.STEPS) + 2, config.max_position_embeddings
    omitted: list[str] = []
    used = [name for name, users in USERS.items() if users & set(parts)]
    sizes = {name: lengths(name, given[name], least, context, omitted) for name in used}
    tasks, _ = load_tasks(given["tasks"], given["rows"])
    prompts = prompt_states(tasks, contract, context, given["tasks"]) if {"row", "batch"} & set(parts) else []
    names, left_out = available(chosen("--columns", given["columns"], tuple(COLUMNS)), numeric, config)
    numeric.apply()
    where = {  # before any model is loaded
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "numeric": numeric.record(),
        "environment": machine_record(),
        **options.git_state(),
    }
    bench = open_bench(given, names, contract, numeric)
    with torch.inference_mode():
        found = measured(bench, parts, sizes, list(zip(tasks, prompts)), given["generate"])
    return {
        "schema": SCHEMA,
        "machine": where,
        "checkpoint": {
            "directory": str(given["checkpoint"]),
            "sha256": file_digests(checkpoint),
            "config": asdict(config),
        },
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in given.items()},
        "columns": [arm.name for arm in bench.arms],
        "baseline": bench.baseline,
        "omitted": left_out + omitted + found.get("batch", {}).get("omitted", []),
        **found,
    }


def open_bench(given: Entry, names: tuple[str, ...], contract: Contract, numeric: NumericContract) -> Bench:
    """Loads every arm: ours in the columns' order, then the reference."""
    directory, module = given["checkpoint"], given["reference"]
    note = (lambda text: None) if given["quiet"] else partial(click.echo, err=True)
    read = StreamingRead(numeric.torch_device, given["buffer"] << 20)
    arms = open_ours(directory, numeric, names)
    if module is not None:
        note(f"loading {module}")
        arms.append(open_reference(module, directory, numeric))
    fresh = partial(memory.in_fresh_process, directory.resolve(), numeric, module)
    counts = {name: given[name] for name in ("repeats", "long_repeats", "steps", "block")}
    return Bench(arms, contract, numeric, **counts, read=read, note=note, fresh=fresh)


def measured(
    bench: Bench, parts: Sequence[str], sizes: dict[str, tuple[int, ...]], rows: list[batch.TaskRow], limit: int | None
) -> Entry:
    """Returns what was measured, and every column whose bits are not those that it must have."""
    found = [measures.decode(bench, context) for context in sizes.get("context", ())]
    found += [measures.prefill(bench, length) for length in sizes.get("prefill", ())]
    found += [measures.build(bench, sizes["prefix"][0], bench.long_repeats)] if "build" in parts else []
    found += [measures.matrix(bench, *rows[0])] if "row" in parts else []
    more: Entry = {"batch": batch.batch(bench, rows, limit)} if "batch" in parts else {}
    if "growth" in parts:
        found.append(measures.build(bench, sizes["length"][0], 1))
        more["growth"] = measures.growth_entry(found[-1])
    if "memory" in parts:
        more["memory"] = memory.memory(bench, sizes["prefix"][0])
    broken = [[row["name"], *pair] for row in found for pair in row["unequal_bits"]]
    broken += more.get("batch", {}).get("unequal_bits", [])
    return {"rows": found, **more, "unequal_bits": broken}


@click.command(help=__doc__)
@partial(options.with_options, options=OPTIONS)
@as_command("experiments.benchmark")
def main(out: Path | None, fresh: bool, **given: Any) -> int:
    directory = out or Path("runs") / f"benchmark-{given['dtype']}"
    check(directory, fresh)
    document = benchmark(given)
    click.echo(f"{printed(document)}\n")  # first: what was measured is not lost where it cannot be written
    write(document, directory)
    click.echo(f"benchmark: {directory}")
    return GATE_FAILED if document["unequal_bits"] else DONE


if __name__ == "__main__":
    main()
