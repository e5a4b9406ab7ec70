"""Columns are one checkpoint under kernels by name."""

from pathlib import Path

from experiments.benchmark.arms import COLUMNS, Ours, available, open_ours
from minimodel.checkpoint import open_checkpoint
from minimodel.decoder import Decoder
from tests.conftest import numeric


def test_columns_share_weights_and_differ_in_kernels(tiny_directory: Path) -> None:
    names, omitted = available(tuple(COLUMNS), numeric("bf16"), open_checkpoint(tiny_directory).config)
    assert len(names) + len(omitted) == len(COLUMNS)
    arms: list[Ours] = open_ours(tiny_directory, numeric("bf16"), names)
    models: dict[str, Decoder] = {arm.name: arm.model for arm in arms}
    for name, model in models.items():
        assert (model.numeric.attention, model.numeric.linear) == COLUMNS[name]
    assert models["repeat_kv"].embed_tokens is models["packed_gqa"].embed_tokens
    assert models["repeat_kv"].attend is not models["packed_gqa"].attend
