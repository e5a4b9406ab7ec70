"""The caller's own torch state: another default device or dtype does not reach the decoder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cache import Boundary, build_incremental, build_live, build_prefill, compare, transplant
from cache.digest import cache_sha256
from cache.storage import Provenance
from decode import Contract, State, greedy_suffix
from minimodel import load_model
from tests.conftest import numeric
from tests.tiny import TASK


def library_block(directory: Path, kernels: str, scratch: Path) -> list[object]:
    """README's library block, and a boundary through a file: every value that it gives."""
    model, contract = load_model(directory, numeric("bf16", kernels=kernels)), Contract.load(directory)
    live = build_live(model, State.prompt(contract, TASK["question"], TASK["choices"]))
    incremental, prefill = build_incremental(model, live.state), build_prefill(model, live.state)
    swapped = transplant(recipient=prefill, donor=incremental, layers=[1], positions=range(3))
    provenance = Provenance.here(directory, model.numeric)
    swapped.save(scratch / "swapped.safetensors", provenance)
    loaded = Boundary.load(scratch / "swapped.safetensors", contract, provenance)
    report = compare(incremental.cache, prefill.cache)
    suffixes = [greedy_suffix(model, one).tokens for one in (live, prefill, swapped, loaded)]
    return [cache_sha256(one.cache) for one in (live, prefill, swapped, loaded)] + [report.first_difference, suffixes]


@contextmanager
def default_device(name: str | None) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kernels", ["repeat_kv", "invariant"])
def test_another_default_device_or_dtype_changes_no_value(tiny_directory, tmp_path, kernels):
    plain = library_block(tiny_directory, kernels, tmp_path)
    with default_device("meta"):
        assert torch.empty(1).is_meta, "the control: the state is in force"
        assert library_block(tiny_directory, kernels, tmp_path) == plain
    with torch.device("meta"):
        assert library_block(tiny_directory, kernels, tmp_path) == plain
    with default_dtype(torch.float64):
        assert torch.ones(1).dtype == torch.float64
        assert library_block(tiny_directory, kernels, tmp_path) == plain
