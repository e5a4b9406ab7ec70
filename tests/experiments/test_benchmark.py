"""The benchmark on a tiny checkpoint: its arms, floors and fresh processes, what it reports, and bits that differ."""

import shutil
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import decode.batched as batched
from cache.kv import KVCache
from decode.contract import Contract
from decode.independence import Together
from decode.state import State
from experiments.benchmark import batch, memory
from experiments.benchmark.__main__ import lengths
from experiments.benchmark.arms import COLUMNS, Workload, available, floor, open_ours
from experiments.benchmark.batch import Row, padded, together
from experiments.benchmark.memory import in_fresh_process, run_workload
from minimodel.bits import COPIES, bits
from minimodel.checkpoint import open_checkpoint
from minimodel.config_file import read_config
from minimodel.roles import NUM_ROLES
from tests.conftest import numeric
from tests.experiments.commands import write_tasks
from tests.experiments.runs import call, one_line
from tests.helpers import read_json, refused
from tests.tiny import CONFIG, write_checkpoint

LAYERS = {"num_hidden_layers": 2}
# a CPU that cannot pack has no packed columns
HERE, OMITTED = available(tuple(COLUMNS), numeric("bf16"), read_config({**CONFIG, **LAYERS}, "tests.tiny"))
TWIN, FLIPPED = "tests.experiments.twin", "tests.experiments.flipped_twin"
COUNTS = {"threads": 1, "repeats": 3, "long-repeats": 2, "steps": 4, "block": 24, "buffer": 1}
SHORT = ["--quiet", *(text for key, value in COUNTS.items() for text in (f"--{key}", str(value)))]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint, tasks, and one finished benchmark with a reference of equal bits."""
    root = tmp_path_factory.mktemp("benchmark")
    write_checkpoint(root / "tiny", config=LAYERS, contract={"caps": {"branch": 3, "merge": 4, "answer": 2}})
    write_tasks(root / "tasks.jsonl", 3)
    sizes = ["--context", "24,48", "--prefill", "48", "--prefix", "60", "--growth", "--length", "100"]
    only = "decode,prefill,build,row,batch,memory"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "in_fresh_process", memory.peaks)  # the fresh process is tested below
        done = bench(root, "done", *sizes, "--only", only, "--reference", TWIN)
    assert done.exit_code == 0, done.output
    return root


def bench(root, out, *more):
    files = ["--checkpoint", root / "tiny", "--tasks", root / "tasks.jsonl", "--out", root / out]
    return call("benchmark", *files, *SHORT, *more, cwd=root)


def document(root, out="done"):
    return read_json(root / out / "benchmark.json")


def test_columns_share_weights_and_differ_in_kernels(tiny_directory):
    names, omitted = available(tuple(COLUMNS), numeric("bf16"), open_checkpoint(tiny_directory).config)
    assert len(names) + len(omitted) == len(COLUMNS)
    arms = open_ours(tiny_directory, numeric("bf16"), names)
    models = {arm.name: arm.model for arm in arms}
    for name, model in models.items():
        assert (model.numeric.attention, model.numeric.linear) == COLUMNS[name]
    assert models["repeat_kv"].embed_tokens is models["packed_gqa"].embed_tokens
    assert models["repeat_kv"].attend is not models["packed_gqa"].attend


def test_workload_has_every_kind_of_block_and_only_ordinary_tokens(contract):
    work = Workload.of(contract, 50, torch.device("cpu"))
    assert all(contract.is_ordinary(token) for token in work.tokens) and set(work.roles) == set(range(NUM_ROLES - 1))
    assert list(work.roles) == sorted(work.roles) and work.tokens == Workload.of(contract, 50, work.device).tokens
    assert work.call(50)[3][0, 0, -1].all(), "the last token sees every key"


class Products(TorchDispatchMode):
    """Counts products and attention by name and shapes."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "linear", "_linear_pointwise") or "attention" in name:
            self.seen[name, *(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "invariant"])
@pytest.mark.parametrize("length", [1, 20])
def test_floor_makes_exactly_the_arms_products(name, length, tiny_directory):
    _, omitted = available(("repeat_kv", name), numeric("bf16"), open_checkpoint(tiny_directory).config)
    if omitted:
        pytest.skip(omitted[0])
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
        run = floor(arm.model, mask[:, :, part])
        with Products() as alone:
            run()
    # packed, a step takes q, k, v as one product and gate, up as one; a call of more rows takes each alone
    products = 5 if arm.model.numeric.linear == "packed" and length == 1 else 8
    assert sum(model.seen.values()) == products * 3 + 1
    assert alone.seen == model.seen


def fresh(directory):
    """Loads and runs one arm in a new process."""
    return in_fresh_process(directory, numeric("bf16"), None, "repeat_kv", partial(run_workload, 40))


