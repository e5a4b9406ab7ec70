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
from cache.drift import compare, compare_tensors
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


def lower_best_logit(boundary):
    """Another token is the eligible argmax."""
    boundary.logits[:, arms.eligible_choice(boundary)[0]] = boundary.logits.min() - 1


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


def when_empty(direction, change):
    """The empty transplant of one direction is what `change` makes of recipient and donor."""

    def changed(real, recipient, donor, layers=None, **site):
        faulty = layers == () and recipient.construction == RECIPIENTS[direction]
        return change(recipient, donor) if faulty else real(recipient, donor, layers, **site)

    return replacing(transplant=changed)


def second_best_start(real, model, boundary):
    """The suffix begins with the second best token of the boundary's logits."""
    logits = boundary.logits.clone()
    token, _ = greedy.choose(logits, boundary.state.contract.eligible[MERGE])
    logits[:, token] = logits.min()
    return real(model, dataclasses.replace(boundary, logits=logits))


def chosen_once(change):
    """Generation makes another choice once, from right logits."""

    @contextmanager
    def fault(row, module):
        calls = iter(range(1))

        def other(real, logits, eligible):
            best = real(logits, eligible)
            return best if next(calls, None) is None else change(real, logits, eligible, best)

        with replaced(greedy, "best_two", other), replaced(control, "best_two", other):
            yield

    return fault


def second_best(real, logits, eligible, best):
    rest = eligible.clone()
    rest[best[0]] = False
    return real(logits, rest)


def another_margin(real, logits, eligible, best):
    token, top, second = best
    return token, top, second - 1


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


def after_a_transplant(**changes):
    """The suffix of a partly transplanted cache says something else; those of both constructions are right."""
    return replacing(suffix_steps=lambda real, *given: dataclasses.replace(real(*given), **changes))


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
    ("functional_state", after_a_transplant(functional_sha256="0" * 64), "carrier"),
    ("copies_synchronised", one_copy_alone, ANY),
    ("copies_synchronised", after_a_transplant(synchronised=False), "carrier"),
    ("argmax", replacing(arms, suffix_steps=second_best_start), f"{ARM} causes"),
    ("argmax", chosen_once(second_best), "batch_control stock_control"),
    ("argmax", chosen_once(another_margin), "batch_control"),
    ("storage_disjoint", shared_storage, ARM),
    ("storage_disjoint", one_storage_for_both, "causes"),
    *(("storage_disjoint", when_empty(way, lambda recipient, donor: recipient), "carrier") for way in RECIPIENTS),
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
    *(("empty_follows_recipient", when_empty(way, transplant), "carrier") for way in RECIPIENTS),
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


@pytest.fixture(scope="module")
def decoded_rows(rows):
    """By experiment: it, and what its right row leaves for the gates."""

    def made(name):
        experiment = EXPERIMENTS[name][1](rows[name])
        return experiment, greedy.alone(experiment.decode(0, Progress(1, 0, quiet=True).row("t")))

    return {name: made(name) for name in ("matrix", "six_arms", "batch_control")}


def failing(experiment, made):
    """The gates that do not hold, with those that fail the whole row closed."""

    def holds(name):
        try:
            return getattr(experiment, name)(made)
        except RowFailure:
            return False

    return {name for name in experiment.gates() if not holds(name)}


@torch.inference_mode()
def with_tensors(arm, edit):
    """The arm from a copy of its boundary, edited in place."""
    boundary = arm.boundary.copy()
    edit(boundary)
    return dataclasses.replace(arm, boundary=boundary)


def with_boundary(arm, **changes):
    return dataclasses.replace(arm, boundary=dataclasses.replace(arm.boundary, **changes))


def with_suffix(arm, **changes):
    return dataclasses.replace(arm, suffix=dataclasses.replace(arm.suffix, **changes))


