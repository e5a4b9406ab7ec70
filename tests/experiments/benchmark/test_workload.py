"""The tokens that every arm is given."""

import torch

from decode.contract import Contract
from experiments.benchmark.workload import Workload
from minimodel.roles import NUM_ROLES


def test_workload_has_every_kind_of_block_and_only_ordinary_tokens(contract: Contract) -> None:
    work = Workload.of(contract, 50, torch.device("cpu"))
    assert all(contract.is_ordinary(token) for token in work.tokens) and set(work.roles) == set(range(NUM_ROLES - 1))
    assert list(work.roles) == sorted(work.roles) and work.tokens == Workload.of(contract, 50, work.device).tokens
    assert work.call(50)[3][0, 0, -1].all(), "the last token sees every key"
