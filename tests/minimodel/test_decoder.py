"""The decoder: against a float64 reference of Qwen2.5 written out here, step by step observed, padded, and stock."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cache import KVCache
from minimodel import Decoder, load_model
from minimodel.attention import ATTENTION_KERNELS
from minimodel.numbers import same_bits
from minimodel.roles import VISIBILITY, attention_mask, position_ids
from tests.conftest import numeric
from tests.helpers import refused
from tests.tiny import CONFIG, write_checkpoint

TOKENS = [5, 9, 200, 31, 31, 7, 260, 12, 99, 268]
ROLES = [0, 0, 0, 1, 1, 2, 3, 4, 4, 5]
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 32


def call(model: Decoder, cache: KVCache | None = None, **changes: torch.Tensor | None) -> torch.Tensor:
    """One forward call over TOKENS, in the model's own visibility."""
    roles = torch.tensor([ROLES])
    inputs = {
        "input_ids": torch.tensor([TOKENS]),
        "roles": roles,
        "position_ids": torch.arange(len(TOKENS))[None],
        "mask": attention_mask(roles, roles),
        **changes,
    }
    with torch.inference_mode():
        return model(**inputs, cache=cache)  # type: ignore[arg-type]


def numpy_weights(directory: Path) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in load_file(directory / "model.safetensors").items()}


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"])


def rotate(x: np.ndarray, position: int) -> np.ndarray:
    """One head vector: pairs (i, i + D/2) turn by position / theta^(2i/D)."""
    half = HEAD_DIM // 2
    angle = position / CONFIG["rope_theta"] ** (np.arange(half) * 2 / HEAD_DIM)
    first, second = x[:half], x[half:]
    return np.concatenate(
        (first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle))
    )


def attention(h: np.ndarray, w: dict[str, np.ndarray], at: str, roles: list[int] | None) -> tuple[np.ndarray, ...]:
    """One attention block, token by token and head by head; also the keys [H_kv, T, D] and values."""
    project = {n: h @ w[f"{at}{n}_proj.weight"].T + w[f"{at}{n}_proj.bias"] for n in "qkv"}
    length = len(h)
    q = np.array([[rotate(project["q"][t].reshape(HEADS, -1)[i], t) for t in range(length)] for i in range(HEADS)])
    k = np.array(
        [[rotate(project["k"][t].reshape(KV_HEADS, -1)[i], t) for t in range(length)] for i in range(KV_HEADS)]
    )
    v = np.array([[project["v"][t].reshape(KV_HEADS, -1)[i] for t in range(length)] for i in range(KV_HEADS)])
    out = np.zeros((length, HEADS * HEAD_DIM))
    for t in range(length):
        seen = [s for s in range(t + 1) if roles is None or VISIBILITY[roles[t]][roles[s]]]
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            scores = np.array([q[head, t] @ k[group, s] for s in seen]) / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            out[t, head * HEAD_DIM : (head + 1) * HEAD_DIM] = weights / weights.sum() @ v[group, seen]
    return out @ w[f"{at}o_proj.weight"].T, k, v


def reference(directory: Path, roles: list[int] | None) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, ...]]]:
    """Final hidden states [T, E], logits [T, V] and the (keys, values) of every layer, all float64."""
    w, held = numpy_weights(directory), []
    h = w["model.embed_tokens.weight"][TOKENS]
    if roles is not None:
        table = load_file(directory / "role_embedding.safetensors")["weight"].double().numpy()
        h = h + table[[8 + role for role in roles]]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        out, k, v = attention(norm(h, w[at + "input_layernorm.weight"]), w, at + "self_attn.", roles)
        held.append((k, v))
        h = h + out
        x = norm(h, w[at + "post_attention_layernorm.weight"])
        gate, up = x @ w[at + "mlp.gate_proj.weight"].T, x @ w[at + "mlp.up_proj.weight"].T
        h = h + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    h = norm(h, w["model.norm.weight"])
    return h, h @ w["lm_head.weight"].T, held


@pytest.mark.parametrize("attention_kernel", sorted(ATTENTION_KERNELS))
@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-11), ("fp32", 1e-4), ("bf16", 0.3)])
def test_decoder_against_the_float64_reference(
    tiny_directory: Path, attention_kernel: str, dtype: str, bound: float
) -> None:
    model = load_model(tiny_directory, numeric(dtype, attention=attention_kernel))
    cache = KVCache.for_model(model, 1, 16)
    hidden = call(model, cache)
    exact_hidden, exact_logits, held = reference(tiny_directory, ROLES)
    assert hidden.shape == (1, len(TOKENS), 128) and len(cache) == len(TOKENS)
    assert np.abs(hidden[0].double().numpy() - exact_hidden).max() < bound
    assert np.abs(model.logits(hidden)[0].double().numpy() - exact_logits).max() < bound * 4
    for layer, (k, v) in enumerate(held):
        assert np.abs(cache.keys(layer)[0].double().numpy() - k).max() < bound
        assert np.abs(cache.values(layer)[0].double().numpy() - v).max() < bound
    if dtype != "bf16":  # the controls: one role, one position, one token, one mask entry
        roles, positions, tokens = torch.tensor([ROLES]), torch.arange(len(TOKENS))[None], torch.tensor([TOKENS])
        roles[0, 2], positions[0, 2], tokens[0, 2] = 4, 4, 201
        mask = attention_mask(torch.tensor([ROLES]), torch.tensor([ROLES]))
        mask[0, 0, 5, 4] = True
        for change in ({"roles": roles}, {"position_ids": positions}, {"input_ids": tokens}, {"mask": mask}):
            assert np.abs(call(model, **change)[0].double().numpy() - exact_hidden).max() > 10 * bound, change


