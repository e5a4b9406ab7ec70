"""Disks that are full or closed, torn and flipped bytes, two writers: nothing that was written is damaged."""

import ctypes
import os
import resource
import signal
import subprocess
import time

import pytest

from experiments.run.progress import Progress, RowProgress
from tests.faults.forked import Ended, in_child, matrix
from tests.faults.test_kills import require_kept, require_same_end


def one_error(ended: Ended, *parts: str) -> None:
    """Exit code 2 and one line on stderr that is an error and holds every part (progress lines aside)."""
    assert ended.code == 2, ended
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in ended.stderr, ended
    for part in parts:
        assert part in lines[0], (part, lines[0])


def limit_file_size(size: int) -> None:
    """The kernel writes up to `size` bytes of any file and refuses the rest, as a full disk does: half a line is there.

    Python ignores the signal that comes with it, so a write fails with an error.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("part", [pytest.param(0.3, marks=pytest.mark.slow), 0.999])
def test_a_row_that_does_not_fit_is_cut_off_whole_and_the_file_named(small, undisturbed, tmp_path, part):
    lines = undisturbed.rows.splitlines(keepends=True)
    size = len(lines[0]) + len(lines[1]) + int(part * len(lines[2]))
    assert size > len((undisturbed.directory / "manifest.json").read_bytes()), "the manifest must fit"
    out = tmp_path / "run"
    ended = small.run(out, before=lambda: limit_file_size(size))
    one_error(ended, str(out / "rows.jsonl"), "File too large")
    assert (out / "rows.jsonl").read_bytes() == lines[0] + lines[1]
    one_error(small.run(out, before=lambda: limit_file_size(size)), str(out / "rows.jsonl"))  # as long as it is full
    assert (out / "rows.jsonl").read_bytes() == lines[0] + lines[1]
    assert small.run(out).code == 0
    require_same_end(out, undisturbed)


def test_a_manifest_that_does_not_fit_leaves_a_directory_that_can_be_used(small, undisturbed, tmp_path):
    out = tmp_path / "run"
    one_error(small.run(out, before=lambda: limit_file_size(500)), str(out / "manifest.json"), "File too large")
    assert not (out / "manifest.json").exists() and not (out / "rows.jsonl").exists()
    assert small.run(out).code == 0
    require_same_end(out, undisturbed)


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of its own with 64 kB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root; the limit on file sizes stands for a full disk in the tests above")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_full_and_then_freed(small, undisturbed, tiny_disk):
    """The real thing: whatever file meets the end of the disk is named, and the run goes on once there is room."""
    out, ballast = tiny_disk / "run", tiny_disk / "ballast"
    lines = undisturbed.rows.splitlines(keepends=True)
    free = len(lines[0]) + len(lines[1]) // 2 + len((undisturbed.directory / "manifest.json").read_bytes())
    ballast.write_bytes(bytes(65536 - (free + 4095) // 4096 * 4096))
    ended = small.run(out)
    one_error(ended, str(out), "No space left on device")
    kept = require_kept(out, undisturbed, 0)
    assert kept < len(lines), "the disk was not full"
    ballast.unlink()
    ended = small.run(out)
    if ended.code == 2:  # the whole run may not fit either
        one_error(ended, "No space left on device")
        require_kept(out, undisturbed, kept)
        subprocess.run(["mount", "-o", "remount,size=4m", str(tiny_disk)], check=True)
        ended = small.run(out)
    assert ended.code == 0, ended
    require_same_end(out, undisturbed)


def give_up_root() -> None:
    """Lets this process obey permissions: root without the capabilities that override them."""
    if os.geteuid() == 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
        assert ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) == 0, "capset"


def test_a_directory_that_may_not_be_written_is_named(small, undisturbed, tmp_path):
    out, closed = tmp_path / "run", tmp_path / "closed"
    closed.mkdir(mode=0o555)
    one_error(small.run(closed / "run", before=give_up_root), str(closed / "run"), "Permission denied")
    assert not (closed / "run").exists()
    one_error(small.run(closed, before=give_up_root), str(closed), "Permission denied")
    ended = small.run(out, "--limit", 2)
    assert ended.code == 0
    out.chmod(0o555)
    for path in out.iterdir():
        path.chmod(0o444)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    one_error(small.run(out, "--limit", 2, before=give_up_root), str(out), "Permission denied")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    out.chmod(0o755)
    for path in out.iterdir():
        path.chmod(0o644)
    assert small.run(out, "--limit", 2).code == 0


def test_torn_lines_of_both_ledgers_are_dropped_and_redone(small, undisturbed, tmp_path):
    """A tail cut in the middle, and one of zero bytes, as a file system may leave after a loss of power. Case 24."""
    out = tmp_path / "run"
    ended = small.run(out, before=lambda: stop_after_rows(2))
    assert ended.code == 130
    rows, timing = out / "rows.jsonl", out / "timing.jsonl"
    for tail, half in ((undisturbed.rows[rows.stat().st_size :][:99], b'{"row":"t00'), (bytes(50), bytes(7))):
        kept = rows.read_bytes()
        rows.write_bytes(kept + tail)
        with open(timing, "ab") as file:
            file.write(half)
        ended = small.run(out, before=lambda: stop_after_rows(1))
        assert ended.code == 130 and f"dropped a torn last line of {len(tail)} bytes" in ended.stderr, ended
        assert rows.read_bytes().startswith(kept)
    assert small.run(out).code == 0
    require_same_end(out, undisturbed)


def stop_after_rows(count: int) -> None:
    """In the child: an interruption as the row after so many begins."""
    real, left = Progress.row, iter(range(count))

    def row(self: Progress, name: str) -> RowProgress:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, name)

    Progress.row = row


def test_a_flipped_byte_in_an_old_line_is_named_and_refused(small, undisturbed, tmp_path):
    out = tmp_path / "run"
    assert small.run(out, before=lambda: stop_after_rows(3)).code == 130
    rows = out / "rows.jsonl"
    good = rows.read_bytes()
    ends = [place for place, byte in enumerate(good) if byte == ord("\n")]
    for place, line in ((ends[0] - 40, 1), (ends[0], 1), (ends[0] + 300, 2), (ends[1] + 1, 3)):
        damaged = bytearray(good)
        damaged[place] ^= 1
        rows.write_bytes(damaged)
        one_error(small.run(out), f"{rows} line {line}: expected an intact row, found damage")
        assert rows.read_bytes() == damaged, "damage must not be touched"
    rows.write_bytes(good)
    assert small.run(out).code == 0
    require_same_end(out, undisturbed)


def test_a_second_process_is_refused_while_the_first_lives_and_not_after_its_death(small, undisturbed, tmp_path):
    """Case 25."""
    out = tmp_path / "run"

    def wait_in_second_row():
        real, left = Progress.row, iter(range(1))

        def row(self, name):
            if next(left, None) is None:
                signal.pause()
            return real(self, name)

        Progress.row = row

    def meanwhile(pid):
        deadline = time.monotonic() + 120
        while not (out / "timing.jsonl").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        second = tmp_path / "second"
        second.mkdir()
        for more in ((), ("--fresh",)):
            one_error(in_child(matrix(small.arguments(out, *more)), second), str(out), "a process that holds its lock")
        os.kill(pid, signal.SIGKILL)

    assert small.run(out, before=wait_in_second_row, after=meanwhile).signal == signal.SIGKILL
    assert require_kept(out, undisturbed, 1) == 1
    assert small.run(out).code == 0
    require_same_end(out, undisturbed)
