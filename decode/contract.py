"""The decoding contract of a checkpoint: delimiters, caps, eligible tokens, visibility, prompt template.

It is read from `contract.json` and `tokenizer.json`. Unknown keys are refused. Absent keys take the defaults of this
file and of `minimodel.roles`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.text import TextCodec, check_template, json_sha256
from minimodel.checkpoint import CONFIG, CONTRACT, TOKENIZER, Checkpoint
from minimodel.config_file import read_config, read_rules
from minimodel.errors import InputError, refuse
from minimodel.files import checkpoint_directory, inside, read_json_object
from minimodel.roles import ANSWER, BRANCH_1, MERGE, NUM_ROLES, ROLE_NAMES, ROLE_OFFSET, VISIBILITY, RoleRules

SCHEMA = "stage-replay-contract-v1"
KEYS = {"schema", "delimiters", "caps", "visibility", "role_offset", "prompt_template", "ineligible_ids"}
OPEN = tuple(f"<|{name}|>" for name in ROLE_NAMES)
CLOSE = tuple(f"<|/{name}|>" for name in ROLE_NAMES)
CAPS = {"branch": 768, "merge": 512, "answer": 64}  # content tokens (paper, section 3.1)
TEMPLATE = "{question}\n\n{choices}"


@dataclass(frozen=True)
class Contract:
    """The decoding contract of one checkpoint, in token ids."""

    open_ids: tuple[int, ...]  # opening delimiters by raw role
    close_ids: tuple[int, ...]  # closing delimiters by raw role
    caps: tuple[int | None, ...]  # content tokens that a block may hold, by raw role; None for the prompt
    rules: RoleRules
    codec: TextCodec = field(compare=False, repr=False)
    ordinary: Tensor = field(compare=False, repr=False)  # bool [V], the ids that a block's content may have
    eligible: Tensor = field(compare=False, repr=False)  # bool [6, V]: row r is ordinary and r's closing delimiter

    @classmethod
    def load(cls, checkpoint: str | Path | Checkpoint) -> "Contract":
        """Reads and checks the contract of an adapted checkpoint, a directory or an opened one; no weights are needed.

        For a stock checkpoint, InputError names the command to run.
        """
        if isinstance(checkpoint, Checkpoint):
            directory, raw, vocab_size = checkpoint.directory, checkpoint.contract, checkpoint.config.vocab_size
        else:
            directory, raw, vocab_size = checkpoint_directory(checkpoint), None, 0
            if inside(directory, CONTRACT).exists():
                raw, config = (read_json_object(inside(directory, name)) for name in (CONTRACT, CONFIG))
                vocab_size = read_config(config, str(directory / CONFIG)).vocab_size
        if raw is None:
            raise InputError(
                f"{directory}: expected contract.json, found none: a stock checkpoint; adapt it with "
                f"python -m experiments.adapt --base {directory} --out DIR"
            )
        return cls.from_parts(raw, inside(directory, TOKENIZER), vocab_size, str(directory / CONTRACT))

    @classmethod
    def from_parts(cls, raw: dict[str, Any], tokenizer: Path, vocab_size: int, where: str) -> "Contract":
        """Returns the contract of contract.json's object and a tokenizer.json. vocab_size: the rows of the head."""
        unknown = sorted(set(raw) - KEYS)
        if unknown:
            raise refuse(f"{where}: keys", " ".join(sorted(KEYS)), unknown[0])
        if raw.get("schema", SCHEMA) != SCHEMA:
            raise refuse(f"{where}: schema", repr(SCHEMA), raw["schema"])
        opening, closing = delimiter_names(raw, where)
        template = check_template(raw.get("prompt_template", TEMPLATE), f"{where}: prompt_template")
        codec = TextCodec.load(tokenizer, template)
        ids = [codec.special_id(name, where) for name in (*opening, *closing)]
        if max(ids) >= vocab_size:
            raise refuse(f"{where}: delimiter ids", f"below vocab_size {vocab_size}", max(ids))
        ordinary = _ordinary(codec, ids, raw.get("ineligible_ids"), vocab_size, where)
        open_ids, close_ids = tuple(ids[:NUM_ROLES]), tuple(ids[NUM_ROLES:])
        eligible = ordinary.repeat(NUM_ROLES, 1)
        eligible[list(range(NUM_ROLES)), list(close_ids)] = True
        caps, rules = _caps(raw.get("caps", {}), where), read_rules(raw, where)
        return cls(open_ids, close_ids, caps, rules, codec, ordinary, eligible)

    def meaning(self) -> dict[str, Any]:
        """Returns what a token id means, however the files spell it: vocabulary, merges, delimiters and ordinary ids.

        A manifest records it beside caps, visibility and role offset.
        """
        ordinary = json_sha256(self.ordinary.nonzero().flatten().tolist())
        delimiters = {"open": list(self.open_ids), "close": list(self.close_ids)}
        return {**self.codec.meaning(), "delimiters": delimiters, "ordinary_ids_sha256": ordinary}

    def is_ordinary(self, token: int) -> bool:
        """Returns whether `token` may stand inside a block."""
        return 0 <= token < self.ordinary.numel() and bool(self.ordinary[token])

    def suffix_limit(self) -> int:
        """Returns the tokens of the longest suffix: merge's content and close; the answer's open, content and close."""
        return _number(self.caps[MERGE]) + _number(self.caps[ANSWER]) + 3

    def prefix_limit(self, prompt_length: int) -> int:
        """Returns the tokens of the longest prefix: the prompt block, three whole branches, merge's open."""
        return prompt_length + sum(_number(cap) + 2 for cap in self.caps[BRANCH_1:MERGE]) + 1


