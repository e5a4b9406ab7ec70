"""The text of a run's token ids, by the tokenizer whose digest is the manifest's, split into blocks and marked where
suffixes diverge; and the run's tasks."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decode.contract import Contract
from decode.state import State
from decode.text import TextCodec
from experiments.report.blocks import Passage, Passages, Span
from experiments.report.charts import ROLE_COLOURS, SERIES
from experiments.report.values import words
from experiments.run.directory import INFORMATION
from experiments.run.ledger import sha256_file
from experiments.run.records import Manifest
from experiments.run.tasks import Task, load_tasks
from minimodel.errors import InputError
from minimodel.roles import ROLE_NAMES
from stats.endpoints import first_divergence

MEANING = ("config.json", "contract.json", "tokenizer.json")  # the checkpoint's files that give tokens their meaning
# GPT-2's table: printable Latin-1 bytes spell themselves, all others take the characters from U+0100 on
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}


@dataclass(frozen=True)
class Texts:
    """What a run's checkpoint and task file add to the token ids of its ledger."""

    codec: TextCodec | None  # None where the checkpoint is missing or another one
    contract: Contract | None = None  # None also for a stock checkpoint, which has no blocks
    tasks: Mapping[str, Task] = field(default_factory=dict)  # by row id; empty where missing or none are read
    missing: tuple[str, ...] = ()  # a sentence for each of the two that is missing

    def spans(self, tokens: Sequence[int]) -> tuple[Span, ...]:
        """Returns tokens as text. Delimiters and other special tokens, undefined ids, and bytes that are no character
        are spelled out; without a tokenizer, the ids."""
        if self.codec is None:
            return (Span(" ".join(map(str, tokens))),) if tokens else ()
        found: list[Span] = []
        for special, members in itertools.groupby(tokens, key=lambda token: self._name(token) is not None):
            if special:
                found += [Span(str(self._name(token)), "special") for token in members]
            else:
                found.append(Span(b"".join(map(self._bytes, members)).decode("utf-8", errors="backslashreplace")))
        return tuple(found)

    def line(self, tokens: Sequence[int]) -> str:
        """Returns tokens as one line of text."""
        return " ".join("".join(span.text for span in self.spans(tokens)).split("\n"))

    def token(self, token: int | None) -> str:
        """Returns one token for a table: its text in quotes and its id; "ended" for None."""
        if token is None or self.codec is None:
            return "ended" if token is None else f"id {token}"
        [span] = self.spans([token])
        return f"{span.text if span.kind else repr(span.text)} (id {token})"

    def by_block(self, tokens: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Returns (role, tokens) of each block in order, delimiters included; nothing without a contract."""
        roles = State.from_tokens(self.contract, tokens).roles if self.contract is not None else ()
        grouped = itertools.groupby(zip(roles, tokens), key=lambda pair: pair[0])
        return [(role, [token for _, token in members]) for role, members in grouped]

    def prefix(self, tokens: Sequence[int]) -> Passages:
        """Returns the blocks up to the boundary as text in their colours; ids where there is no contract."""
        if self.contract is None:
            return Passages("The prefix", (Passage(f"{len(tokens)} token ids", Texts(None).spans(tokens)),))
        passages = (
            Passage(f"{words(ROLE_NAMES[role])}, {len(found)} tokens", self.spans(found), ROLE_COLOURS[role])
            for role, found in self.by_block(tokens)
        )
        return Passages("The prefix, block by block, through the boundary", tuple(passages))

    def suffixes(self, suffixes: Mapping[str, Sequence[int]]) -> Passages:
        """Returns the equal part of suffixes, then a column per different continuation with its first token marked."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, suffix in suffixes.items():
            groups.setdefault(tuple(suffix), []).append(name)
        one, *others = groups
        if not others:
            return Passages("The suffix", (Passage(f"all arms, {len(one)} tokens", self.spans(one), "third"),))
        first = min(index for index in (first_divergence(one, other) for other in others) if index is not None)
        columns = [Passage(f"equal in all arms, {first} tokens", self.spans(one[:first]))]
        for index, (tokens, names) in enumerate(groups.items()):
            [marked] = self.spans(tokens[first : first + 1]) or [Span("(ended)")]
            shown = (Span(marked.text, "mark"), *self.spans(tokens[first + 1 :]))
            columns.append(Passage(", ".join(names), shown, SERIES[index % 4]))
        return Passages("The suffixes after the boundary", tuple(columns), columns=True)

    def _name(self, token: int) -> str | None:
        """Returns the spelling of a token that is not text; None for text."""
        assert self.codec is not None, "without a tokenizer ids are shown"
        added = self.codec.tokenizer.get_added_tokens_decoder().get(token)
        if added is not None:
            return str(added.content) if added.special else None
        return f"[id {token}]" if self.codec.tokenizer.id_to_token(token) is None else None

    def _bytes(self, token: int) -> bytes:
        """Returns a text token's bytes. Byte-level BPE spells a byte as one character; an added token is plain text."""
        assert self.codec is not None, "without a tokenizer ids are shown"
        piece = str(self.codec.tokenizer.id_to_token(token))
        if token in self.codec.tokenizer.get_added_tokens_decoder() or not all(c in BYTES for c in piece):
            return piece.encode()
        return bytes(BYTES[c] for c in piece)


def read_texts(manifest: Manifest) -> Texts:
    """Reads tokenizer and tasks from where the run had them, if their digests are the manifest's."""
    missing: list[str] = []
    information = manifest.get(INFORMATION, {})
    codec, contract, tasks = None, None, {}
    try:
        directory, digests = Path(str(information.get("checkpoint", ""))), manifest["checkpoint"]
        for name in (name for name in MEANING if name in digests or name != "contract.json"):
            _require(directory / name, digests.get(name), "checkpoint")
        contract = Contract.load(directory) if "contract.json" in digests else None
        codec = contract.codec if contract else TextCodec.load(directory / "tokenizer.json", "{question}{choices}")
    except InputError as error:
        missing.append(f"Token ids are shown in place of text: {error}.")
    if manifest.get("tasks_sha256"):
        try:
            path = Path(str(information.get("tasks", "")))
            _require(path, manifest["tasks_sha256"], "tasks")
            tasks = {task.id: task for task in load_tasks(path, None)[0]}
        except InputError as error:
            missing.append(f"Questions are shown as part of the prompt only: {error}.")
    return Texts(codec, contract, tasks, tuple(missing))


def _require(path: Path, digest: str | None, what: str) -> None:
    if not path.is_file():
        raise InputError(f"{path}: expected the run's {what}, found nothing")
    found = sha256_file(path)
    if found != digest:
        raise InputError(f"{path}: expected SHA-256 {digest}, found {found}")