def test_memory_is_of_the_arm_alone(tmp_path):
    """A larger checkpoint raises the peak by its weights; ballast in this process does not."""
    ballast = torch.ones(1 << 26)  # 256 MB
    large = {"hidden_size": 1024, "intermediate_size": 4096}
    found, sizes = {}, {}
    for name, config in (("small", {}), ("large", large)):
        directory = write_checkpoint(tmp_path / name, config=config)
        sizes[name] = (directory / "model.safetensors").stat().st_size
        found[name] = fresh(directory)
        assert found[name]["imports"] <= found[name]["loaded"] <= found[name]["peak"] and found[name]["seconds"] > 0
    grown = {name: found[name]["loaded"] - found[name]["imports"] for name in found}
    assert sizes["large"] > 80e6 and ballast[0] == 1
    assert grown["small"] < 60e6 < 0.9 * sizes["large"] < grown["large"] < sizes["large"] + 60e6


def test_a_child_that_fails_is_one_line(tmp_path):
    with refused("child process", "nowhere"):
        fresh(tmp_path / "nowhere")


def test_defaults_are_cut_to_the_context():
    omitted = []
    assert lengths("context", None, 26, 2048, omitted) == (128, 512, 2048)
    assert lengths("length", None, 26, 2048, omitted) == (2048,) and lengths("prefix", None, 26, 2048, []) == (2000,)
    assert omitted == [f"--{n}: cut to max_position_embeddings 2048" for n in ("context 4096", "length 8192")]
    with refused("--length", "8192"):
        lengths("length", "8192", 26, 2048, [])


def test_every_row_has_every_column_with_its_samples(place):
    found = document(place)
    assert found["columns"] == [*HERE, "twin"] and found["baseline"] == "twin"
    assert all(any(sentence in text for text in found["omitted"]) for sentence in OMITTED)
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


def test_bits_are_compared_with_the_reference(place):
    rows = {row["name"]: row["columns"] for row in document(place)["rows"]}
    for cells in rows.values():
        same = {cell["bits_sha256"] for cell in cells.values() if cell["bits"] == "equal"}
        assert len(same) == 1 and cells["twin"]["bits_sha256"] in same
        assert {cells[name]["bits"] for name in HERE if name.startswith("repeat_kv")} == {"equal"}
    assert rows["incremental build, 100 tokens"]["invariant"]["bits"] == "differs"
    assert document(place)["unequal_bits"] == []


def test_one_flipped_bit_ends_it_with_three(place):
    """The control is the reference as it is, in the test above."""
    one = ("--context", 24, "--columns", "repeat_kv", "--reference", FLIPPED)
    done = bench(place, "flipped", "--only", "decode", *one)
    assert done.exit_code == 3
    found = document(place, "flipped")
    assert found["rows"][0]["columns"]["repeat_kv"]["bits"] == "differs"
    assert found["unequal_bits"] == [["decode, context 24", "repeat_kv", "flipped twin"]]
    assert "decode, context 24: repeat_kv has other bits than flipped twin" in done.output
    assert "OTHER BITS" in (place / "flipped" / "report.md").read_text()


def test_a_batch_has_the_memory_of_a_fresh_process_per_series_and_names_the_sizes_it_cannot_take(place, monkeypatch):
    monkeypatch.setattr(batch, "together_here", lambda model, most: Together(1, model, "the o map, 4 rows"))
    few = ("--rows", 2, "--generate", 2, "--columns", "repeat_kv")
    assert bench(place, "fresh", "--only", "batch", *few).exit_code == 0
    found = document(place, "fresh")
    assert "column repeat_kv: at most 1 rows together, the o map, 4 rows" in found["omitted"]
    assert list(found["batch"]["series"]["repeat_kv"]) == ["1"]
    assert found["batch"]["series"]["repeat_kv"]["1"]["peak_bytes"] > 50e6


def test_memory_floor_and_limit_stand_in_the_document(place):
    found = document(place)
    for cell in found["memory"]["columns"].values():
        assert 0 < cell["imports"]["median"] <= cell["loaded"]["median"] <= cell["peak"]["median"]
        assert len(cell["samples"]) == cell["seconds"]["n"] == 2
    decode, prefill = found["rows"][1:3]
    for row in (decode, prefill):
        with_floor = {name for name, cell in row["columns"].items() if "over_floor" in cell}
        assert with_floor == set(HERE) - {"invariant"}
    limit = decode["limit"]
    assert limit["bytes"] > 0 and limit["seconds"]["median"] > 0 and prefill["limit"] is None
    speed = limit["gigabytes_a_second"]["median"]
    assert limit["seconds"]["median"] == pytest.approx(limit["bytes"] / speed / 1e9, rel=0.5)


