"""The decoder: Qwen2.5 in plain PyTorch, with a role term at the input and any cache that has `append`.

Every numeric step is named through `observe`, in forward order, so that two runs, or a run here and one under
transformers, can be compared step by step. Source of names and rounding order: transformers
`models/qwen2/modeling_qwen2.py` (4.46 to 5.24). Shapes: B batch, T query length, S key length, H query heads,
H_kv key/value heads, D head size, E hidden size, I intermediate size, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from minimodel.attention import ATTENTION_KERNELS, SeveralAttention
from minimodel.config import ModelConfig
from minimodel.errors import InputError
from minimodel.layers import SILU_KERNELS, RotaryTables, rms_norm, rotate
from minimodel.linear import LINEAR_KERNELS, Joint, Linear, joint_of, linear_of
from minimodel.numerics import NumericContract
from minimodel.roles import NUM_ROLES, RoleRules, causal_mask, check_ids, check_mask

Observe = Callable[[str, Tensor], None]
Record = Callable[[Tensor, Tensor | None, Tensor, Tensor | None], None]  # input_ids, roles, position_ids, mask
Note = Callable[[str, Tensor], Tensor]  # shows a named step to `observe` and returns its tensor
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, query, new keys and values -> [B, T, H, D]


class Cache(Protocol):
    """What the decoder needs of a cache. `append`: a layer's new [B, H_kv, T, D] twice -> all [B, H_kv, S, D]."""

    def __len__(self) -> int: ...
    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Layer:
    """One decoder layer. The linear maps hold their weights in the layout of the contract's linear kernel."""

    input_layernorm: Tensor  # [E]
    qkv_proj: Joint  # q_proj, k_proj, v_proj: [B, T, E] -> [B, T, H*D], [B, T, H_kv*D], [B, T, H_kv*D], with biases
    o_proj: Linear  # [B, T, H*D] -> [B, T, E]
    post_attention_layernorm: Tensor  # [E]
    gate_up_proj: Joint  # gate_proj, up_proj: [B, T, E] -> [B, T, I] twice
    down_proj: Linear  # [B, T, I] -> [B, T, E]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], name: str, kernel: str) -> "Layer":
        """Takes the weights of one layer by their names in the checkpoint; `name` ends with a dot."""
        return cls(
            weights[name + "input_layernorm.weight"],
            joint_of(kernel, weights, *(f"{name}self_attn.{x}_proj" for x in "qkv")),
            linear_of(kernel, weights, name + "self_attn.o_proj"),
            weights[name + "post_attention_layernorm.weight"],
            joint_of(kernel, weights, name + "mlp.gate_proj", name + "mlp.up_proj"),
            linear_of(kernel, weights, name + "mlp.down_proj"),
        )


