"""The same bytes whatever goes on around a run, and a refusal by name when what decides them has changed."""

import itertools
import json
import os
import random
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cache import Boundary, build_incremental, build_live, build_prefill, compare, transplant
from cache.digest import cache_sha256
from cache.storage import Provenance
from decode import Contract, State, greedy_suffix
from decode.greedy import alone
from experiments.run.designs import RetainedLive
from experiments.run.directory import RunDirectory
from experiments.run.experiment import Arm, Arms
from experiments.run.ledger import seal
from experiments.run.progress import Progress
from experiments.run.tasks import load_tasks
from minimodel import load_model
from tests.conftest import numeric
from tests.experiments.commands import command
from tests.experiments.runs import manifest_of
from tests.faults.conftest import CAPS, SMALL, Small, write_small
from tests.faults.forked import Ended, one_error, stop_after_rows
from tests.faults.test_kills import require_same_end
from tests.helpers import edit_json, edit_tensors, random_tensor
from tests.tiny import TASK, write_checkpoint


def spin(count):
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
    """A process with another environment, also with every core busy, against a forked one."""
    surroundings = {"LC_ALL": "tr_TR.UTF-8", "LANG": "C", "TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "12345"}
    spinners, out = spin(os.cpu_count() or 1) if busy else [], Path("somewhere/else")
    try:
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


@pytest.fixture
def walk(small, undisturbed):
    """The matrix of the small run's tasks, made here, its prompts, and the ledger's lines."""
    model, contract = load_model(small.checkpoint, numeric("bf16")), Contract.load(small.checkpoint)
    tasks, _ = load_tasks(small.tasks, None)
    prompts = [State.prompt(contract, task.question, task.choices) for task in tasks]
    return RetainedLive(model, tasks, prompts), prompts, undisturbed.rows.decode().splitlines()


def test_arms_decoded_in_reverse_order_are_the_same_row(walk):
    """Prefill before live, replicas before their originals, suffixes from the last arm to the first."""
    matrix, prompts, lines = walk
    model, names = matrix.decoder, RetainedLive.arms
    for index, prompt in enumerate(prompts[:2]):
        tokens = json.loads(lines[index])["prefix"]["tokens"]
        prefill = build_prefill(model, State.from_tokens(prompt.contract, tokens))
        prefill_replica, live = prefill.replica(), build_live(model, prompt)
        boundaries = dict(zip(names, (live, live.replica(), prefill, prefill_replica)))
        suffixes = {name: greedy_suffix(model, boundaries[name]) for name in reversed(names)}
        made = Arms(index, {name: Arm(boundaries[name], suffixes[name]) for name in names})
        assert seal(matrix.checked_row(index, made)) == lines[index]


def test_rows_decoded_in_another_order_are_the_same_rows(walk):
    matrix, prompts, lines = walk
    progress = Progress(1, 0, quiet=True).row("a")
    for index in (4, 0, 3):
        assert seal(alone(matrix.row(index, progress))) == lines[index]
    prompts[4] = State.prompt(prompts[4].contract, "x", ["y"])
    assert seal(alone(matrix.row(4, progress))) != lines[4], "the control: another prompt"


def test_another_thread_count_is_refused_on_resume(small, undisturbed, tmp_path):
    """Case 2. In its own process: a forked one with two threads would wait for those of this process."""
    out = tmp_path / "run"
    assert small.run(out, before=lambda: stop_after_rows(2)).code == 130
    before = (out / "rows.jsonl").read_bytes()
    done = command("experiments.matrix", *small.arguments(out, threads=2), cwd=tmp_path)
    ended = Ended(done.returncode, 0, done.stdout, done.stderr)
    one_error(ended, str(out / "manifest.json"), "[0].threads: expected 2, found 1", "--out or --fresh")
    assert (out / "rows.jsonl").read_bytes() == before
    assert small.run(out).code == 0
    require_same_end(out, undisturbed)


def test_a_checkpoint_file_changed_since_the_start_is_refused_by_name(small, tmp_path):
    """The change may be one that decides no bit by itself: the file is another one."""
    mine, out = small.copy(tmp_path), tmp_path / "run"
    assert mine.run(out, "--limit", 2).code == 0
    before = (out / "rows.jsonl").read_bytes()
    for file in ("config.json", "contract.json", "tokenizer.json", "role_embedding.safetensors"):
        path = mine.checkpoint / file
        good = path.read_bytes()
        path.write_bytes(good + b"\n" if file.endswith(".json") else good[:-1] + bytes([good[-1] ^ 1]))
        one_error(mine.run(out, "--limit", 2), str(out / "manifest.json"), f"checkpoint.{file}: expected")
        assert (out / "rows.jsonl").read_bytes() == before
        path.write_bytes(good)
    assert mine.run(out, "--limit", 2).code == 0


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
    """What the moments of the kills are drawn from: two counts per row, growing."""
    assert len(undisturbed.calls) == 2 * undisturbed.rows.count(b"\n")
    assert all(left < right for left, right in itertools.pairwise(undisturbed.calls))


def warnings_of(small, out, *more):
    assert small.run(out, "--limit", 1, *more).code == 0
    return manifest_of(out)["checkpoint_warnings"]


def test_the_warning_about_a_head_beside_a_tied_flag_is_in_the_manifest(small, tmp_path):
    """vllm-project/vllm 51665 (case 10): never dropped silently."""
    mine = Small(tmp_path, small.tasks)
    write_checkpoint(mine.checkpoint, config={**SMALL, "tie_word_embeddings": True}, contract={"caps": CAPS})
    assert warnings_of(mine, tmp_path / "tied") == []
    head = random_tensor(288, SMALL["hidden_size"], dtype=torch.bfloat16)
    edit_tensors(mine.checkpoint / "model.safetensors", **{"lm_head.weight": head})
    [warning] = warnings_of(mine, tmp_path / "head")
    assert "tie_word_embeddings is true" in warning and "the file's head is used" in warning
    assert (tmp_path / "tied/rows.jsonl").read_bytes() != (tmp_path / "head/rows.jsonl").read_bytes()


def test_a_cast_that_changes_values_is_named_in_the_manifest(small, tmp_path):
    """A BF16 checkpoint with a value below FP16's smallest: FP16 loses it, FP32 does not."""
    mine, name = small.copy(tmp_path), "model.norm.weight"
    norm = load_file(mine.checkpoint / "model.safetensors")[name]
    norm[0] = 1e-9
    edit_tensors(mine.checkpoint / "model.safetensors", **{name: norm})
    assert warnings_of(mine, tmp_path / "fp32", "--dtype", "fp32") == []
    [warning] = warnings_of(mine, tmp_path / "fp16", "--dtype", "fp16")
    assert warning.startswith("read as float16 from BF16, ") and "model.norm.weight (1 of " in warning


def soak(root, rows, marks):
    """Resident bytes and open handles after each of `marks` parts of a run's rows."""
    path, small = root / "marks", write_small(root, rows)

    def record():
        real, count = RunDirectory.append, itertools.count(1)

        def append(self, row, timing):
            real(self, row, timing)
            if next(count) % (rows // marks) == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                with open(path, "a") as file:
                    file.write(f"{pages * os.sysconf('SC_PAGE_SIZE')} {len(os.listdir('/proc/self/fd'))}\n")

        RunDirectory.append = append

    ended = small.run(root / "run", "--quiet", before=record)
    assert ended.code == 0, ended
    assert (root / "run/rows.jsonl").read_bytes().count(b"\n") == rows
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()]


def test_handles_stay_the_same_over_ten_rows(tmp_path):
    found = soak(tmp_path, 10, 10)
    assert len(found) == 10 and len({handles for _, handles in found}) == 1


@pytest.mark.slow
def test_memory_and_handles_stay_flat_over_a_thousand_rows(tmp_path):
    """After a fifth of the rows nothing grows but by the noise of the allocator: under 8 MB, far less than the rows."""
    found = soak(tmp_path, 1000, 20)
    print(*(f"\n{resident / 1e6:.1f} MB, {handles} handles" for resident, handles in found))
    warm = found[4:]
    assert len({handles for _, handles in warm}) == 1 and warm[-1][0] - warm[0][0] < 8e6


def library_block(directory, kernels, scratch):
    """README's library block, and a boundary through a file: every value that it gives."""
    model, contract = load_model(directory, numeric("bf16", kernels=kernels)), Contract.load(directory)
    live = build_live(model, State.prompt(contract, TASK["question"], TASK["choices"]))
    incremental, prefill = build_incremental(model, live.state), build_prefill(model, live.state)
    swapped = transplant(recipient=prefill, donor=incremental, layers=[1], positions=range(3))
    provenance = Provenance.here(directory, model.numeric)
    swapped.save(scratch / "swapped.safetensors", provenance)
    loaded = Boundary.load(scratch / "swapped.safetensors", contract, provenance)
    suffixes = [greedy_suffix(model, one).tokens for one in (live, loaded)]
    first = compare(incremental.cache, prefill.cache).first_difference
    return [cache_sha256(one.cache) for one in (live, prefill, swapped, loaded)], first, suffixes


@contextmanager
def default(setter, value, usual):
    setter(value)
    try:
        yield
    finally:
        setter(usual)


@pytest.mark.parametrize("kernels", ["repeat_kv", "invariant"])
def test_a_callers_default_device_or_dtype_changes_no_value(tiny_directory, tmp_path, kernels):
    plain = library_block(tiny_directory, kernels, tmp_path)
    for state, in_force in (
        (default(torch.set_default_device, "meta", None), lambda: torch.empty(1).is_meta),
        (torch.device("meta"), lambda: torch.empty(1).is_meta),
        (default(torch.set_default_dtype, torch.float64, torch.float32), lambda: torch.ones(1).dtype == torch.float64),
    ):
        with state:
            assert in_force(), "the control"
            assert library_block(tiny_directory, kernels, tmp_path) == plain