def _number(cap: int | None) -> int:
    assert cap is not None, "only the prompt has no cap"
    return cap


def contract_document(caps: Mapping[str, int], template: str) -> dict[str, Any]:
    """Returns the object of a new contract.json, with the default delimiters, role offset and visibility."""
    return {
        "schema": SCHEMA,
        "delimiters": {"open": list(OPEN), "close": list(CLOSE)},
        "caps": dict(caps),
        "role_offset": ROLE_OFFSET,
        "visibility": [list(row) for row in VISIBILITY],
        "prompt_template": template,
    }


def delimiter_names(contract: dict[str, Any], where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the opening and of the closing delimiters in contract.json's object, by raw role."""
    raw = contract.get("delimiters", {})
    if not isinstance(raw, dict) or set(raw) - {"open", "close"}:
        raise refuse(f"{where}: delimiters", "an object with 'open' and 'close'", raw)
    both = {"open": list(OPEN), "close": list(CLOSE), **raw}
    for key, names in both.items():
        if not isinstance(names, list) or len(names) != NUM_ROLES or not all(isinstance(n, str) and n for n in names):
            raise refuse(f"{where}: delimiters.{key}", "six names, one per role", names)
    if len({*both["open"], *both["close"]}) != 2 * NUM_ROLES:
        raise refuse(f"{where}: delimiters", "twelve different names", [*both["open"], *both["close"]])
    return tuple(both["open"]), tuple(both["close"])


def _caps(raw: Any, where: str) -> tuple[int | None, ...]:
    if not isinstance(raw, dict) or set(raw) - set(CAPS):
        raise refuse(f"{where}: caps", "an object with 'branch', 'merge' and 'answer'", raw)
    caps = {**CAPS, **raw}
    for key, value in caps.items():
        if type(value) is not int or not 1 <= value <= 1 << 20:
            raise refuse(f"{where}: caps.{key}", "an integer from 1 to 1048576", value)
    return (None, caps["branch"], caps["branch"], caps["branch"], caps["merge"], caps["answer"])


def _ordinary(codec: TextCodec, delimiters: list[int], ineligible: Any, vocab_size: int, where: str) -> Tensor:
    """Returns bool [V]: the ids that the tokenizer defines, without the delimiters and the other special tokens.

    A list `ineligible` is left out in place of the other special tokens: an empty one makes those ordinary.
    """
    if ineligible is not None and (
        not isinstance(ineligible, list) or any(type(i) is not int or not 0 <= i < vocab_size for i in ineligible)
    ):
        raise refuse(f"{where}: ineligible_ids", f"a list of ids below vocab_size {vocab_size}", ineligible)
    banned = {*delimiters, *(codec.special_ids() if ineligible is None else ineligible)}
    kept = [i for i in codec.defined_ids() if i < vocab_size and i not in banned]
    ordinary = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
    ordinary[torch.tensor(kept, dtype=torch.int64, device="cpu")] = True
    if not ordinary.any():
        raise InputError(f"{where}: expected at least one ordinary token, found none that is eligible")
    return ordinary
