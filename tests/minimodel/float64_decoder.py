"""Qwen2.5 written out in float64, token by token and head by head: what the decoder is compared with."""

import numpy as np
from safetensors.torch import load_file

from minimodel.roles import VISIBILITY
from tests.tiny import CONFIG

TOKENS = [5, 9, 200, 31, 31, 7, 260, 12, 99, 268]
ROLES = [0, 0, 0, 1, 1, 2, 3, 4, 4, 5]  # all six
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 32


def norm(x, weight):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"])


def rotate(x, position):
    """One head vector: pairs (i, i + D/2) turn by position / theta^(2i/D)."""
    half = HEAD_DIM // 2
    angle = position / CONFIG["rope_theta"] ** (np.arange(half) * 2 / HEAD_DIM)
    first, second = x[:half], x[half:]
    return np.concatenate(
        (first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle))
    )


def attention(h, w, at, roles):
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


def reference(directory, roles):
    """Final hidden states [T, E], logits [T, V] and the (keys, values) of every layer, all float64."""
    w = {name: tensor.double().numpy() for name, tensor in load_file(directory / "model.safetensors").items()}
    held = []
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
