"""The decoder: Qwen2.5 in plain PyTorch, one page, with a role term at the input and a cache it does not know.

Read top to bottom. Every numeric step is named through `observe`, in forward order, so that two runs, or a run here
and one under transformers, can be compared step by step. Source of names and of the rounding order: transformers
`models/qwen2/modeling_qwen2.py` (4.46 to 5.24). Shapes: B batch, T query length, S key length, H query heads,
H_kv key/value heads, D head size, E hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from minimodel.attention import ATTENTION_KERNELS
from minimodel.config import ModelConfig
from minimodel.errors import InputError
from minimodel.layers import SILU_KERNELS, RotaryTables, Silu, rms_norm, rotate
from minimodel.linear import LINEAR_KERNELS, Joint, Linear, together
from minimodel.numerics import NumericContract
from minimodel.packed import Part
from minimodel.roles import NUM_ROLES, RoleRules, causal_mask, check_ids, check_mask

Observe = Callable[[str, Tensor], None]
Record = Callable[[Tensor, Tensor | None, Tensor, Tensor | None], None]  # input_ids, roles, position_ids, mask
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, query, new keys and values -> attention's output


class Cache(Protocol):
    """What the decoder asks of a cache: the length it holds, and to append one layer's new keys and values."""

    def __len__(self) -> int: ...

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values [B, H_kv, T, D] -> all of this layer's so far, [B, H_kv, S, D] each."""
        ...


@dataclass(frozen=True)
class Layer:
    """One decoder layer: two norm weights [E] and seven linear maps, their weights already inside the kernel.

    Maps of one input stand together: q, k, v and gate, up.
    """

    input_layernorm: Tensor
    qkv_proj: Joint
    o_proj: Linear
    post_attention_layernorm: Tensor
    gate_up_proj: Joint
    down_proj: Linear


