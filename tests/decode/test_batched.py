"""Several requests in one step: each has the bits, the record and the failure that it has alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import decode.batched as batched
from cache.build import incremental_steps, live_steps
from decode import RowFailure, State
from decode.batched import Job, best_two_each, in_flight
from decode.greedy import alone, best_two, suffix_steps
from decode.independence import together_here
from minimodel import load_model
from tests.conftest import numeric


class Clock:
    """Checks that the time of a job is taken in pairs of start and stop, and shared only between them."""

    def __init__(self):
        self.running = False

    def start(self):
        assert not self.running
        self.running = True

    def stop(self):
        assert self.running
        self.running = False

    def share(self, seconds):
        assert seconds >= 0 and not self.running


@pytest.fixture
def prompts(contract):
    """Five prompts of different lengths."""
    words = "how many apples are left when two of seven are eaten by one of us today"
    return [State.prompt(contract, words[: 5 + 9 * n], ["1", "2"] * (n % 3)) for n in range(5)]


def whole(model, prompt):
    """A live boundary, its suffix, and the incremental boundary of the same tokens."""
    live = yield from live_steps(model, prompt)
    suffix = yield from suffix_steps(model, live)
    incremental = yield from incremental_steps(model, live.state)
    return live, suffix, incremental


def run(model, requests, size):
    jobs = (Job(number, steps, Clock()) for number, steps in enumerate(requests))
    return dict(in_flight(jobs, size, together_here(model).model))


def same(left, right):
    """Tokens, margins and structure; both caches, the logits and the records, in bits."""
    states = left[0].state == right[0].state and left[0].margins == right[0].margins and left[1] == right[1]
    return states and all(
        mine.cache.equals(theirs.cache)
        and torch.equal(mine.logits, theirs.logits)
        and mine.record.sha256() == theirs.record.sha256()
        for mine, theirs in ((left[0], right[0]), (left[2], right[2]))
    )


QUICK = [("bf16", "repeat_kv"), ("fp32", "repeat_kv")]
SLOW = [("bf16", "packed_gqa"), ("fp32", "eager/plain"), ("fp64", "eager/plain"), ("bf16", "invariant")]
SLOW += [("fp32", "invariant"), ("fp32", "repeat_kv/packed"), ("bf16", "repeat_kv/packed")]


@pytest.mark.parametrize(
    ("dtype", "kernels"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_requests_have_the_bits_they_have_alone(tiny_directory, dtype, kernels, prompts):
    """As many in flight as the check allows, two fewer than there are: they meet at different lengths and blocks."""
    model = load_model(tiny_directory, numeric(dtype, kernels=kernels))
    size = min(together_here(model).size, len(prompts) - 2)
    found = run(model, [whole(model, prompt) for prompt in prompts], size)
    assert sorted(found) == list(range(len(prompts)))
    assert all(same(found[number], alone(whole(model, prompt))) for number, prompt in enumerate(prompts))


def test_one_request_that_fails_closed_ends_alone(bf16, prompts):
    """NaN in one cache, half-way: its message is the one it has alone, the others keep their bits."""

    def poisoned(prompt):
        steps, count = whole(bf16, prompt), 0
        step = next(steps)
        while True:
            count += 1
            if count == len(prompt) + 4:
                step.stepper.cache.values(0)[:] = float("nan")
            try:
                after = yield step
            except RowFailure as failure:
                step = steps.throw(failure)
            else:
                step = steps.send(after)

    with pytest.raises(RowFailure) as expected:
        alone(poisoned(prompts[1]))
    requests = [poisoned(prompt) if n == 1 else whole(bf16, prompt) for n, prompt in enumerate(prompts[:3])]
    found = run(bf16, requests, together_here(bf16).size)
    assert isinstance(found[1], RowFailure) and str(found[1]) == str(expected.value) and "NaN" in str(found[1])
    assert all(same(found[n], alone(whole(bf16, prompts[n]))) for n in (0, 2))


@pytest.fixture
def joined(monkeypatch):
    """The number of requests in each step that several took together."""
    counts, real = [], batched.take_together
    monkeypatch.setattr(
        batched, "take_together", lambda steps, together: counts.append(len(steps)) or real(steps, together)
    )
    return counts


def test_the_next_enters_as_soon_as_one_ends_and_is_drawn_only_then(bf16, prompts, joined):
    """Never more than `size` in flight, never fewer while requests are left."""
    flying, drawn, seen, ended = 0, 0, [], 0

    def counted(prompt):
        nonlocal flying
        flying += 1
        made = yield from live_steps(bf16, prompt)
        flying -= 1
        return made

    def jobs():
        nonlocal drawn
        for number, prompt in enumerate(prompts):
            seen.append((len(joined), flying))
            drawn += 1
            yield Job(number, counted(prompt), Clock())

    for _ in in_flight(jobs(), 3, together_here(bf16).model):
        ended += 1
        assert drawn <= ended + 3
    assert ended == len(prompts) and max(joined) == 3
    assert all(count == 3 for count in joined[: seen[-1][0]]) and all(flying == 2 for _, flying in seen[3:])


def test_observed_steps_and_single_copies_are_taken_alone(bf16, prompts, joined):
    names = []
    requests = [
        live_steps(bf16, prompts[0], observe=lambda name, tensor: names.append(name)),
        live_steps(bf16, prompts[1], copies=1),
        *(live_steps(bf16, prompt) for prompt in prompts[2:4]),
    ]
    found = run(bf16, requests, 4)
    assert set(joined) == {2} and "layers.0.self_attn.attention" in names
    for number, prompt in enumerate(prompts[:4]):
        expected = alone(live_steps(bf16, prompt, copies=1 if number == 1 else 2))
        assert found[number].cache.equals(expected.cache) and found[number].state == expected.state


def test_what_is_no_row_failure_ends_all(bf16, prompts):
    def broken(prompt):
        yield from live_steps(bf16, prompt)
        raise KeyError("not a row's own failure")

    with pytest.raises(KeyError):
        run(bf16, [broken(prompt) for prompt in prompts], 3)


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 3.5, float("inf"), float("-inf"), float("nan"), 1e-40])


@settings(max_examples=200)
@given(st.lists(st.lists(SPECIAL, min_size=5, max_size=5), min_size=1, max_size=4), st.data())
def test_choices_of_several_are_the_choices_of_each(values, data):
    """Ties, signed zeros, infinities, NaN, copies that differ in one bit, few eligible ids."""
    logits = torch.tensor(values)[:, None].repeat(1, 2, 1)  # [K, 2, V], both copies equal
    flags = st.lists(st.booleans(), min_size=5, max_size=5).filter(any)
    eligible = torch.tensor([data.draw(flags) for _ in values])
    if data.draw(st.booleans()):
        logits[0, 1, 2] = data.draw(SPECIAL)
    for number, choice in enumerate(best_two_each(logits, eligible)):
        try:
            assert choice == best_two(logits[number], eligible[number])
        except RowFailure as failure:
            assert isinstance(choice, RowFailure) and str(choice) == str(failure)
