"""The training script: it learns, it resumes to the same bits, it refuses another run's state, it writes what loads."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import Parameter

from experiments.demo.corpus import collate, train_tokenizer, training_pool
from experiments.demo.model import ROLE_EMBEDDING, config_json, initial_weights, loss_sum
from experiments.demo.train import DECAY_FROM, PRIMARY_AT, WARMUP, Optimizer, Plan, rate, train
from minimodel.checkpoint import open_checkpoint
from minimodel.config_file import read_config
from minimodel.decoder import Decoder
from minimodel.errors import InputError
from tests.conftest import numeric
from tests.experiments.runs import call

PLAN = Plan(seed=1, steps=20, batch_size=1)


def test_rate_rises_holds_falls_and_ends_low():
    assert rate(WARMUP / 2) == pytest.approx(0.5) and rate(DECAY_FROM) == 1.0
    assert rate(PRIMARY_AT) == pytest.approx(0.04) and rate(1.0) == pytest.approx(0.04)
    falling = [rate(step / 100) for step in range(round(100 * DECAY_FROM), round(100 * PRIMARY_AT) + 1)]
    assert falling == sorted(set(falling), reverse=True)


def first_layer_attention(weights, ids):
    """Attention probabilities of layer 0, [H,T,T], worked out from what the decoder shows."""
    config = read_config(config_json(weights["model.embed_tokens.weight"].shape[0]))
    decoder, seen = Decoder(config, weights, numeric("fp32", attention="eager")), {}
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]
    positions = torch.arange(ids.shape[1])[None]
    decoder(ids, torch.zeros_like(ids), positions, mask, None, observe=seen.__setitem__)
    query, key = (seen[f"layers.0.self_attn.{name}_rotary"][0] for name in "qk")
    scores = query @ key.repeat_interleave(query.shape[0] // key.shape[0], 0).mT / config.head_dim**0.5
    return scores.masked_fill(~mask[0], float("-inf")).softmax(-1)


def test_one_head_starts_on_the_token_before_and_one_on_equal_tokens():
    weights = initial_weights(read_config(config_json(1000)), 0)
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[None, :40]
    ids[0, 30] = ids[0, 20]
    found = first_layer_attention(weights, ids)
    before = found[:, range(1, 40), range(39)]
    assert before[0].mean() > 0.75 and before[1:].mean() < 0.2
    others = [slot for slot in range(30) if slot != 20]
    assert found[2, 30, 20] > 2 * found[2, 30, others].max()
    assert found[3, 30, 20] < 2 * found[3, 30, others].max()  # a head whose query is not its key: no such preference


def test_loss_is_the_weighted_mean_and_trains_every_tensor():
    tokenizer = train_tokenizer(0, count=200)
    config = read_config(config_json(tokenizer.get_vocab_size()))
    weights = {name: Parameter(tensor) for name, tensor in initial_weights(config, 0).items()}
    decoder = Decoder(config, weights, numeric("fp32", attention="eager"))
    batch = collate(training_pool(0, 0, 1, 0.0, tokenizer)[0])
    total, weight = loss_sum(decoder, batch)
    assert float(weight) == pytest.approx(float(batch.weights.sum()))
    assert 5.0 < float(total.detach() / weight) < 9.0  # near ln V before any step
    (total / weight).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in weights.values())
    assert not weights[ROLE_EMBEDDING].grad[:8].any() and not weights[ROLE_EMBEDDING][:8].any()
    before = float(total.detach())
    optimizer = Optimizer(weights)
    for _ in range(3):
        optimizer.step(1.0)
        total, weight = loss_sum(decoder, batch)
        (total / weight).backward()
    assert float(total.detach()) < before


@pytest.mark.slow
def test_a_run_in_two_parts_ends_with_the_bits_of_a_run_in_one(tmp_path):
    train(tmp_path / "one", PLAN, threads=1, save_every=7)
    train(tmp_path / "two", PLAN, threads=1, save_every=7, stop=9)
    assert not (tmp_path / "two" / "primary").exists()
    train(tmp_path / "two", PLAN, threads=1, save_every=7)
    train(tmp_path / "other", Plan(2, 20, 1), threads=1, save_every=20)
    for name in ("primary", "later"):
        one, two, other = (tmp_path / run / name / "model.safetensors" for run in ("one", "two", "other"))
        assert one.read_bytes() == two.read_bytes() != other.read_bytes()
        assert load_file(one).keys() == load_file(other).keys()
        assert open_checkpoint(tmp_path / "one" / name).contract is not None
    primary, later = (tmp_path / "one" / name / "model.safetensors" for name in ("primary", "later"))
    assert primary.read_bytes() != later.read_bytes()
    with pytest.raises(InputError, match=r"steps: expected 30, as given, found '20'"):
        train(tmp_path / "two", Plan(1, 30, 1), threads=1, save_every=7)


@pytest.mark.parametrize("arguments", [[], ["--out", "x", "--steps", "3"], ["--out", "x", "--batch", "0"]])
def test_bad_usage_exits_with_2(arguments):
    assert call("demo.train", *arguments).exit_code == 2
