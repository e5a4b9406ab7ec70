"""The discrete state of a request: tokens, their roles and positions, and where the structure stands."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from decode.contract import Contract
from decode.structure import Structure, advance
from minimodel.errors import InputError
from minimodel.roles import ROLE_NAMES


@dataclass(frozen=True)
class State:
    """Tokens through some point of the contract. Roles follow from the tokens; position ids are 0, 1, 2, ...

    Both physical copies share one state: there is no padding in the design.
    """

    contract: Contract = field(repr=False)
    tokens: tuple[int, ...]
    roles: tuple[int, ...]
    structure: Structure

    @classmethod
    def from_tokens(cls, contract: Contract, tokens: Iterable[int]) -> "State":
        """Replays the tokens through the structural machine; InputError names the first that was not eligible."""
        structure, roles, kept = Structure(), [], []
        for index, token in enumerate(tokens):
            role = structure.block
            try:
                structure = advance(contract, structure, token)
            except InputError as error:
                raise InputError(f"token {index}: {error}") from None
            kept.append(int(token))
            roles.append(role)
        return cls(contract, tuple(kept), tuple(roles), structure)

    @classmethod
    def prompt(cls, contract: Contract, question: str, choices: Sequence[str]) -> "State":
        """Returns the prompt block of a task, delimiters included; everything the user typed is ordinary text."""
        ids = contract.codec.encode(contract.codec.prompt(question, list(choices)))
        return cls.from_tokens(contract, [contract.open_ids[0], *ids, contract.close_ids[0]])

    def __len__(self) -> int:
        return len(self.tokens)

    def sha256(self) -> str:
        """Returns the digest of the tokens."""
        return token_digest(self.tokens)


def token_digest(tokens: Sequence[int]) -> str:
    """Returns the SHA-256 of the canonical JSON list: ASCII, separators "," and ":"."""
    return hashlib.sha256(json.dumps(list(tokens), separators=(",", ":")).encode("ascii")).hexdigest()


def content_of(contract: Contract, tokens: Sequence[int], role: int, first_open: bool) -> tuple[int, ...]:
    """Returns the content of block `role`, up to its closing delimiter or the end; empty when it does not occur.

    It begins after the opening delimiter, or with `first_open` at the start of `tokens`.
    """
    start = 0 if first_open else min(_index(tokens, contract.open_ids[role]) + 1, len(tokens))
    stop = _index(tokens, contract.close_ids[role])
    assert start <= stop, f"block {ROLE_NAMES[role]} closes before it opens"
    return tuple(tokens[start:stop])


def _index(tokens: Sequence[int], token: int) -> int:
    return tokens.index(token) if token in tokens else len(tokens)
