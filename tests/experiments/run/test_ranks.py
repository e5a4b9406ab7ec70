"""Who a process is among ranks, which devices it takes, and which commands can share their rows."""

import signal
import socket
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from experiments.run import exits as ranks
from experiments.run.exits import SHARDED, RankFailed, claim_devices, current, launcher_words, world
from experiments.run.loop import phases
from experiments.run.options import ROOT
from tests.experiments.commands import start as start_command
from tests.experiments.runs import call, one_line
from tests.helpers import refused


def test_rank_and_world_size_together_ask_for_ranks():
    assert world({}) == world({"WORLD_SIZE": "4"}) == world({"RANK": "0", "WORLD_SIZE": "1"}) == 1
    assert world({"RANK": "2", "WORLD_SIZE": "4"}) == 4
    for size in ("four", "-1"):
        with refused(f"environment variable WORLD_SIZE: expected a whole number, found '{size}'"):
            world({"RANK": "2", "WORLD_SIZE": size})


def test_without_the_launchers_address_the_job_cannot_be_joined(monkeypatch):
    assert current() is None
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with refused("torchrun: expected its environment and its store", "MASTER_ADDR"):
        current()


def joined_as(monkeypatch, port, attempt):
    values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**values, ranks.AGENT: "True", ranks.ATTEMPT: str(attempt)}.items():
        monkeypatch.setenv(name, value)


