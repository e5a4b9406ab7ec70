"""Hostile checkpoints by the thousand: whatever a directory holds, opening it ends in a model or in one clear line.

    python -m tests.faults.fuzz --inputs 20000 --seed 0

Inputs are opened in forked children under limits on memory and CPU time, one child per batch. A fault is: another
exception than InputError, a message of several lines, a read outside the directory, a signal, a limit.
"""

import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from decode import Contract, State
from minimodel import NumericContract, load_model, safetensors_file
from minimodel.errors import InputError
from tests.faults.forked import in_child, limit_memory
from tests.faults.mutate import MUTATORS, mutate_kind
from tests.tiny import split_into_shards, write_checkpoint

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY["num_key_value_heads"] = 1
QUESTION = "Where do <|merge|> and \u00e9 stand? " + "x" * 40
MEMORY_BYTES = 2 << 30  # above what the process holds before the first input
CPU_SECONDS = 30  # of one input; a batch gets as many times more as it has inputs, at 20 per second
BATCH = 250


@dataclass
class Findings:
    """What happened to the inputs, by mutated file, and the inputs that must not have happened."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    peak_bytes: int = 0  # the most that a child held beyond what its parent held

    @property
    def inputs(self) -> int:
        return sum(self.outcomes.values())


class Bases:
    """The good directories: one with a single file, one with two shards; and a valid file outside both."""

    def __init__(self, root: Path) -> None:
        self.root = root
        single = write_checkpoint(root / "single", config=TINY, contract={"role_offset": 0})
        sharded = write_checkpoint(root / "sharded", config=TINY, contract={"role_offset": 0})
        (root / "outside.safetensors").write_bytes((sharded / "model.safetensors").read_bytes())
        split_into_shards(sharded, 2)
        self.good = {
            base.name: {path.name: path.read_bytes() for path in sorted(base.iterdir())} for base in (single, sharded)
        }

    def write(self, seed: int, index: int) -> tuple[Path, str]:
        """Writes input `index` of `seed` into the working directory; returns it and the name of the mutated file."""
        rng = random.Random(f"{seed}/{index}")
        files = self.good[rng.choice(["single", "sharded"])]
        name = rng.choice(sorted(set(files) & set(MUTATORS)))
        directory = self.root / "input"
        directory.mkdir(exist_ok=True)
        for path in directory.iterdir():
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        for other, data in files.items():
            (directory / other).write_bytes(data)
        (directory / "link.safetensors").symlink_to(self.root / "outside.safetensors")
        if rng.random() < 0.02:
            mutate_kind(rng, directory / name)
        else:
            (directory / name).write_bytes(MUTATORS[name](rng, files[name]))
        return directory, name


def open_all(directory: Path) -> str:
    """Everything that a command does with a checkpoint before the first row; returns 'opened' or the refusal."""
    try:
        model = load_model(directory, NumericContract("bf16", threads=1))
        contract = Contract.load(directory)
        state = State.prompt(contract, QUESTION, ["a", "b"])
        contract.codec.decode(state.tokens)
        assert all(contract.is_ordinary(token) for token in state.tokens[1:-1])
        assert max(state.tokens) < model.config.vocab_size
    except InputError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 2000, f"not one line: {message[:200]!r}"
        return "refused"
    return "opened"


looking = [False]  # an audit hook cannot be taken away; it looks only while an input is opened


def watch_reads(directory: Path) -> list[str]:
    """From now on, lists every file opened outside `directory`, by Python and by the safetensors library."""
    outside: list[str] = []
    real = safetensors_file.safe_open

    def note(path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            resolved = Path(os.path.realpath(os.fsdecode(path)))
            # Python itself reads its own modules now and then
            if resolved.parent != directory.resolve() and resolved.suffix not in (".py", ".pyc"):
                outside.append(str(resolved))

    def watched(path: Any, *more: Any, **named: Any) -> Any:
        note(path)
        return real(path, *more, **named)

    safetensors_file.safe_open = watched
    sys.addaudithook(lambda event, given: note(given[0]) if event == "open" and looking[0] else None)
    return outside


def run_batch(bases: Bases, seed: int, indices: range, log: Path) -> int:
    """In a child: opens the inputs one by one and logs each line by line, so that the parent can name the last one."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # what the parent held is the child's from the start
    limit_memory(MEMORY_BYTES)
    seconds = CPU_SECONDS + len(indices) // 20
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    outside = watch_reads(bases.root / "input")
    with open(log, "a", buffering=1) as file:
        for index in indices:
            directory, name = bases.write(seed, index)
            file.write(f"{index} {name} ")
            outside.clear()
            looking[0] = True
            try:
                outcome = open_all(directory)
            except BaseException as error:
                outcome = f"FAULT {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            looking[0] = False
            file.write((f"FAULT read outside: {outside[0]}" if outside else outcome) + "\n")
        file.write(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before}\n")
    return 0


def fuzz(root: Path, inputs: int, seed: int, say: Callable[["Findings"], None] = lambda findings: None) -> Findings:
    """Opens so many inputs; a child that dies leaves the rest of its batch to the next one."""
    findings, bases, first, log = Findings(), Bases(root), 0, root / "log.txt"
    while first < inputs:
        log.write_text("")
        batch = range(first, min(first + BATCH, inputs))
        ended = in_child(partial(run_batch, bases, seed, batch, log), root, after=partial(_alarm, len(batch)))
        done = _read_log(log.read_text(), findings, seed)
        if ended.code != 0:
            why = signal.Signals(ended.signal).name if ended.signal else ended.stderr.strip().splitlines()[-1:]
            findings.faults.append(f"seed {seed} input {first + done}: the process ended: {why}")
            findings.outcomes["?", "FAULT"] += 1
            done += 1
        first += done
        say(findings)
    return findings


def _alarm(inputs: int, pid: int) -> None:
    """Ends a child that waits for ever (a pipe, a lock), which uses no CPU time, by the parent's clock."""
    deadline = time.monotonic() + 120 + 2 * inputs
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.02)


def _read_log(text: str, findings: Findings, seed: int) -> int:
    """Adds what a child logged; returns how many inputs it finished."""
    done = 0
    for line in text.splitlines():
        index, name, outcome = [*line.split(" ", 2), "", ""][:3]
        if index == "peak":
            findings.peak_bytes = max(findings.peak_bytes, int(name) * 1024)
        elif outcome:
            done += 1
            findings.outcomes[name, outcome.split()[0]] += 1
            if outcome.startswith("FAULT"):
                findings.faults.append(f"seed {seed} input {index} ({name}): {outcome}")
    return done


@click.command(help=__doc__)
@click.option("--inputs", default=20_000, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True, type=int)
def main(inputs: int, seed: int) -> None:
    torch.set_num_threads(1)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        found = fuzz(Path(root), inputs, seed, lambda now: click.echo(f"{now.inputs} inputs, {len(now.faults)} faults"))
    for (name, outcome), count in sorted(found.outcomes.items()):
        click.echo(f"{name} {outcome}: {count}")
    click.echo("\n".join(found.faults))
    click.echo(f"{found.inputs} inputs, {len(found.faults)} faults, peak {found.peak_bytes / 1e9:.2f} GB, ", nl=False)
    click.echo(f"{time.monotonic() - start:.0f} s")
    sys.exit(1 if found.faults else 0)


if __name__ == "__main__":
    main()
