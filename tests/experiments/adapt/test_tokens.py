"""The delimiters' rows: copies where they are new, kept where they are there, and no other row moves."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from decode.contract import CLOSE, OPEN
from minimodel.bits import same_bits
from tests.experiments.adapt.bases import EMBED, HEAD, adapted, write_base


@pytest.mark.parametrize("spare", [0, 5, 12, 30])
@pytest.mark.parametrize("tied", [False, True])
def test_delimiter_rows_are_copies_and_every_other_row_keeps_its_bits(tmp_path: Path, spare: int, tied: bool) -> None:
    base = write_base(tmp_path / "base", spare, tied=tied)
    out = adapted(base, tmp_path / "out")
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(before) == set(after) and (HEAD in after) != tied
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in (*OPEN, *CLOSE)}
    assert sorted(ids.values()) == list(range(259, 271))
    for name in before:
        if name not in (EMBED, HEAD):
            assert same_bits(before[name], after[name]), name
            continue
        assert after[name].shape[0] == max(259 + spare, 271)
        for token in range(after[name].shape[0]):
            source = token
            if token in ids.values():
                source = 257 if token in [ids[n] for n in OPEN] else 258
            assert same_bits(after[name][token], before[name][source]), (name, token)


def test_delimiters_that_are_there_keep_their_rows(tmp_path: Path) -> None:
    first = adapted(write_base(tmp_path / "base"), tmp_path / "first")
    weights = load_file(first / "model.safetensors")
    weights[EMBED][260] = 0.5  # trained, say
    save_file(weights, first / "model.safetensors", metadata={"format": "pt"})
    (first / "contract.json").unlink()
    (first / "role_embedding.safetensors").unlink()
    second = adapted(first, tmp_path / "second")
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    assert same_bits(load_file(second / "model.safetensors")[EMBED], weights[EMBED])
