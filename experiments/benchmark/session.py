"""One benchmark from its command line to its document: everything opened and checked first, then measured in order."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decode.contract import Contract
from experiments.benchmark.arms import COLUMNS, Arm, available, open_ours, open_reference
from experiments.benchmark.batch import batch_entry, broken_batches
from experiments.benchmark.bench import Bench, Measured
from experiments.benchmark.child import STEPS, Job, in_child
from experiments.benchmark.growth import growth_entry
from experiments.benchmark.limits import Lengths, chosen
from experiments.benchmark.machine import StreamingRead, machine
from experiments.benchmark.measures import build, decode, matrix, prefill
from experiments.benchmark.options import BATCH, CONTEXTS, GROWTH, PREFILLS, PREFIX, BenchOptions
from experiments.benchmark.results import Baseline, memory_entry, row_entry
from experiments.benchmark.timing import rotated
from experiments.plan.estimates import weight_bytes
from experiments.run.tasks import load_tasks, prompt_states
from minimodel.checkpoint import file_digests, open_checkpoint

SCHEMA = "stage-replay-benchmark-v1"


@dataclass(frozen=True)
class Asked:
    """Lengths that the options ask for, cut to the context: of decode and prefill, one build's, the growth's (0: none),
    and of a batch's longest request. omitted: what was left out, and why.
    """

    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    prefix: int
    longest: int
    batch: int
    omitted: list[str]


def benchmark(options: BenchOptions) -> dict[str, Any]:
    """benchmark.json's object. InputError before anything is measured."""
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


def asked(options: BenchOptions, context: int) -> Asked:
    """InputError for a length that the options name and the context does not hold."""
    lengths, parts = Lengths(context, max(options.steps, STEPS) + 1), options.parts
    return Asked(
        lengths.several("--context", options.context, CONTEXTS) if "decode" in parts else (),
        lengths.several("--prefill", options.prefill, PREFILLS) if "prefill" in parts else (),
        lengths.one("--prefix", options.prefix, PREFIX),
        lengths.one("--length", options.length, GROWTH) if "growth" in parts else 0,
        min(context, BATCH)
        if options.context is None
        else max(lengths.several("--context", options.context, CONTEXTS)),
        lengths.omitted,
    )


def open_bench(options: BenchOptions, contract: Contract, names: tuple[str, ...]) -> tuple[Bench, dict[str, Any]]:
    """The bench with its arms, and the machine as it was before any model was there: the streaming read's trials meet
    a quiet process."""
    numeric = options.numeric
    read = StreamingRead(numeric.torch_device, options.buffer << 20)
    where = machine(numeric)
    counts = (options.repeats, options.long_repeats, options.steps, options.block)
    return Bench(open_arms(options, names), contract, numeric, *counts, read, options.note), where


def measure(bench: Bench, lengths: Asked, parts: Sequence[str]) -> list[Measured]:
    """Decode steps, prefills and the build, in that order."""
    measured = [decode(bench, context) for context in lengths.contexts]
    measured += [prefill(bench, length) for length in lengths.prefills]
    if "build" in parts:
        measured.append(build(bench, lengths.prefix, bench.long_repeats))
    return measured


def open_arms(options: BenchOptions, names: tuple[str, ...]) -> list[Arm]:
    """Ours in the columns' order, then the reference."""
    arms: list[Arm] = [*open_ours(options.checkpoint, options.numeric, names)]
    if options.reference is not None:
        options.note(f"loading {options.reference}")
        arms.append(open_reference(options.reference, options.checkpoint, options.numeric))
    return arms


def children(options: BenchOptions, bench: Bench, length: int) -> dict[str, list[dict[str, Any]]]:
    """Every arm loaded and put to a prefix of `length` tokens in fresh processes, in turn."""
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in bench.arms}
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
    """Bytes of the checkpoint's weights in the model dtype, the role table among them."""
    table = bench.arms[0].model.role_embedding
    return weight_bytes(bench.config, bench.numeric.dtype, 0 if table is None else table.shape[0])
