"""The bundled checkpoints and tasks, read through the project's loaders: files, shapes, sizes, held-out rows."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from decode.contract import Contract, contract_document
from experiments import demo
from experiments.demo.corpus import CAPS, TEMPLATE, held_out_tasks, training_pool
from experiments.demo.model import config_json
from experiments.demo.problems import held_out
from experiments.demo.train import TASKS
from experiments.run.tasks import load_tasks
from minimodel.checkpoint import file_digests, open_checkpoint
from tests.experiments.demo.test_problems import read_story

ROOT = Path(demo.__file__).parent
SEED = 20260728
FILES = {"config.json", "contract.json", "model.safetensors", "role_embedding.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("name", ["primary", "later"])
def test_a_checkpoint_holds_what_the_script_writes(name):
    files = list((ROOT / name).iterdir())
    assert {file.name for file in files} == FILES and sum(file.stat().st_size for file in files) <= 12_000_000
    tokenizer = Tokenizer.from_file(str(ROOT / name / "tokenizer.json"))
    config = json.loads((ROOT / name / "config.json").read_text(encoding="utf-8"))
    assert config == config_json(tokenizer.get_vocab_size())
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]
    assert json.loads((ROOT / name / "contract.json").read_text(encoding="utf-8")) == contract_document(CAPS, TEMPLATE)
    assert Contract.load(ROOT / name).caps == (None, 128, 128, 128, 128, 16)
    shape = open_checkpoint(ROOT / name).config
    assert shape.num_attention_heads >= 2 * shape.num_key_value_heads and shape.head_dim == 64
    weights = load_file(ROOT / name / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 and bool(tensor.isfinite().all()) for tensor in weights.values())
    assert any("q_proj.bias" in key and bool(tensor.any()) for key, tensor in weights.items())
    with safe_open(ROOT / name / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    (table,) = load_file(ROOT / name / "role_embedding.safetensors").values()
    assert table.shape == (14, shape.hidden_size)
    assert not table[:8].any() and bool(table[8:].any(dim=1).all()), "the first role rows are zero, the others trained"


def test_the_two_checkpoints_differ_in_weights_and_share_everything_else():
    primary, later = file_digests(ROOT / "primary"), file_digests(ROOT / "later")
    differing = {name for name in primary if primary[name] != later[name]}
    assert differing == {"model.safetensors", "role_embedding.safetensors"}


def test_the_corpus_is_the_one_that_they_were_trained_on():
    """Any other digest is another corpus: what the script would train is no longer what is bundled."""
    tokenizer = Tokenizer.from_file(str(ROOT / "primary/tokenizer.json"))
    pool = [[tuple(row) for row in batch] for batch in training_pool(SEED, 0, 2, 0.0, tokenizer)]
    assert hashlib.sha256(repr(pool).encode()).hexdigest().startswith("4effabc0fb8bd0bb")


def test_tasks_are_the_200_held_out_rows_the_script_draws():
    tasks, data = load_tasks(ROOT / "tasks.jsonl", None)
    assert [json.loads(line) for line in data.splitlines()] == held_out_tasks(SEED, TASKS)
    assert len(tasks) == TASKS == 200
    for task in tasks:
        start, events = read_story(task.question)
        assert held_out(start, events)
        assert int(task.choices["ABCD".index(task.answer)].split()[0]) == start + sum(events)
