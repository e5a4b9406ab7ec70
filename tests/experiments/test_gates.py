"""Every gate of every experiment fails on the fault that it is there for, and on a right row none does."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

import decode.greedy as greedy
import experiments.batch_control as batch_control
import experiments.bridge as bridge
import experiments.carrier.__main__ as carrier
import experiments.causes.__main__ as causes
import experiments.fixed_prefix as fixed_prefix
import experiments.replication as replication
import experiments.run.control as control
import experiments.run.control as whole
import experiments.run.designs as retained_live
import experiments.run.designs as six_arms
import experiments.run.experiment as arms
import experiments.stock_control as stock_control
from cache import Boundary, build_live, transplant
from cache.drift import compare
from decode import RowFailure, State, Suffix
from decode.greedy import alone
from experiments.carrier.sites import sites
from experiments.causes.cells import Cell
from experiments.causes.oracle import Oracle
from experiments.run.designs import RetainedLive, SixArms
from experiments.run.experiment import Experiment
from experiments.run.inputs import Models, Prefix
from experiments.run.progress import Progress
from experiments.run.records import Panel
from experiments.run.tasks import Task
from minimodel import Decoder, load_model
from minimodel.checkpoint import open_checkpoint
from minimodel.numerics import KERNELS
from minimodel.roles import MERGE
from tests.conftest import numeric
from tests.faulty import entering
from tests.helpers import flip_bit
from tests.tiny import TASK

SLOT = 20  # of the prompt
CHAT_END = 270  # <|im_end|>
DIRECTIONS = {six_arms.INTO_PREFILL: "prefill", six_arms.INTO_INCREMENTAL: "incremental"}  # the recipient of each


@dataclass(frozen=True)
class Row:
    """What the row functions of all experiments are given."""

    model: Decoder
    prompt: State
    state: State
    oracle: Oracle

    @property
    def prefix(self) -> Prefix:
        return Prefix("t", self.state.tokens, self.state.sha256())


Rows = Callable[[str], Row]


@pytest.fixture(scope="module")
def rows(bf16: Decoder, prompt: State, tiny_directory: Path, stock_directory: Path) -> Rows:
    """By experiment: `causes` gets the invariant model, the stock control a stock one, others the default one."""
    oracle = Oracle(open_checkpoint(tiny_directory), "cpu", 1)
    invariant = load_model(tiny_directory, numeric("bf16", kernels="invariant"))
    made = {model: Row(model, prompt, build_live(model, prompt).state, oracle) for model in (bf16, invariant)}
    default = made[bf16]
    stock = dataclasses.replace(default, model=load_model(stock_directory, numeric("bf16")))
    return lambda experiment: {"causes": made[invariant], "stock_control": stock}.get(experiment, default)


PROGRESS = Progress(1, 0, quiet=True).row("t")
NO_PANEL: Panel = {}
SCORED = Task("t", TASK["question"], tuple(TASK["choices"]), "C")
INVARIANT = Cell("bf16", *KERNELS["invariant"])


class OneModel(Models):
    """One loaded model under every name."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def at(self, name: str) -> Decoder:
        return self.model


def decoded(experiment: Experiment[Any]) -> dict[str, Any]:
    return alone(experiment.row(0, PROGRESS))


def _carrier(row: Row) -> dict[str, Any]:
    """Two sites, whole and empty, and a prefill that differs enough for another suffix."""
    with (
        patch.object(carrier, "sites", lambda *given: sites(*given)[:2]),
        patch.object(carrier, "build_prefill", _moved(carrier.build_prefill)),
    ):
        return decoded(carrier.Carrier(row.model, [row.prefix], [row.state], NO_PANEL))


def _stock(row: Row) -> dict[str, Any]:
    with patch.object(stock_control, "LIMIT", 40):
        given = stock_control.chat_input(row.model, "t", list(row.prompt.tokens), (CHAT_END,))
        return decoded(control.Control("stock_control", row.model, [given], NO_PANEL, 400))


def _batch(row: Row) -> dict[str, Any]:
    given = batch_control.whole_input(row.model, "t", row.prompt)
    return decoded(control.Control("batch_control", row.model, [given], NO_PANEL, 400))


def _fixed(row: Row) -> dict[str, Any]:
    cell = fixed_prefix.Cell("bf16", row.prefix, row.state, SCORED)
    return decoded(fixed_prefix.FixedPrefix(OneModel(row.model), [cell]))


def _bridge(row: Row) -> dict[str, Any]:
    return decoded(bridge.Bridge(row.model, [row.prefix], [row.prompt], NO_PANEL))


