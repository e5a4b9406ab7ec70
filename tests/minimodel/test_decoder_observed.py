"""Every step of the decoder is observed, in forward order, and observing leaves the bits alone."""

import torch

from minimodel.bits import same_bits
from minimodel.roles import attention_mask
from tests.minimodel.forward import LAYERS, ROLES, TOKENS, call


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


def test_observed_steps_are_complete_in_order_and_leave_the_bits_alone(bf16):
    plain = call(bf16)
    seen = []
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