@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-11), ("fp32", 1e-4)])
def test_a_stock_checkpoint_runs_as_plain_qwen(stock_directory: Path, dtype: str, bound: float) -> None:
    model = load_model(stock_directory, numeric(dtype))
    exact = reference(stock_directory, None)[0]
    assert np.abs(call(model, roles=None, mask=None)[0].double().numpy() - exact).max() < bound
    hidden_by_roles = call(model, roles=None)[0].double().numpy()
    assert np.abs(hidden_by_roles - exact).max() > 10 * bound, "the multi-branch mask is not the causal one"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_stock_bits_are_those_of_a_zero_role_table(tmp_path: Path, stock_directory: Path, dtype: str) -> None:
    zero = write_checkpoint(tmp_path / "zero")
    save_file({"weight": torch.zeros(14, 128, dtype=torch.bfloat16)}, zero / "role_embedding.safetensors")
    stock, adapted = (load_model(directory, numeric(dtype)) for directory in (stock_directory, zero))
    assert stock.role_embedding is None
    assert same_bits(call(stock, roles=None, mask=None), call(adapted, mask=None))
    save_file({"weight": torch.ones(14, 128, dtype=torch.bfloat16)}, zero / "role_embedding.safetensors")
    assert not same_bits(call(stock, roles=None, mask=None), call(load_model(zero, numeric(dtype)), mask=None))


def test_roles_go_with_a_role_table_and_only_with_one(bf16: Decoder, stock_directory: Path) -> None:
    with refused("roles", "a role table"):
        call(bf16, roles=None)
    with refused("roles", "no role table"):
        call(load_model(stock_directory, numeric("bf16")))


