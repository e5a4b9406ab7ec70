"""Trains the bundled demo from nothing: `python -m experiments.demo.train --out DIR`.

Writes `primary/`, `later/` and `tasks.jsonl`. One run, step-based: the batch of a step depends on the seed and the step
alone, so a run that is interrupted and started again continues as it would have gone on. The two checkpoints are two
moments of this run, at 90 % and at its end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from tokenizers import Tokenizer
from torch.nn import Parameter

from experiments.demo.corpus import POOL_BATCHES, Batch, collate, held_out_tasks, training_pool
from experiments.demo.model import config_json, initial_weights, loss_sum, write_checkpoint
from experiments.demo.optimizer import PRIMARY_AT, Optimizer, load_state, rate, save_state
from experiments.demo.tokenizer import train_tokenizer
from experiments.run.exits import DONE, run_command
from minimodel.config import ModelConfig
from minimodel.decoder import Decoder
from minimodel.numerics import NumericContract

TASKS = 200
LOG_EVERY = 20


@dataclass(frozen=True)
class Plan:
    """What decides every batch and learning rate of a run."""

    seed: int
    steps: int
    batch_size: int

    def record(self) -> dict[str, str]:
        """As kept in the training state."""
        return {name: str(value) for name, value in asdict(self).items()}


def batches(plan: Plan, first: int, last: int, tokenizer: Tokenizer) -> Iterator[Batch]:
    """The batches of steps `first` to `last` - 1 of the plan, counted from zero."""
    for pool in range(first // POOL_BATCHES, -(-last // POOL_BATCHES)):
        rows = training_pool(plan.seed, pool, plan.batch_size, pool * POOL_BATCHES / plan.steps, tokenizer)
        for index, chosen in enumerate(rows):
            if first <= pool * POOL_BATCHES + index < last:
                yield collate(chosen)


def prepare(out: Path, seed: int) -> Tokenizer:
    """The run's tokenizer and tasks, made on the first start and read again on later ones."""
    tokenizer_file, tasks_file = out / "tokenizer.json", out / "tasks.jsonl"
    if not tokenizer_file.exists():
        out.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(task) + "\n" for task in held_out_tasks(seed, TASKS)]
        tasks_file.write_text("".join(lines), encoding="utf-8")
        train_tokenizer(seed).save(str(tokenizer_file))
    return Tokenizer.from_file(str(tokenizer_file))


def log(out: Path, line: dict[str, object]) -> None:
    """One line to standard error and to `train.jsonl`; tokens and seconds count from this start."""
    click.echo(json.dumps(line), err=True)
    with (out / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def train(out: Path, plan: Plan, threads: int, save_every: int, stop: int | None = None) -> None:
    """Runs the plan from where `out` stands to its end, or to step `stop`. A state of another plan is refused."""
    numeric = NumericContract(dtype="fp32", device="cpu", attention="eager", threads=threads)
    numeric.apply()
    tokenizer = prepare(out, plan.seed)
    config = config_json(tokenizer.get_vocab_size())
    shape = ModelConfig.from_dict(config)
    parameters = {name: Parameter(tensor) for name, tensor in initial_weights(shape, plan.seed).items()}
    optimizer = Optimizer(parameters)
    decoder = Decoder(shape, parameters, numeric)
    state_file, last = out / "state.safetensors", min(plan.steps, stop or plan.steps)
    done = load_state(state_file, plan.record(), parameters, optimizer) if state_file.exists() else 0
    started, tokens, losses = time.perf_counter(), 0, []
    for step, batch in enumerate(batches(plan, done, last, tokenizer), start=done + 1):
        total, weight = loss_sum(decoder, batch)
        (total / weight).backward()
        optimizer.step(rate(step / plan.steps))
        tokens += int(batch.valid.sum())
        losses.append(float(total.detach() / weight))
        if step % LOG_EVERY == 0 or step == last:
            seconds, loss = time.perf_counter() - started, sum(losses) / len(losses)
            log(out, {"step": step, "loss": round(loss, 4), "tokens": tokens, "seconds": round(seconds, 1)})
            losses = []
        if step == round(PRIMARY_AT * plan.steps):
            write_checkpoint(out / "primary", config, parameters, tokenizer)
        if step % save_every == 0 or step == last:
            save_state(state_file, step, plan.record(), parameters, optimizer)
            write_checkpoint(out / "later", config, parameters, tokenizer)


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Directory to write.")
@click.option("--seed", type=click.IntRange(0), default=20260728, show_default=True, help="Seed of all draws.")
@click.option("--steps", type=click.IntRange(20), default=3600, show_default=True, help="Optimizer steps of the run.")
@click.option("--batch", type=click.IntRange(1), default=10, show_default=True, help="Problems per optimizer step.")
@click.option("--threads", type=click.IntRange(1, 1024), default=2, show_default=True, help="CPU threads to use.")
@click.option("--save-every", type=click.IntRange(1), default=100, show_default=True, help="Steps between saves.")
def main(out: Path, seed: int, steps: int, batch: int, threads: int, save_every: int) -> None:
    """Train the demo checkpoint on seeded synthetic word problems. The same command again resumes."""

    def command() -> int:
        train(out, Plan(seed, steps, batch), threads, save_every)
        return DONE

    run_command(command, "experiments.demo.train")


if __name__ == "__main__":
    main()
