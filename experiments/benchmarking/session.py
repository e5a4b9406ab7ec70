"""One benchmark from its command line to its document: everything opened and checked first, then measured in order."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from decode.contract import Contract
from experiments.benchmarking.arms import COLUMNS, Arm, available, open_ours, open_reference
from experiments.benchmarking.child import STEPS, Job, in_child
from experiments.benchmarking.growth import growth_entry
from experiments.benchmarking.limits import Lengths, chosen
from experiments.benchmarking.machine import StreamingRead, machine
from experiments.benchmarking.measures import Bench, Measured, build, decode, matrix, prefill
from experiments.benchmarking.options import CONTEXTS, GROWTH, PREFILLS, PREFIX, BenchOptions
from experiments.benchmarking.results import Baseline, memory_entry, row_entry
from experiments.benchmarking.timing import rotated
from experiments.harness.tasks import load_tasks, prompt_states
from experiments.planning.estimates import weight_bytes
from minimodel.checkpoint import file_digests, open_checkpoint

SCHEMA = "stage-replay-benchmark-v1"


def benchmark(options: BenchOptions) -> dict[str, Any]:
    """benchmark.json's object. InputError before anything is measured."""
    numeric, parts = options.numeric, options.parts
    contract, config = Contract.load(options.checkpoint), open_checkpoint(options.checkpoint).config
    lengths = Lengths(config.max_position_embeddings, max(options.steps, STEPS) + 1)
    contexts = lengths.several("--context", options.context, CONTEXTS) if "decode" in parts else ()
    prefills = lengths.several("--prefill", options.prefill, PREFILLS) if "prefill" in parts else ()
    prefix = lengths.one("--prefix", options.prefix, PREFIX)
    longest = lengths.one("--length", options.length, GROWTH) if "growth" in parts else 0
    tasks, _ = load_tasks(options.tasks, 1)
    prompts = prompt_states(tasks, contract, lengths.limit, options.tasks) if "row" in parts else []
    names, omitted = available(chosen("--columns", options.columns, tuple(COLUMNS)), numeric)
    # the read comes before the models, so that its trials meet a quiet process
    bench = Bench(
        [],
        contract,
        numeric,
        options.repeats,
        options.long_repeats,
        options.steps,
        options.block,
        StreamingRead(numeric.torch_device, options.buffer << 20),
        options.note,
    )
    where = machine(numeric)
    bench = replace(bench, arms=open_arms(options, names))
    baseline = Baseline.of(bench.arms, numeric.dtype)
    measured: list[Measured] = [decode(bench, context) for context in contexts]
    measured += [prefill(bench, length) for length in prefills]
    if "build" in parts:
        measured.append(build(bench, prefix, options.long_repeats))
    measured += [matrix(bench, task, prompt) for task, prompt in zip(tasks, prompts)]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": where,
        "checkpoint": {
            "directory": str(options.checkpoint),
            "sha256": file_digests(options.checkpoint),
            "config": asdict(config),
        },
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()},
        "columns": [arm.name for arm in bench.arms],
        "baseline": baseline.name,
        "omitted": omitted + lengths.omitted,
    }
    if "growth" in parts:
        grown = build(bench, longest, 1)
        measured.append(grown)
        document["growth"] = growth_entry(grown)
    document["rows"] = [row_entry(one, baseline) for one in measured]
    if "memory" in parts:
        document["memory"] = memory_entry(children(options, bench, prefix), baseline.name, weights_of(bench))
    document["broken_promises"] = [[row["name"], *pair] for row in document["rows"] for pair in row["broken_promises"]]
    return document


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
