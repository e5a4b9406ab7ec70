"""Blocks that are freed while a checkpoint loads go back to the system, the ones between them staying."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
from contextlib import nullcontext
from minimodel.memory import blocks_apart

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.ones(2 << 20), torch.ones(1)  # 8 MiB freed: from here on glibc would keep such blocks in its heap
before, kept = resident(), []
with blocks_apart() if sys.argv[1] == "apart" else nullcontext():
    for _ in range(20):  # a plain weight of 4 MiB, its packed copy, and the plain one is freed
        plain = torch.ones(1 << 20)
        kept.append(plain.clone())
        later = torch.ones(1 << 19)
        kept.append(later)
        del plain
print(resident() - before - sum(t.nbytes for t in kept))
"""


def beyond_what_is_kept(how: str) -> int:
    """Resident bytes that nothing needs, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="these are glibc's limits")
def test_freed_blocks_leave_no_holes() -> None:
    assert beyond_what_is_kept("apart") < 4 << 20
    assert beyond_what_is_kept("as it is") > 16 << 20  # the control: freed blocks of 4 MiB stay in the heap
