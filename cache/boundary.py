"""The boundary state: a prefix, its K/V cache and its next-token logits, in one construction."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from cache.isolation import cache_tensors
from cache.kv import KVCache
from decode.state import State
from decode.stepper import FunctionalRecord


@dataclass(frozen=True)
class Boundary:
    """The state right after merge's opening delimiter. Owns compact storage; nothing that reads it writes it.

    construction: "live", "incremental", "prefill" or a transplant's name. logits: [B, V], of the last prefix token.
    record: the digest of all that the decoder was shown. margins: of the prefix's own choices, live only.
    rebuild: a prefill's independent second call; None where a replica is a copy.
    """

    construction: str
    state: State
    cache: KVCache
    logits: Tensor
    record: FunctionalRecord
    margins: tuple[float | None, ...] = ()
    rebuild: Callable[[], "Boundary"] | None = field(default=None, repr=False, compare=False)

    def replica(self) -> "Boundary":
        """A second, storage-isolated instance: an independent second call for prefill, else a bit-exact deep copy."""
        if self.rebuild is not None:
            return self.rebuild()
        return replace(self, cache=self.cache.copy(), logits=self.logits.clone(), record=self.record.copy())

    def tensors(self) -> list[Tensor]:
        """Every tensor it owns: keys and values in forward order, then the logits."""
        return [*cache_tensors(self.cache), self.logits]
