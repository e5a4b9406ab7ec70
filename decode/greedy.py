"""Greedy decoding under the structural mask, with physical copies that must agree, and the margin of every choice."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from decode.contract import Contract
from decode.record import FunctionalRecord
from decode.state import State, content_of
from decode.stepper import Stepper, make_ready
from decode.structure import Structure, advance, forced
from minimodel.decoder import Decoder, Observe
from minimodel.errors import InputError
from minimodel.numbers import bits
from minimodel.roles import ANSWER, MERGE, ROLE_NAMES


class RowFailure(RuntimeError):
    """A row that must not be used: copies that disagree, NaN or infinity, a tensor that is not what it claims."""


@dataclass(frozen=True)
class Generated:
    """Tokens chosen or forced, with the margin of each choice (None where forced), and where the structure ended.

    A margin is the best eligible logit less the second best, exact in float64; 0.0 is a tie. tops: the best itself.
    """

    tokens: tuple[int, ...]
    roles: tuple[int, ...]
    margins: tuple[float | None, ...]
    tops: tuple[float | None, ...]
    structure: Structure


@dataclass(frozen=True)
class Suffix:
    """What follows a boundary: every token after the prefix, delimiters included."""

    tokens: tuple[int, ...]
    margins: tuple[float | None, ...]  # as in `Generated`
    tops: tuple[float | None, ...]  # as in `Generated`
    merge: tuple[int, ...]  # the block's content tokens
    answer: tuple[int, ...]  # the block's content tokens
    functional_sha256: str  # the record of prefix and suffix, as they entered the decoder
    synchronised: bool  # prefix and suffix entered alike in all physical copies

    @property
    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {"merge": self.merge, "answer": self.answer}


class BoundaryLike(Protocol):
    """What the suffix decoder needs of a boundary: read only, never written."""

    @property
    def state(self) -> State: ...
    @property
    def logits(self) -> Tensor: ...
    @property
    def record(self) -> FunctionalRecord: ...
    @property
    def cache(self) -> Any: ...


def choose(logits: Tensor, eligible: Tensor) -> tuple[int, float]:
    """The eligible id with the largest logit, and the margin. See `best_two`."""
    token, top, second = best_two(logits, eligible)
    return token, top - second


def best_two(logits: Tensor, eligible: Tensor) -> tuple[int, float, float]:
    """The eligible id with the largest logit, that logit, and the next. logits [B, V], the copies; eligible bool [V].

    Ties go to the lowest id: argmax gives the first of equal maxima (`topk` keeps no such order). Eligibility applies
    before the tie rule. RowFailure when copies differ in any bit or a logit is NaN or infinite; InputError when nothing
    is eligible.
    """
    if eligible.dtype != torch.bool or eligible.shape != logits.shape[1:]:
        found = f"{eligible.dtype} {list(eligible.shape)}"
        raise InputError(f"eligible: expected torch.bool {list(logits.shape[1:])}, found {found}")
    require_equal_copies(logits, "logits")
    low, high = torch.aminmax(logits[0])
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise RowFailure("logits: expected finite values, found NaN or infinity")
    masked = logits[0].masked_fill(~eligible, float("-inf"))
    best = masked.argmax()
    top = masked[best].item()
    if top == float("-inf"):  # every logit is finite
        raise InputError("eligible: expected at least one id that may be chosen, found none")
    masked[best] = float("-inf")
    token = int(best)
    return token, top, masked.max().item()


def equal_copies(tensor: Tensor) -> bool:
    """Every copy along the first axis holds the same bits."""
    return tensor.shape[0] <= 1 or torch.equal(bits(tensor[1:]), bits(tensor[:1].expand_as(tensor[1:])))


def require_equal_copies(tensor: Tensor, name: str) -> None:
    """RowFailure unless every copy along the first axis holds the same bits."""
    if not equal_copies(tensor):
        raise RowFailure(f"{name}: the physical copies differ in bits")


def generate(
    stepper: Stepper,
    contract: Contract,
    structure: Structure,
    logits: Tensor | None,
    stop: Callable[[Structure], bool],
    observe: Observe | None = None,
) -> tuple[Generated, Tensor]:
    """Decodes until `stop`; returns what was generated and the last hidden state [B, 1, E].

    `logits` [B, V] belong to the last token fed, None when the first token is forced. The token at which `stop` holds
    is fed too, unless it ends the answer: nothing would read its K/V. No logits are computed for a forced token.
    `observe` sees the decoder's steps, not the logits of the choices.
    """
    eligible = contract.eligible.to(stepper.model.numeric.torch_device)
    tokens: list[int] = []
    roles: list[int] = []
    margins: list[float | None] = []
    tops: list[float | None] = []
    hidden = torch.empty(0)
    while not stop(structure):
        token, margin, top = forced(contract, structure), None, None
        if token is None:
            assert logits is not None, "a free choice needs logits"
            try:
                token, top, second = best_two(logits, eligible[structure.block])
            except RowFailure as failure:
                at = f"block {ROLE_NAMES[structure.block]}, step {structure.content + 1}"
                raise RowFailure(f"{at}, slot {stepper.length}: {failure}") from None
            margin = top - second
        role, structure = structure.block, advance(contract, structure, token)
        tokens.append(token)
        roles.append(role)
        margins.append(margin)
        tops.append(top)
        if structure.done:
            break
        hidden = stepper.feed(token, role, observe)
        free = not stop(structure) and forced(contract, structure) is None
        logits = stepper.model.logits(hidden)[:, 0] if free else None
    return Generated(tuple(tokens), tuple(roles), tuple(margins), tuple(tops), structure), hidden


@torch.inference_mode()
def greedy_suffix(model: Decoder, boundary: BoundaryLike) -> Suffix:
    """Continues a boundary to the end of the answer on a working copy of its cache; the boundary is not written.

    RowFailure when the physical copies disagree in a logit during, or in the cache after, the suffix.
    """
    state = boundary.state
    contract = state.contract
    make_ready(model, contract.rules)
    capacity = len(state) + contract.suffix_limit()
    cache = boundary.cache.copy(capacity)
    stepper = Stepper(model, cache, cache.batch, capacity)
    stepper.resume(state.roles, boundary.record)
    out, _ = generate(stepper, contract, state.structure, boundary.logits, lambda structure: structure.done)
    cache.require_equal_copies()
    return Suffix(
        out.tokens,
        out.margins,
        out.tops,
        merge=content_of(contract, out.tokens, MERGE, first_open=True),
        answer=content_of(contract, out.tokens, ANSWER, first_open=False),
        functional_sha256=stepper.record.sha256(),
        synchronised=stepper.record.synchronised,
    )
