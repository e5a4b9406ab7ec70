"""Trains the bundled demo from nothing: `python -m experiments.demo.train --out DIR`.

Writes `primary/`, `later/` and `tasks.jsonl`. One run, step-based: the batch of a step depends on the seed and the step
alone, so a run that is interrupted and started again continues as it would have gone on. The two checkpoints are two
moments of this run, at 90 % and at its end.
"""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import click
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import Parameter

from experiments.demo.corpus import POOL_BATCHES, Batch, collate, held_out_tasks, train_tokenizer, training_pool
from experiments.demo.model import config_json, initial_weights, loss_sum, write_checkpoint
from experiments.run.exits import DONE, as_command
from experiments.run.ledger import write_whole
from experiments.run.options import PathOption
from minimodel.config_file import read_config
from minimodel.decoder import Decoder
from minimodel.errors import refuse
from minimodel.numerics import NumericContract
from minimodel.safetensors_file import save_tensors

TASKS = 200
LOG_EVERY = 20
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3
WARMUP, DECAY_FROM = 0.01, 0.4  # shares of the run
PRIMARY_AT = 0.9  # share of the run after which the primary checkpoint is taken; the later one is the end


class Plan(NamedTuple):
    """What decides every batch and learning rate of a run."""

    seed: int
    steps: int
    batch_size: int


def rate(progress: float) -> float:
    """Returns the learning rate's factor at `progress` in [0, 1].

    A short warm-up, constant to 40 % of the run, linear to 4 % at the primary checkpoint, 4 % from there to the end.
    """
    if progress < WARMUP:
        return progress / WARMUP
    return min(1.0, max(0.04, 1.0 - 0.96 * (progress - DECAY_FROM) / (PRIMARY_AT - DECAY_FROM)))


