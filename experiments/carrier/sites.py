"""Places of the cache at which a partial transplant is made."""

from dataclasses import dataclass

from decode.state import State
from minimodel.config import ModelConfig
from minimodel.roles import ROLE_NAMES


@dataclass(frozen=True)
class Site:
    """Arguments of `cache.transplant`: None means all. `family` groups sites of one kind in reports."""

    name: str
    family: str
    layers: tuple[int, ...] | None = None
    tensors: str = "kv"
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None


def sites(config: ModelConfig, state: State) -> list[Site]:
    """Every site of a prefix, in report order: whole and empty, K and V, layers, blocks, heads, layer by K or V."""
    layers = range(config.num_hidden_layers)
    found = [
        Site("whole", "whole"),
        Site("empty", "whole", layers=()),
        Site("keys", "tensor", tensors="k"),
        Site("values", "tensor", tensors="v"),
    ]
    found += [Site(f"first_{k}", "first", layers=tuple(layers[:k])) for k in layers if k]
    found += [Site(f"last_{k}", "last", layers=tuple(layers[len(layers) - k :])) for k in layers if k]
    found += [Site(f"layer_{i}", "layer", layers=(i,)) for i in layers]
    found += [Site(f"layer_{i}_keys", "layer_keys", layers=(i,), tensors="k") for i in layers]
    found += [Site(f"layer_{i}_values", "layer_values", layers=(i,), tensors="v") for i in layers]
    for role in sorted(set(state.roles)):
        slots = tuple(slot for slot, held in enumerate(state.roles) if held == role)
        found.append(Site(f"block_{ROLE_NAMES[role]}", "block", positions=slots))
    if config.num_key_value_heads > 1:
        found += [Site(f"head_{h}", "head", heads=(h,)) for h in range(config.num_key_value_heads)]
    return found
