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
import experiments.run.control as control
import experiments.run.designs as designs
import experiments.run.experiment as arms
import experiments.stock_control as stock_control
from cache import Boundary, build_live, transplant
from cache.drift import compare
from decode import RowFailure, State
from decode.greedy import alone
from experiments.causes.measures import fp64_oracle
from experiments.replication import Replication
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
RECIPIENTS = {INTO_PREFILL: "prefill", INTO_INCREMENTAL: "incremental"}
NAME, SCORED = Prefix("t", ()), Task("t", TASK["question"], tuple(TASK["choices"]), "C")


def one_of(row, name):
    """The row's model as the one loaded under a name."""
    return SimpleNamespace(numeric={name: row.model.numeric}, at=lambda _: row.model)


def _control(row, module):
    if module is stock_control:
        given = stock_control.chat_input(row.model, "t", list(row.prompt.tokens), (CHAT_END,))
    else:
        given = batch_control.whole_input(row.model, "t", row.prompt)
    return control.Control(module.__name__, row.model, [given], {}, 400)


# by experiment: the module whose builders a fault replaces, and the experiment over one row
EXPERIMENTS = {
    "matrix": (designs, lambda row: designs.RetainedLive(row.model, [SCORED], [row.prompt])),
    "fixed_prefix": (
        fixed_prefix,
        lambda row: fixed_prefix.FixedPrefix(one_of(row, "bf16"), [SCORED], [row.state]),
    ),
    "bridge": (
        bridge,
        lambda row: bridge.Bridge(row.model, [Prefix("t", row.state.tokens)], [row.prompt], {}),
    ),
    "six_arms": (designs, lambda row: Replication(row.model, [NAME], [row.state], {}, True, ())),
    "batch_control": (batch_control, lambda row: _control(row, batch_control)),
    "stock_control": (stock_control, lambda row: _control(row, stock_control)),
    "causes": (
        causes,
        lambda row: causes.Causes(one_of(row, "bf16/blocked/tiled"), [SCORED], [row.state], row.oracle, {}),
    ),
    "carrier": (carrier, lambda row: carrier.Carrier(row.model, [NAME], [row.state], {})),
}


@pytest.fixture(scope="module")
def rows(bf16, prompt, tiny_directory, stock_directory):
    """Inputs by experiment: `causes` gets the invariant model, the stock control a stock one, others the default.

    `carrier` gets two sites, whole and empty, and a prefill that differs enough for another suffix.
    """
    invariant = load_model(tiny_directory, numeric("bf16", kernels="invariant"))
    oracle, state = fp64_oracle(open_checkpoint(tiny_directory), "cpu", 1), build_live(bf16, prompt).state
    row = partial(SimpleNamespace, prompt=prompt)
    made = dict.fromkeys(EXPERIMENTS, row(model=bf16, state=state))
    made["causes"] = row(model=invariant, state=build_live(invariant, prompt).state, oracle=oracle)
    made["stock_control"] = row(model=load_model(stock_directory, numeric("bf16")), state=state)
    sites = carrier.sites
    with (
        patch.object(carrier, "sites", lambda *given: dict(list(sites(*given).items())[:2])),
        replaced(carrier, "build_prefill", edited(move_values)),
        patch.object(stock_control, "LIMIT", 40),
    ):
        yield made


def decoded(experiment, row):
    """The ledger entry of the experiment's one row."""
    return alone(EXPERIMENTS[experiment][1](row).row(0, Progress(1, 0, quiet=True).row("t")))


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
        faulty = recipient.construction == RECIPIENTS[direction]
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