def entered_again(record):
    """The record after one more token."""
    other, one = record.copy(), torch.ones(2, 1, dtype=torch.int64)
    other.enter(one, one, one, torch.ones(2, 1, 1, 1, dtype=torch.bool))
    return other


def other_tokens(state):
    return dataclasses.replace(state, tokens=(*state.tokens[:SLOT], 1 + state.tokens[SLOT], *state.tokens[SLOT + 1 :]))


def shorter(boundary):
    boundary.cache._length -= 1


def lower(boundary):
    boundary.cache.layers -= 1


CHANGES = {  # of one arm: how, and the gates that see it; "replica" stands for the arm's own
    "nothing": (lambda arm: arm, ""),
    "a bit of the last value": (
        lambda arm: with_tensors(arm, lambda b: [flip_bit(b.cache.values(2), (c, 1, -1, 31)) for c in (0, 1)]),
        "replica",
    ),
    "a bit of a logit": (
        lambda arm: with_tensors(arm, lambda b: [flip_bit(b.logits, (c, -1)) for c in (0, 1)]),
        "replica",
    ),
    "a bit of the first copy": (
        lambda arm: with_tensors(arm, lambda b: flip_bit(b.cache.keys(1), (0, 0, 5, 0))),
        "replica copies_synchronised",
    ),
    "a bit of the second copy's logits": (
        lambda arm: with_tensors(arm, lambda b: flip_bit(b.logits, (1, 0))),
        "replica copies_synchronised argmax",
    ),
    "one copy": (
        lambda arm: with_boundary(arm, logits=arm.boundary.logits[:1].clone()),
        "replica copies_synchronised",
    ),
    "another stride": (
        lambda arm: with_boundary(arm, cache=arm.boundary.cache.copy(1 + len(arm.boundary.cache))),
        "replica",
    ),
    "a token less in the cache": (lambda arm: with_tensors(arm, shorter), "replica functional_state prefix"),
    "a layer less": (lambda arm: with_tensors(arm, lower), "replica"),
    "another record": (
        lambda arm: with_boundary(arm, record=entered_again(arm.boundary.record)),
        "replica functional_state prefix",
    ),
    "tokens that never entered": (
        lambda arm: with_boundary(arm, state=other_tokens(arm.boundary.state)),
        "functional_state",
    ),
    "another margin": (lambda arm: with_suffix(arm, margins=(-1.0, *arm.suffix.margins[1:])), "replica"),
    "another record of the suffix": (
        lambda arm: with_suffix(arm, functional_sha256="0" * 64),
        "replica functional_state",
    ),
    "another first token": (
        lambda arm: with_suffix(arm, tokens=(1 + arm.suffix.tokens[0], *arm.suffix.tokens[1:])),
        "replica functional_state argmax",
    ),
    "copies that were given two things": (
        lambda arm: with_suffix(arm, synchronised=False),
        "replica copies_synchronised",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_gate_reads_every_part_of_the_first_and_of_the_last_arm(decoded_rows, change):
    edit, seen = CHANGES[change]
    for name, places in (("matrix", ("live", "prefill_replica")), ("six_arms", ("incremental", "prefill_replica"))):
        experiment, made = decoded_rows[name]
        for place in places:
            own = f"replica_{place.removesuffix('_replica')}"
            expected = {own if gate == "replica" else gate for gate in seen.split()} & set(experiment.gates())
            found = failing(experiment, arms.Arms(0, {**made.arms, place: edit(made[place])}))
            # beside these: a transplant is no longer of this donor, and its logits not of this recipient
            assert {gate for gate in found if not gate.startswith(("provenance", "raw_argmax"))} == expected, place


def test_logits_alone_are_storage_too(decoded_rows):
    experiment, made = decoded_rows["matrix"]
    logits = made["live"].boundary.logits
    shared = {**made.arms, "live_replica": with_boundary(made["live_replica"], logits=logits)}
    assert failing(experiment, arms.Arms(0, shared)) == {"storage_disjoint"}


def test_the_raw_argmax_gate_reads_the_eligible_argmax_too(decoded_rows):
    experiment, made = decoded_rows["six_arms"]
    raised = {name: with_tensors(made[name], raise_opening_logit) for name in designs.NATIVE}
    assert experiment.raw_argmax(arms.Arms(0, {**made.arms, **raised}))
    for name in designs.NATIVE:
        lowered = with_tensors(raised[name], lower_best_logit)
        assert not experiment.raw_argmax(arms.Arms(0, {**made.arms, **raised, name: lowered})), name


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({}, ""),
        ({"margins": ()}, "replica_pair"),
        ({"logprobs": ()}, "replica_pair"),
        ({"functional_sha256": "0" * 64}, "replica_pair functional_state"),
        ({"synchronised": False}, "replica_pair copies_synchronised"),
        ({"chosen_by_logits": False}, "replica_pair argmax"),
    ],
)
def test_a_control_gate_reads_every_part_of_every_generation(decoded_rows, change, seen):
    experiment, (given, made) = decoded_rows["batch_control"]
    for name in control.ARMS:
        found = failing(experiment, (given, {**made, name: dataclasses.replace(made[name], **change)}))
        assert found == set(seen.split()) - ({"replica_pair"} if name == "singleton" else set()), name


