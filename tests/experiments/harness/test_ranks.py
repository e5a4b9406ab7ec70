"""Who a process is among ranks, which devices it takes, and which commands know how to share their rows."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.harness.options import RunOptions
from experiments.harness.ranks import SHARDED, claim_devices, current, world
from experiments.harness.sharding import phases
from minimodel.errors import InputError
from tests.experiments.runs import call, one_line
from tests.helpers import refused


def test_rank_and_world_size_together_ask_for_ranks():
    assert world({}) == world({"WORLD_SIZE": "4"}) == world({"RANK": "0", "WORLD_SIZE": "1"}) == 1
    assert world({"RANK": "2", "WORLD_SIZE": "4"}) == 4
    with refused("environment variable WORLD_SIZE: expected a whole number, found 'four'"):
        world({"RANK": "2", "WORLD_SIZE": "four"})


def test_without_the_launchers_address_the_job_cannot_be_joined(monkeypatch):
    assert current() is None
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with refused("torchrun: expected its environment and its store", "MASTER_ADDR"):
        current()


@pytest.mark.parametrize("name", ["audit", "study", "adapt"])
def test_a_command_without_rows_to_share_is_refused_under_torchrun(monkeypatch, tmp_path, name):
    arguments = {"audit": ("a", "b"), "study": (), "adapt": ("--base", "a", "--out", "b")}[name]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = one_line(call(name, *arguments, cwd=tmp_path))
    assert f"experiments.{name}: expected one process, found torchrun's WORLD_SIZE 2" in line
    assert not list(tmp_path.iterdir())


def rank(local: int, size: int = 4, **more: str) -> dict[str, str]:
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


def test_devices_that_cannot_be_shared_out_are_refused():
    with refused("device, counted within each rank", "found 'cuda:1'"):
        claim_devices("cuda:1", rank(0))
    with refused("CUDA_VISIBLE_DEVICES: expected at least 8 devices for 4 local ranks, found '0,1,2'"):
        claim_devices("cuda:0,cuda:1", rank(0, CUDA_VISIBLE_DEVICES="0,1,2"))
    alone: dict[str, str] = {}
    claim_devices("cuda:1", alone)
    assert alone == {}


def test_a_device_that_cannot_be_shared_out_is_a_usage_error(monkeypatch, tmp_path):
    for name, value in rank(0).items():
        monkeypatch.setenv(name, value)
    done = call("matrix", "--dtype", "bf16", "--device", "cuda:3", cwd=tmp_path)
    assert done.exit_code == 2 and "counted within each rank" in done.stderr


@given(total=st.integers(0, 12), early=st.sets(st.integers(0, 11)), gone=st.sets(st.integers(0, 11)))
def test_phases_part_the_rows_left_where_the_preflight_begins_or_ends(total, early, gone):
    plan = SimpleNamespace(total=total, is_preflight=lambda index: index in early)
    left = [index for index in range(total) if index not in gone]
    found = phases(plan, left)  # type: ignore[arg-type]
    assert [index for rows in found for index in rows] == left and all(found)
    for rows in found:
        assert len({index in early for index in rows}) == 1
        inside = range(rows[0], rows[-1])
        assert len({index in early for index in [*inside, rows[-1]]}) == 1, "a row of another kind lies between"


def test_the_experiments_that_share_rows_are_those_that_take_the_common_options():
    """The list in the code is the list of commands that run the row loop."""
    import importlib
    from pathlib import Path

    folder = Path(importlib.import_module("experiments").__file__).parent
    commands = [*folder.glob("*.py"), *folder.glob("*/__main__.py")]
    loops = {p.parent.name if p.stem == "__main__" else p.stem for p in commands if "return run_plan(" in p.read_text()}
    assert loops == set(SHARDED)
    assert RunOptions  # the options that they share


def test_input_error_is_what_is_raised():
    with pytest.raises(InputError):
        world({"RANK": "", "WORLD_SIZE": "-1"})
