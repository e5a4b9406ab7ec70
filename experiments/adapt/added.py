"""What an adapted checkpoint adds to its base: twelve delimiter tokens with their rows, and the role table."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from decode.text import load_tokenizer
from minimodel.bits import all_finite
from minimodel.errors import InputError, refuse
from minimodel.roles import ROLE_ROWS
from minimodel.safetensors_file import FILE_DTYPES


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
    ids, sources, kept = dict[str, int](), dict[int, int](), list[str]()
    for name, like in ((name, like) for group, like in zip(names, likes) for name in group):
        token = tokenizer.token_to_id(name)
        if token is None:
            source = tokenizer.token_to_id(like)
            if source is None:
                raise InputError(
                    f"{path}: expected the token {like!r}, whose rows the delimiters copy, found none; "
                    "choose others with --open-like and --close-like"
                )
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
    return Delimiters(tokenizer, ids, sources, tuple(kept), max(vocab_size, *(token + 1 for token in ids.values())))


def made_table(hidden_size: int, dtype: str, std: float, seed: int) -> Tensor:
    """Returns [14, E], normal with mean 0, drawn in FP32 from a new generator and rounded once; for std 0 all -0.0.

    Adding a row of -0.0 changes no bit: x + (-0) is x, while x + (+0) turns -0 into +0.
    """
    table = torch.full((ROLE_ROWS, hidden_size), -0.0, dtype=torch.float32, device="cpu")
    if std:
        table = torch.randn(table.shape, generator=torch.Generator().manual_seed(seed), device="cpu") * std
    return table.to(FILE_DTYPES[dtype])


def converted_table(path: Path, hidden_size: int) -> Tensor:
    """Reads the table of a .safetensors file, or of a pickle with weights-only loading, in the file's dtype.

    The file holds one matrix, bare or under one name. InputError for anything else, fewer than 14 rows, another width,
    NaN or infinity.
    """
    if not path.is_file():
        raise InputError(f"{path}: expected a role table, found {'a directory' if path.is_dir() else 'nothing'}")
    named = path.suffix == ".safetensors"
    try:  # the pickle holds tensors and containers; no code of it is run
        table = load_file(path) if named else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged stream can raise anything
        reason, kind = " ".join(str(error).split())[:120], "file of tensors" if named else "pickle of one tensor"
        raise InputError(f"{path}: expected a {kind}, found something else ({reason})") from None
    if isinstance(table, Mapping):
        if len(table) != 1:
            raise refuse(f"{path}: tensors", "one", sorted(map(str, table))[:4])
        (table,) = table.values()
    if not isinstance(table, Tensor):
        raise refuse(f"{path}: content", "one tensor, bare or under one name", type(table).__name__)
    if table.ndim != 2 or table.shape[1] != hidden_size or table.shape[0] < ROLE_ROWS:
        raise refuse(f"{path}: shape", f"[{ROLE_ROWS} or more, {hidden_size}]", list(table.shape))
    if table.dtype not in FILE_DTYPES.values():
        raise refuse(f"{path}: dtype", "BF16, F16, F32 or F64", table.dtype)
    if not all_finite(table):
        raise InputError(f"{path}: expected finite values, found NaN or infinity")
    return table.detach().clone()
