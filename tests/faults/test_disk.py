"""Disks that are full or closed, torn and flipped bytes, two writers: nothing that was written is damaged."""

import ctypes
import os
import signal
import subprocess

import pytest

from tests.faults.forked import in_child, limit_file_size, matrix, one_error, stop_after_rows
from tests.faults.test_kills import require_kept, require_same_end
from tests.helpers import wait_until


@pytest.fixture
def finish(small, undisturbed, tmp_path):
    """Ends the run in `tmp_path`/run, undisturbed, with the undisturbed run's bytes."""

    def finish(out=tmp_path / "run"):
        ended = small.run(out)
        assert ended.code == 0, ended
        require_same_end(out, undisturbed)

    return finish


@pytest.mark.parametrize("part", [pytest.param(0.3, marks=pytest.mark.slow), 0.999])
def test_a_row_that_does_not_fit_is_cut_off_whole_and_the_file_named(small, undisturbed, tmp_path, part, finish):
    lines, out = undisturbed.rows.splitlines(keepends=True), tmp_path / "run"
    size = len(lines[0]) + len(lines[1]) + int(part * len(lines[2]))
    assert size > len((undisturbed.directory / "manifest.json").read_bytes()), "the manifest must fit"
    for message in ("File too large", ""):  # again as long as the disk is full
        one_error(small.run(out, before=lambda: limit_file_size(size)), str(out / "rows.jsonl"), message)
        assert (out / "rows.jsonl").read_bytes() == lines[0] + lines[1]
    finish()


def test_a_manifest_that_does_not_fit_leaves_a_directory_that_can_be_used(small, tmp_path, finish):
    out = tmp_path / "run"
    one_error(small.run(out, before=lambda: limit_file_size(500)), str(out / "manifest.json"), "File too large")
    assert not (out / "manifest.json").exists() and not (out / "rows.jsonl").exists()
    finish()


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 kB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root; the limit on file sizes stands for a full disk in the tests above")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_full_and_then_freed(small, undisturbed, tiny_disk, finish):
    """The real thing: whatever file meets the end of the disk is named, and the run goes on once there is space."""
    out, ballast, lines = tiny_disk / "run", tiny_disk / "ballast", undisturbed.rows.splitlines(keepends=True)
    free = len(lines[0]) + len(lines[1]) // 2 + len((undisturbed.directory / "manifest.json").read_bytes())
    ballast.write_bytes(bytes(65536 - (free + 4095) // 4096 * 4096))
    one_error(small.run(out), str(out), "No space left on device")
    kept = require_kept(out, undisturbed, 0)
    assert kept < len(lines), "the disk was not full"
    ballast.unlink()
    ended = small.run(out)
    if ended.code == 2:  # the whole run may not fit either
        one_error(ended, "No space left on device")
        require_kept(out, undisturbed, kept)
        subprocess.run(["mount", "-o", "remount,size=4m", str(tiny_disk)], check=True)
    finish(out)


def give_up_root():
    """Lets this process obey permissions: root without the capabilities that override them."""
    if os.geteuid() == 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
        assert ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) == 0, "capset"


def test_a_boundary_that_does_not_fit_is_named_and_leaves_no_part(small, undisturbed, tmp_path):
    out, size = tmp_path / "run", (undisturbed.directory / "manifest.json").stat().st_size + 1000
    ended = small.run(out, "--save-boundaries", before=lambda: limit_file_size(size))
    one_error(ended, f"{out / 'boundaries'}/", "File too large")
    assert not list((out / "boundaries").iterdir())
    assert small.run(out, "--save-boundaries").code == 0
    assert (out / "rows.jsonl").read_bytes() == undisturbed.rows
    assert min(path.stat().st_size for path in (out / "boundaries").iterdir()) > size, "each was too large"


def test_a_directory_that_may_not_be_written_is_named(small, tmp_path):
    out, closed = tmp_path / "run", tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for place in (closed / "run", closed):
        one_error(small.run(place, before=give_up_root), str(place), "Permission denied")
    assert not (closed / "run").exists()
    assert small.run(out, "--limit", 2).code == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    for path in (out, *before):
        path.chmod(0o555 if path == out else 0o444)
    one_error(small.run(out, "--limit", 2, before=give_up_root), str(out), "Permission denied")
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    for path in (out, *before):
        path.chmod(0o755 if path == out else 0o644)
    assert small.run(out, "--limit", 2).code == 0


def test_torn_lines_of_both_ledgers_are_dropped_and_redone(small, undisturbed, tmp_path, finish):
    """A tail cut in the middle, and one of zero bytes, as a file system may leave after a loss of power (case 24)."""
    out = tmp_path / "run"
    assert small.run(out, before=lambda: stop_after_rows(2)).code == 130
    rows, timing = out / "rows.jsonl", out / "timing.jsonl"
    for tail, half in ((undisturbed.rows[rows.stat().st_size :][:99], b'{"row":"t00'), (bytes(50), bytes(7))):
        kept = rows.read_bytes()
        rows.write_bytes(kept + tail)
        timing.write_bytes(timing.read_bytes() + half)
        ended = small.run(out, before=lambda: stop_after_rows(1))
        assert ended.code == 130 and f"dropped a torn last line of {len(tail)} bytes" in ended.stderr, ended
        assert rows.read_bytes().startswith(kept)
    finish()


def test_a_flipped_byte_in_an_old_line_is_named_and_refused(small, tmp_path, finish):
    out = tmp_path / "run"
    assert small.run(out, before=lambda: stop_after_rows(3)).code == 130
    rows = out / "rows.jsonl"
    good = rows.read_bytes()
    ends = [place for place, byte in enumerate(good) if byte == ord("\n")]
    for place, line in ((ends[0], 1), (ends[0] + 300, 2), (ends[1] + 1, 3)):
        damaged = bytearray(good)
        damaged[place] ^= 1
        rows.write_bytes(damaged)
        one_error(small.run(out), f"{rows} line {line}: expected an intact row, found damage")
        assert rows.read_bytes() == damaged, "damage must not be touched"
    rows.write_bytes(good)
    finish()


def test_a_second_process_is_refused_while_the_first_lives_and_not_after_its_death(
    small, undisturbed, tmp_path, finish
):
    """Case 25."""
    out, second = tmp_path / "run", tmp_path / "second"
    second.mkdir()

    def meanwhile(pid):
        wait_until((out / "timing.jsonl").exists)
        for more in ((), ("--fresh",)):
            one_error(in_child(matrix(small.arguments(out, *more)), second), str(out), "a process that holds its lock")
        os.kill(pid, signal.SIGKILL)

    assert small.run(out, before=lambda: stop_after_rows(1, signal.pause), after=meanwhile).signal == signal.SIGKILL
    assert require_kept(out, undisturbed, 1) == 1
    finish()