def _six_arms(row: Row) -> dict[str, Any]:
    return decoded(replication.Replication(row.model, [row.prefix], [row.state], NO_PANEL, True, ()))


def _causes(row: Row) -> dict[str, Any]:
    return decoded(causes.Causes(OneModel(row.model), [INVARIANT], [SCORED], [row.state], row.oracle, NO_PANEL))


# by experiment: its class, the module whose builders a fault replaces, and one row of it
ROWS: dict[str, tuple[type[Experiment[Any]], ModuleType, Callable[[Row], dict[str, Any]]]] = {
    "matrix": (RetainedLive, retained_live, lambda row: decoded(RetainedLive(row.model, [SCORED], [row.prompt]))),
    "fixed_prefix": (fixed_prefix.FixedPrefix, fixed_prefix, _fixed),
    "bridge": (bridge.Bridge, bridge, _bridge),
    "six_arms": (SixArms, six_arms, _six_arms),
    "batch_control": (control.Control, batch_control, _batch),
    "stock_control": (control.Control, stock_control, _stock),
    "causes": (causes.Causes, causes, _causes),
    "carrier": (carrier.Carrier, carrier, _carrier),
}

Builder = Callable[..., Boundary]
Fault = Callable[[Row, ModuleType], AbstractContextManager[Any]]