EXACT = {"merge_equal", "answer_tokens_equal", "answer_equal", "correct_equal", "argmax_equal"}


@pytest.mark.parametrize(
    ("change", "unequal"),
    [
        ({}, ""),
        ({"merge": [1]}, "merge_equal"),
        ({"answer": [1]}, "answer_tokens_equal"),  # stated in other tokens
        ({"argmax": -1}, "argmax_equal"),
        ({"scored": "D"}, "answer_equal"),
        ({"scored": None}, "answer_equal"),
        ({"correct": False}, "correct_equal"),
    ],
)
def test_a_comparison_is_of_both_arms(decoded_rows, change, unequal):
    """Its verdicts are of the entries; those on tensors and suffixes are of the arms."""
    _, made = decoded_rows["matrix"]
    live, prefill = made["live"], made["prefill"]
    entry = {**arms.arm_entry(live, SCORED), "scored": "C", "correct": True}
    for mine, theirs in (({**entry, **change}, entry), (entry, {**entry, **change})):
        found = arms.comparison_entry(live, live, mine, theirs)
        assert {name for name in EXACT if not found[name]} == set(unequal.split())
    silent = {**entry, "scored": None}  # where neither states an answer, the tokens are compared
    assert arms.comparison_entry(live, live, {**silent, **change}, silent)["answer_equal"] == (
        "answer" not in change and change.get("scored") is None
    )
    found = arms.comparison_entry(live, prefill, entry, entry)
    assert found["cache"] == compare(live.boundary.cache, prefill.boundary.cache).as_dict()
    assert found["logits"] == compare_tensors(live.boundary.logits, prefill.boundary.logits, "x").as_dict()
    assert found["cache"]["differing"] and found["logits"]["differing"]
    tokens, tops = ((other + 1, *rest) for other, *rest in (live.suffix.tokens, live.suffix.tops))
    found = arms.comparison_entry(live, with_suffix(live, tokens=tokens, tops=tops), entry, entry)
    assert found["suffix"] == {"exact": False, "first_divergence": 0, "tops": [live.suffix.tops[0], tops[0]]}


@pytest.mark.parametrize(("text", "stated", "correct"), [("C", "C", True), ("B", "B", False), ("?", None, False)])
def test_an_answer_is_right_where_it_is_the_tasks(decoded_rows, text, stated, correct):
    _, made = decoded_rows["matrix"]
    answer = tuple(made.state.contract.codec.encode(text))
    entry = arms.arm_entry(with_suffix(made["live"], answer=answer), SCORED)
    assert (entry["scored"], entry["correct"], entry["answer_text"]) == (stated, correct, text)
