"""Hostile checkpoints: a model, or one clear line. `python -m tests.faults.fuzz` opens as many as one likes."""

import os
import signal

import pytest

import tests.faults.fuzz as module
from minimodel.safetensors_file import table_of_contents
from tests.faults.forked import in_child
from tests.faults.fuzz import Bases, fuzz, watch_reads


def require_sound(findings, inputs):
    assert findings.faults == []
    assert findings.inputs == inputs
    assert findings.peak_bytes < 1 << 30  # half of the limit under which an input is opened
    files = {name for name, _ in findings.outcomes}
    assert {"config.json", "contract.json", "tokenizer.json", "model.safetensors.index.json"} <= files
    for name in files:  # neither does everything pass, nor is everything refused, or the inputs would show nothing
        assert findings.outcomes[name, "refused"] > 0, name
    assert sum(count for (_, outcome), count in findings.outcomes.items() if outcome == "opened") > inputs // 50


SLOW = int(os.environ.get("STAGE_REPLAY_FUZZ", "20000"))


@pytest.mark.parametrize(("inputs", "seed"), [(300, 7), pytest.param(SLOW, 8, marks=pytest.mark.slow)])
def test_hostile_checkpoints(tmp_path, inputs, seed):
    """STAGE_REPLAY_FUZZ sets how many are opened in the slow case."""
    require_sound(fuzz(tmp_path, inputs, seed), inputs)


def test_the_fuzzer_sees_every_kind_of_fault(tmp_path, monkeypatch):
    """The control: an opener with one defect of each kind, one input each."""
    kind, real = ["KeyError", "outside", "lines", "killed", "memory", "fine"], Bases.write
    now = []

    def broken(directory):
        if kind[now[-1]] == "KeyError":
            raise KeyError("shape")
        if kind[now[-1]] == "outside":
            (directory.parent / "outside.safetensors").read_bytes()
        assert kind[now[-1]] != "lines", "not one line"
        if kind[now[-1]] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind[now[-1]] == "memory":
            bytearray(3 << 30)
        return "opened"

    monkeypatch.setattr(Bases, "write", lambda self, seed, index: now.append(index) or real(self, seed, index))
    monkeypatch.setattr(module, "open_all", broken)
    findings = fuzz(tmp_path, 6, seed=0)
    expected = ["FAULT KeyError", "read outside", "FAULT AssertionError", "SIGKILL", "FAULT MemoryError"]
    assert len(findings.faults) == 5, findings.faults
    assert all(part in fault for fault, part in zip(findings.faults, expected)), findings.faults


def test_reads_outside_are_seen_and_reads_inside_are_not(tmp_path):
    bases = Bases(tmp_path)
    directory, _ = bases.write(0, 0)

    def body():
        outside = watch_reads(directory)
        module.looking[0] = True
        (directory / "config.json").read_bytes()
        inside = len(outside)
        table_of_contents(tmp_path / "outside.safetensors")
        return 0 if inside == 0 and len(outside) == 2 else 1

    assert in_child(body, tmp_path).code == 0
