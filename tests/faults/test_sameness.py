"""The same bytes whatever goes on around a run, and a refusal by name when what decides them has changed."""

import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from cache import build_live, build_prefill
from decode import Contract, State, greedy_suffix
from decode.greedy import alone
from experiments.run.designs import RetainedLive
from experiments.run.experiment import Arm, Arms
from experiments.run.ledger import seal
from experiments.run.progress import Progress
from experiments.run.tasks import load_tasks
from minimodel import load_model
from tests.conftest import numeric
from tests.experiments.commands import command
from tests.faults.forked import Ended
from tests.faults.test_disk import one_error, stop_after_rows
from tests.faults.test_kills import require_same_end
from tests.helpers import edit_json


def spin(count: int) -> list[int]:
    """Processes that keep as many cores busy until they are killed, or their parent has ended."""
    pids, parent = [], os.getpid()
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            while os.getppid() == parent:
                sum(range(10_000))
            os._exit(0)
        pids.append(pid)
    return pids


@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_load_locale_time_zone_hash_seed_and_directory_move_no_byte(small, undisturbed, tmp_path, busy):
    """A process of its own, also with every core busy, against a forked one under the test's own circumstances."""
    surroundings = {"LC_ALL": "tr_TR.UTF-8", "LANG": "C", "TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "12345"}
    spinners = spin(os.cpu_count() or 1) if busy else []
    try:
        out = Path("somewhere/else")
        done = command("experiments.matrix", *small.arguments(out), cwd=tmp_path, **surroundings)
    finally:
        for pid in spinners:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert done.returncode == 0, done.stderr
    require_same_end(tmp_path / out, undisturbed)


def test_clocks_that_jump_move_no_byte(small, undisturbed, tmp_path):
    def jump():
        rng = random.Random(3)
        for name in ("time", "monotonic", "perf_counter"):
            real = getattr(time, name)
            setattr(time, name, lambda real=real: real() + rng.choice([-1, 1]) * rng.choice([0.0, 3600.0, 1e9]))

    ended = small.run(tmp_path / "run", before=jump)
    assert ended.code == 0, ended
    require_same_end(tmp_path / "run", undisturbed)


def test_arms_decoded_in_reverse_order_are_the_same_row(small, undisturbed):
    """Prefill before live, replicas before their originals, suffixes from the last arm to the first."""
    model, contract = load_model(small.checkpoint, numeric("bf16")), Contract.load(small.checkpoint)
    tasks, _ = load_tasks(small.tasks, 2)
    lines = undisturbed.rows.decode().splitlines()
    for index, task in enumerate(tasks):
        prompt = State.prompt(contract, task.question, task.choices)
        tokens = json.loads(lines[index])["prefix"]["tokens"]
        prefill = build_prefill(model, State.from_tokens(contract, tokens))
        prefill_replica = prefill.replica()
        live = build_live(model, prompt)
        names = RetainedLive.arms
        boundaries = dict(zip(names, (live, live.replica(), prefill, prefill_replica)))
        suffixes = {name: greedy_suffix(model, boundaries[name]) for name in reversed(names)}
        made = Arms(index, len(live.state), {name: Arm(name, boundaries[name], suffixes[name]) for name in names})
        matrix = RetainedLive(model, tasks, [prompt] * len(tasks))
        gates = {name: getattr(matrix, name)(made) for name in matrix.gates()}
        assert seal(matrix.entry(index, made, gates)) == lines[index]


def test_rows_decoded_in_another_order_are_the_same_rows(small, undisturbed):
    model, contract = load_model(small.checkpoint, numeric("bf16")), Contract.load(small.checkpoint)
    tasks, _ = load_tasks(small.tasks, None)
    prompts = [State.prompt(contract, task.question, task.choices) for task in tasks]
    lines = undisturbed.rows.decode().splitlines()
    matrix, progress = RetainedLive(model, tasks, prompts), Progress(1, 0, quiet=True).row("a")
    for index in (4, 0, 3):
        assert seal(alone(matrix.row(index, progress))) == lines[index]
    prompts[4] = State.prompt(contract, "x", ["y"])
    row = alone(matrix.row(4, progress))
    assert seal(row) != lines[4], "the control: another prompt"


def test_another_thread_count_is_refused_on_resume(small, undisturbed, tmp_path):
    """Case 2."""
    out = tmp_path / "run"
    assert small.run(out, before=lambda: stop_after_rows(2)).code == 130
    before = (out / "rows.jsonl").read_bytes()
    # in a process of its own: a forked one that asks for two threads would wait for those of this process
    done = command("experiments.matrix", *small.arguments(out, threads=2), cwd=tmp_path)
    ended = Ended(done.returncode, 0, done.stdout, done.stderr)
    one_error(ended, str(out / "manifest.json"), "[0].threads: expected 2, found 1", "--out or --fresh")
    assert (out / "rows.jsonl").read_bytes() == before
    assert small.run(out).code == 0
    require_same_end(out, undisturbed)


@pytest.mark.parametrize("file", ["config.json", "contract.json", "tokenizer.json", "role_embedding.safetensors"])
def test_a_checkpoint_file_changed_since_the_start_is_refused_by_name(small, tmp_path, file):
    """The change may be one that decides no bit by itself: the file is another one."""
    mine, out = small.copy(tmp_path), tmp_path / "run"
    assert mine.run(out, "--limit", 2).code == 0
    path = mine.checkpoint / file
    good, before = path.read_bytes(), (out / "rows.jsonl").read_bytes()
    if file.endswith(".json"):
        path.write_bytes(good + b"\n")
    else:
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    one_error(mine.run(out, "--limit", 2), str(out / "manifest.json"), f"checkpoint.{file}: expected")
    assert (out / "rows.jsonl").read_bytes() == before
    path.write_bytes(good)
    assert file != "config.json" or mine.run(out, "--limit", 2).code == 0


def test_a_weight_that_became_nan_fails_by_name_and_logits_fail_the_row(small, tmp_path):
    """NaN in a file is refused before the first row; NaN that arises in decoding fails the row and names its place."""
    mine = small.copy(tmp_path)
    path = mine.checkpoint / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-2] + b"\xc0\x7f")  # a BF16 NaN in the last tensor
    one_error(mine.run(tmp_path / "run"), "model.safetensors: tensor ", "expected finite values, found NaN or infinity")
    path.write_bytes(good)
    edit_json(mine.checkpoint / "config.json", rms_norm_eps=1e29)  # every hidden state underflows, none is NaN
    assert mine.run(tmp_path / "eps").code == 0
    edit_json(mine.checkpoint / "config.json", rms_norm_eps=1e-6, rope_theta=1e-300)  # angles beyond FP32
    ended = mine.run(tmp_path / "theta")
    assert ended.code == 3, ended
    assert "preflight failed: row t000: " in ended.stdout and "NaN or infinity" in ended.stdout
    [row] = [json.loads(line) for line in (tmp_path / "theta/rows.jsonl").read_text().splitlines()]
    assert not row["passed"] and row["arms"] == {} and "NaN" in row["failure"], row


def test_the_counts_of_calls_are_those_of_the_rows(undisturbed):
    """What the moments of the kills are drawn from: two counts a row, growing."""
    assert len(undisturbed.calls) == 2 * undisturbed.rows.count(b"\n")
    assert all(left < right for left, right in itertools.pairwise(undisturbed.calls))
