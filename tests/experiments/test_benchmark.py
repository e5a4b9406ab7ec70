"""The benchmark on a tiny checkpoint: what it says is what was measured, and wrong bits are told."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch.utils._python_dispatch import TorchDispatchMode

from cache.kv import KVCache
from decode.contract import Contract
from experiments.benchmarking.arms import COLUMNS, Ours, open_ours
from experiments.benchmarking.child import Job, in_child
from experiments.benchmarking.floor import Floor
from experiments.benchmarking.limits import Lengths
from experiments.benchmarking.machine import StreamingRead
from experiments.benchmarking.timing import Spread, interleaved, ratios
from experiments.benchmarking.workload import Workload
from experiments.planning.estimates import COPIES
from experiments.reporting.svg import available
from minimodel.decoder import Decoder
from minimodel.roles import NUM_ROLES
from tests.conftest import numeric
from tests.experiments.commands import write_tasks
from tests.experiments.runs import call, one_line
from tests.helpers import refused
from tests.tiny import write_checkpoint

TWIN, FLIPPED = "tests.experiments.twin", "tests.experiments.flipped_twin"
COUNTS = {"threads": 1, "repeats": 3, "long-repeats": 2, "steps": 4, "block": 24, "buffer": 1}
SHORT = ["--quiet", *(text for key, value in COUNTS.items() for text in (f"--{key}", str(value)))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, tasks, and one finished benchmark with a reference of equal bits."""
    root = tmp_path_factory.mktemp("benchmark")
    write_checkpoint(
        root / "tiny", config={"num_hidden_layers": 2}, contract={"caps": {"branch": 3, "merge": 4, "answer": 2}}
    )
    write_tasks(root / "tasks.jsonl", 1)
    lengths = ["--context", "24,48", "--prefill", "48", "--prefix", "60", "--growth", "--length", "100"]
    only = "decode,prefill,build,row"
    done = bench(root, "done", *lengths, "--only", only, "--reference", TWIN)
    assert done.exit_code == 0, done.output
    return root


def bench(root: Path, out: str, *more: object) -> Result:
    files = ["--checkpoint", root / "tiny", "--tasks", root / "tasks.jsonl", "--out", root / out]
    return call("benchmark", *files, *SHORT, *more, cwd=root)


def document(root: Path, out: str = "done") -> dict[str, Any]:
    return json.loads((root / out / "benchmark.json").read_text())


def test_every_row_has_every_column_with_its_samples(place: Path) -> None:
    found = document(place)
    assert found["columns"] == [*COLUMNS, "twin"] and found["baseline"] == "twin"
    names = ["decode, context 24", "decode, context 48", "prefill, 48 tokens", "incremental build, 60 tokens"]
    assert [row["name"] for row in found["rows"]] == [*names, "matrix row", "incremental build, 100 tokens"]
    counts = [3, 3, 3, 2 * 3, 2, 5]  # rounds; builds of 3 blocks, twice; the growth's 5 blocks, once
    for row, count in zip(found["rows"], counts):
        assert list(row["columns"]) == found["columns"]
        for cell in row["columns"].values():
            low, high = cell["seconds"]["quartiles"]
            assert 0 < low <= cell["seconds"]["median"] <= high and len(cell["samples"]) == count
        assert row["columns"]["twin"]["speed"]["median"] == 1.0
    assert found["machine"]["numeric"]["threads"] == 1 and found["machine"]["environment"]["torch"]


def test_bits_are_compared_with_the_reference(place: Path) -> None:
    rows = {row["name"]: row["columns"] for row in document(place)["rows"]}
    for cells in rows.values():
        same = {cell["bits_sha256"] for cell in cells.values() if cell["bits"] == "equal"}
        assert len(same) == 1 and cells["twin"]["bits_sha256"] in same
        assert cells["repeat_kv"]["bits"] == cells["repeat_kv+packed"]["bits"] == "equal"
    assert rows["incremental build, 100 tokens"]["invariant"]["bits"] == "differs"
    assert document(place)["broken_promises"] == []


