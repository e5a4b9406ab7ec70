"""Every gate of every experiment fails on the fault that it is there for, and on a right row none does."""

import dataclasses
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import decode.greedy as greedy
import experiments.batch_control as batch_control
import experiments.bridge as bridge
import experiments.carrier as carrier
import experiments.causes.__main__ as causes
import experiments.fixed_prefix as fixed_prefix
import experiments.replication as replication
import experiments.run.control as control
import experiments.run.designs as designs
import experiments.run.experiment as arms
import experiments.stock_control as stock_control
from cache import Boundary, build_live, transplant
from cache.drift import compare
from decode import RowFailure, State
from decode.greedy import alone
from experiments.causes.measures import Oracle
from experiments.run.progress import Progress
from experiments.run.tasks import Prefix, Task
from minimodel import load_model
from minimodel.checkpoint import open_checkpoint
from minimodel.roles import MERGE
from stats.donors import INTO_INCREMENTAL, INTO_PREFILL
from tests.conftest import numeric
from tests.helpers import entering, flip_bit
from tests.tiny import TASK

SLOT = 20  # of the prompt
CHAT_END = 270  # <|im_end|>
DIRECTIONS = {INTO_PREFILL: "prefill", INTO_INCREMENTAL: "incremental"}  # the recipient of each
PROGRESS = Progress(1, 0, quiet=True).row("t")
NAME, SCORED = Prefix("t", ()), Task("t", TASK["question"], tuple(TASK["choices"]), "C")
INVARIANT = "bf16/blocked/tiled"


@pytest.fixture(scope="module")
def rows(bf16, prompt, tiny_directory, stock_directory):
    """Inputs by experiment: `causes` gets the invariant model, the stock control a stock one, others the default."""
    oracle = Oracle(open_checkpoint(tiny_directory), "cpu", 1)

    def row(model, state):
        return SimpleNamespace(model=model, prompt=prompt, state=state, oracle=oracle)

    invariant = load_model(tiny_directory, numeric("bf16", kernels="invariant"))
    state = build_live(bf16, prompt).state
    special = {
        "causes": row(invariant, build_live(invariant, prompt).state),
        "stock_control": row(load_model(stock_directory, numeric("bf16")), state),
    }
    return lambda experiment: special.get(experiment, row(bf16, state))


def models(row, name):
    """One loaded model under one name."""
    return SimpleNamespace(numeric={name: row.model.numeric}, at=lambda name: row.model)


def _carrier(row):
    """Two sites, whole and empty, and a prefill that differs enough for another suffix."""
    real = carrier.sites
    with (
        patch.object(carrier, "sites", lambda *given: dict(list(real(*given).items())[:2])),
        patch.object(carrier, "build_prefill", partial(edited(move_values), carrier.build_prefill)),
    ):
        return alone(carrier.Carrier(row.model, [NAME], [row.state], {}).row(0, PROGRESS))


def _stock(row):
    with patch.object(stock_control, "LIMIT", 40):
        given = stock_control.chat_input(row.model, "t", list(row.prompt.tokens), (CHAT_END,))
        return alone(control.Control("stock_control", row.model, [given], {}, 400).row(0, PROGRESS))


def _bridge(row):
    saved = Prefix("t", row.state.tokens)
    return bridge.Bridge(row.model, [saved], [row.prompt], {})


def _batch(row):
    given = batch_control.whole_input(row.model, "t", row.prompt)
    return control.Control("batch_control", row.model, [given], {}, 400)


def _causes(row):
    return causes.Causes(models(row, INVARIANT), [SCORED], [row.state], row.oracle, {})


def decoding(build):
    """Row 0 of the experiment that `build` makes."""
    return lambda row: alone(build(row).row(0, PROGRESS))


# by experiment: its class, the module whose builders a fault replaces, and one row of it
ROWS = {
    "matrix": (
        designs.RetainedLive,
        designs,
        decoding(lambda row: designs.RetainedLive(row.model, [SCORED], [row.prompt])),
    ),
    "fixed_prefix": (
        fixed_prefix.FixedPrefix,
        fixed_prefix,
        decoding(lambda row: fixed_prefix.FixedPrefix(models(row, "bf16"), [SCORED], [row.state])),
    ),
    "bridge": (bridge.Bridge, bridge, decoding(_bridge)),
    "six_arms": (
        designs.SixArms,
        designs,
        decoding(lambda row: replication.Replication(row.model, [NAME], [row.state], {}, True, ())),
    ),
    "batch_control": (control.Control, batch_control, decoding(_batch)),
    "stock_control": (control.Control, stock_control, _stock),
    "causes": (causes.Causes, causes, decoding(_causes)),
    "carrier": (carrier.Carrier, carrier, _carrier),
}


