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

with blocks_apart():
    pass  # it leaves glibc's ceilings: from here on, blocks below 32 MiB lie in the heap, on every machine
torch.ones(1)
before, kept = resident(), []
with blocks_apart() if sys.argv[1] == "apart" else nullcontext():
    for i in range(20):  # a plain weight, its packed copy, and the plain one is freed; none fits an earlier one's hole
        plain = torch.ones((8 + i) << 16)
        kept += [plain.clone(), torch.ones(1 << 18)]
        del plain
print(resident() - before - sum(t.nbytes for t in kept))
"""


def beyond_what_is_kept(how: str) -> int:
    """Returns the resident bytes that nothing needs, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_freed_blocks_leave_no_holes() -> None:
    assert beyond_what_is_kept("apart") < 4 << 20
    assert beyond_what_is_kept("in the heap") > 32 << 20  # the control: holes stay between the blocks of one heap
