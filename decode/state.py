"""The discrete state of a request: tokens, their roles, and the open block. Pure functions of integers.

Six ordered, non-nested blocks. Inside an open block, ordinary tokens and that block's own closing delimiter are
eligible; between blocks only the next opening delimiter; at the content cap only the closing delimiter; after the
answer closes, nothing (paper, section 3.1). `forced` gives the only eligible token where there is one; everywhere else
`Contract.eligible` is the structural mask of the logits.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from decode.contract import Contract
from minimodel.errors import InputError
from minimodel.roles import ANSWER, MERGE, ROLE_NAMES


@dataclass(frozen=True)
class Structure:
    """A position in the sequence of blocks."""

    block: int = 0  # raw role of the open block, or of the next one to open
    open: bool = False  # whether its opening delimiter has been seen
    content: int = 0  # ordinary tokens in the open block so far

    @property
    def done(self) -> bool:
        """Whether the answer has closed."""
        return self.block > ANSWER

    @property
    def at_boundary(self) -> bool:
        """Whether merge's opening delimiter was the last token: merge is open and empty."""
        return self.block == MERGE and self.open and self.content == 0


def forced(contract: Contract, structure: Structure) -> int | None:
    """Returns the only eligible token, or None where the logits choose. InputError when the answer has closed."""
    if structure.done:
        raise InputError("structure: expected an open or pending block, found a closed answer")
    if not structure.open:
        return contract.open_ids[structure.block]
    cap = contract.caps[structure.block]
    return contract.close_ids[structure.block] if cap is not None and structure.content >= cap else None


def advance(contract: Contract, structure: Structure, token: int) -> Structure:
    """Returns the structure after `token`. InputError, with the block and what was expected, if it is not eligible."""
    only = forced(contract, structure)
    if only is not None and token != only:
        raise InputError(f"block {ROLE_NAMES[structure.block]}: expected only token {only}, found {token}")
    if not structure.open:
        return replace(structure, open=True, content=0)
    if token == contract.close_ids[structure.block]:
        return Structure(block=structure.block + 1)
    if not contract.is_ordinary(token):
        raise InputError(
            f"block {ROLE_NAMES[structure.block]}: expected an ordinary token or its closing delimiter "
            f"{contract.close_ids[structure.block]}, found {token}"
        )
    return replace(structure, content=structure.content + 1)


@dataclass(frozen=True)
class State:
    """A request's tokens up to some point of its blocks.

    A token's role is its block; both delimiters belong to their block. Position ids are 0, 1, 2, ...: there is no
    padding. Both physical copies share one state.
    """

    contract: Contract = field(repr=False)
    tokens: tuple[int, ...]
    roles: tuple[int, ...]
    structure: Structure

    @classmethod
    def from_tokens(cls, contract: Contract, tokens: Iterable[int]) -> "State":
        """Returns the state after these tokens. InputError names the first that was not eligible."""
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
        ids = contract.codec.encode(contract.codec.prompt(question, choices))
        return cls.from_tokens(contract, [contract.open_ids[0], *ids, contract.close_ids[0]])

    def __len__(self) -> int:
        return len(self.tokens)

    def sha256(self) -> str:
        """Returns the digest of the tokens."""
        return token_digest(self.tokens)


def token_digest(tokens: Sequence[int]) -> str:
    """Returns the SHA-256 of the canonical JSON list: ASCII, separators "," and ":"."""
    return hashlib.sha256(json.dumps(list(tokens), separators=(",", ":")).encode("ascii")).hexdigest()


def content_of(contract: Contract, tokens: Iterable[int], roles: Iterable[int], role: int) -> tuple[int, ...]:
    """Returns the content of block `role`: the tokens of that role without the block's two delimiters."""
    delimiters = contract.open_ids[role], contract.close_ids[role]
    return tuple(token for token, own in zip(tokens, roles) if own == role and token not in delimiters)