def replaced(target, name, change):
    """`target.name` replaced by `change`, which gets the real function first. Steps are then run at once, alone."""
    real = getattr(target, name)
    if not name.endswith("_steps"):
        return patch.object(target, name, partial(change, real))

    def steps(*given, **named):
        return change(lambda *g, **n: greedy.alone(real(*g, **n)), *given, **named)
        yield

    return patch.object(target, name, steps)


def replacing(target=None, **changes):
    """The fault that replaces functions of `target`, by default of the experiment's module."""

    @contextmanager
    def fault(row, module):
        with ExitStack() as stack:
            for name, change in changes.items():
                stack.enter_context(replaced(target or module, name, change))
            yield

    return fault


def edited(edit):
    """A builder whose boundary is edited in place."""

    @torch.inference_mode()
    def build(real, *given, **named):
        boundary = real(*given, **named)
        edit(boundary)
        return boundary

    return build


def move_values(boundary):
    """Values far from the right ones: another suffix follows."""
    for layer in range(boundary.cache.layers):
        boundary.cache.values(layer).mul_(-2)


def flip_key(boundary):
    """The same bit in both copies."""
    for copy in range(boundary.cache.batch):
        flip_bit(boundary.cache.keys(0), (copy, 1, 5, 0))


def raise_opening_logit(boundary):
    """The largest logit is that of a token which no block may hold; the eligible argmax stays."""
    boundary.logits[:, boundary.state.contract.open_ids[0]] = boundary.logits.max() + 8


def replica_of(construction):
    """One bit of one construction's replica, the same in both copies."""
    real = Boundary.replica

    def replica(boundary):
        copy = real(boundary)
        return edited(flip_key)(lambda: copy) if boundary.construction == construction else copy

    return lambda row, module: patch.object(Boundary, "replica", replica)


def at_entry(part, calls="all", slot=SLOT):
    """Another token, role, position or mask entry at the decoder's entry, in both copies."""
    return lambda row, module: entering(row.model, part, slot, calls=calls)


def in_a_suffix(row, module):
    return entering(row.model, "role", len(row.state) + 2)


def in_its_answer(row, module):
    return entering(row.model, "token", len(row.prompt) + 5)


@contextmanager
def one_copy_alone(row, module):
    """The second copy gets another token, whose embedding is the right one's: no tensor shows it, only what entered."""
    token = row.state.tokens[SLOT]
    weights = row.model.embed_tokens.clone()
    weights[token + 1] = weights[token]
    with patch.object(row.model, "embed_tokens", weights), entering(row.model, "token", SLOT, copies=slice(1, 2)):
        yield


def another_prefix(row, module):
    """Both constructions consume one other prefix, each in the right way."""
    changed = list(row.state.tokens)
    changed[SLOT] += 1
    other = State.from_tokens(row.state.contract, changed)
    build = {name: lambda real, model, state: real(model, other) for name in ("incremental_steps", "build_prefill")}
    return replacing(**build)(row, module)


def shared_storage(row, module):
    """A replica that is its source."""
    return patch.object(Boundary, "replica", lambda boundary: boundary)


def one_storage_for_both(row, module):
    """Prefill returns the tensors of the incremental boundary."""
    made = []

    def incremental(real, model, state):
        made.append(real(model, state))
        return made[-1]

    given = {"incremental_steps": incremental, "build_prefill": lambda real, *_, **more: made[-1]}
    return replacing(**given)(row, module)


def shared_when_empty(real, recipient, donor, layers=None, **site):
    """The empty transplant returns the tensors of the recipient."""
    return recipient if layers == () else real(recipient, donor, layers, **site)


def second_best_start(real, model, boundary):
    """The suffix begins with the second best token of the boundary's logits."""
    logits = boundary.logits.clone()
    token, _ = greedy.choose(logits, boundary.state.contract.eligible[MERGE])
    logits[:, token] = logits.min()
    return real(model, dataclasses.replace(boundary, logits=logits))


@contextmanager
def second_best_once(row, module):
    """Generation takes the second best token once; the logits beside it are right."""
    calls = iter(range(1))

    def second(real, logits, eligible):
        best = real(logits, eligible)
        if next(calls, None) is None:
            return best
        rest = eligible.clone()
        rest[best[0]] = False
        return real(logits, rest)

    with replaced(greedy, "best_two", second), replaced(control, "best_two", second):
        yield


def layer_left_out(direction):
    """The transplant of one direction leaves the last layer as it was."""

    def partly(real, recipient, donor):
        faulty = recipient.construction == DIRECTIONS[direction]
        return real(recipient, donor, layers=range(recipient.cache.layers - 1) if faulty else None)

    return replacing(transplant=partly)


def cut_after(real, model, boundary):
    """The continuation leaves one token less in its boundary's cache."""
    suffix = real(model, boundary)
    boundary.cache._length -= 1
    return suffix


def one_suffix_for_all(row, module):
    """Every boundary gets the first one's suffix: there is no divergence to explain."""
    made = []

    def first(real, model, boundary):
        made.append(made[0] if made else real(model, boundary))
        return made[0]

    return replaced(arms, "suffix_steps", first)


