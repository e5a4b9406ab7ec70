"""A checkpoint directory under transformers: loaded as users load it, with the role term added to inputs_embeds.

Every number comes out of transformers' own modules: embedding, rotary table, decoder layers, DynamicCache, head.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from minimodel.checkpoint import ROLE_TABLE, open_checkpoint
from minimodel.config import ModelConfig
from minimodel.decoder import Record
from minimodel.errors import refuse
from minimodel.roles import RoleRules
from tests.hf import versions


class Reference:
    """Qwen2ForCausalLM of a directory in one dtype, and the role table beside it where there is one."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, attention: str = "sdpa", device: torch.device | None = None
    ) -> None:
        """Loads with from_pretrained; attention: "sdpa" or "eager". InputError when another RoPE base came out."""
        checkpoint = open_checkpoint(directory)
        self.device, self.attention = device or torch.device("cpu"), attention
        arguments = versions.load_arguments(dtype, attention)
        self.model: Any = versions.modeling_qwen2.Qwen2ForCausalLM.from_pretrained(directory, **arguments)
        torch.nn.Module.to(self.model.eval(), self.device)
        self.config: ModelConfig = checkpoint.config
        self.rules, self.role_table = RoleRules(), None
        if checkpoint.rules is not None:
            self.rules = checkpoint.rules
            self.role_table = load_file(directory / ROLE_TABLE)["weight"].to(self.device, dtype)
        require_gradients_on(self.model)
        self._cache_name = versions.argument(type(self.model.model).forward, versions.CACHE)
        require_rope_base(self.model, self.config.rope_theta)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.model.embed_tokens.weight.dtype

    def embed(self, input_ids: Tensor, roles: Tensor | None) -> Tensor:
        """embed_tokens, plus the role rows where there is a table, added in the model dtype: [B, T] -> [B, T, E]."""
        embeds = self.model.model.embed_tokens(input_ids)
        if self.role_table is None:
            return embeds
        assert roles is not None, "an adapted checkpoint needs roles"
        return embeds + torch.nn.functional.embedding(roles + self.rules.role_offset, self.role_table)

    def hidden(
        self,
        input_ids: Tensor,
        roles: Tensor | None,
        position_ids: Tensor | None,
        mask: Tensor | None,
        cache: Any,
        record: Record | None = None,
    ) -> Tensor:
        """One call of the base model, which fills `cache`: [B, T] x3, bool [B, 1, T, S] -> [B, T, E] after the norm.

        A stock checkpoint takes input_ids as they are; without mask and position_ids transformers makes its own.
        `record` is called first, with the tensors of this call.
        """
        if record is not None:
            assert position_ids is not None, "a recorded call names its positions"
            record(input_ids, roles, position_ids, mask)
        if mask is not None and self.attention == "eager":
            # transformers' eager adds its mask to the scores: a bool one would add 0 and 1
            wide = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
            mask = wide.masked_fill_(~mask, torch.finfo(self.dtype).min)
        given = {"input_ids": input_ids} if self.role_table is None else {"inputs_embeds": self.embed(input_ids, roles)}
        out = self.model.model(
            **given, attention_mask=mask, position_ids=position_ids, use_cache=True, **{self._cache_name: cache}
        )
        return out[0]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, V] through lm_head."""
        return self.model.lm_head(hidden_states)


def require_gradients_on(model: Any) -> None:
    """InputError for frozen parameters, such as a load under torch.inference_mode leaves: they move bits.

    from_pretrained leaves parameters that require gradients, and for those torch.matmul folds a strided [B, 1, E] input
    (the last hidden states of a prefill, before lm_head) into one product of B rows; for others it makes B products.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise refuse(f"parameter {name}", "requires_grad, as from_pretrained leaves it", "a frozen one")


def rope_base(model: Any) -> float:
    """The base that the loaded model rotates with, read off its own inverse frequencies (FP32, so to 6 digits)."""
    inv_freq = model.model.rotary_emb.inv_freq.to(torch.float64)
    return float(inv_freq[1] ** -inv_freq.numel())  # inv_freq[i] = base ** -(i / number of frequencies)


def require_rope_base(model: Any, expected: float) -> None:
    """InputError when transformers read another base than the checkpoint says, or holds rounded frequencies.

    Release 4 reads `rope_theta`, 5 `rope_parameters.rope_theta`; the one that is not there silently gives 10,000.
    """
    found = rope_base(model)
    if abs(found / expected - 1.0) > 1e-4:
        raise refuse(f"transformers {versions.INSTALLED}: RoPE base", f"the checkpoint's {expected:g}", f"{found:g}")
    if model.model.rotary_emb.inv_freq.dtype != torch.float32:
        raise refuse(
            "RoPE inv_freq dtype", "float32, as from_pretrained keeps it", model.model.rotary_emb.inv_freq.dtype
        )