def test_rows_together_have_the_bits_of_one_row_at_a_time_and_a_padded_batch_stands_beside_them(place):
    entry = document(place)["batch"]
    assert len(entry["load_average"]) == 2 and entry["rows"] == 3
    assert list(entry["series"]) == [*HERE, "twin", "twin, padded batch"]
    for name, cells in entry["series"].items():
        sizes = ["2"] if name == "twin, padded batch" else ["1"] if name == "twin" else ["1", "2"]
        assert list(cells) == sizes
        for cell in cells.values():
            assert len(cell["samples"]) == 2 and cell["peak_bytes"] > 50e6
            assert cell["rows_per_minute"] == pytest.approx(3 * 60 / cell["seconds"]["median"])
            assert cell["tokens_per_second"] >= 3 * 12 / cell["seconds"]["median"]  # tokens of a row, all delimiters
            assert "padded" in name or (cell["bits"], cell["rows_with_other_bits"]) == ("equal", 0)


def test_a_padded_batch_decodes_the_same_rows_up_to_rounding(place):
    contract = Contract.load(place / "tiny")
    [arm] = open_ours(place / "tiny", numeric("fp32"), ("repeat_kv",))
    prompts = [State.prompt(contract, "odd " * count, ["1", "2"]) for count in (1, 9, 4)]
    rows = [Row.after(prompt, None, torch.device("cpu")) for prompt in prompts]
    with torch.inference_mode():
        alone, found = together(arm, rows, 1, arm.model), padded(arm, rows, 3)
    for (wanted, tensors), (tokens, others) in zip(alone, found, strict=True):
        assert tokens == wanted and tokens[-1] == contract.close_ids[-1]
        assert all(torch.allclose(mine, other, atol=1e-4) for mine, other in zip(tensors, others, strict=True))


def test_rows_together_with_other_bits_end_it_with_three(place, monkeypatch):
    real = batched.take_together

    def flawed(steps, together):
        found = real(steps, together)
        bits(steps[-1].stepper.cache.values(0))[:, 0, -1, 0] ^= 1
        return found

    monkeypatch.setattr(batched, "take_together", flawed)
    monkeypatch.setattr(memory, "in_fresh_process", memory.peaks)
    done = bench(place, "flawed", "--only", "batch", "--generate", "5", "--columns", "repeat_kv")
    assert done.exit_code == 3 and ": repeat_kv has other bits than repeat_kv one at a time" in done.output
    cells = document(place, "flawed")["batch"]["series"]["repeat_kv"]
    assert cells["1"]["bits"] == "equal" and cells["2"]["bits"] == "differs" and cells["2"]["rows_with_other_bits"] > 0


def test_growth_is_of_the_build(place):
    growth = document(place)["growth"]
    assert growth["ends"] == [24, 48, 72, 96, 100]
    per_token = 2 * 2 * COPIES * 2 * 32 * 2  # keys and values, layers, copies, K/V heads, head size, bytes
    assert growth["cache_bytes"] == [end * per_token for end in growth["ends"]]
    for name, totals in growth["total_seconds"].items():
        steps = growth["step_seconds"][name]
        assert totals[-1] == pytest.approx(sum(s * k for s, k in zip(steps, (24, 24, 24, 24, 4))))
        assert totals == sorted(totals)


def test_report_holds_the_tables_and_drawings(place):
    text = (place / "done/report.md").read_text()
    for part in ("decode, context 48: ms", "prefill, 48 tokens: tokens/s", "matrix row: s", "over its floor", "bits",
                 "Fresh processes; weights of", "3 rows decoded together"):  # fmt: skip
        assert part in text
    figures = sorted(path.name for path in (place / "done/figures").glob("*.svg"))
    assert figures == ["batch.svg", "growth-build.svg", "growth-cache.svg", "growth-step.svg"]
    assert (place / "done/report.html").exists()


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (("--context", "24,2000"), ("--context", "max_position_embeddings 1024", "2000")),
        (("--context", "4"), ("--context", "10 to")),
        (("--context", "many"), ("--context", "whole numbers", "'many'")),
        (("--columns", "repeat_kv,fast"), ("--columns", "'fast'")),
        (("--only", "everything"), ("--only", "'everything'")),
        (("--reference", "no.such.module"), ("--reference no.such.module", "can be imported")),
        *((("--reference", name), (f"--reference {name}: expected a module",)) for name in ("", ".", ".json")),
        (("--reference", "json"), ("--reference json", "open_arm")),
        (("--checkpoint", "nowhere"), ("nowhere",)),
    ],
)
def test_bad_input_is_one_line(place, more, parts):
    one_line(bench(place, "refused", *more), *parts)
    assert not (place / "refused").exists()


def test_an_earlier_benchmark_is_kept(place):
    few = ("--only", "prefill", "--prefill", 30, "--columns", "repeat_kv")
    shutil.copytree(place / "done", place / "twice")
    assert "--fresh" in one_line(bench(place, "twice", *few))
    assert bench(place, "twice", *few, "--fresh").exit_code == 0
    (place / "mine").mkdir()
    (place / "mine" / "thesis.txt").write_text("x")
    assert "found no benchmark.json" in one_line(bench(place, "mine", *few, "--fresh"))
    assert [path.name for path in place.glob("mine*")] == ["mine"]
    assert len(document(place, "twice")["rows"]) == 1 and document(place, "twice.1") == document(place)