def test_one_flipped_bit_ends_it_with_three(place: Path) -> None:
    done = bench(
        place, "flipped", "--only", "decode", "--context", "24", "--columns", "repeat_kv", "--reference", FLIPPED
    )
    assert done.exit_code == 3
    found = document(place, "flipped")
    assert found["rows"][0]["columns"]["repeat_kv"]["bits"] == "differs"
    assert found["broken_promises"] == [["decode, context 24", "repeat_kv", "flipped twin"]]
    assert "decode, context 24: repeat_kv has other bits than flipped twin" in done.output
    assert "BROKEN PROMISE" in (place / "flipped" / "report.md").read_text()
    # control: the same command with the reference as it is
    done = bench(
        place, "straight", "--only", "decode", "--context", "24", "--columns", "repeat_kv", "--reference", TWIN
    )
    assert done.exit_code == 0 and document(place, "straight")["rows"][0]["columns"]["repeat_kv"]["bits"] == "equal"


def test_floor_and_limit_stand_in_the_document(place: Path) -> None:
    found = document(place)
    decode, prefill = found["rows"][1], found["rows"][2]
    for row in (decode, prefill):
        with_floor = {name for name, cell in row["columns"].items() if "over_floor" in cell}
        assert with_floor == set(COLUMNS) - {"invariant"}
    assert decode["limit"]["bytes"] > 0 and decode["limit"]["seconds"]["median"] > 0 and prefill["limit"] is None
    speed = decode["limit"]["gigabytes_a_second"]["median"]
    assert decode["limit"]["seconds"]["median"] == pytest.approx(decode["limit"]["bytes"] / speed / 1e9, rel=0.5)


def test_growth_is_of_the_build(place: Path) -> None:
    growth = document(place)["growth"]
    assert growth["ends"] == [24, 48, 72, 96, 100]
    per_token = 2 * 2 * COPIES * 2 * 32 * 2  # keys and values, layers, copies, K/V heads, head size, bytes
    assert growth["cache_bytes"] == [end * per_token for end in growth["ends"]]
    for name, totals in growth["total_seconds"].items():
        steps = growth["step_seconds"][name]
        assert totals[-1] == pytest.approx(sum(s * k for s, k in zip(steps, (24, 24, 24, 24, 4))))
        assert totals == sorted(totals)
    figures = sorted(path.name for path in (place / "done" / "figures").glob("*.svg"))
    assert figures == (["growth-build.svg", "growth-cache.svg", "growth-step.svg"] if available() else [])


def test_report_holds_the_tables(place: Path) -> None:
    text = (place / "done" / "report.md").read_text()
    for part in ("decode, context 48: ms", "prefill, 48 tokens: tokens/s", "matrix row: s", "over its floor", "bits"):
        assert part in text
    assert (place / "done" / "report.html").exists()


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (("--context", "24,2000"), ("--context", "max_position_embeddings 1024", "2000")),
        (("--context", "4"), ("--context", "10 to")),
        (("--context", "many"), ("--context", "whole numbers", "'many'")),
        (("--columns", "repeat_kv,fast"), ("--columns", "'fast'")),
        (("--only", "everything"), ("--only", "'everything'")),
        (("--reference", "no.such.module"), ("--reference no.such.module", "can be imported")),
        (("--reference", "json"), ("--reference json", "open_arm")),
        (("--checkpoint", "nowhere"), ("nowhere",)),
    ],
)
def test_bad_input_is_one_line(place: Path, more: tuple[str, ...], parts: tuple[str, ...]) -> None:
    line = one_line(bench(place, "refused", *more))
    assert all(part in line for part in parts), line
    assert not (place / "refused").exists()


def test_an_earlier_benchmark_is_kept(place: Path, tmp_path: Path) -> None:
    few = ("--only", "prefill", "--prefill", "30", "--columns", "repeat_kv")
    assert bench(place, "twice", *few).exit_code == 0
    assert "--fresh" in one_line(bench(place, "twice", *few))
    assert bench(place, "twice", *few, "--fresh").exit_code == 0
    assert document(place, "twice")["rows"] and document(place, "twice.1")["rows"]


def test_defaults_are_cut_to_the_context() -> None:
    lengths = Lengths(limit=2048, least=25)
    assert lengths.several("--context", None, (128, 512, 2048, 4096)) == (128, 512, 2048)
    assert lengths.one("--length", None, 8192) == 2048 and lengths.one("--prefix", None, 2000) == 2000
    assert lengths.omitted == [
        "--context 4096: beyond max_position_embeddings 2048",
        "--length 8192: cut to max_position_embeddings 2048",
    ]
    with refused("--length", "8192"):
        lengths.one("--length", 8192, 8192)


def test_rounds_take_turns_and_warm_up_does_not_count() -> None:
    order: list[str] = []

    def arm(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = interleaved({name: lambda name=name: arm(name) for name in "abc"}, repeats=2, warm_up=1)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [6.0, 8.0], "b": [4.0, 9.0], "c": [5.0, 7.0]}


