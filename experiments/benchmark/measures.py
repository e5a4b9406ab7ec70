"""The measurements: each takes the arms through the same work in turn and returns one `Measured`."""

from functools import partial

import torch

from decode.state import State
from decode.stepper import Stepper
from experiments.benchmark.arms import Arm
from experiments.benchmark.bench import Bench, Measured, digest, prefilled
from experiments.benchmark.machine import load
from experiments.benchmark.timing import Rounds, interleaved, rotated
from experiments.plan.estimates import prefill_cost, step_bytes
from experiments.run.ledger import canonical, sha256_text
from experiments.run.tasks import Task
from minimodel.bits import COPIES


@torch.inference_mode()
def decode(bench: Bench, context: int) -> Measured:
    """Seconds a step, the token through the decoder and its logits: the steps that take the cache to `context`."""
    bench.note(f"decode, context {context}")
    before, work, start = load(), bench.work(context), context - bench.steps - 1
    record, bits = work.record(start), {}
    held = {arm.name: prefilled(arm, work, start)[0] for arm in bench.arms}

    def sample(arm: Arm) -> float:
        cache = arm.copy_cache(held[arm.name], context)
        stepper, watch = Stepper(arm.model, cache, COPIES, context), bench.watch()
        stepper.resume(work.roles[:start], record)
        stepper.feed(work.tokens[start], work.roles[start])  # untimed: the first step meets a cold cache
        with watch:
            for token, role in work.steps(start + 1, context):
                logits = arm.model.logits(stepper.feed(token, role))
        if arm.name not in bits:
            bits[arm.name] = digest(arm, cache, logits)
        return watch.seconds / bench.steps

    floors = bench.floors(1, context, work.call(context)[3][:, :, -1:])
    taken = bench.in_turn(sample, floors, bench.steps, read=True)
    return Measured(
        f"decode, context {context}",
        "ms",
        taken.seconds,
        bits,
        (before, load()),
        floors=taken.floors,
        read=taken.read,
        bytes=step_bytes(bench.config, bench.numeric.dtype, context),
        detail={"context": context, "steps": bench.steps, "read": bench.read.way},
    )


@torch.inference_mode()
def prefill(bench: Bench, length: int) -> Measured:
    """Seconds of one call of `length` tokens of both copies, the allocation of its cache and the last logits in it."""
    bench.note(f"prefill, {length} tokens")
    before, work = load(), bench.work(length)
    bits: dict[str, str] = {}

    def sample(arm: Arm) -> float:
        watch = bench.watch()
        with watch:
            cache, logits = prefilled(arm, work, length)
        if arm.name not in bits:
            bits[arm.name] = digest(arm, cache, logits)
        return watch.seconds

    taken = bench.in_turn(sample, bench.floors(length, length, work.call(length)[3]), 1, read=False)
    return Measured(
        f"prefill, {length} tokens",
        "tokens/s",
        taken.seconds,
        bits,
        (before, load()),
        floors=taken.floors,
        tokens=length,
        detail={"length": length, "flops": prefill_cost(bench.config, bench.numeric.dtype, length).flops},
    )


@torch.inference_mode()
def build(bench: Bench, length: int, repeats: int) -> Measured:
    """Seconds of an incremental build of `length` tokens, without logits until the last.

    The arms take turns block by block, so that a build of minutes is still compared in pairs: a sample is one block.
    """
    ends = [*range(bench.block, length, bench.block), length]
    before, work, bits = load(), bench.work(length), {}
    seconds: Rounds = {arm.name: [] for arm in bench.arms}
    for number in range(repeats):
        held: list[int] = []
        steppers = {arm.name: Stepper(arm.model, arm.new_cache(length), COPIES, length) for arm in bench.arms}
        for index, (start, stop) in enumerate(zip([0, *ends], ends)):
            bench.note(f"incremental build {number + 1} of {repeats}, {start} of {length} tokens")
            for arm in rotated(bench.arms, index + number):
                stepper, watch = steppers[arm.name], bench.watch()
                with watch:
                    for token, role in work.steps(start, stop):
                        hidden = stepper.feed(token, role)
                    logits = arm.model.logits(hidden) if stop == length else None
                seconds[arm.name].append(watch.seconds)
                if logits is not None and arm.name not in bits:
                    bits[arm.name] = digest(arm, stepper.cache, logits)
            held.append(sum(t.nbytes for t in bench.arms[0].tensors(steppers[bench.arms[0].name].cache)))
    totals = {
        name: [sum(found[at : at + len(ends)]) for at in range(0, len(found), len(ends))]
        for name, found in seconds.items()
    }
    detail = {"length": length, "builds": repeats, "ends": ends, "cache_bytes": held}
    name = f"incremental build, {length} tokens"
    return Measured(name, "s", seconds, bits, (before, load()), totals=totals, detail=detail)


def matrix(bench: Bench, task: Task, prompt: State) -> Measured:
    """Seconds of one whole row of the retained-live matrix, digests and comparisons in it; bits: the ledger's line."""
    bench.note(f"matrix row {task.id}")
    before, bits, lengths = load(), {}, {}

    def sample(arm: Arm) -> float:
        watch = bench.watch()
        with watch:
            row = arm.row(task, prompt)
        bits[arm.name] = sha256_text(canonical(row))
        lengths[arm.name] = [row["prefix"]["length"], *(len(one["suffix"]) for one in row["arms"].values())]
        return watch.seconds

    found = interleaved({arm.name: partial(sample, arm) for arm in bench.arms}, bench.long_repeats)
    detail = {"row": task.id, "lengths": lengths}
    return Measured("matrix row", "s", found, bits, (before, load()), detail=detail)
