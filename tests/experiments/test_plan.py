"""Planning arithmetic: against the files' sizes, against counted work, and its command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cache.kv import KVCache
from decode.contract import Contract
from experiments.benchmark.arms import Workload
from experiments.plan import PRESETS, scaled, span
from experiments.run.costs import (
    COPIES,
    Cost,
    cache_bytes,
    parameters,
    prefill_cost,
    row_cache_bytes,
    row_cost,
    row_parts,
    step_bytes,
    steps_cost,
    token_flops,
    weight_bytes,
)
from minimodel.checkpoint import open_checkpoint
from minimodel.config_file import read_config
from minimodel.decoder import Decoder
from tests.experiments.runs import call, one_line
from tests.tiny import CONFIG, write_checkpoint


def file_bytes(directory: Path) -> int:
    """Bytes of every tensor in a checkpoint's files, role table included."""
    return sum(entry.stop - entry.start for entry in open_checkpoint(directory).tensors.values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_weight_bytes_are_the_files(tied: bool, dtype: str, tmp_path: Path) -> None:
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    directory = write_checkpoint(tmp_path / "c", torch_dtype, config={"tie_word_embeddings": tied})
    config = open_checkpoint(directory).config
    assert weight_bytes(config, dtype) == file_bytes(directory)
    assert weight_bytes(config, dtype, role_rows=13) != file_bytes(directory)  # control
    stock = write_checkpoint(tmp_path / "s", torch_dtype, config={"tie_word_embeddings": tied}, stock=True)
    assert weight_bytes(config, dtype, role_rows=0) == file_bytes(stock)


def test_cache_bytes_are_the_caches(bf16: Decoder) -> None:
    cache = KVCache.for_model(bf16, COPIES, 37)
    with torch.inference_mode():
        for layer in range(cache.layers):
            cache.append(layer, *(torch.zeros(COPIES, 2, 37, 32, dtype=torch.bfloat16) for _ in range(2)))
    assert cache_bytes(bf16.config, "bf16", 37) == sum(tensor.nbytes for _, _, tensor in cache.tensors())


@pytest.mark.parametrize("length", [1, 25])
def test_flops_are_those_of_the_products(length: int, bf16: Decoder, contract: Contract) -> None:
    """Counted by torch's counter over a real call, which leaves out SDPA on the CPU; its share is added."""
    tokens, roles, positions, mask = Workload.of(contract, 25, torch.device("cpu")).call(25)
    part = slice(25 - length, 25)
    with torch.no_grad():
        cache = KVCache.for_model(bf16, COPIES, 25)
        if length < 25:
            bf16(*Workload.of(contract, 25, torch.device("cpu")).call(24), cache)
        with FlopCounterMode(display=False) as counter:
            hidden = bf16(tokens[:, part], roles[:, part], positions[:, part], mask[:, :, part], cache)
            bf16.logits(hidden[:, -1:])
    config = bf16.config
    attention = COPIES * length * 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * 25
    products = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    counted = sum(count for op, count in products.items() if "attention" not in op)
    expected = COPIES * token_flops(config, 25, True) if length == 1 else prefill_cost(config, "bf16", 25).flops
    assert counted + attention == expected


def test_step_bytes_are_what_a_step_reads(bf16: Decoder) -> None:
    """Every weight but the embedding, whose head is another table here; then the K/V."""
    config = bf16.config
    table = config.vocab_size * config.hidden_size
    assert step_bytes(config, "bf16", 0) == (parameters(config, 0) - table) * 2
    assert step_bytes(config, "bf16", 0, logits=False) == (parameters(config, 0) - 2 * table) * 2
    assert step_bytes(config, "fp32", 9) == 2 * step_bytes(config, "bf16", 9)
    assert step_bytes(config, "bf16", 9) - step_bytes(config, "bf16", 0) == cache_bytes(config, "bf16", 9)
    tied = read_config({**CONFIG, "tie_word_embeddings": True})
    assert step_bytes(tied, "bf16", 9) == step_bytes(config, "bf16", 9), "a tied head is read all the same"


def test_many_steps_are_the_sum_of_single_ones(bf16: Decoder) -> None:
    one_by_one = [steps_cost(bf16.config, "bf16", s, s + 1, True) for s in range(5, 12)]
    together = steps_cost(bf16.config, "bf16", 5, 12, True)
    assert together.bytes == sum(cost.bytes for cost in one_by_one)
    assert together.flops == sum(cost.flops for cost in one_by_one)
    assert one_by_one[0].bytes == step_bytes(bf16.config, "bf16", 6)


def test_row_is_the_sum_of_its_parts(bf16: Decoder) -> None:
    config = bf16.config
    live, arm = steps_cost(config, "bf16", 0, 50, True), steps_cost(config, "bf16", 50, 60, True)
    whole, prefill = row_cost(config, "bf16", 50, 10), prefill_cost(config, "bf16", 50)
    assert whole.bytes == live.bytes + 2 * prefill.bytes + 4 * arm.bytes
    assert row_cache_bytes(config, "bf16", 50, 10) == cache_bytes(config, "bf16", 4 * 50 + 60)
    # read-bound at a slow memory, computing at a slow processor
    for speed, seconds in (((1.0, None), whole.bytes / 1e9), ((1e9, 1.0), whole.flops / 1e12)):
        found = sum(part.seconds(*speed) for part in row_parts(config, "bf16", 50, 10))
        assert found == pytest.approx(seconds)
    assert Cost(3e9, 5e12).seconds(1.0, 1.0) == 5.0 and Cost(3e9, 5e12).seconds(1.0, 10.0) == 3.0


def test_presets_have_their_published_sizes() -> None:
    """Parameters in thousand millions as the model cards say them."""
    published = dict(zip(PRESETS, (0.49, 1.54, 3.09, 7.61, 14.7, 32.5, 72.7)))
    for name, size in published.items():
        assert parameters(PRESETS[name], 0) / 1e9 == pytest.approx(size, rel=0.015), name
    assert 29.4e9 < weight_bytes(PRESETS["qwen2.5-14b"], "bf16") < 29.6e9
    assert cache_bytes(PRESETS["qwen2.5-14b"], "bf16", 1, copies=1) == 192 * 1024


def lines_of(*arguments: object, cwd: Path) -> list[list[str]]:
    done = call("plan", *arguments, cwd=cwd)
    assert done.exit_code == 0, (done.output, done.stderr)
    table = [line for line in done.output.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (table[0], *table[2:])]


def test_command_tells_of_every_preset(tmp_path: Path) -> None:
    header, *lines = lines_of(cwd=tmp_path)
    assert [line[0] for line in lines[::4]] == list(PRESETS) and len(lines) == 4 * len(PRESETS)
    assert "row at least" not in header
    fourteen = next(line for line in lines if line[:2] == ["qwen2.5-14b", "bf16"])
    assert fourteen[header.index("weights")] == "29.5 GB"


def test_command_reads_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    more = ["--dtype", "bf16", "--bandwidth", 10, "--prefix", 100, "--suffix", 10]
    header, line = lines_of("--config", "config.json", *more, cwd=tmp_path)
    config = read_config(CONFIG)
    assert line[header.index("weights")] == scaled(weight_bytes(config, "bf16"))
    assert line[header.index("row at least")] == span(row_cost(config, "bf16", 100, 10).bytes / 10e9)
    assert lines_of("--checkpoint", ".", *more, cwd=tmp_path)[1][1:] == line[1:]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--preset", next(iter(PRESETS)), "--config", "config.json"], ("at most one of",)),
        (["--tflops", "3"], ("--tflops", "--bandwidth")),
        (["--config", "nothing.json"], ("nothing.json",)),
        (["--prefix", "32768"], ("max_position_embeddings 32768", "33043")),
    ],
)
def test_bad_input_is_one_line(arguments: list[Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    one_line(call("plan", *arguments, cwd=tmp_path), *parts)


@pytest.mark.parametrize("option", ["--bandwidth", "--tflops"])
@pytest.mark.parametrize("value", ["nan", "inf", "0"])
def test_a_speed_that_is_no_number_is_refused(option: str, value: str, tmp_path: Path) -> None:
    speeds = {"--bandwidth": "10", "--tflops": "10", option: value}
    done = call("plan", *(word for pair in speeds.items() for word in pair), cwd=tmp_path)
    assert done.exit_code == 2 and option in done.stderr and "nan" not in done.stdout


def test_default_prefix_leaves_room_in_a_short_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 500}))
    assert "Rows of 225 prefix and 275 suffix tokens" in call("plan", "--config", "config.json", cwd=tmp_path).output


def test_numbers_are_readable() -> None:
    shown = [scaled(x) for x in (999, 1234, 29.5e9, 145.4e9, 12e12)]
    assert shown == ["999 B", "1.23 kB", "29.5 GB", "145 GB", "12.0 TB"]
    assert scaled(14.77e9, "") == "14.8 G" and [span(s) for s in (0.0061, 24.9, 7200)] == [
        "6.1 ms",
        "24.9 s",
        "120 min",
    ]
