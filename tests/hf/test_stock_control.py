"""The stock control's generation is transformers' own `generate`: tokens, logits at every choice, and its end."""

import pytest
import torch

from decode.greedy import alone
from experiments.run.control import chat_steps, selected_logprob
from minimodel import load_model
from minimodel.numerics import DTYPES
from tests.hf.conftest import numeric
from tests.hf.reference import Reference

PROMPT = [269, 10, 11, 12, 30, 31, 270, 269, 13]
NEW = 24


@pytest.mark.parametrize("copies", [1, 2])
def test_tokens_and_log_probabilities_are_those_of_generate(stock_directory, dtype, copies):
    model = load_model(stock_directory, numeric(dtype))
    reference = Reference(stock_directory, DTYPES[dtype])
    given = torch.tensor([PROMPT] * copies)

    def theirs(stop):
        out = reference.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=stop,
            pad_token_id=256,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[0, len(PROMPT) :].tolist()
        # widened to FP32 by transformers, which changes no value
        rows = [logits.to(DTYPES[dtype]) for logits in out.logits]
        return tokens, [selected_logprob(logits, token) for logits, token in zip(rows, tokens)]

    free = alone(chat_steps(model, PROMPT, copies, (), NEW))
    assert theirs([287]) == (list(free.tokens), list(free.logprobs)) and len(free.tokens) == NEW
    end = next(token for i, token in enumerate(free.tokens) if i > 4 and token not in free.tokens[:i])
    stopped = alone(chat_steps(model, PROMPT, copies, (end,), NEW))
    assert theirs([end]) == (list(stopped.tokens), list(stopped.logprobs)) and stopped.tokens[-1] == end
