"""The floor under an arm: its linear calls and its SDPA calls alone, same shapes, same weights, back to back."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.kv import KVCache
from minimodel.bits import COPIES
from minimodel.decoder import Decoder

FLOORED = ("repeat_kv", "packed_gqa")  # kernels that call SDPA once a layer


class Floor:
    """One forward call of T tokens over S keys, and the logits of the last, without anything between the products.

    The linear calls are the model's own; the inputs are fixed random numbers; K/V lies as in the model's cache.
    """

    def __init__(self, model: Decoder, length: int, key_length: int, mask: Tensor) -> None:
        """mask: bool [B, 1, T, S]."""
        config, numeric = model.config, model.numeric
        assert numeric.attention in FLOORED, "a kernel that is no single SDPA call has no floor"
        self._model, self._mask = model, mask
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(numeric.torch_dtype).to(numeric.torch_device)

        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._hidden = random(COPIES, length, config.hidden_size)
        self._attended = random(COPIES, length, heads * size)
        self._product = random(COPIES, length, config.intermediate_size)
        self._query = random(COPIES, length, heads, size).transpose(1, 2)
        if numeric.attention == "packed_gqa" and length == 1:
            self._query = self._query.reshape(COPIES, kv_heads, heads // kv_heads, size)
        self._cache = KVCache.for_model(model, COPIES, key_length)
        for layer in range(config.num_hidden_layers):
            self._cache.append(layer, *(random(COPIES, kv_heads, key_length, size) for _ in range(2)))

    def __call__(self) -> None:
        """Every product of the call once."""
        hidden, scale = self._hidden, self._model.config.head_dim**-0.5
        grouped = self._query.shape[1] != self._model.config.num_key_value_heads
        for index, layer in enumerate(self._model.layers):
            layer.qkv_proj(hidden)
            keys, values = self._cache.keys(index), self._cache.values(index)
            F.scaled_dot_product_attention(
                self._query, keys, values, attn_mask=self._mask, scale=scale, enable_gqa=grouped
            )
            layer.o_proj(self._attended)
            layer.gate_up_proj(hidden)
            layer.down_proj(self._product)
        self._model.lm_head(hidden[:, -1:].contiguous())
