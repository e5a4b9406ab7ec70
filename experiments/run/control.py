"""One copy of an input against two copies of it: three whole generations per row, their comparison and endpoints.

A chosen token's log-probability is taken from the logits that chose it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cache.kv import KVCache
from decode.greedy import Choice, Step, Steps, best_two, choose, generate
from decode.record import FunctionalRecord
from decode.state import State, token_digest
from decode.stepper import CausalStepper, Stepper, make_ready
from experiments.report.values import outcome, rate
from experiments.run.experiment import Experiment, gate
from experiments.run.inputs import SPREAD, panel_counts, panel_span, select_spread, shortfall, spread_record
from experiments.run.progress import RowProgress
from experiments.run.records import Comparison, Endpoints, Panel, Row, RowBody, Summary
from experiments.run.summary import run_summary
from experiments.run.tasks import Prefix
from minimodel.decoder import Decoder
from stats.endpoints import disagreement, divergence_spread, first_divergence

WANTED = 10
ARMS = {"singleton": 1, "pair": 2, "pair_replica": 2}  # physical copies
PAIRS = (("pair", "pair_replica"), ("singleton", "pair"))
RULE = SPREAD.replace("prefix", "prompt")
# a token, its margin (None where it is forced), the hidden state it was chosen from, and bool [V], what could be chosen
Chosen = tuple[int, float | None, Tensor | None, Tensor]


@dataclass(frozen=True)
class Generation:
    """Everything generated after a prompt, delimiters included."""

    tokens: tuple[int, ...]
    margins: tuple[float | None, ...]  # None for a forced token
    logprobs: tuple[float | None, ...]  # None for a forced token
    functional_sha256: str  # the record of prompt and tokens, as they entered the decoder
    synchronised: bool  # the same tokens entered in all physical copies
    chosen_by_logits: bool  # every free token is the eligible argmax of the logits whose log-softmax is its logprob


def whole_steps(model: Decoder, prompt: State, copies: int) -> Steps[Generation]:
    """Generates greedily from the prompt to the end of the answer. RowFailure when the copies disagree."""
    contract = prompt.contract
    make_ready(model, contract.rules)
    capacity = contract.prefix_limit(len(prompt)) + contract.suffix_limit()
    cache = KVCache.for_model(model, copies, capacity)
    stepper = Stepper(model, cache, copies, capacity)
    for token, role in zip(prompt.tokens, prompt.roles):
        yield Step(stepper, token, role)
    out = yield from generate(stepper, contract, prompt.structure, None, lambda structure: structure.done)
    eligible = contract.eligible.to(model.numeric.torch_device)
    masks = [eligible[role] for role in out.roles]
    return _generation(stepper, list(zip(out.tokens, out.margins, (None, *out.hidden), masks, strict=True)))


def chat_steps(
    model: Decoder, prompt: Sequence[int], copies: int, stop: Collection[int], limit: int
) -> Steps[Generation]:
    """Generates greedily with a stock checkpoint: the prompt in one call, then token by token, over the whole output
    head, until a token of `stop` (the last one then) or `limit` tokens. RowFailure when the copies disagree.
    """
    model.numeric.apply()
    device, capacity = model.numeric.torch_device, len(prompt) + limit
    cache, record = KVCache.for_model(model, copies, capacity), FunctionalRecord()
    eligible = torch.ones(model.config.vocab_size, dtype=torch.bool, device=device)
    input_ids = torch.tensor(list(prompt), device=device).expand(copies, -1)
    positions = torch.arange(len(prompt), device=device).expand(copies, -1)
    hidden = model(input_ids, None, positions, None, cache, None, record.enter)[:, -1:]
    stepper = CausalStepper(model, cache, copies, capacity)
    stepper.resume([0] * len(prompt), record)
    choice: Choice | None = best_two(model.logits(hidden)[:, 0], eligible)
    chosen: list[Chosen] = []
    while choice is not None:
        token, top, second = choice
        chosen.append((token, top - second, hidden, eligible))
        if len(chosen) == limit or token in stop:
            break
        hidden, choice = yield Step(stepper, token, 0, eligible)
    return _generation(stepper, chosen)


def _generation(stepper: Stepper, chosen: Sequence[Chosen]) -> Generation:
    cache, record, logprobs, agree = stepper.cache, stepper.record, [], True
    assert isinstance(cache, KVCache)
    cache.require_equal_copies()
    for token, margin, hidden, mask in chosen:
        logits = None if margin is None or hidden is None else stepper.model.logits(hidden)[:, 0]
        agree = agree and (logits is None or choose(logits, mask) == (token, margin))
        logprobs.append(None if logits is None else selected_logprob(logits, token))
    tokens, margins = tuple(one[0] for one in chosen), tuple(one[1] for one in chosen)
    return Generation(tokens, margins, tuple(logprobs), record.sha256(), record.synchronised, agree)


def selected_logprob(logits: Tensor, token: int) -> float:
    """Returns the natural log-probability of `token` in the first copy. logits: [B, V], model dtype.

    The softmax is in float64: the sum over V then rounds far below the difference of two model-dtype logits.
    """
    return torch.log_softmax(logits[0].to(torch.float64), dim=-1)[token].item()


@dataclass(frozen=True)
class Input(Prefix):
    """A prompt, and how a row continues it."""

    generate: Callable[[int], Steps[Generation]]  # from the number of physical copies
    derived: Callable[[tuple[int, ...]], str | None]  # the functional record's digest, from tokens and output alone


def select(inputs: Sequence[Input], limit: int | None) -> tuple[list[Input], Panel]:
    """Returns the frozen rows in selection order, and their panel. limit: keep the first of them."""
    found = select_spread(inputs, WANTED)[:limit]
    return found, spread_record(RULE, found, WANTED, len(inputs))


Made = tuple[Input, dict[str, Generation]]  # the generations of one row, by arm


@dataclass(frozen=True)
class Control(Experiment[Made]):
    """Generates one input three times and compares."""

    name: str  # the command's
    decoder: Decoder
    tasks: Sequence[Input]  # the frozen rows
    panel: Panel
    limit: int  # the most tokens that any row's cache can hold

    @property
    def longest(self) -> int:
        return self.limit

    def decode(self, index: int, progress: RowProgress) -> Steps[Made]:
        given, arms = self.tasks[index], {}
        for name, copies in ARMS.items():
            progress.arm(name)
            arms[name] = yield from given.generate(copies)
            progress.fed(len(given) + len(arms[name].tokens))
        return given, arms

    @gate
    def replica_pair(self, made: Made) -> bool:
        """Tokens, margins, log-probabilities and functional state are equal."""
        return made[1]["pair"] == made[1]["pair_replica"]

    @gate
    def functional_state(self, made: Made) -> bool:
        """What entered the decoder follows from the integer tokens alone."""
        return all(one.functional_sha256 == made[0].derived(one.tokens) for one in made[1].values())

    @gate
    def copies_synchronised(self, made: Made) -> bool:
        return all(one.synchronised for one in made[1].values())

    @gate
    def argmax(self, made: Made) -> bool:
        return all(one.chosen_by_logits for one in made[1].values())

    def entry(self, index: int, made: Made) -> RowBody:
        given, arms = made
        return {
            "input": {"length": len(given), "sha256": given.sha256},
            "arms": {
                name: {
                    "copies": ARMS[name],
                    "tokens": list(one.tokens),
                    "tokens_sha256": token_digest(one.tokens),
                    "logprobs": list(one.logprobs),
                    "margins": list(one.margins),
                    "state_sha256": one.functional_sha256,
                }
                for name, one in arms.items()
            },
            "comparisons": {f"{a}:{b}": comparison_entry(arms[a], arms[b]) for a, b in PAIRS},
        }

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Returns the head and the endpoints of one copy against two."""
        pairs = [row["comparisons"]["singleton:pair"] for row in rows if row["comparisons"]]
        tokens, logprobs = [pair["tokens"] for pair in pairs], [pair["logprobs"] for pair in pairs]
        endpoints: Endpoints = {
            "panel": panel_counts(self.panel),
            "input_length": panel_span(self.panel),
            "comparison": "singleton:pair",
            "compared_rows": len(pairs),
            "token_disagreement": disagreement([one["exact"] for one in tokens]).as_dict(),
            "logprob_disagreement": disagreement([one["exact"] for one in logprobs]).as_dict(),
            "first_token_divergence": divergence_spread([one["first_divergence"] for one in tokens]),
            "first_logprob_divergence": divergence_spread([one["first_divergence"] for one in logprobs]),
            "max_abs_aligned": max((one["max_abs_aligned"] for one in logprobs), default=None),
            "max_abs_shared": max((one["max_abs_shared"] for one in logprobs), default=None),
        }
        return run_summary(self.name, self.decoder.numeric.dtype, rows, endpoints)

    def closing(self, summary: Summary) -> list[str]:
        tokens, logprobs = rate(summary["token_disagreement"]), rate(summary["logprob_disagreement"])
        line = f"{outcome(summary)}; one copy against two: tokens differ {tokens}, log-probabilities differ {logprobs}"
        return [line, *shortfall(summary["panel"])]


def comparison_entry(left: Generation, right: Generation) -> Comparison:
    """Returns the row's `comparisons["LEFT:RIGHT"]`. `max_abs_aligned` is defined as in the paper's release."""
    tokens = first_divergence(left.tokens, right.tokens)
    bits: list[list[Any]] = [[None if v is None else v.hex() for v in side.logprobs] for side in (left, right)]
    logprobs = first_divergence(*bits)
    pairs = list(zip(left.logprobs, right.logprobs))
    aligned, shared = (
        max((abs(a - b) for a, b in some if a is not None and b is not None), default=0.0)
        for some in (pairs, pairs[:tokens])
    )
    return {
        "tokens": {"exact": tokens is None, "first_divergence": tokens},
        "logprobs": {
            "exact": logprobs is None,
            "first_divergence": logprobs,
            "max_abs_aligned": aligned,
            "max_abs_shared": shared,
        },
    }
