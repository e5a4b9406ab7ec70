"""Speed and memory of our kernels, of another implementation, and of the least that this machine needs for the same.

One process takes the arms in turn after a warm-up: medians with quartiles, and ratios from samples of one round. The
columns are our kernels by name and, with --reference, another implementation, such as transformers with DynamicCache
and SDPA:

    python -m experiments.benchmark --dtype bf16 --reference tests.hf.bench_arm

Times are also shown over the arm's floor (its linear and SDPA calls alone, back to back) and over the time to read its
bytes at the bandwidth measured in the same rounds. The raw bits of the timed logits and K/V are compared too: exit code
3 where a column differs from one whose bits it promises. Load time and peak memory are measured in fresh processes.
Writes benchmark.json, report.md and report.html with drawings.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from decode.contract import Contract
from experiments.benchmark.arms import COLUMNS, Arm, available, open_ours, open_reference
from experiments.benchmark.batch import batch_entry, broken_batches
from experiments.benchmark.child import Job, Peak, in_child
from experiments.benchmark.measures import Bench, Measured, build, decode, matrix, prefill
from experiments.benchmark.options import (
    COUNTS,
    INPUTS,
    LENGTHS,
    OUTPUTS,
    Asked,
    BenchOptions,
    asked,
    chosen,
)
from experiments.benchmark.report import check, printed, write
from experiments.benchmark.results import Baseline, growth_entry, memory_entry, row_entry
from experiments.run.costs import StreamingRead, rotated, weight_bytes
from experiments.run.exits import DONE, GATE_FAILED, run_command
from experiments.run.options import Command, git_state, with_options
from experiments.run.tasks import load_tasks, prompt_states
from minimodel.checkpoint import file_digests, open_checkpoint
from minimodel.machine import cpu_model, machine_record
from minimodel.numerics import NumericContract

SCHEMA = "stage-replay-benchmark-v1"


def benchmark(options: BenchOptions) -> dict[str, Any]:
    """Returns benchmark.json's object. Bad input is refused before anything is measured."""
    numeric, parts = options.numeric, options.parts
    checkpoint = open_checkpoint(options.checkpoint)
    contract, config = Contract.load(checkpoint), checkpoint.config
    lengths = asked(options, config.max_position_embeddings)
    tasks, _ = load_tasks(options.tasks, 1)
    prompts = prompt_states(tasks, contract, config.max_position_embeddings, options.tasks) if "row" in parts else []
    names, omitted = available(chosen("--columns", options.columns, tuple(COLUMNS)), numeric, config)
    bench, where = open_bench(options, contract, names)
    baseline = Baseline.of(bench.arms, numeric.dtype)
    measured = measure(bench, lengths, parts)
    measured += [matrix(bench, task, prompt) for task, prompt in zip(tasks, prompts)]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": where,
        "checkpoint": {
            "directory": str(options.checkpoint),
            "sha256": file_digests(checkpoint),
            "config": asdict(config),
        },
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()},
        "columns": [arm.name for arm in bench.arms],
        "baseline": baseline.name,
        "omitted": omitted + lengths.omitted,
    }
    broken: list[list[str]] = []
    if "batch" in parts:
        document["batch"] = batch_entry(bench, lengths.batch)
        document["omitted"] += document["batch"]["omitted"]
        broken = broken_batches(document["batch"])
    if "growth" in parts:
        grown = build(bench, lengths.longest, 1)
        measured.append(grown)
        document["growth"] = growth_entry(grown)
    document["rows"] = [row_entry(one, baseline) for one in measured]
    if "memory" in parts:
        found = children(options, bench, lengths.prefix)
        document["memory"] = memory_entry(found, baseline.name, weights_of(bench))
    document["broken_promises"] = [[row["name"], *pair] for row in document["rows"] for pair in row["broken_promises"]]
    document["broken_promises"] += broken
    return document


def open_bench(options: BenchOptions, contract: Contract, names: tuple[str, ...]) -> tuple[Bench, dict[str, Any]]:
    """Returns the bench with its arms, and the machine's record, taken before any model is loaded."""
    numeric = options.numeric
    read = StreamingRead(numeric.torch_device, options.buffer << 20)
    where = machine(numeric)
    counts = (options.repeats, options.long_repeats, options.steps, options.block)
    return Bench(open_arms(options, names), contract, numeric, *counts, read, options.note), where


def measure(bench: Bench, lengths: Asked, parts: Sequence[str]) -> list[Measured]:
    """Returns decode steps, prefills and the build, in that order."""
    measured = [decode(bench, context) for context in lengths.contexts]
    measured += [prefill(bench, length) for length in lengths.prefills]
    if "build" in parts:
        measured.append(build(bench, lengths.prefix, bench.long_repeats))
    return measured


def open_arms(options: BenchOptions, names: tuple[str, ...]) -> list[Arm]:
    """Returns our arms in the columns' order, then the reference."""
    arms: list[Arm] = [*open_ours(options.checkpoint, options.numeric, names)]
    if options.reference is not None:
        options.note(f"loading {options.reference}")
        arms.append(open_reference(options.reference, options.checkpoint, options.numeric))
    return arms


def children(options: BenchOptions, bench: Bench, length: int) -> dict[str, list[Peak]]:
    """Loads and runs every arm over `length` tokens in fresh processes, in turn."""
    found: dict[str, list[Peak]] = {arm.name: [] for arm in bench.arms}
    for number in range(options.long_repeats):
        for name in rotated(list(found), number):
            options.note(f"fresh process {number + 1} of {options.long_repeats}: {name}")
            job = Job(
                str(options.checkpoint.resolve()),
                options.dtype,
                options.device,
                options.threads,
                name if name in COLUMNS else None,
                options.reference,
                length,
            )
            found[name].append(in_child(job))
    return found


def weights_of(bench: Bench) -> int:
    """Returns the bytes of the checkpoint's weights in the model dtype, role table included."""
    table = bench.arms[0].model.role_embedding
    return weight_bytes(bench.config, bench.numeric.dtype, 0 if table is None else table.shape[0])


def machine(numeric: NumericContract) -> dict[str, Any]:
    """Returns processor, cores, memory, numerics, versions and commit."""
    numeric.apply()
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "numeric": numeric.record(),
        "environment": machine_record(),
        **git_state(),
    }


def bench_options(command: Command) -> Command:
    """Returns the command with every option."""
    return with_options(command, [*INPUTS, *LENGTHS, *COUNTS, *OUTPUTS])


@click.command(help=__doc__)
@bench_options
def main(**given: Any) -> None:
    options = BenchOptions(**given)

    def body() -> int:
        check(options.directory, options.fresh)
        document = benchmark(options)
        write(document, options.directory)
        click.echo(printed(document))
        click.echo(f"\nbenchmark: {options.directory}")
        return GATE_FAILED if document["broken_promises"] else DONE

    run_command(body, "experiments.benchmark", resumes=False)


if __name__ == "__main__":
    main()
