"""Two files that another attention kernel sets apart: the kernel is named as the cause."""

import pytest

from cache import build_incremental, build_live, build_prefill
from cache.storage import Provenance
from decode import Contract, State
from experiments.run.options import DEMO
from experiments.run.tasks import load_tasks
from minimodel import load_model
from tests.conftest import numeric
from tests.experiments.crosscheck.recordings import record
from tests.experiments.runs import call, crosscheck, one_line


def test_another_attention_kernel(genuine, tiny_directory, bf16, tmp_path, state):
    other = numeric("bf16", attention="eager")
    model = load_model(tiny_directory, other)
    files = record(tmp_path, model, state, state, "incremental", Provenance.here(tiny_directory, other))
    report = crosscheck(genuine["incremental trace"], files["incremental trace"], "--checkpoint", tiny_directory)
    (finding,) = report["findings"]["r"]
    assert finding["first"]["tensor"] == "self_attn.attention" and finding["first"]["head"] is not None
    assert "repeat_kv" in finding["kernels"]["A"] and "eager" not in finding["kernels"]["A"]
    assert "eager" in finding["kernels"]["B"] and "repeat_kv" not in finding["kernels"]["B"]
    assert any("attention" in line and "repeat_kv" in line and "eager" in line for line in report["environment"])
    # from the boundaries alone, reruns find the very step that the traces show
    report = crosscheck(genuine["incremental boundary"], files["incremental boundary"], "--checkpoint", tiny_directory)
    assert report["findings"]["r"][0]["first"] == finding["first"]
    assert "incremental: B is equal under eager of ours" in report["findings"]["r"][0]["lines"]
    # what tokens alone do not give cannot be computed again
    paths = [tmp_path / f"{one.numeric.attention}.safetensors" for one in (bf16, model)]
    for one, path in zip((bf16, model), paths):
        build_prefill(one, state, chunk=3).save(path, Provenance.here(tiny_directory, one.numeric), "r")
    line = "construction: expected live, incremental or prefill to compute again, found 'prefill_in_calls_of_3'"
    one_line(call("crosscheck", *paths, "--checkpoint", tiny_directory), line)


def test_packed_heads_on_the_demo_are_named_as_the_cause(tmp_path):
    """The kernels of two transformers releases, over a prefix long enough for their sums to differ."""
    directory, (task, *_) = DEMO / "primary", load_tasks(DEMO / "tasks.jsonl", 1)[0]
    models = [load_model(directory, numeric("bf16", kernels=name)) for name in ("repeat_kv", "packed_gqa")]
    prompt = State.prompt(Contract.load(directory), task.question, task.choices)
    state, files, built = build_live(models[0], prompt).state, [], []
    for model in models:
        files.append(tmp_path / f"{model.numeric.attention}.safetensors")
        built.append(build_incremental(model, state))
        built[-1].save(files[-1], Provenance.here(directory, model.numeric), "r")
    if built[0].cache.equals(built[1].cache):
        pytest.skip("repeat_kv and packed_gqa have the same bits on this CPU")
    (finding,) = crosscheck(*files, "--checkpoint", directory)["findings"]["r"]
    assert finding["kernels"] == {"A": ["repeat_kv"], "B": ["packed_gqa"]}