def _replacing(target: Any, name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`target.name` replaced by `change`, which gets the real function first. Steps are then run at once, alone."""
    real = getattr(target, name)
    if not name.endswith("_steps"):
        return patch.object(target, name, partial(change, real))

    def steps(*given: Any, **named: Any) -> greedy.Steps[Any]:
        return change(lambda *g, **n: greedy.alone(real(*g, **n)), *given, **named)
        yield

    return patch.object(target, name, steps)


def _moved(build: Builder) -> Builder:
    """A builder whose values are far from the right ones: its suffix is another."""

    def moved(model: Decoder, state: State) -> Boundary:
        boundary = build(model, state)
        with torch.inference_mode():
            for layer in range(boundary.cache.layers):
                boundary.cache.values(layer).mul_(-2)
        return boundary

    return moved


def replica_of(construction: str) -> Fault:
    """One bit of one construction's replica, the same in both copies."""

    @contextmanager
    def fault(row: Row, module: ModuleType) -> Iterator[None]:
        def flipped(real: Callable[[Boundary], Boundary], boundary: Boundary) -> Boundary:
            replica = real(boundary)
            if boundary.construction == construction:
                with torch.inference_mode():
                    for copy in range(replica.cache.batch):
                        flip_bit(replica.cache.values(1), (copy, 0, 3, 5))
            return replica

        real = Boundary.replica
        with patch.object(Boundary, "replica", lambda boundary: flipped(real, boundary)):
            yield

    return fault


def at_entry(part: str, calls: str = "all", slot: int = SLOT) -> Fault:
    """Another token, role, position or mask entry at the decoder's entry, in both copies."""
    return lambda row, module: entering(row.model, part, slot, calls=calls)


def in_a_suffix(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    return entering(row.model, "role", len(row.state) + 2)


def in_its_answer(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    return entering(row.model, "token", len(row.prompt) + 5)


@contextmanager
def one_copy_alone(row: Row, module: ModuleType) -> Iterator[None]:
    """The second copy gets another token, whose embedding is the right one's: no tensor shows it, only what entered."""
    token = row.state.tokens[SLOT]
    weights = row.model.embed_tokens.clone()
    weights[token + 1] = weights[token]
    with patch.object(row.model, "embed_tokens", weights), entering(row.model, "token", SLOT, copies=slice(1, 2)):
        yield


def another_prefix(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    """Both constructions consume one other prefix, each in the right way."""
    changed = list(row.state.tokens)
    changed[SLOT] += 1
    other = State.from_tokens(row.state.contract, changed)
    stack = ExitStack()
    for name in ("incremental_steps", "build_prefill"):
        stack.enter_context(_replacing(module, name, lambda real, model, state: real(model, other)))
    return stack


def shared_storage(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    """A replica that is its source."""
    return patch.object(Boundary, "replica", lambda boundary: boundary)


def one_storage_for_both(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    """Prefill returns the incremental boundary's own tensors."""
    made: list[Boundary] = []

    def incremental(real: Builder, model: Decoder, state: State) -> Boundary:
        made.append(real(model, state))
        return made[-1]

    stack = ExitStack()
    stack.enter_context(_replacing(module, "incremental_steps", incremental))
    stack.enter_context(patch.object(module, "build_prefill", lambda model, state: made[-1]))
    return stack


def unisolated_transplant(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    """The empty transplant returns the recipient's own tensors."""

    def shared(real: Builder, recipient: Boundary, donor: Boundary, layers: Any, *more: Any) -> Boundary:
        return recipient if layers == () else real(recipient, donor, layers, *more)

    return _replacing(module, "transplant", shared)


def suffix_from_other_logits(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    """Suffixes begin with the second best token of the boundary's logits."""

    def other(real: Callable[..., Any], model: Decoder, boundary: Boundary) -> Any:
        logits = boundary.logits.clone()
        token, _ = greedy.choose(logits, boundary.state.contract.eligible[MERGE])
        logits[:, token] = logits.min()
        return real(model, dataclasses.replace(boundary, logits=logits))

    return _replacing(arms, "suffix_steps", other)


def second_best_once(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    """Generation takes the second best token once; the logits beside it are right."""
    calls = iter(range(1))

    def second(real: Callable[..., Any], logits: torch.Tensor, eligible: torch.Tensor) -> Any:
        best = real(logits, eligible)
        if next(calls, None) is None:
            return best
        rest = eligible.clone()
        rest[best[0]] = False
        return real(logits, rest)

    stack = ExitStack()
    for place in (greedy, whole):
        stack.enter_context(_replacing(place, "best_two", second))
    return stack


def prefill_of_another_raw_argmax(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    """The largest logit of prefill is that of a token which no block may hold; the eligible argmax stays."""

    def raised(real: Builder, model: Decoder, state: State) -> Boundary:
        boundary = real(model, state)
        with torch.inference_mode():
            boundary.logits[:, state.contract.open_ids[0]] = boundary.logits.max() + 8
        return boundary

    return _replacing(module, "build_prefill", raised)


def layer_left_out(direction: str) -> Fault:
    """The transplant of one direction leaves the last layer as it was."""

    def partly(real: Builder, recipient: Boundary, donor: Boundary) -> Boundary:
        faulty = recipient.construction == DIRECTIONS[direction]
        return real(recipient, donor, layers=range(recipient.cache.layers - 1) if faulty else None)

    return lambda row, module: _replacing(module, "transplant", partly)


def caches_cut_by_suffixes(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    """Each continuation leaves one token less in its boundary's own cache."""

    def cut(real: Callable[..., Suffix], model: Decoder, boundary: Boundary) -> Suffix:
        suffix = real(model, boundary)
        boundary.cache._length -= 1
        return suffix

    return _replacing(arms, "suffix_steps", cut)


def one_bit_in_prefill(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    def flipped(real: Builder, model: Decoder, state: State, **more: Any) -> Boundary:
        boundary = real(model, state, **more)
        with torch.inference_mode():
            for copy in range(boundary.cache.batch):
                flip_bit(boundary.cache.keys(0), (copy, 1, 5, 0))
        return boundary

    return _replacing(module, "build_prefill", flipped)


def blind_comparison(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    return patch.object(module, "compare", lambda left, right: compare(left, left))


def one_suffix_for_all(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    """Every boundary gets the first one's suffix: there is no divergence to explain."""
    made: list[Suffix] = []

    def first(real: Callable[..., Suffix], model: Decoder, boundary: Boundary) -> Suffix:
        made.append(made[0] if made else real(model, boundary))
        return made[0]

    return _replacing(arms, "suffix_steps", first)


def empty_transplant_moves_all(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    return patch.object(module, "transplant", lambda recipient, donor, *more: transplant(recipient, donor))


def third_generation_drifts(row: Row, module: ModuleType) -> AbstractContextManager[Any]:
    """The repeated pair has another log-probability."""
    calls = iter(range(3))

    def drifting(real: Callable[..., Any], *given: Any) -> Any:
        found = real(*given)
        if next(calls) < 2:
            return found
        return dataclasses.replace(found, logprobs=tuple(p if p is None else p / 2 for p in found.logprobs))

    return _replacing(module, "chat_steps" if module is stock_control else "whole_steps", drifting)


COMMON: dict[str, Fault] = {
    "functional_state": at_entry("role"),
    "copies_synchronised": one_copy_alone,
    "argmax": suffix_from_other_logits,
    "storage_disjoint": shared_storage,
}
FAULTS: dict[str, dict[str, Fault]] = {
    "matrix": {**COMMON, "replica_live": replica_of("live"), "replica_prefill": replica_of("prefill")},
    "fixed_prefix": {
        **COMMON,
        "prefix": another_prefix,
        "replica_incremental": replica_of("incremental"),
        "replica_prefill": replica_of("prefill"),
    },
    "bridge": {
        **COMMON,
        "replica_live": replica_of("live"),
        "replica_incremental": replica_of("incremental"),
        "boundary_length": caches_cut_by_suffixes,
    },
    "six_arms": {
        **COMMON,
        "prefix": another_prefix,
        "replica_incremental": replica_of("incremental"),
        "replica_prefill": replica_of("prefill"),
        "raw_argmax": prefill_of_another_raw_argmax,
        **{f"provenance_{direction}": layer_left_out(direction) for direction in DIRECTIONS},
    },
    "stock_control": {
        "replica_pair": third_generation_drifts,
        "functional_state": at_entry("token"),
        "copies_synchronised": one_copy_alone,
        "argmax": second_best_once,
    },
    "batch_control": {
        "replica_pair": third_generation_drifts,
        "functional_state": at_entry("role"),
        "copies_synchronised": one_copy_alone,
        "argmax": second_best_once,
    },
    "causes": {
        **COMMON,
        "storage_disjoint": one_storage_for_both,
        "invariant_exact": one_bit_in_prefill,
        "flip_caught": blind_comparison,
    },
    "carrier": {
        "prefix": another_prefix,
        "functional_state": at_entry("role"),
        "storage_disjoint": unisolated_transplant,
        "copies_synchronised": one_copy_alone,
        "divergent": one_suffix_for_all,
        "empty_follows_recipient": empty_transplant_moves_all,
    },
}
# a fault in what one construction or one suffix is given is seen wherever such a part is
PARTS: dict[str, list[Fault]] = {
    "matrix": [at_entry("token", "many"), at_entry("mask", "one"), at_entry("position", "many"), in_a_suffix],
    "fixed_prefix": [at_entry("token", "one"), at_entry("mask", "many"), at_entry("role", "many"), in_a_suffix],
    "bridge": [at_entry("token"), in_a_suffix],
    "six_arms": [at_entry("role", "one"), at_entry("position", "many"), in_a_suffix],
    "stock_control": [at_entry("position", "many"), in_its_answer],
    "batch_control": [at_entry("token"), at_entry("mask"), in_a_suffix],
    "causes": [at_entry("mask", "many"), in_a_suffix],
    "carrier": [at_entry("token", "many"), in_a_suffix],
}


@pytest.mark.parametrize("experiment", ROWS)
def test_a_right_row_passes_every_gate_and_each_has_its_fault(rows: Rows, experiment: str) -> None:
    (kind, _, decode), row = ROWS[experiment], rows(experiment)
    found = decode(row)
    assert found["passed"] and list(found["gates"]) == kind.gates()
    assert sorted(FAULTS[experiment]) == sorted(kind.gates())


@pytest.mark.parametrize(("experiment", "gate"), [(name, gate) for name, gates in FAULTS.items() for gate in gates])
def test_each_gate_fails_on_the_fault_that_it_is_there_for(rows: Rows, experiment: str, gate: str) -> None:
    """The gate itself: in a row that failed closed no gate would be left True."""
    (_, module, decode), row = ROWS[experiment], rows(experiment)
    with FAULTS[experiment][gate](row, module):
        found = decode(row)
    assert not found["gates"][gate] and not found["passed"] and any(found["gates"].values())


@pytest.mark.parametrize(("experiment", "fault"), [(name, fault) for name in PARTS for fault in PARTS[name]])
def test_whatever_enters_the_decoder_wrongly_fails_the_row(rows: Rows, experiment: str, fault: Fault) -> None:
    """Through the gate, or closed where a transplant finds that donor and recipient hold two states."""
    (_, module, decode), row = ROWS[experiment], rows(experiment)
    with fault(row, module):
        try:
            assert not decode(row)["gates"]["functional_state"]
        except RowFailure as failure:
            assert hasattr(module, "transplant") and "one functional state" in str(failure)


def test_prefill_and_incremental_take_their_roles_from_the_tokens_and_not_from_live(rows: Rows) -> None:
    """Live accumulates a wrong role: its own suffix shows it, the other constructions are as they were."""

    def wrong(real: Builder, model: Decoder, prompt: State, **more: Any) -> Boundary:
        live = real(model, prompt, **more)
        roles = list(live.state.roles)
        roles[-2] = 5
        return dataclasses.replace(live, state=dataclasses.replace(live.state, roles=tuple(roles)))

    for experiment, arm in (("matrix", "prefill"), ("bridge", "incremental")):
        (_, module, decode), row = ROWS[experiment], rows(experiment)
        right = decode(row)
        with _replacing(module, "live_steps", wrong):
            found = decode(row)
        assert found["arms"][arm] == right["arms"][arm] and not found["gates"]["functional_state"]
        assert found["arms"]["live"]["suffix_state_sha256"] != right["arms"]["live"]["suffix_state_sha256"]