def test_raw_role_r_reads_row_offset_plus_r(bf16: Decoder, tmp_path: Path) -> None:
    assert bf16.role_embedding is not None
    embedded = bf16.embed(torch.tensor([TOKENS]), torch.tensor([ROLES]))
    rows = bf16.role_embedding[[8 + role for role in ROLES]]
    assert same_bits(embedded[0], bf16.embed_tokens[TOKENS] + rows)
    shifted = load_model(write_checkpoint(tmp_path / "shifted", contract={"role_offset": 7}), numeric("bf16"))
    assert not same_bits(shifted.embed(torch.tensor([TOKENS]), torch.tensor([ROLES])), embedded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_mask_that_is_not_bool_is_refused(bf16: Decoder, dtype: torch.dtype) -> None:
    """pytorch/pytorch 103963 (case 5)."""
    mask = attention_mask(torch.tensor([ROLES]), torch.tensor([ROLES]))
    with refused("mask dtype", "torch.bool", str(dtype)):
        call(bf16, mask=mask.to(dtype))
    with refused("mask shape"):
        call(bf16, mask=mask[..., :-1])


def test_no_mask_is_causal_over_the_cache_too(stock_directory: Path) -> None:
    model = load_model(stock_directory, numeric("fp32"))
    cache = KVCache.for_model(model, 1, 10)
    tokens, positions = torch.tensor([TOKENS]), torch.arange(len(TOKENS))[None]
    with torch.inference_mode():
        parts = [
            model(tokens[:, p], None, positions[:, p], None, cache) for p in (slice(0, 4), slice(4, 9), slice(9, 10))
        ]
    assert (torch.cat(parts, dim=1) - call(model, roles=None, mask=None)).abs().max() < 1e-4


def expected_names() -> list[str]:
    layer = [
        "input_layernorm",
        *(
            f"self_attn.{step}"
            for step in ("q_proj", "k_proj", "v_proj", "q_rotary", "k_rotary", "attention", "o_proj")
        ),
        "attention_residual",
        "post_attention_layernorm",
        *(f"mlp.{step}" for step in ("gate_proj", "up_proj", "product", "down_proj")),
        "mlp_residual",
    ]
    return ["embed", *(f"layers.{i}.{step}" for i in range(LAYERS) for step in layer), "norm", "logits"]


def test_observed_steps_are_complete_in_order_and_leave_the_bits_alone(bf16: Decoder) -> None:
    plain = call(bf16)
    seen: list[tuple[str, torch.Tensor]] = []
    roles = torch.tensor([ROLES])
    with torch.inference_mode():
        hidden = bf16(
            torch.tensor([TOKENS]),
            roles,
            torch.arange(len(TOKENS))[None],
            attention_mask(roles, roles),
            observe=lambda name, tensor: seen.append((name, tensor.clone())),
        )
        logits = bf16.logits(hidden, lambda name, tensor: seen.append((name, tensor.clone())))
    assert [name for name, _ in seen] == expected_names()
    steps = dict(seen)
    assert same_bits(hidden, plain) and same_bits(logits, bf16.logits(plain))
    assert same_bits(steps["norm"], hidden) and same_bits(steps["logits"], logits)
    assert all(tensor.dtype == torch.bfloat16 for tensor in steps.values())
    # each residual step is the sum of what went into it
    for layer in range(LAYERS):
        at, before = f"layers.{layer}.", "embed" if layer == 0 else f"layers.{layer - 1}.mlp_residual"
        assert same_bits(steps[at + "attention_residual"], steps[before] + steps[at + "self_attn.o_proj"])
        assert same_bits(steps[at + "mlp_residual"], steps[at + "attention_residual"] + steps[at + "mlp.down_proj"])
    assert same_bits(
        steps["layers.0.self_attn.q_rotary"][:, :, 0], steps["layers.0.self_attn.q_proj"].view(1, 10, 4, 32)[:, 0]
    )
    assert not same_bits(
        steps["layers.0.self_attn.q_rotary"][:, :, 1], steps["layers.0.self_attn.q_proj"].view(1, 10, 4, 32)[:, 1]
    )


def padded_call(model: Decoder, fill: int) -> tuple[torch.Tensor, KVCache, dict[str, torch.Tensor]]:
    """Rows of 3 and 8 tokens, the short one left-padded with `fill`."""
    tokens = torch.tensor([[fill] * 5 + TOKENS[:3], TOKENS[:8]])
    roles = torch.tensor([[0] * 5 + ROLES[:3], ROLES[:8]])
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[0, :5] = False
    steps: dict[str, torch.Tensor] = {}
    cache = KVCache.for_model(model, 2, 8)
    with torch.inference_mode():
        mask = attention_mask(roles, roles, valid, valid)
        hidden = model(tokens, roles, position_ids(valid), mask, cache, lambda n, t: steps.update({n: t.clone()}))
    return hidden, cache, steps


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("attention_kernel", sorted(ATTENTION_KERNELS))
def test_padding_leaves_no_nan_and_does_not_reach_valid_rows(
    tiny_directory: Path, attention_kernel: str, dtype: str
) -> None:
    """pytorch/pytorch 103749 (case 4)."""
    model = load_model(tiny_directory, numeric(dtype, attention=attention_kernel))
    (hidden, cache, _), (other_hidden, other, _) = padded_call(model, 3), padded_call(model, 77)
    for (_, name, mine), (_, _, theirs) in zip(cache.tensors(), other.tensors()):
        assert mine.isfinite().all() and theirs.isfinite().all(), name
        assert same_bits(mine[0, :, 5:], theirs[0, :, 5:]) and same_bits(mine[1], theirs[1])
        assert not same_bits(mine[0, :, :5], theirs[0, :, :5]), "the control: the fill does reach its own slots"
    assert same_bits(hidden[0, 5:], other_hidden[0, 5:]) and same_bits(hidden[1], other_hidden[1])


def test_the_first_valid_key_of_a_left_padded_row_stands_at_position_zero(fp32: Decoder) -> None:
    """unslothai/unsloth 3795 (case 6): RoPE is relative, so logits hide a shift that the first K row shows."""
    _, cache, steps = padded_call(fp32, 3)
    projected = steps["layers.0.self_attn.k_proj"].view(2, 8, KV_HEADS, HEAD_DIM).transpose(1, 2)
    keys = cache.keys(0)
    assert torch.equal(keys[0, :, 5], projected[0, :, 5]), "position 0 rotates by nothing"
    assert not torch.equal(keys[0, :, 6], projected[0, :, 6])
    short = KVCache.for_model(fp32, 1, 3)
    roles = torch.tensor([ROLES[:3]])
    with torch.inference_mode():
        fp32(torch.tensor([TOKENS[:3]]), roles, torch.arange(3)[None], attention_mask(roles, roles), short)
    assert (keys[:1, :, 5:] - short.keys(0)).abs().max() < 1e-5


def test_parameters_that_require_gradients_train(tiny_directory: Path) -> None:
    weights = load_file(tiny_directory / "model.safetensors")
    table = load_file(tiny_directory / "role_embedding.safetensors")["weight"]
    named = {**weights, "role_embedding.weight": table}
    parameters = {name: tensor.float().requires_grad_() for name, tensor in named.items()}
    model = load_model(tiny_directory, numeric("fp32"))
    model = Decoder(model.config, parameters, model.numeric, model.rules)
    roles = torch.tensor([ROLES])
    hidden = model(torch.tensor([TOKENS]), roles, torch.arange(len(TOKENS))[None], attention_mask(roles, roles))
    model.logits(hidden).logsumexp(-1).sum().backward()
    still = [
        name for name, tensor in parameters.items() if tensor.grad is None or not bool(tensor.grad.abs().sum() > 0)
    ]
    assert still == []
