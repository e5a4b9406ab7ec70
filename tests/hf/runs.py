"""Requests for the ladder, through our decoder or through transformers, in one call or token by token."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cache.kv import KVCache
from decode.contract import Contract
from minimodel.bits import same_bits
from minimodel.decoder import Decoder, Observe
from minimodel.roles import NUM_ROLES, VISIBILITY
from tests.hf import versions
from tests.hf.hooks import observing
from tests.hf.reference import Reference

# wide and long enough for the two SDPA kernels to differ in BF16 too: their sums differ late in FP32, and only a few
# of them lie where BF16 rounds apart
WIDE = {"hidden_size": 256}
CONTRACT = {"caps": {"branch": 64, "merge": 64, "answer": 32}}
CONTENT = (30, 25, 20, 22, 30, 20)


@dataclass(frozen=True)
class Request:
    """input_ids, roles, position_ids int64 [B, T]; mask bool [B, 1, T, T], or None for plain causal attention."""

    input_ids: Tensor
    roles: Tensor | None
    position_ids: Tensor
    mask: Tensor | None

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]

    def call(self, start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """The arguments of one call over tokens start to stop-1, the earlier ones in the cache."""
        part = slice(start, stop)
        return (
            self.input_ids[:, part],
            None if self.roles is None else self.roles[:, part],
            self.position_ids[:, part],
            None if self.mask is None else self.mask[:, :, part, :stop],
        )


def role_mask(roles: Tensor, visibility: tuple[tuple[int, ...], ...] = VISIBILITY) -> Tensor:
    """roles [B, T] -> bool [B, 1, T, T], written out afresh: token q sees token k when k <= q and the table says so.

    The loops are the point: nothing of the decoder's own mask code is used.
    """
    batch, length = roles.shape
    mask = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for b, row in enumerate(roles.tolist()):
        for q in range(length):
            for k in range(q + 1):
                mask[b, 0, q, k] = visibility[row[q]][row[k]] == 1
    return mask


def six_blocks(directory: Path, seed: int = 0, content: tuple[int, ...] = (9, 6, 7, 5, 8, 4)) -> Request:
    """Two rows over all six blocks: random ordinary tokens, the second row's block lengths in another order."""
    contract, generator = Contract.load(directory), torch.Generator().manual_seed(seed)
    ordinary = contract.ordinary.nonzero().flatten()
    tokens: list[list[int]] = [[], []]
    roles: list[list[int]] = [[], []]
    for row, lengths in enumerate((content, tuple(reversed(content)))):
        for role in range(NUM_ROLES):
            chosen = ordinary[torch.randint(len(ordinary), (lengths[role],), generator=generator)]
            tokens[row] += [contract.open_ids[role], *chosen.tolist(), contract.close_ids[role]]
            roles[row] += [role] * (lengths[role] + 2)
    role_ids = torch.tensor(roles)
    positions = torch.arange(role_ids.shape[1]).expand(2, -1)
    return Request(torch.tensor(tokens), role_ids, positions, role_mask(role_ids, contract.rules.visibility))


def plain(vocab_size: int, length: int = 48, seed: int = 0) -> Request:
    """Two rows of random tokens without roles and without a mask: what a stock checkpoint is given."""
    tokens = torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    return Request(tokens, None, torch.arange(length).expand(2, -1), None)


Run = dict[str, Tensor]  # every layer's key and value, then hidden states and logits of every call, in forward order


def calls(length: int, construction: str) -> list[tuple[int, int]]:
    """(start, stop) of each call: one for "prefill", one per token for "incremental"; "chunks" mixes both."""
    half = length // 2
    return {
        "prefill": [(0, length)],
        "incremental": [(t, t + 1) for t in range(length)],
        "chunks": [(0, half), (half, length - 1), (length - 1, length)],
    }[construction]


@torch.inference_mode()
def run_ours(model: Decoder, request: Request, construction: str, observe: Observe | None = None) -> Run:
    """Logits only of each call's last token, on both sides: the number of rows can move the bits of a product."""
    cache, outputs = KVCache.for_model(model, request.input_ids.shape[0], request.length), {}
    for start, stop in calls(request.length, construction):
        hidden = model(*request.call(start, stop), cache, observe)
        outputs |= {f"hidden {start}": hidden, f"logits {start}": model.logits(hidden[:, -1:])}
    return {f"layer {layer} {name}": tensor for layer, name, tensor in cache.tensors()} | outputs


@torch.inference_mode()
def run_theirs(reference: Reference, request: Request, construction: str, observe: Observe | None = None) -> Run:
    cache, outputs = versions.new_cache(), {}
    for start, stop in calls(request.length, construction):
        with observing(reference.model.model, observe):
            hidden = reference.hidden(*request.call(start, stop), cache)
        outputs |= {f"hidden {start}": hidden, f"logits {start}": reference.logits(hidden[:, -1:])}
    pairs = enumerate(versions.keys_and_values(cache))
    return {f"layer {i} {name}": held for i, pair in pairs for name, held in zip(("key", "value"), pair)} | outputs


def differing(left: Run, right: Run) -> list[str]:
    """Names of the tensors that are not equal in dtype, shape and raw bits, in order."""
    assert list(left) == list(right), "two different runs"
    return [name for name in left if not same_bits(left[name], right[name])]
