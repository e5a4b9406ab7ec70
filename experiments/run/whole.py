"""A whole generation, prompt to end, in any number of physical copies, with the log-probability of every choice."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.kv import KVCache
from decode.greedy import Choice, Step, Steps, best_two, choose, generate
from decode.record import FunctionalRecord
from decode.state import State
from decode.stepper import CausalStepper, Stepper, make_ready
from minimodel.decoder import Decoder


@dataclass(frozen=True)
class Generation:
    """Everything generated after a prompt, delimiters included."""

    tokens: tuple[int, ...]
    margins: tuple[float | None, ...]  # None for a forced token
    logprobs: tuple[float | None, ...]  # None for a forced token
    functional_sha256: str  # the record of prompt and tokens, as they entered the decoder
    synchronised: bool  # they entered alike in all physical copies
    chosen_by_logits: bool  # every free token is the eligible argmax of the logits whose log-softmax is its logprob


def whole_steps(model: Decoder, prompt: State, copies: int) -> Steps[Generation]:
    """Ordinary greedy generation from the prompt to the end of the answer. RowFailure when the copies disagree."""
    contract = prompt.contract
    make_ready(model, contract.rules)
    capacity = contract.prefix_limit(len(prompt)) + contract.suffix_limit()
    cache = KVCache.for_model(model, copies, capacity)
    stepper = Stepper(model, cache, copies, capacity)
    for token, role in zip(prompt.tokens, prompt.roles):
        yield Step(stepper, token, role)
    out = yield from generate(stepper, contract, prompt.structure, None, lambda structure: structure.done)
    cache.require_equal_copies()
    eligible, logprobs, agree = contract.eligible.to(model.numeric.torch_device), [], True
    for index, (token, role, margin) in enumerate(zip(out.tokens, out.roles, out.margins)):
        logits = None if margin is None else model.logits(out.hidden[index - 1])[:, 0]
        agree = agree and (logits is None or choose(logits, eligible[role]) == (token, margin))
        logprobs.append(None if logits is None else selected_logprob(logits, token))
    record = stepper.record
    return Generation(out.tokens, out.margins, tuple(logprobs), record.sha256(), record.synchronised, agree)


def chat_steps(
    model: Decoder, prompt: Sequence[int], copies: int, stop: Collection[int], limit: int
) -> Steps[Generation]:
    """Plain greedy generation of a stock checkpoint: the prompt in one call, then token by token, over the whole output
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
    tokens: list[int] = []
    margins, logprobs, agree = [], [], True
    while choice is not None:
        logits, (token, top, second) = model.logits(hidden)[:, 0], choice
        agree = agree and int(logits[0].argmax()) == token
        tokens.append(token)
        margins.append(top - second)
        logprobs.append(selected_logprob(logits, token))
        if len(tokens) == limit or token in stop:
            break
        hidden, choice = yield Step(stepper, token, 0, eligible)
    cache.require_equal_copies()
    record = stepper.record
    return Generation(tuple(tokens), tuple(margins), tuple(logprobs), record.sha256(), record.synchronised, agree)


def selected_logprob(logits: Tensor, token: int) -> float:
    """logits [B, V] in the model dtype -> natural log-probability of `token` in the first copy.

    The softmax sees float64: the sum over V then rounds far below the difference of two model-dtype logits.
    """
    return torch.log_softmax(logits[0].to(torch.float64), dim=-1)[token].item()