def third_generation_drifts(row, module):
    """The repeated pair has another log-probability."""
    calls = iter(range(3))

    def drifting(real, *given):
        found = real(*given)
        if next(calls) < 2:
            return found
        return dataclasses.replace(found, logprobs=tuple(p if p is None else p / 2 for p in found.logprobs))

    return replaced(module, "chat_steps" if module is stock_control else "whole_steps", drifting)


COMMON = {
    "functional_state": at_entry("role"),
    "copies_synchronised": one_copy_alone,
    "argmax": replacing(arms, suffix_steps=second_best_start),
    "storage_disjoint": shared_storage,
}
LIVE = {"replica_live": replica_of("live")}
INCREMENTAL = {"replica_incremental": replica_of("incremental")}
PREFILL = {"replica_prefill": replica_of("prefill")}
CONTROL = {
    "replica_pair": third_generation_drifts,
    "functional_state": at_entry("token"),
    "copies_synchronised": one_copy_alone,
    "argmax": second_best_once,
}
FAULTS = {
    "matrix": {**COMMON, **LIVE, **PREFILL},
    "fixed_prefix": {**COMMON, "prefix": another_prefix, **INCREMENTAL, **PREFILL},
    "bridge": {**COMMON, **LIVE, **INCREMENTAL, "boundary_length": replacing(arms, suffix_steps=cut_after)},
    "six_arms": {
        **COMMON,
        "prefix": another_prefix,
        **INCREMENTAL,
        **PREFILL,
        "raw_argmax": replacing(build_prefill=edited(raise_opening_logit)),
        **{f"provenance_{direction}": layer_left_out(direction) for direction in DIRECTIONS},
    },
    "stock_control": CONTROL,
    "batch_control": {**CONTROL, "functional_state": at_entry("role")},
    "causes": {
        **COMMON,
        "storage_disjoint": one_storage_for_both,
        "invariant_exact": replacing(build_prefill=edited(flip_key)),
        "flip_caught": replacing(compare=lambda real, left, right: compare(left, left)),
    },
    "carrier": {
        "prefix": another_prefix,
        "functional_state": at_entry("role"),
        "storage_disjoint": replacing(transplant=shared_when_empty),
        "copies_synchronised": one_copy_alone,
        "divergent": one_suffix_for_all,
        "empty_follows_recipient": replacing(
            transplant=lambda real, recipient, donor, **_: transplant(recipient, donor)
        ),
    },
}
# a fault in what one construction or one suffix is given is seen wherever such a part is
PARTS = {
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
def test_a_right_row_passes_every_gate_and_each_has_its_fault(rows, experiment):
    kind, _, decode = ROWS[experiment]
    found = decode(rows(experiment))
    assert found["passed"] and list(found["gates"]) == kind.gates()
    assert sorted(FAULTS[experiment]) == sorted(kind.gates())


@pytest.mark.parametrize(("experiment", "gate"), [(name, gate) for name, gates in FAULTS.items() for gate in gates])
def test_each_gate_fails_on_the_fault_that_it_is_there_for(rows, experiment, gate):
    """The gate itself: in a row that failed closed no gate would be left True."""
    (_, module, decode), row = ROWS[experiment], rows(experiment)
    with FAULTS[experiment][gate](row, module):
        found = decode(row)
    assert not found["gates"][gate] and not found["passed"] and any(found["gates"].values())


@pytest.mark.parametrize(("experiment", "fault"), [(name, fault) for name in PARTS for fault in PARTS[name]])
def test_whatever_enters_the_decoder_wrongly_fails_the_row(rows, experiment, fault):
    """Through the gate, or closed where a transplant finds that donor and recipient hold two states."""
    (_, module, decode), row = ROWS[experiment], rows(experiment)
    with fault(row, module):
        try:
            assert not decode(row)["gates"]["functional_state"]
        except RowFailure as failure:
            assert hasattr(module, "transplant") and "one functional state" in str(failure)


@pytest.mark.parametrize(("experiment", "arm"), [("matrix", "prefill"), ("bridge", "incremental")])
def test_other_constructions_take_their_roles_from_the_tokens_and_not_from_live(rows, experiment, arm):
    """Live accumulates a wrong role: its suffix shows it, the other constructions are as they were."""

    def wrong(real, model, prompt, **more):
        live = real(model, prompt, **more)
        roles = list(live.state.roles)
        roles[-2] = 5
        return dataclasses.replace(live, state=dataclasses.replace(live.state, roles=tuple(roles)))

    (_, module, decode), row = ROWS[experiment], rows(experiment)
    right = decode(row)
    with replaced(module, "live_steps", wrong):
        found = decode(row)
    assert found["arms"][arm] == right["arms"][arm] and not found["gates"]["functional_state"]
    assert found["arms"]["live"]["suffix_state_sha256"] != right["arms"]["live"]["suffix_state_sha256"]
