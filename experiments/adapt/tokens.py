"""The twelve delimiter tokens: their ids in a base's tokenizer, and the rows that they start from."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from decode.text import load_tokenizer
from minimodel.errors import InputError, refuse


@dataclass(frozen=True)
class Delimiters:
    """The base's tokenizer with the delimiters added."""

    tokenizer: Tokenizer
    ids: dict[str, int]
    sources: dict[int, int]  # new token: the id whose rows it copies
    kept: tuple[str, ...]  # special tokens of the base, which keep their rows
    rows: int  # of embedding and head


def add_delimiters(
    path: Path, vocab_size: int, names: tuple[tuple[str, ...], tuple[str, ...]], likes: tuple[str, str]
) -> Delimiters:
    """Adds the missing delimiters. InputError where a name is an ordinary token or a token to copy does not exist.

    vocab_size: rows of the base's embedding, which grows only where spare rows run out. names: opening and closing
    delimiters. likes: the token that each kind copies.
    """
    tokenizer = load_tokenizer(path)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if largest >= vocab_size:
        raise refuse(f"{path}: ids", f"below the base's vocab_size {vocab_size}", largest)
    kept: list[str] = []
    ids: dict[str, int] = {}
    sources: dict[int, int] = {}
    for name, like in ((name, like) for group, like in zip(names, likes) for name in group):
        token = tokenizer.token_to_id(name)
        if token is None:
            source = _existing(tokenizer, like, path)
            tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
            token = tokenizer.token_to_id(name)
            assert token is not None, f"{name} was just added"
            sources[token] = source
        elif token in special:
            kept.append(name)
        else:
            raise refuse(f"{path}: delimiter {name!r}", "no ordinary token of this name", token)
        ids[name] = token
    if len(set(ids.values())) != len(ids) or any(token <= largest for token in sources):
        raise InputError(f"{path}: expected new ids above {largest}, found {sorted(sources)}")
    rows = max(vocab_size, *(token + 1 for token in ids.values()))
    missing = sorted(set(range(vocab_size, rows)) - set(sources))
    if missing:
        raise InputError(f"{path}: expected consecutive new ids from {vocab_size}, found none for row {missing[0]}")
    return Delimiters(tokenizer, ids, sources, tuple(kept), rows)


def _existing(tokenizer: Tokenizer, name: str, path: Path) -> int:
    token = tokenizer.token_to_id(name)
    if token is None:
        raise InputError(
            f"{path}: expected the token {name!r}, whose rows the delimiters copy, found none; "
            "choose others with --open-like and --close-like"
        )
    return token
