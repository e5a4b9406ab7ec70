"""The structural machine: which block is open, and which tokens may come next. Pure functions of integers.

Six ordered, non-nested blocks. Inside an open block, ordinary tokens and that block's own closing delimiter are
eligible; between blocks only the next opening delimiter; at the content cap only the closing delimiter; after the
answer closes, nothing (paper, section 3.1).
"""

from dataclasses import dataclass, replace

from decode.contract import Contract
from minimodel.errors import InputError
from minimodel.roles import ANSWER, MERGE, ROLE_NAMES


@dataclass(frozen=True)
class Structure:
    """A place in the sequence of blocks."""

    block: int = 0  # raw role of the open block, or of the next one to open
    open: bool = False  # whether its opening delimiter has been seen
    content: int = 0  # its ordinary tokens so far

    @property
    def done(self) -> bool:
        """Whether the answer has closed."""
        return self.block > ANSWER

    @property
    def at_boundary(self) -> bool:
        """Whether merge's opening delimiter was the last token."""
        return self.block == MERGE and self.open and self.content == 0


def forced(contract: Contract, structure: Structure) -> int | None:
    """Returns the only eligible token; None where the logits choose. InputError when generation has ended."""
    if structure.done:
        raise InputError("structure: expected an open or pending block, found a closed answer")
    if not structure.open:
        return contract.open_ids[structure.block]
    cap = contract.caps[structure.block]
    return contract.close_ids[structure.block] if cap is not None and structure.content >= cap else None


def advance(contract: Contract, structure: Structure, token: int) -> Structure:
    """Returns the structure after `token`. InputError names the block and what was eligible when the token was not."""
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