def test_what_an_attempt_has_said_does_not_reach_the_next(monkeypatch):
    """torchrun --max-restarts keeps one store over all attempts."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    joined_as(monkeypatch, store.port, 0)
    first = current()
    assert first.fail(137) and not current().fail(3), "only the first failure of an attempt prints"
    with pytest.raises(RankFailed):
        first.check()
    joined_as(monkeypatch, store.port, 1)
    second = current()
    second.check()
    assert second.count() == 0 and second.fail(2)


def unused_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_store_that_no_process_holds_is_one_line_within_the_patience(monkeypatch):
    joined_as(monkeypatch, unused_port(), 0)
    for patience in (1.0, 1000.0):  # the second time nothing is tried again
        start = time.monotonic()
        with refused("torchrun: expected its store at 127.0.0.1:", "within 1 s", "Connection refused"):
            current(timedelta(seconds=patience))
        assert time.monotonic() - start < 10
    with socket.create_server(("127.0.0.1", 0)) as silent:  # no store: torch would wait, and print lines of C++
        joined_as(monkeypatch, silent.getsockname()[1], 0)
        with refused("torchrun: expected its environment and its store, found: "):
            current(timedelta(seconds=1))
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("listening", [False, True])
def test_an_interruption_while_the_store_is_awaited_ends_at_once(tmp_path, listening):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if not listening:
            silent.close()
        ranked = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        process = start_command(
            "experiments.matrix", "--dtype", "bf16", cwd=tmp_path, **ranked, TORCHELASTIC_USE_AGENT_STORE="True"
        )
        time.sleep(8)  # the imports; before their end the interruption is one line all the same
        assert process.poll() is None, "it waits, as it should"
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - begun < 20 and out == ""
    assert "interrupted" in err and "frame #" not in err and "Traceback" not in err


def test_the_launchers_own_options_are_kept():
    torchrun = ["/v/bin/python", "/v/bin/torchrun", "--nnodes", "2", "--max-restarts=3", "-m", "experiments.matrix"]
    assert launcher_words([*torchrun, "--dtype", "bf16"]) == ["torchrun", "--nnodes", "2", "--max-restarts=3"]
    for module in ("experiments.launch", "torch.distributed.run"):
        words = ["/v/bin/python", "-m", module, "--standalone", "--nproc-per-node", "2", "-m", "experiments.bridge"]
        assert launcher_words(words) == ["python", "-m", module, "--standalone", "--nproc-per-node", "2"]
    for other in ([], ["/v/bin/python", "-m", "pytest", "-m", "slow"], ["bash", "-c", "x"], [*torchrun[:5], "run.py"]):
        assert launcher_words(other) == []
    assert launcher_words(["python", "-m", "experiments.matrix", "--dtype", "bf16"]) == []


def test_without_the_launchers_command_line_itsknown_options_are_named(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert ranks.known_options() == ["torchrun", "--nproc-per-node", "3"]
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    wanted = ["torchrun", "--nnodes", "2", "--nproc-per-node", "3", "--max-restarts", "2"]
    assert ranks.known_options() == wanted


@pytest.mark.parametrize("name", ["audit", "study", "adapt"])
def test_a_command_without_rows_to_share_is_refused_under_torchrun(monkeypatch, tmp_path, name):
    arguments = {"audit": ("a", "b"), "study": (), "adapt": ("--base", "a", "--out", "b")}[name]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = one_line(call(name, *arguments, cwd=tmp_path))
    assert f"experiments.{name}: expected one process, found torchrun's WORLD_SIZE 2" in line
    assert not list(tmp_path.iterdir())


def rank(local, size=4, **more):
    whole = {"RANK": str(local), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}
    return {**whole, **more}


@pytest.mark.parametrize(
    ("device", "given_devices", "wanted"),
    [
        ("cuda", None, ["0", "1", "2", "3"]),
        ("cuda:0", "7,5,3,1", ["7", "5", "3", "1"]),
        ("cuda:0,cuda:1", None, ["0,1", "2,3", "4,5", "6,7"]),
        ("cuda", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]),
        ("cpu", None, [None] * 4),
        ("cpu,cpu", "0", ["0"] * 4),
    ],
)
def test_each_local_rank_sees_its_own_devices_alone(device, given_devices, wanted):
    found = []
    for local in range(4):
        environment = rank(local, **({} if given_devices is None else {"CUDA_VISIBLE_DEVICES": given_devices}))
        claim_devices(device, environment)
        found.append(environment.get("CUDA_VISIBLE_DEVICES"))
    assert found == wanted


def test_devices_that_cannot_be_shared_out_are_refused(monkeypatch, tmp_path):
    with refused("device, counted within each rank", "found 'cuda:1'"):
        claim_devices("cuda:1", rank(0))
    with refused("CUDA_VISIBLE_DEVICES: expected at least 8 devices for 4 local ranks, found '0,1,2'"):
        claim_devices("cuda:0,cuda:1", rank(0, CUDA_VISIBLE_DEVICES="0,1,2"))
    alone: dict[str, str] = {}
    claim_devices("cuda:1", alone)
    assert alone == {}
    for name, value in rank(0).items():
        monkeypatch.setenv(name, value)
    done = call("matrix", "--dtype", "bf16", "--device", "cuda:3", cwd=tmp_path)
    assert done.exit_code == 2 and "counted within each rank" in done.stderr, "a usage error"


@given(total=st.integers(0, 12), early=st.sets(st.integers(0, 11)), gone=st.sets(st.integers(0, 11)))
def test_the_first_phase_is_the_preflight_wherever_its_rows_stand(total, early, gone):
    plan = SimpleNamespace(total=total, is_preflight=lambda index: index in early)
    left = [index for index in range(total) if index not in gone]
    found = phases(plan, left)  # type: ignore[arg-type]
    first, rest = ([index for index in left if (index in early) == wanted] for wanted in (True, False))
    assert found == [rows for rows in (first, rest) if rows]


def test_the_experiments_that_share_rows_are_those_that_run_the_row_loop():
    folder = ROOT / "experiments"
    commands = [*folder.glob("*.py"), *folder.glob("*/__main__.py")]
    named = {p.parent.name if p.stem == "__main__" else p.stem: p.read_text() for p in commands}
    assert {name for name, text in named.items() if "from experiments.run.loop import run\n" in text} == set(SHARDED)
