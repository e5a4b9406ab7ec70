"""The decoding contract: blocks and delimiters, the structural mask, discrete state, and the greedy loop."""

from decode.contract import Contract
from decode.greedy import Suffix, greedy_suffix
from decode.state import State, Structure, token_digest
from minimodel.bits import RowFailure

__all__ = ["Contract", "RowFailure", "State", "Structure", "Suffix", "greedy_suffix", "token_digest"]
