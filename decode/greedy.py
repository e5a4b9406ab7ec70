"""Greedy decoding under the structural mask (`decode.state`), with physical copies that must agree, and each margin.

Generation, and construction of a cache token by token, are Python generators: each yields a `Step`, which feeds one
token, and is sent what the step computed. `alone` runs the steps of one request. That is the specification;
`decode.batched` runs the steps of several requests together, to the same bits.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from decode.contract import Contract
from decode.record import FunctionalRecord
from decode.state import State, Structure, advance, content_of, forced
from decode.stepper import Stepper, make_ready
from minimodel.bits import RowFailure, require_equal_copies, require_finite
from minimodel.decoder import Decoder, Observe
from minimodel.errors import InputError
from minimodel.roles import ANSWER, MERGE, ROLE_NAMES


@dataclass(frozen=True)
class Generated:
    """Tokens chosen or forced, how each was chosen, and where the structure ended."""

    tokens: tuple[int, ...]
    roles: tuple[int, ...]
    margins: tuple[float | None, ...]  # best eligible logit minus the second best, exact in float64; None where forced
    tops: tuple[float | None, ...]  # the best eligible logit; None where forced
    structure: Structure
    hidden: tuple[Tensor, ...] = field(repr=False, compare=False)  # [B, 1, E] after each token that was fed


@dataclass(frozen=True)
class Suffix:
    """What follows a boundary: every token after the prefix, delimiters included."""

    tokens: tuple[int, ...]
    margins: tuple[float | None, ...]  # as in `Generated`
    tops: tuple[float | None, ...]  # as in `Generated`
    merge: tuple[int, ...]  # content tokens of merge, without delimiters
    answer: tuple[int, ...]  # content tokens of the answer, without delimiters
    functional_sha256: str  # the record of prefix and suffix, as they entered the decoder
    synchronised: bool  # whether all physical copies had the same prefix and suffix
    cache_length: int  # tokens in the working cache at the end: the delimiter that closes the answer is not fed


Choice = tuple[int, float, float]  # the token chosen, its logit, and the second best logit


@dataclass(frozen=True)
class Step:
    """One token of one request to feed."""

    stepper: Stepper
    token: int
    role: int
    eligible: Tensor | None = None  # bool [V], the tokens that may come next; None where the next one needs no logits
    observe: Observe | None = None


Stepped = tuple[Tensor, Choice | None]  # what a step computed: hidden state [B, 1, E], and the choice of the next token
T = TypeVar("T")
Steps = Generator[Step, Stepped, T]  # a RowFailure of a step is raised at the `yield` of that step


class BoundaryLike(Protocol):
    """What the suffix decoder reads of a boundary (`cache.Boundary`); it writes none of it."""

    @property
    def state(self) -> State: ...
    @property
    def logits(self) -> Tensor: ...
    @property
    def record(self) -> FunctionalRecord: ...
    @property
    def cache(self) -> Any: ...  # a `cache.KVCache`


def choose(logits: Tensor, eligible: Tensor) -> tuple[int, float]:
    """Returns the eligible id with the largest logit, and the margin. See `best_two`."""
    token, top, second = best_two(logits, eligible)
    return token, top - second


def best_two(logits: Tensor, eligible: Tensor) -> tuple[int, float, float]:
    """Returns the eligible id with the largest logit, that logit and the second best. logits [B, V]; eligible bool [V].

    Ties among eligible ids go to the lowest: argmax returns the first of equal maxima, which `topk` does not promise.
    RowFailure when copies differ in any bit or a logit is NaN or infinite; InputError when nothing is eligible.
    """
    if eligible.dtype != torch.bool or eligible.shape != logits.shape[1:]:
        found = f"{eligible.dtype} {list(eligible.shape)}"
        raise InputError(f"eligible: expected torch.bool {list(logits.shape[1:])}, found {found}")
    require_equal_copies(logits, "logits")
    require_finite(logits[0], "logits")
    masked = logits[0].masked_fill(~eligible, float("-inf"))  # [V]
    token = int(masked.argmax())
    top = masked[token].item()
    if top == float("-inf"):  # logits are finite, so no id is eligible
        raise InputError("eligible: expected at least one id that may be chosen, found none")
    masked[token] = float("-inf")
    return token, top, masked.max().item()


def take(step: Step) -> Stepped:
    """Runs one step of one request. RowFailure as in `best_two`."""
    hidden = step.stepper.feed(step.token, step.role, step.observe)
    if step.eligible is None:
        return hidden, None
    return hidden, best_two(step.stepper.model.logits(hidden)[:, 0], step.eligible)


@torch.inference_mode()
def alone(steps: Steps[T]) -> T:
    """Runs the steps of one request to their end and returns its result."""
    try:
        step = next(steps)
        while True:
            try:
                stepped = take(step)
            except RowFailure as failure:
                step = steps.throw(failure)
            else:
                step = steps.send(stepped)
    except StopIteration as end:
        result: T = end.value
        return result


def generate(
    stepper: Stepper,
    contract: Contract,
    structure: Structure,
    choice: Choice | None,
    stop: Callable[[Structure], bool],
    observe: Observe | None = None,
) -> Steps[Generated]:
    """Yields the steps of decoding until `stop` is true of the structure; returns what was generated.

    `choice`: the first token, if it is not forced. The token after which `stop` is true is fed too: a live boundary
    holds merge's opening delimiter. The delimiter that closes the answer (`Structure.done`) is not fed, as nothing
    would read its K/V. No logits are computed for a forced token. `observe` gets the decoder's steps, not those logits.
    """
    eligible = contract.eligible.to(stepper.model.numeric.torch_device)
    made: list[tuple[int, int, Choice | None]] = []  # token, role, and the choice where it was not forced
    hidden: list[Tensor] = []  # [B, 1, E] each
    while not structure.done and not stop(structure):
        token, role = forced(contract, structure), structure.block
        if token is not None:
            choice = None
        else:
            assert choice is not None, "a token that is not forced is chosen by logits"
            token = choice[0]
        made.append((token, role, choice))
        structure = advance(contract, structure, token)
        if not structure.done:
            free = not stop(structure) and forced(contract, structure) is None
            with located(stepper, structure):
                after, choice = yield Step(stepper, token, role, eligible[structure.block] if free else None, observe)
            hidden.append(after)
    tokens, roles, choices = zip(*made) if made else ((), (), ())
    margins = tuple(None if one is None else one[1] - one[2] for one in choices)
    tops = tuple(None if one is None else one[1] for one in choices)
    return Generated(tokens, roles, margins, tops, structure, tuple(hidden))


@contextmanager
def located(stepper: Stepper, structure: Structure) -> Iterator[None]:
    """Puts block, step in the block and slot in front of the text of a RowFailure raised inside."""
    try:
        yield
    except RowFailure as failure:
        at = f"block {ROLE_NAMES[structure.block]}, step {structure.content + 1}"
        raise RowFailure(f"{at}, slot {stepper.length}: {failure}") from None


def greedy_suffix(model: Decoder, boundary: BoundaryLike) -> Suffix:
    """Returns the suffix of a boundary, through the end of the answer, decoded on a copy of its cache.

    RowFailure when the physical copies differ in a logit on the way, or in the cache at the end.
    """
    return alone(suffix_steps(model, boundary))


def suffix_steps(model: Decoder, boundary: BoundaryLike) -> Steps[Suffix]:
    """Returns the steps of `greedy_suffix`."""
    state = boundary.state
    contract = state.contract
    assert state.structure.at_boundary, "a suffix begins after merge's opening delimiter"
    make_ready(model, contract.rules)
    capacity = len(state) + contract.suffix_limit()
    cache = boundary.cache.copy(capacity)
    stepper = Stepper(model, cache, cache.batch, capacity)
    stepper.resume(state.roles, boundary.record)
    with located(stepper, state.structure):
        choice = best_two(boundary.logits, contract.eligible[MERGE].to(boundary.logits.device))
    out = yield from generate(stepper, contract, state.structure, choice, lambda structure: structure.done)
    cache.require_equal_copies()
    merge, answer = (content_of(contract, out.tokens, out.roles, role) for role in (MERGE, ANSWER))
    digest, synchronised = stepper.record.sha256(), stepper.record.synchronised
    return Suffix(out.tokens, out.margins, out.tops, merge, answer, digest, synchronised, len(cache))
