"""The bundled checkpoints and tasks, read through the project's own loaders: files, shapes, sizes, held-out rows."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from decode.contract import Contract, contract_document
from experiments import demo
from experiments.demo.contract import CAPS, TEMPLATE
from experiments.demo.corpus import held_out_tasks
from experiments.demo.model import config_json
from experiments.demo.problems import held_out
from experiments.demo.train import TASKS
from experiments.run.tasks import load_tasks
from minimodel.checkpoint import file_digests, open_checkpoint
from tests.experiments.demo.test_problems import read_story

ROOT = Path(demo.__file__).parent
NAMES = ("primary", "later")
SEED = 20260728
FILES = {"config.json", "contract.json", "model.safetensors", "role_embedding.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("name", NAMES)
def test_directory_holds_its_files_within_12_mb(name):
    files = list((ROOT / name).iterdir())
    assert {file.name for file in files} == FILES
    assert sum(file.stat().st_size for file in files) <= 12_000_000


@pytest.mark.parametrize("name", NAMES)
def test_config_and_contract_are_those_of_the_script(name):
    tokenizer = Tokenizer.from_file(str(ROOT / name / "tokenizer.json"))
    config = json.loads((ROOT / name / "config.json").read_text(encoding="utf-8"))
    assert config == config_json(tokenizer.get_vocab_size())
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]
    assert json.loads((ROOT / name / "contract.json").read_text(encoding="utf-8")) == contract_document(CAPS, TEMPLATE)
    contract = Contract.load(ROOT / name)
    assert contract.caps == (None, 128, 128, 128, 128, 16)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_finite_bf16_and_the_first_role_rows_are_zero(name):
    checkpoint = open_checkpoint(ROOT / name)
    assert checkpoint.config.num_attention_heads >= 2 * checkpoint.config.num_key_value_heads
    assert checkpoint.config.head_dim == 64
    weights = load_file(ROOT / name / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 and bool(tensor.isfinite().all()) for tensor in weights.values())
    assert any("q_proj.bias" in key and bool(tensor.any()) for key, tensor in weights.items())
    with safe_open(ROOT / name / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    table = load_file(ROOT / name / "role_embedding.safetensors")
    assert table.keys() == {"weight"} and table["weight"].shape == (14, checkpoint.config.hidden_size)
    assert not table["weight"][:8].any() and bool(table["weight"][8:].any(dim=1).all())


def test_the_two_checkpoints_differ_in_weights_and_share_everything_else():
    primary, later = (file_digests(ROOT / name) for name in NAMES)
    assert {name for name in primary if primary[name] != later[name]} == {
        "model.safetensors",
        "role_embedding.safetensors",
    }


def test_tasks_are_the_200_held_out_rows_the_script_draws():
    tasks, data = load_tasks(ROOT / "tasks.jsonl", None)
    assert [json.loads(line) for line in data.splitlines()] == held_out_tasks(SEED, TASKS)
    assert len(tasks) == TASKS == 200
    for task in tasks:
        start, events = read_story(task.question)
        assert held_out(start, events)
        assert int(task.choices["ABCD".index(task.answer)].split()[0]) == start + sum(events)