class Decoder:
    """A Qwen2.5 decoder over named weights.

    weights: the checkpoint's own names (`model.embed_tokens.weight` [V, E], `model.layers.0.self_attn.q_proj.weight`
    [H*D, E], ...), all in the contract's dtype, plus `role_embedding.weight` [rows, E] where the checkpoint has a role
    table. Without `lm_head.weight` the head is tied to the embedding. The `plain` kernel copies nothing: parameters
    that require gradients train. A layer runs where its weights lie; hidden states, mask and rotary tables move at each
    border between devices, and a tied head that lies on another device than the embedding holds a copy.
    """

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
        self.embed_tokens = weights["model.embed_tokens.weight"]
        self.role_embedding = weights.get("role_embedding.weight")
        self.norm = weights["model.norm.weight"]
        # before the layers: a kernel that packs holds the largest weight twice, and nothing else is there yet
        self.lm_head = self._head(weights.get("lm_head.weight"))
        self.layers = tuple(
            _layer(weights, f"model.layers.{i}.", numeric.linear) for i in range(config.num_hidden_layers)
        )
        self.places = tuple(layer.input_layernorm.device for layer in self.layers)
        before = (self.embed_tokens.device, *self.places)
        self._borders = {i: place for i, place in enumerate(self.places) if place != before[i]}
        self.rotary = RotaryTables(
            config.head_dim, config.rope_theta, self.embed_tokens.dtype, self.embed_tokens.device
        )

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

        `roles` are raw roles 0-5, None exactly for a stock checkpoint. `mask` None means plain causal attention,
        whatever the roles: who may see whom is the mask's alone (`roles.attention_mask`).
        `record` is called once, before anything else, with the four tensors that the call goes on to read.
        Errors: InputError for a mask of another dtype or shape, for roles without a role table or the reverse, and on
        the CPU for token ids, roles or positions out of range.
        """
        if record is not None:
            record(input_ids, roles, position_ids, mask)
        note = observe or unobserved
        length = input_ids.shape[1]
        key_length = length + (0 if cache is None else len(cache))
        check_mask(mask, input_ids.shape[0], length, key_length)
        last = check_ids("position_ids", position_ids, self.config.max_position_embeddings)
        if mask is None and length > 1 and key_length > length:
            mask = causal_mask(length, key_length, input_ids.device)
        hidden_states = self.embed(input_ids, roles)
        note("embed", hidden_states)
        rotary = self.rotary.at(position_ids, max(key_length, last + 1))
        held = mask

        def attend(index: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            nonlocal held
            held = None if held is None else held.to(query.device)
            if cache is not None:
                keys, values = cache.append(index, keys, values)
            return self.attend(query, keys, values, held, self.scaling)

        return self.through_layers(hidden_states, rotary, attend, note)

    def through_layers(
        self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, note: Observe
    ) -> Tensor:
        """All layers and the final norm, [B, T, E] -> [B, T, E]. `attend` holds the caches and the masks."""
        for index, layer in enumerate(self.layers):
            name = f"layers.{index}."
            if index in self._borders:  # moving changes no bit
                place = self._borders[index]
                hidden_states, rotary = hidden_states.to(place), (rotary[0].to(place), rotary[1].to(place))
            normed = rms_norm(hidden_states, layer.input_layernorm, self.config.rms_norm_eps)
            note(name + "input_layernorm", normed)
            hidden_states = hidden_states + self._attention(index, layer, normed, rotary, attend, note)
            note(name + "attention_residual", hidden_states)
            normed = rms_norm(hidden_states, layer.post_attention_layernorm, self.config.rms_norm_eps)
            note(name + "post_attention_layernorm", normed)
            hidden_states = hidden_states + _mlp(name, layer, normed, self.silu, note)
            note(name + "mlp_residual", hidden_states)
        hidden_states = rms_norm(hidden_states, self.norm, self.config.rms_norm_eps)
        note("norm", hidden_states)
        return hidden_states

    def _head(self, weight: Tensor | None) -> Linear:
        """The output head, from a weight of its own or the embedding's, where the final norm lies."""
        weight = self.embed_tokens.to(self.norm.device) if weight is None else weight
        return LINEAR_KERNELS[self.numeric.linear](weight, None)

    def embed(self, input_ids: Tensor, roles: Tensor | None) -> Tensor:
        """embed_tokens[token] + role_embedding[offset + role], the sum in the model dtype: [B, T] -> [B, T, E]."""
        if (roles is None) != (self.role_embedding is None):
            table = "no role table" if roles is not None else "a role table"
            raise InputError(f"roles: expected roles exactly where the checkpoint has a role table, found {table}")
        check_ids("input_ids", input_ids, self.config.vocab_size)
        hidden_states = F.embedding(input_ids, self.embed_tokens)
        if roles is None or self.role_embedding is None:
            return hidden_states
        check_ids("roles", roles, NUM_ROLES)
        return hidden_states + F.embedding(roles + self.rules.role_offset, self.role_embedding)

    def logits(self, hidden_states: Tensor, observe: Observe | None = None) -> Tensor:
        """[B, T, E] -> [B, T, V] in the model dtype; no cast to FP32: the argmax sees the model's own rounding.

        They are made where the head lies, and given back on the embedding's device, where choices are made.
        """
        # contiguous: torch multiplies a strided [B, 1, E] (the last row of a prefill) copy by copy, but makes it one
        # product of B rows where parameters require gradients, as transformers' do; in FP32 the two differ in bits
        logits = self.lm_head(hidden_states.contiguous()).to(self.embed_tokens.device)
        (observe or unobserved)("logits", logits)
        return logits

    def _attention(
        self,
        index: int,
        layer: Layer,
        normed: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        note: Observe,
    ) -> Tensor:
        """Grouped-query attention with biased q, k, v and an unbiased o: [B, T, E] -> [B, T, E]."""
        batch, length, _ = normed.shape
        heads = (batch, length, -1, self.config.head_dim)
        name = f"layers.{index}.self_attn."
        query, keys, values = layer.qkv_proj(normed)
        note(name + "q_proj", query)
        note(name + "k_proj", keys)
        note(name + "v_proj", values)
        # [B, T, H*D] -> [B, T, H, D] -> [B, H, T, D]
        query = rotate(query.view(heads), *rotary).transpose(1, 2)
        keys = rotate(keys.view(heads), *rotary).transpose(1, 2)
        values = values.view(heads).transpose(1, 2)
        note(name + "q_rotary", query)
        note(name + "k_rotary", keys)
        out = attend(index, query, keys, values).reshape(batch, length, -1)
        note(name + "attention", out)
        out = layer.o_proj(out)
        note(name + "o_proj", out)
        return out


def _mlp(name: str, layer: Layer, normed: Tensor, silu: Silu, note: Observe) -> Tensor:
    """SwiGLU: down(silu(gate(x)) * up(x)), [B, T, E] -> [B, T, E]; silu and product each round to the model dtype."""
    gate, up = layer.gate_up_proj(normed)
    note(name + "mlp.gate_proj", gate)
    note(name + "mlp.up_proj", up)
    product = silu(gate) * up
    note(name + "mlp.product", product)
    down = layer.down_proj(product)
    note(name + "mlp.down_proj", down)
    return down


def _layer(weights: Mapping[str, Tensor], name: str, kernel: str) -> Layer:
    def part(module: str) -> Part:
        return weights[f"{name}{module}.weight"], weights.get(f"{name}{module}.bias")

    return Layer(
        input_layernorm=weights[name + "input_layernorm.weight"],
        qkv_proj=together(kernel, [part(f"self_attn.{x}_proj") for x in "qkv"]),
        o_proj=LINEAR_KERNELS[kernel](*part("self_attn.o_proj")),
        post_attention_layernorm=weights[name + "post_attention_layernorm.weight"],
        gate_up_proj=together(kernel, [part("mlp.gate_proj"), part("mlp.up_proj")]),
        down_proj=LINEAR_KERNELS[kernel](*part("mlp.down_proj")),
    )


def unobserved(name: str, tensor: Tensor) -> None:
    """The default observer."""