def test_spread_and_ratios() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 5.0, 4.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 1)
    # a machine twice as slow in the second round moves the figures, not the ratio
    assert ratios([2.0, 4.0, 2.0], [1.0, 2.0, 1.0]) == Spread(2.0, 2.0, 2.0, 3)


class Products(TorchDispatchMode):
    """Counts products and attention by name and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "linear", "_linear_pointwise") or "attention" in name:
            self.seen[name, *(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "invariant"])
@pytest.mark.parametrize("length", [1, 20])
def test_floor_makes_exactly_the_arms_products(name: str, length: int, tiny_directory: Path) -> None:
    [arm] = open_ours(tiny_directory, numeric("bf16"), (name,))
    work = Workload.of(Contract.load(tiny_directory), 40, torch.device("cpu"))
    tokens, roles, positions, mask = work.call(40)
    with torch.no_grad():
        cache = KVCache.for_model(arm.model, COPIES, 40)
        if length < 40:
            arm.model(*work.call(40 - length), cache)
        part = slice(40 - length, 40)
        with Products() as model:
            hidden = arm.model(tokens[:, part], roles[:, part], positions[:, part], mask[:, :, part], cache)
            arm.model.logits(hidden[:, -1:])
        floor = Floor(arm.model, length, 40, mask[:, :, part])
        with Products() as alone:
            floor()
    # packed, a step takes q, k, v as one product and gate, up as one; a call of more rows takes each alone
    products = 5 if arm.model.numeric.linear == "packed" and length == 1 else 8
    assert sum(model.seen.values()) == products * 3 + 1
    assert alone.seen == model.seen


def test_columns_share_weights_and_differ_in_kernels(tiny_directory: Path) -> None:
    arms: list[Ours] = open_ours(tiny_directory, numeric("bf16"), tuple(COLUMNS))
    models: dict[str, Decoder] = {arm.name: arm.model for arm in arms}
    for name, (attention, linear) in COLUMNS.items():
        assert (models[name].numeric.attention, models[name].numeric.linear) == (attention, linear)
    assert models["repeat_kv"].embed_tokens is models["packed_gqa"].embed_tokens
    assert models["repeat_kv"].attend is not models["packed_gqa"].attend


def test_workload_has_every_kind_of_block_and_only_ordinary_tokens(contract: Contract) -> None:
    work = Workload.of(contract, 50, torch.device("cpu"))
    assert all(contract.is_ordinary(token) for token in work.tokens) and set(work.roles) == set(range(NUM_ROLES - 1))
    assert list(work.roles) == sorted(work.roles) and work.tokens == Workload.of(contract, 50, work.device).tokens
    assert work.call(50)[3][0, 0, -1].all(), "the last token sees every key"


def test_streaming_read_takes_time_in_proportion() -> None:
    small, large = (StreamingRead(torch.device("cpu"), size) for size in (1 << 20, 1 << 26))
    seconds = [min(read() for _ in range(5)) * size for read, size in ((small, 1 << 20), (large, 1 << 26))]
    assert 0 < seconds[0] < seconds[1]


def test_memory_is_of_the_arm_alone(tmp_path: Path) -> None:
    """A larger checkpoint raises the peak by its weights; ballast in this process does not."""
    ballast = torch.ones(1 << 26)  # 256 MB
    large = {"hidden_size": 1024, "intermediate_size": 4096}
    found, sizes = {}, {}
    for name, config in (("small", {}), ("large", large)):
        directory = write_checkpoint(tmp_path / name, config=config)
        sizes[name] = (directory / "model.safetensors").stat().st_size
        job = Job(str(directory), "bf16", "cpu", 1, "repeat_kv", None, 40)
        found[name] = in_child(job)
        assert found[name]["imports"] <= found[name]["loaded"] <= found[name]["peak"] and found[name]["seconds"] > 0
    grown = {name: found[name]["loaded"] - found[name]["imports"] for name in found}
    assert sizes["large"] > 80e6 and ballast[0] == 1
    assert grown["small"] < 60e6 < 0.9 * sizes["large"] < grown["large"] < sizes["large"] + 60e6


def test_a_child_that_fails_is_one_line(tmp_path: Path) -> None:
    with refused("child process", "nowhere"):
        in_child(Job(str(tmp_path / "nowhere"), "bf16", "cpu", 1, "repeat_kv", None, 40))
