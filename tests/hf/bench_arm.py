"""transformers as a column of `experiments.benchmark`: Qwen2ForCausalLM, DynamicCache and SDPA, under the same mask.

    python -m experiments.benchmark --reference tests.hf.bench_arm

Our own step loop (positions, mask row, one token of both copies per call) feeds it, so that the column shows what
transformers' decoder and cache cost and not what a slow caller adds. A matrix row is that of `tests.hf.record`, whose
mask rows and choices take about a hundredth of the time.
"""

import copy
from pathlib import Path
from typing import Any

from torch import Tensor

from decode.greedy import alone
from decode.state import State
from experiments.benchmark.arms import Arm
from experiments.run.progress import Progress
from experiments.run.tasks import Task
from minimodel.decoder import Observe, Record
from minimodel.numerics import NumericContract
from tests.hf import versions
from tests.hf.record import Recording
from tests.hf.reference import Reference


class HeldCache:
    """A DynamicCache whose `len` is the tokens it holds (transformers' own counts layers)."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return int(self.inner.get_seq_length())

    def copy(self, capacity: int) -> "HeldCache":
        """Returns a copy; `capacity` is not needed, as a DynamicCache grows by concatenation."""
        return HeldCache(copy.deepcopy(self.inner))


class Driven:
    """transformers' model under our decoder's signature."""

    def __init__(self, reference: Reference, numeric: NumericContract) -> None:
        self.reference, self.numeric = reference, numeric
        self.config, self.rules = reference.config, reference.rules

    def __call__(
        self,
        input_ids: Tensor,
        roles: Tensor | None,
        position_ids: Tensor,
        mask: Tensor | None,
        cache: HeldCache,
        observe: Observe | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """As `minimodel.decoder.Decoder`, without an observer."""
        assert observe is None, "the benchmark observes nothing"
        return self.reference.hidden(input_ids, roles, position_ids, mask, cache.inner, record)

    def logits(self, hidden_states: Tensor) -> Tensor:
        return self.reference.logits(hidden_states)


class TransformersArm(Arm):
    """The column of transformers."""

    def new_cache(self, capacity: int, copies: int = 2) -> HeldCache:
        """Neither is needed: a DynamicCache takes the first call's copies and grows by concatenation."""
        return HeldCache(versions.new_cache())

    def tensors(self, cache: HeldCache) -> list[Tensor]:
        return [tensor for pair in versions.keys_and_values(cache.inner) for tensor in pair]

    def row(self, task: Task, prompt: State) -> dict[str, Any]:
        return alone(Recording(self.model.reference, [task], [prompt]).row(0, Progress(1, 0, quiet=True).row("a")))


def open_arm(directory: Path, numeric: NumericContract) -> TransformersArm:
    """Returns the arm of `--reference tests.hf.bench_arm`."""
    reference = Reference(directory, numeric.torch_dtype, device=numeric.torch_device)
    return TransformersArm(f"transformers {versions.INSTALLED}", Driven(reference, numeric), versions.matching_kernel())