class Optimizer:
    """Muon for the layers' projections and AdamW for embeddings, norms and biases, all FP32."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        matrices = {name for name in parameters if name.startswith("model.layers.") and name.endswith("proj.weight")}
        muon = [parameter for name, parameter in parameters.items() if name in matrices]
        self.others = [parameter for name, parameter in parameters.items() if name not in matrices]
        self.muon = torch.optim.Muon(muon, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.01)
        self.adamw = torch.optim.AdamW(self.others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, factor: float) -> None:
        """Updates at `factor` of the full rates. AdamW's gradients are clipped to norm 1; Muon is scale-free."""
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimizer, full in ((self.muon, MATRIX_RATE), (self.adamw, OTHER_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = full * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def save_state(path: Path, step: int, plan: Plan, parameters: dict[str, Parameter], optimizer: Optimizer) -> None:
    """Writes parameters and both optimizers' moments after `step` steps as one safetensors file, replaced whole."""
    tensors = {f"parameter.{name}": parameter.detach().contiguous() for name, parameter in parameters.items()}
    for kind in ("muon", "adamw"):
        for index, moments in getattr(optimizer, kind).state_dict()["state"].items():
            tensors |= {f"{kind}.{index}.{key}": value.contiguous() for key, value in moments.items()}
    record = {name: str(value) for name, value in (*plan._asdict().items(), ("step", step))}
    save_tensors(path, tensors, record)


def load_state(path: Path, plan: Plan, parameters: dict[str, Parameter], optimizer: Optimizer) -> int:
    """Fills parameters and moments in place and returns the steps done. InputError for another plan's state."""
    moments: dict[str, dict[int, dict[str, Tensor]]] = {"muon": {}, "adamw": {}}
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        for key, expected in plan._asdict().items():
            if metadata.get(key) != str(expected):
                raise refuse(f"{path}: {key}", f"{expected}, as given", metadata.get(key))
        for name in list(file.keys()):
            kind, rest = name.split(".", 1)
            if kind == "parameter":
                parameters[rest].data.copy_(file.get_tensor(name))
            else:
                index, key = rest.split(".", 1)
                moments[kind].setdefault(int(index), {})[key] = file.get_tensor(name)
    for kind, state in moments.items():
        part = getattr(optimizer, kind)
        part.load_state_dict({**part.state_dict(), "state": state})
    return int(metadata["step"])


def batches(plan: Plan, first: int, last: int, tokenizer: Tokenizer) -> Iterator[Batch]:
    """Yields the batches of steps `first` to `last` - 1 of the plan, counted from zero."""
    for pool in range(first // POOL_BATCHES, -(-last // POOL_BATCHES)):
        start = pool * POOL_BATCHES
        rows = training_pool(plan.seed, pool, plan.batch_size, start / plan.steps, tokenizer)
        yield from map(collate, rows[max(0, first - start) : last - start])


def prepare(out: Path, seed: int) -> Tokenizer:
    """Returns the run's tokenizer, made with its tasks on the first start and read again on later ones."""
    path = out / "tokenizer.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "tasks.jsonl", "".join(json.dumps(task) + "\n" for task in held_out_tasks(seed, TASKS)))
        write_whole(path, train_tokenizer(seed).to_str(pretty=True))
    return Tokenizer.from_file(str(path))


def train(out: Path, plan: Plan, threads: int, save_every: int, stop: int | None = None) -> None:
    """Runs the plan from where `out` stands to its end, or to step `stop`. A state of another plan is refused.

    Logs to standard error and to `train.jsonl`; tokens and seconds count from this start.
    """
    numeric = NumericContract(dtype="fp32", device="cpu", attention="eager", threads=threads)
    numeric.apply()
    tokenizer = prepare(out, plan.seed)
    config = config_json(tokenizer.get_vocab_size())
    shape = read_config(config)
    parameters = {name: Parameter(tensor) for name, tensor in initial_weights(shape, plan.seed).items()}
    optimizer, decoder = Optimizer(parameters), Decoder(shape, parameters, numeric)
    state_file, last = out / "state.safetensors", min(plan.steps, stop or plan.steps)
    done = load_state(state_file, plan, parameters, optimizer) if state_file.exists() else 0
    started, tokens, losses = time.perf_counter(), 0, []
    for step, batch in enumerate(batches(plan, done, last, tokenizer), start=done + 1):
        total, weight = loss_sum(decoder, batch)
        (total / weight).backward()
        optimizer.step(rate(step / plan.steps))
        tokens += int(batch.valid.sum())
        losses.append(float(total.detach() / weight))
        if step % LOG_EVERY == 0 or step == last:
            seconds, loss = round(time.perf_counter() - started, 1), round(sum(losses) / len(losses), 4)
            line = json.dumps({"step": step, "loss": loss, "tokens": tokens, "seconds": seconds})
            click.echo(line, err=True)
            with (out / "train.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            losses = []
        if step == round(PRIMARY_AT * plan.steps):
            write_checkpoint(out / "primary", config, parameters, tokenizer)
        if step % save_every == 0 or step == last:
            save_state(state_file, step, plan, parameters, optimizer)
            write_checkpoint(out / "later", config, parameters, tokenizer)


@click.command()
@click.option("--out", type=PathOption(path_type=Path, file_okay=False), required=True, help="Directory to write.")
@click.option("--seed", type=click.IntRange(0), default=20260728, show_default=True, help="Seed of all draws.")
@click.option("--steps", type=click.IntRange(20), default=3600, show_default=True, help="Optimizer steps of the run.")
@click.option("--batch", type=click.IntRange(1), default=10, show_default=True, help="Problems per optimizer step.")
@click.option("--threads", type=click.IntRange(1, 1024), default=2, show_default=True, help="CPU threads to use.")
@click.option("--save-every", type=click.IntRange(1), default=100, show_default=True, help="Steps between saves.")
@as_command("experiments.demo.train", resumes=True)
def main(out: Path, seed: int, steps: int, batch: int, threads: int, save_every: int) -> int:
    """Train the demo checkpoint on seeded synthetic word problems. The same command again resumes."""
    train(out, Plan(seed, steps, batch), threads, save_every)
    return DONE


if __name__ == "__main__":
    main()
