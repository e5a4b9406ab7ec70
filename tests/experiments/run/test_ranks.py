"""How a process joins a job of ranks, which devices it takes, and which commands share no rows."""

import socket
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from experiments.run import exits as ranks
from experiments.run.exits import RankFailed, claim_devices, current, launcher_words, world
from experiments.run.loop import phases
from tests.experiments.runs import call, one_line
from tests.helpers import refused


def test_rank_and_world_size_together_ask_for_ranks():
    assert world({}) == world({"WORLD_SIZE": "4"}) == world({"RANK": "0", "WORLD_SIZE": "1"}) == 1
    assert world({"RANK": "2", "WORLD_SIZE": "4"}) == 4
    for size in ("four", "-1"):
        with refused(f"environment variable WORLD_SIZE: expected a whole number, found '{size}'"):
            world({"RANK": "2", "WORLD_SIZE": size})


@pytest.fixture
def store():
    """What torchrun's agent holds."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def joined_as(monkeypatch, port, attempt=0, number=1):
    """The environment of a rank of two."""
    values = {"RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, ranks.ATTEMPT: attempt}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_one_process_is_a_job_of_one_rank_that_prints():
    alone = current()
    alone.tell("key", "value")
    assert (alone.rank, alone.world_size, alone.hear("key")) == (0, 1, "value") and alone.fail(2)


def test_what_an_attempt_has_said_does_not_reach_the_next(monkeypatch, store):
    """torchrun --max-restarts keeps one store over all attempts."""
    joined_as(monkeypatch, store.port)
    first = current()
    assert first.fail(137) and not current().fail(3), "only the first failure of an attempt prints"
    with pytest.raises(RankFailed):
        first.check()
    joined_as(monkeypatch, store.port, attempt=1)
    second = current()
    second.check()
    assert second.count() == 0 and second.fail(2)


def test_a_store_that_no_process_holds_is_one_line(monkeypatch):
    with socket.socket() as silent:  # bound, so that no other process takes the port, and never listening
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        joined_as(monkeypatch, port)
        with refused(f"torchrun: expected its store at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port}", "Connection refused"):
            current()
        monkeypatch.delenv("MASTER_ADDR")
        with refused(f"torchrun: expected its store at MASTER_ADDR:MASTER_PORT :{port}"):
            current()


def test_the_launchers_own_options_are_kept():
    torchrun = ["/v/bin/python", "/v/bin/torchrun", "--nnodes", "2", "--max-restarts=3", "-m", "experiments.matrix"]
    whole = [*torchrun, "--dtype", "bf16"]
    assert launcher_words(whole, "experiments.matrix") == ["torchrun", "--nnodes", "2", "--max-restarts=3"]
    assert launcher_words(whole, "experiments.bridge") == launcher_words(whole[:5], "experiments.matrix") == []
    for module in ("experiments.launch", "torch.distributed.run"):
        words = ["/v/bin/python", "-m", module, "--standalone", "--nproc-per-node", "2", "-m", "experiments.bridge"]
        assert launcher_words(words, "experiments.bridge") == ["python", *words[1:6]]
    for other in ([], ["/v/bin/python", "-m", "experiments.matrix", "--dtype", "bf16"], ["bash", "-c", "x"]):
        assert launcher_words(other, "experiments.matrix") == []


@pytest.mark.parametrize("name", ["audit", "study", "adapt"])
def test_a_command_without_rows_to_share_is_refused_under_torchrun(monkeypatch, tmp_path, store, name):
    arguments = {"audit": ("a", "b"), "study": (), "adapt": ("--base", "a", "--out", "b")}[name]
    joined_as(monkeypatch, store.port)
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


def test_devices_that_cannot_be_shared_out_are_refused(monkeypatch, tmp_path, store):
    with refused("device, counted within each rank", "found 'cuda:1'"):
        claim_devices("cuda:1", rank(0))
    with refused("CUDA_VISIBLE_DEVICES: expected at least 8 devices for 4 local ranks, found '0,1,2'"):
        claim_devices("cuda:0,cuda:1", rank(0, CUDA_VISIBLE_DEVICES="0,1,2"))
    alone: dict[str, str] = {}
    claim_devices("cuda:1", alone)
    assert alone == {}
    joined_as(monkeypatch, store.port, number=0)
    line = one_line(call("matrix", "--dtype", "bf16", "--device", "cuda:3", cwd=tmp_path))
    assert "device, counted within each rank" in line


@given(total=st.integers(0, 12), early=st.sets(st.integers(0, 11)), gone=st.sets(st.integers(0, 11)))
def test_the_first_phase_is_the_preflight_wherever_its_rows_stand(total, early, gone):
    plan = SimpleNamespace(preflight=early)
    left = [index for index in range(total) if index not in gone]
    found = phases(plan, left)  # type: ignore[arg-type]
    first, rest = ([index for index in left if (index in early) == wanted] for wanted in (True, False))
    assert found == [rows for rows in (first, rest) if rows]
