"""transformers as the benchmark's reference: the release's own kernel has its bits in every row."""

import pytest
import torch

from decode.contract import Contract
from experiments.benchmark import memory
from experiments.benchmark.arms import Workload, open_ours, open_reference
from experiments.benchmark.measures import digest, prefilled, resumed
from minimodel.bits import same_bits
from minimodel.numerics import NumericContract
from minimodel.packed import why_not_packed
from tests.experiments.commands import write_tasks
from tests.experiments.runs import call
from tests.helpers import flip_bit, read_json
from tests.hf import versions

COUNTS = {"threads": 1, "repeats": 1, "long-repeats": 1, "steps": 8, "block": 64, "buffer": 1}
LENGTHS = {"context": 160, "prefill": 160, "prefix": 180, "rows": 2, "generate": 6}


# a whole benchmark takes seconds at one dtype and is the same code at the other
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)], scope="session")
def test_whole_benchmark(dtype, directory, tmp_path, monkeypatch):
    if dtype == "bf16":  # at the other dtype memory is that of fresh processes
        monkeypatch.setattr(memory, "in_fresh_process", memory.peaks)
    write_tasks(tmp_path / "tasks.jsonl", 2)
    given = {"checkpoint": directory, "tasks": tmp_path / "tasks.jsonl", "dtype": dtype, "out": tmp_path / "out"}
    given |= {**COUNTS, **LENGTHS, "reference": "tests.hf.bench_arm", "only": "decode,prefill,build,row,batch"}
    given["columns"] = f"invariant,{versions.matching_kernel()},{versions.matching_kernel()}+packed"
    arguments = [text for key, value in given.items() for text in (f"--{key}", str(value))]
    done = call("benchmark", *arguments, "--quiet")
    assert done.exit_code == 0, (done.output, done.stderr)
    document = read_json(tmp_path / "out/benchmark.json")
    reference = f"transformers {versions.INSTALLED}"
    assert document["baseline"] == document["columns"][-1] == reference and document["unequal_bits"] == []
    rows = {row["name"]: {name: cell["bits"] for name, cell in row["columns"].items()} for row in document["rows"]}
    series = document["batch"]["series"]
    assert list(series)[-2:] == [reference, f"{reference}, padded batch"] and list(series[reference]) == ["1"]
    assert series[f"{reference}, padded batch"]["2"]["tokens_per_second"] > 0
    assert len(rows) == 4
    for name, bits in rows.items():
        assert bits[versions.matching_kernel()] == "equal", name
        if dtype == "bf16" and not why_not_packed(torch.bfloat16, torch.device("cpu")):
            assert bits[f"{versions.matching_kernel()}+packed"] == "equal", name
    # controls: what is compared differs under another kernel, token by token as in the ledger's line
    for name in ("incremental build, 180 tokens", "matrix row"):
        assert rows[name]["invariant"] == "differs"


@pytest.fixture
def numeric(dtype):
    made = NumericContract(dtype=dtype, threads=1)
    made.apply()
    return made


def test_one_stepper_feeds_both_and_one_bit_is_seen(directory, numeric):
    theirs = open_reference("tests.hf.bench_arm", directory, numeric)
    [ours] = open_ours(directory, numeric, (versions.matching_kernel(),))
    work = Workload.of(Contract.load(directory), 60, torch.device("cpu"))
    states = []
    with torch.inference_mode():
        for arm in (ours, theirs):
            cache, logits = prefilled(arm, work, 50, 60)
            held = cache.copy(60)
            stepper = resumed(arm, held, work, 50, 60)
            assert len(cache) == len(held) == 50
            for token, role in work.steps(50, 60):
                hidden = stepper.feed(token, role)
            assert len(held) == 60 and len(cache) == 50, "the copy grew, its origin did not"
            states.append((digest(arm.model.logits(hidden), *arm.tensors(held)), logits, stepper.record.sha256(), held))
        (mine, my_logits, my_record, my_cache), (other, logits, record, _) = states
        assert mine == other and same_bits(my_logits, logits) and my_record == record
        flip_bit(my_cache.keys(1), (0, 1, 30, 3))
        assert digest(ours.model.logits(hidden), *ours.tensors(my_cache)) != other