class Decoder:
    """A Qwen2.5 decoder over named weights.

    weights: under the checkpoint's names (`model.embed_tokens.weight` [V, E], ...; see weights.md), all in the
    contract's dtype, plus `role_embedding.weight` [rows, E] where the checkpoint has a role table. Without
    `lm_head.weight` the head is tied to the embedding. The `plain` kernel copies nothing: parameters that require
    gradients train. Each layer runs on the device of its weights.
    """

    attend_several: SeveralAttention | None = None  # of several requests in one call (see `decode.together`)

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        numeric: NumericContract,
        rules: RoleRules | None = None,
    ) -> None:
        self.config, self.numeric, self.rules = config, numeric, rules or RoleRules()
        self.attend, self.silu = ATTENTION_KERNELS[numeric.attention], SILU_KERNELS[numeric.linear]
        self.scaling = config.head_dim**-0.5
        self.embed_tokens = weights["model.embed_tokens.weight"]  # [V, E]
        self.role_embedding = weights.get("role_embedding.weight")  # [rows, E]
        self.norm = weights["model.norm.weight"]  # [E]
        # before the layers: a kernel that packs holds the largest weight twice, and nothing else is there yet
        head = weights.get("lm_head.weight")
        head = self.embed_tokens.to(self.norm.device) if head is None else head  # [V, E]
        self.lm_head = LINEAR_KERNELS[numeric.linear](head, None)
        names = [f"model.layers.{i}." for i in range(config.num_hidden_layers)]
        self.layers = tuple(Layer.of(weights, name, numeric.linear) for name in names)
        self.places = tuple(layer.input_layernorm.device for layer in self.layers)
        device = self.embed_tokens.device
        self.rotary = RotaryTables(config.head_dim, config.rope_theta, self.embed_tokens.dtype, device)

    def __call__(
        self,
        input_ids: Tensor,
        roles: Tensor | None,
        position_ids: Tensor,
        mask: Tensor | None,
        cache: Cache | None = None,
        observe: Observe | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """input_ids, roles, position_ids int64 [B, T]; mask bool [B, 1, T, S]; cache of S - T tokens -> [B, T, E].

        `roles` are raw roles 0-5, None exactly for a stock checkpoint. `mask` None means plain causal attention: only
        the mask (`roles.attention_mask`) restricts visibility. `record` is called first, with the four input tensors.
        InputError for a mask of another dtype or shape, for roles without a role table or the reverse, and on the CPU
        for token ids, roles or positions out of range.
        """
        if record is not None:
            record(input_ids, roles, position_ids, mask)
        batch, length = input_ids.shape  # B, T
        key_length = length + (0 if cache is None else len(cache))  # S
        check_mask(mask, batch, length, key_length)
        last = check_ids("position_ids", position_ids, self.config.max_position_embeddings)
        if mask is None and length > 1 and key_length > length:
            mask = causal_mask(length, key_length, input_ids.device)

        def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if cache is not None:
                keys, values = cache.append(layer, keys, values)  # [B, H_kv, S, D]
            return self.attend(query, keys, values, None if mask is None else mask.to(query.device), self.scaling)

        note = noting(observe)
        hidden_states = note("embed", self.embed(input_ids, roles))  # [B, T, E]
        cos, signed_sin = self.rotary.at(position_ids, max(key_length, last + 1))  # [B, T, 1, D]
        return self.through_layers(hidden_states, cos, signed_sin, attend, note)  # [B, T, E]

    def embed(self, input_ids: Tensor, roles: Tensor | None) -> Tensor:
        """embed_tokens[token] + role_embedding[offset + role], the sum in the model dtype: [B, T] -> [B, T, E]."""
        if (roles is None) != (self.role_embedding is None):
            table = "no role table" if roles is not None else "a role table"
            raise InputError(f"roles: expected roles exactly where the checkpoint has a role table, found {table}")
        check_ids("input_ids", input_ids, self.config.vocab_size)
        hidden_states = F.embedding(input_ids, self.embed_tokens)  # [B, T, E]
        if roles is None or self.role_embedding is None:
            return hidden_states
        check_ids("roles", roles, NUM_ROLES)
        return hidden_states + F.embedding(roles + self.rules.role_offset, self.role_embedding)  # [B, T, E]

    def through_layers(
        self, hidden_states: Tensor, cos: Tensor, signed_sin: Tensor, attend: Attend, note: Note
    ) -> Tensor:
        """Runs all layers and the final norm, [B, T, E] -> [B, T, E]. `attend` holds the caches and the masks."""
        eps = self.config.rms_norm_eps
        for i, (layer, place) in enumerate(zip(self.layers, self.places)):
            name = f"layers.{i}."
            hidden_states, cos, signed_sin = (x.to(place) for x in (hidden_states, cos, signed_sin))  # changes no bit
            normed = note(name + "input_layernorm", rms_norm(hidden_states, layer.input_layernorm, eps))  # [B, T, E]
            attn_output = self.self_attn(i, layer, normed, cos, signed_sin, attend, note)  # [B, T, E]
            hidden_states = note(name + "attention_residual", hidden_states + attn_output)  # [B, T, E]
            normed = rms_norm(hidden_states, layer.post_attention_layernorm, eps)  # [B, T, E]
            note(name + "post_attention_layernorm", normed)
            down = self.mlp(layer, normed, name + "mlp.", note)  # [B, T, E]
            hidden_states = note(name + "mlp_residual", hidden_states + down)  # [B, T, E]
        return note("norm", rms_norm(hidden_states, self.norm, eps))  # [B, T, E]

    def self_attn(
        self, i: int, layer: Layer, normed: Tensor, cos: Tensor, signed_sin: Tensor, attend: Attend, note: Note
    ) -> Tensor:
        """Grouped-query attention with biased q, k, v and an unbiased o: [B, T, E] -> [B, T, E]."""
        batch, length, _ = normed.shape
        heads, name = (batch, length, -1, self.config.head_dim), f"layers.{i}.self_attn."
        query, keys, values = layer.qkv_proj(normed)  # [B, T, H*D], [B, T, H_kv*D], [B, T, H_kv*D]
        note(name + "q_proj", query)
        note(name + "k_proj", keys)
        note(name + "v_proj", values)
        query = note(name + "q_rotary", rotate(query.view(heads), cos, signed_sin).transpose(1, 2))  # [B, H, T, D]
        keys = note(name + "k_rotary", rotate(keys.view(heads), cos, signed_sin).transpose(1, 2))  # [B, H_kv, T, D]
        values = values.view(heads).transpose(1, 2)  # [B, H_kv, T, D]
        attn_output = attend(i, query, keys, values).reshape(batch, length, -1)  # [B, T, H, D] -> [B, T, H*D]
        note(name + "attention", attn_output)
        return note(name + "o_proj", layer.o_proj(attn_output))  # [B, T, E]

    def mlp(self, layer: Layer, normed: Tensor, name: str, note: Note) -> Tensor:
        """SwiGLU, [B, T, E] -> [B, T, E]: down(silu(gate(x)) * up(x)); silu and product each round to the dtype."""
        gate, up = layer.gate_up_proj(normed)  # [B, T, I]
        note(name + "gate_proj", gate)
        note(name + "up_proj", up)
        product = note(name + "product", self.silu(gate) * up)  # [B, T, I]
        return note(name + "down_proj", layer.down_proj(product))  # [B, T, E]

    def logits(self, hidden_states: Tensor, observe: Observe | None = None) -> Tensor:
        """[B, T, E] -> [B, T, V] in the model dtype, whose rounding argmax sees, on the embedding's device."""
        # contiguous: torch multiplies a strided [B, 1, E] (the last row of a prefill) copy by copy, but makes it one
        # product of B rows where parameters require gradients, as transformers' do; in FP32 the two differ in bits
        logits = self.lm_head(hidden_states.contiguous()).to(self.embed_tokens.device)  # [B, T, V]
        return noting(observe)("logits", logits)


def noting(observe: Observe | None) -> Note:
    """Returns a function that shows a step to `observe`, if there is one, and returns the step's tensor."""

    def note(name: str, tensor: Tensor) -> Tensor:
        if observe is not None:
            observe(name, tensor)
        return tensor

    return note
