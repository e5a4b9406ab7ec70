"""The decoder: Qwen2.5 in plain PyTorch, with a role term at the input and any cache that has `append`.

Names and rounding order are those of transformers `models/qwen2/modeling_qwen2.py` (4.46 to 5.24). Every numeric step
is named through `observe`, in forward order, so that two runs, or a run here and one under transformers, can be
compared step by step. Shapes: B batch, T query length, S key length, H query heads, H_kv key/value heads, D head size,
E hidden size, I intermediate size, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from minimodel.attention import ATTENTION_KERNELS, SeveralAttention
from minimodel.config import ModelConfig
from minimodel.errors import refuse
from minimodel.layers import SILU_KERNELS, RotaryEmbedding, apply_rotary_pos_emb, rms_norm
from minimodel.linear import LINEAR_KERNELS, Projections
from minimodel.numerics import NumericContract
from minimodel.roles import NUM_ROLES, RoleRules, causal_mask, check_ids, check_mask

Observe = Callable[[str, Tensor], None]
Record = Callable[[Tensor, Tensor | None, Tensor, Tensor | None], None]  # input_ids, roles, position_ids, mask
Note = Callable[[str, Tensor], Tensor]  # passes a step's name and tensor to `observe`, and returns the tensor
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, query states, new key and value states -> attention


class Cache(Protocol):
    """What the decoder needs of a cache. `append` takes a layer's new keys and values, [B, H_kv, T, D] each, and
    returns all keys and values of that layer, [B, H_kv, S, D] each. `len` is the number of tokens held.
    """

    def __len__(self) -> int: ...
    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Projections that read the same input are one function, which returns one tensor for each."""

    input_layernorm: Tensor  # [E]
    qkv_proj: Projections  # q, k, v with biases: [B, T, E] -> [B, T, H*D], [B, T, H_kv*D], [B, T, H_kv*D]
    o_proj: Projections  # [B, T, H*D] -> one [B, T, E]
    post_attention_layernorm: Tensor  # [E]
    gate_up_proj: Projections  # gate_proj, up_proj: [B, T, E] -> [B, T, I], [B, T, I]
    down_proj: Projections  # [B, T, I] -> one [B, T, E]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], prefix: str, kernel: str) -> "Layer":
        """Builds a layer from the weights whose names begin with `prefix` ("model.layers.0."); kernel: a linear one."""

        def project(*modules: str) -> Projections:
            names = [prefix + module for module in modules]
            return LINEAR_KERNELS[kernel]([(weights[f"{name}.weight"], weights.get(f"{name}.bias")) for name in names])

        return cls(
            input_layernorm=weights[prefix + "input_layernorm.weight"],
            qkv_proj=project("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            o_proj=project("self_attn.o_proj"),
            post_attention_layernorm=weights[prefix + "post_attention_layernorm.weight"],
            gate_up_proj=project("mlp.gate_proj", "mlp.up_proj"),
            down_proj=project("mlp.down_proj"),
        )


class Decoder:
    """A Qwen2.5 decoder over named weights.

    weights: under the checkpoint's names (`model.embed_tokens.weight` [V, E], ...; see weights.md), all in the
    contract's dtype, plus `role_embedding.weight` [rows, E] where the checkpoint has a role table. Without
    `lm_head.weight` the head is tied to the embedding. The `plain` kernel copies nothing: parameters that require
    gradients train. Each layer runs on the device of its weights.
    """

    attend_several: SeveralAttention | None = None  # not used here: `decode.together` sets it on its copy

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
        # The head comes before the layers: while `packed` packs a weight it holds it twice, and the head is the largest
        # weight, so it is packed while no layer is in memory yet.
        head = weights.get("lm_head.weight")
        head = self.embed_tokens.to(self.norm.device) if head is None else head  # [V, E]; `.to` changes no bit
        self.lm_head = LINEAR_KERNELS[numeric.linear]([(head, None)])  # [B, T, E] -> [B, T, V]
        prefixes = (f"model.layers.{i}." for i in range(config.num_hidden_layers))
        self.layers = tuple(Layer.of(weights, prefix, numeric.linear) for prefix in prefixes)
        self.devices = tuple(layer.input_layernorm.device for layer in self.layers)  # of each layer
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope_theta, self.norm.dtype, self.embed_tokens.device)

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
        InputError for a mask of another dtype or shape, for roles or positions of another shape, for roles without a
        role table or the reverse, and on the CPU for token ids, roles or positions out of range.
        """
        if record is not None:
            record(input_ids, roles, position_ids, mask)
        batch, length = input_ids.shape  # B, T
        key_length = length + (0 if cache is None else len(cache))  # S
        check_mask(mask, batch, length, key_length)
        if mask is None and 1 < length < key_length:
            mask = causal_mask(length, key_length, input_ids.device)  # [1, 1, T, S]

        def attend(layer: int, query_states: Tensor, key_states: Tensor, value_states: Tensor) -> Tensor:
            if cache is not None:
                key_states, value_states = cache.append(layer, key_states, value_states)  # [B, H_kv, S, D] each
            placed = None if mask is None else mask.to(query_states.device)  # [B, 1, T, S], on the layer's device
            return self.attend(query_states, key_states, value_states, placed, self.scaling)  # [B, T, H, D]

        return self.forward(input_ids, roles, position_ids, key_length, attend, observe)  # [B, T, E]

    def forward(
        self,
        input_ids: Tensor,
        roles: Tensor | None,
        position_ids: Tensor,
        key_length: int,
        attend: Attend,
        observe: Observe | None,
    ) -> Tensor:
        """Runs embedding, layers and final norm: [B, T] -> [B, T, E].

        `attend` appends to the caches, applies the masks and calls the attention kernel. key_length is S, the largest
        one where several requests step together.
        """
        note = noting(observe)
        largest = check_ids("position_ids", position_ids, self.config.max_position_embeddings, input_ids.shape)
        hidden_states = note("embed", self.embed(input_ids, roles))  # [B, T, E]
        # a caller may give positions beyond S; on an accelerator, where `largest` is -1, they must be below S
        cos, sin = self.rotary_emb(position_ids, max(key_length, largest + 1))  # [B, T, 1, D] each
        for i, device in enumerate(self.devices):
            hidden_states, cos, sin = (x.to(device) for x in (hidden_states, cos, sin))  # changes no bit
            hidden_states = self.layer(i, hidden_states, cos, sin, attend, noting(observe, f"layers.{i}."))  # [B, T, E]
        return note("norm", rms_norm(hidden_states, self.norm, self.config.rms_norm_eps))  # [B, T, E]

    def embed(self, input_ids: Tensor, roles: Tensor | None) -> Tensor:
        """embed_tokens[token] + role_embedding[offset + role], the sum in the model dtype: [B, T] -> [B, T, E]."""
        if (roles is None) != (self.role_embedding is None):
            expected = "raw roles: there is a role table" if roles is None else "None: there is no role table"
            raise refuse("roles", expected, None if roles is None else list(roles.shape))
        check_ids("input_ids", input_ids, self.config.vocab_size)
        inputs_embeds = F.embedding(input_ids, self.embed_tokens)  # [B, T, E]
        if roles is None or self.role_embedding is None:
            return inputs_embeds
        check_ids("roles", roles, NUM_ROLES, input_ids.shape)
        return inputs_embeds + F.embedding(roles + self.rules.role_offset, self.role_embedding)  # [B, T, E]

    def layer(self, i: int, hidden_states: Tensor, cos: Tensor, sin: Tensor, attend: Attend, note: Note) -> Tensor:
        """Decoder layer i: attention and MLP, each after a norm and added to its input: [B, T, E] -> [B, T, E]."""
        layer, eps = self.layers[i], self.config.rms_norm_eps
        normed = note("input_layernorm", rms_norm(hidden_states, layer.input_layernorm, eps))  # [B, T, E]
        attn_output = self.self_attn(i, normed, cos, sin, attend, note)  # [B, T, E]
        hidden_states = note("attention_residual", hidden_states + attn_output)  # [B, T, E]
        normed = rms_norm(hidden_states, layer.post_attention_layernorm, eps)  # [B, T, E]
        note("post_attention_layernorm", normed)
        return note("mlp_residual", hidden_states + self.mlp(layer, normed, note))  # [B, T, E]

    def self_attn(self, i: int, normed: Tensor, cos: Tensor, sin: Tensor, attend: Attend, note: Note) -> Tensor:
        """Grouped-query attention with biased q, k, v and an unbiased o: [B, T, E] -> [B, T, E]."""
        layer, (batch, length, _) = self.layers[i], normed.shape
        hidden_shape = (batch, length, -1, self.config.head_dim)  # [B, T, H or H_kv, D]
        query, key, value = layer.qkv_proj(normed)  # [B, T, H*D], [B, T, H_kv*D], [B, T, H_kv*D]
        note("self_attn.q_proj", query)
        note("self_attn.k_proj", key)
        note("self_attn.v_proj", value)
        query_states = apply_rotary_pos_emb(query.view(hidden_shape), cos, sin).transpose(1, 2)  # [B, H, T, D]
        note("self_attn.q_rotary", query_states)
        key_states = apply_rotary_pos_emb(key.view(hidden_shape), cos, sin).transpose(1, 2)  # [B, H_kv, T, D]
        note("self_attn.k_rotary", key_states)
        value_states = value.view(hidden_shape).transpose(1, 2)  # [B, H_kv, T, D]
        attn_output = attend(i, query_states, key_states, value_states)  # [B, T, H, D]
        attn_output = note("self_attn.attention", attn_output.reshape(batch, length, -1))  # [B, T, H*D]
        [attn_output] = layer.o_proj(attn_output)  # [B, T, E]
        return note("self_attn.o_proj", attn_output)

    def mlp(self, layer: Layer, normed: Tensor, note: Note) -> Tensor:
        """SwiGLU, [B, T, E] -> [B, T, E]: down(silu(gate(x)) * up(x)); silu and product each round to the dtype."""
        gate, up = layer.gate_up_proj(normed)  # [B, T, I] each
        note("mlp.gate_proj", gate)
        note("mlp.up_proj", up)
        product = note("mlp.product", self.silu(gate) * up)  # [B, T, I]
        [down] = layer.down_proj(product)  # [B, T, E]
        return note("mlp.down_proj", down)

    def logits(self, hidden_states: Tensor, observe: Observe | None = None) -> Tensor:
        """[B, T, E] -> [B, T, V] on the embedding's device. No cast follows: argmax sees the model dtype's rounding."""
        # `contiguous` gives transformers' bits in FP32. The last row of a prefill is a strided [B, 1, E]: torch
        # multiplies it copy by copy, but as one product of B rows where parameters require gradients, as theirs do.
        [logits] = self.lm_head(hidden_states.contiguous())  # [B, T, V]
        return noting(observe)("logits", logits.to(self.embed_tokens.device))  # [B, T, V]


def noting(observe: Observe | None, prefix: str = "") -> Note:
    """Returns a function (name, tensor) -> tensor that calls observe(prefix + name, tensor) if there is an observer."""

    def note(name: str, tensor: Tensor) -> Tensor:
        if observe is not None:
            observe(prefix + name, tensor)
        return tensor

    return note
