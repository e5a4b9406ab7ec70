"""Every numeric step of transformers' Qwen2 under our observe names (`minimodel/decoder.py`), in forward order.

Module hooks see everything but the rotation, which is a function: its global name in the modelling file is wrapped
while the hooks are in place.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from minimodel.decoder import Observe
from tests.hf import versions

OUTPUTS = (  # of a decoder layer's submodules, under their own names
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
INPUTS = {  # steps that are no module's output, seen as the next module's input
    "self_attn.o_proj": "self_attn.attention",
    "post_attention_layernorm": "attention_residual",
    "mlp.down_proj": "mlp.product",
}


@contextmanager
def observing(base: Any, observe: Observe | None) -> Iterator[None]:
    """Calls `observe(name, tensor)` at every step of the base model (Qwen2Model) until the block ends.

    The logits are not among them: the caller of the head notes those that belong to the trace.
    """
    if observe is None:
        yield
        return
    with ExitStack() as stack:
        handles = [base.layers[0].register_forward_pre_hook(_input(observe, "embed"), with_kwargs=True)]
        current = [""]
        for index, layer in enumerate(base.layers):
            handles += _layer_hooks(layer, f"layers.{index}.", observe, current)
        handles.append(base.norm.register_forward_hook(_output(observe, "norm")))
        for handle in handles:
            stack.callback(handle.remove)
        rotate = versions.modeling_qwen2.apply_rotary_pos_emb

        def observed(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            query, keys = rotate(*args, **kwargs)
            observe(current[0] + "self_attn.q_rotary", query)
            observe(current[0] + "self_attn.k_rotary", keys)
            return query, keys

        stack.enter_context(patch.object(versions.modeling_qwen2, "apply_rotary_pos_emb", observed))
        yield


def _layer_hooks(layer: nn.Module, name: str, observe: Observe, current: list[str]) -> list[Any]:
    """Hooks of one layer; `current` holds the name of the layer whose attention runs, for the rotation."""

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        current[0] = name

    handles = [layer.register_forward_pre_hook(enter)]
    for path, step in INPUTS.items():
        hook = _input(observe, name + step)
        handles.append(layer.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True))
    for path in OUTPUTS:
        handles.append(layer.get_submodule(path).register_forward_hook(_output(observe, name + path)))
    handles.append(layer.register_forward_hook(_output(observe, name + "mlp_residual")))
    return handles


def _output(observe: Observe, name: str) -> Callable[..., None]:
    return lambda module, args, output: observe(name, versions.first_output(output))


def _input(observe: Observe, name: str) -> Callable[..., None]:
    return lambda module, args, kwargs: observe(name, args[0] if args else kwargs["hidden_states"])