ARM = "matrix fixed_prefix bridge six_arms"
ANY = f"{ARM} batch_control stock_control causes carrier"
LIVE, BANK = "matrix bridge", "fixed_prefix six_arms"
FAULTS = [  # gate, fault, experiments
    ("functional_state", at_entry("role"), ANY.replace("stock_control ", "")),
    ("functional_state", at_entry("token"), "batch_control stock_control bridge"),
    ("functional_state", at_entry("mask"), "batch_control"),
    ("functional_state", at_entry("position", "many"), "matrix stock_control"),
    ("functional_state", at_entry("token", "many"), "matrix"),
    ("functional_state", at_entry("token", "one"), "fixed_prefix"),
    ("functional_state", at_entry("mask", "one"), "matrix"),
    ("functional_state", at_entry("mask", "many"), "fixed_prefix causes"),
    ("functional_state", at_entry("role", "many"), "fixed_prefix"),
    ("functional_state", in_a_suffix, f"{ARM} batch_control causes carrier"),
    ("functional_state", in_its_answer, "stock_control"),
    ("copies_synchronised", one_copy_alone, ANY),
    ("argmax", replacing(arms, suffix_steps=second_best_start), f"{ARM} causes"),
    ("argmax", second_best_once, "batch_control stock_control"),
    ("storage_disjoint", shared_storage, ARM),
    ("storage_disjoint", one_storage_for_both, "causes"),
    ("storage_disjoint", replacing(transplant=shared_when_empty), "carrier"),
    ("replica_live", replica_of("live"), LIVE),
    ("replica_incremental", replica_of("incremental"), f"bridge {BANK}"),
    ("replica_prefill", replica_of("prefill"), f"matrix {BANK}"),
    ("replica_pair", third_generation_drifts, "batch_control stock_control"),
    ("prefix", another_prefix, f"{BANK} carrier"),
    ("boundary_length", replacing(arms, suffix_steps=cut_after), "bridge"),
    ("raw_argmax", replacing(build_prefill=edited(raise_opening_logit)), "six_arms"),
    *((f"provenance_{direction}", layer_left_out(direction), "six_arms") for direction in RECIPIENTS),
    ("invariant_exact", replacing(build_prefill=edited(flip_key)), "causes"),
    ("flip_caught", replacing(compare=lambda real, left, right: compare(left, left)), "causes"),
    ("divergent", one_suffix_for_all, "carrier"),
    (
        "empty_follows_recipient",
        replacing(transplant=lambda real, recipient, donor, **_: transplant(recipient, donor)),
        "carrier",
    ),
]
# donor and recipient then hold two states: the transplant itself ends the row
CLOSED = [
    *((fault, "six_arms") for fault in (at_entry("role", "one"), at_entry("position", "many"))),
    (at_entry("token", "many"), "carrier"),
]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_right_row_passes_every_gate_and_each_has_its_fault(rows, experiment):
    found = decoded(experiment, rows[experiment])
    assert found["passed"]
    assert set(found["gates"]) == {gate for gate, _, names in FAULTS if experiment in names.split()}


@pytest.mark.parametrize(
    ("experiment", "gate", "fault"),
    [(name, gate, fault) for gate, fault, names in FAULTS for name in names.split()],
)
def test_each_gate_fails_on_the_faults_that_it_is_there_for(rows, experiment, gate, fault):
    """The gate itself: in a row that failed closed no gate would be left True."""
    with fault(rows[experiment], EXPERIMENTS[experiment][0]):
        found = decoded(experiment, rows[experiment])
    assert not found["gates"][gate] and not found["passed"] and any(found["gates"].values())


@pytest.mark.parametrize(("fault", "experiment"), CLOSED)
def test_constructions_of_two_states_are_not_transplanted(rows, fault, experiment):
    with (
        fault(rows[experiment], EXPERIMENTS[experiment][0]),
        pytest.raises(RowFailure, match="one functional state"),
    ):
        decoded(experiment, rows[experiment])


@pytest.mark.parametrize(("experiment", "arm"), [("matrix", "prefill"), ("bridge", "incremental")])
def test_other_constructions_take_their_roles_from_the_tokens_and_not_from_live(rows, experiment, arm):
    """Live accumulates a wrong role: its suffix shows it, the other constructions are as they were."""

    def wrong(real, model, prompt, **more):
        live = real(model, prompt, **more)
        roles = list(live.state.roles)
        roles[-2] = 5
        return dataclasses.replace(live, state=dataclasses.replace(live.state, roles=tuple(roles)))

    right = decoded(experiment, rows[experiment])
    with replaced(EXPERIMENTS[experiment][0], "live_steps", wrong):
        found = decoded(experiment, rows[experiment])
    assert found["arms"][arm] == right["arms"][arm] and not found["gates"]["functional_state"]
    assert found["arms"]["live"]["suffix_state_sha256"] != right["arms"]["live"]["suffix_state_sha256"]
