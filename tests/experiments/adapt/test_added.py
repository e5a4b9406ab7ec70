"""What an adapted checkpoint adds: delimiter rows that are copies, and a role table that is neutral or converted."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from decode import Contract
from decode.contract import CLOSE, OPEN
from minimodel import load_model
from minimodel.bits import bits, same_bits
from tests.conftest import numeric
from tests.experiments.adapt.bases import EMBED, HEAD, adapted, write_base
from tests.experiments.runs import call, one_line
from tests.helpers import edit_json, refused


@pytest.mark.parametrize("spare", [0, 5, 12, 30])
@pytest.mark.parametrize("tied", [False, True])
def test_delimiter_rows_are_copies_and_every_other_row_keeps_its_bits(tmp_path, spare, tied):
    base = write_base(tmp_path / "base", spare, tied=tied)
    out = adapted(base, tmp_path / "out")
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(before) == set(after) and (HEAD in after) != tied
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in (*OPEN, *CLOSE)}
    assert sorted(ids.values()) == list(range(259, 271))
    copied = {ids[name]: 257 if name in OPEN else 258 for name in ids}
    for name in before:
        if name in (EMBED, HEAD):
            assert after[name].shape[0] == max(259 + spare, 271)
            before[name] = torch.stack([before[name][copied.get(token, token)] for token in range(len(after[name]))])
        assert same_bits(before[name], after[name]), name


def test_delimiters_that_are_there_keep_their_rows(tmp_path):
    first = adapted(write_base(tmp_path / "base"), tmp_path / "first")
    weights = load_file(first / "model.safetensors")
    weights[EMBED][260] = 0.5  # trained, say
    save_file(weights, first / "model.safetensors", metadata={"format": "pt"})
    (first / "contract.json").unlink()
    (first / "role_embedding.safetensors").unlink()
    second = adapted(first, tmp_path / "second")
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    assert same_bits(load_file(second / "model.safetensors")[EMBED], weights[EMBED])


def test_negative_zeros_are_neutral_and_positive_ones_are_not(tmp_path):
    base = write_base(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights[EMBED][65, ::3] = -0.0
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    out = adapted(base, tmp_path / "out")
    ids, roles = torch.tensor([[65, 66, 65]]), torch.tensor([[0, 3, 5]])
    plain = load_model(base, numeric("bf16")).embed(ids, None)
    assert same_bits(load_model(out, numeric("bf16")).embed(ids, roles), plain)
    table = load_file(out / "role_embedding.safetensors")["weight"]
    assert table.shape == (14, 128) and not table.any() and bool((bits(table) != 0).all())
    save_file({"weight": torch.zeros_like(table)}, out / "role_embedding.safetensors")
    assert not same_bits(load_model(out, numeric("bf16")).embed(ids, roles), plain)


def test_a_table_is_converted_from_a_pickle_or_a_safetensors_file(tmp_path):
    base = write_base(tmp_path / "base")
    table = torch.randn(20, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    torch.save(table, tmp_path / "bare.pt")
    torch.save({"role_embedding.weight": torch.nn.Parameter(table)}, tmp_path / "named.pt")
    save_file({"anything": table}, tmp_path / "role.safetensors")
    for name in ("bare.pt", "named.pt", "role.safetensors"):
        out = adapted(base, tmp_path / f"out-{name}", "--role-table", tmp_path / name)
        assert same_bits(load_file(out / "role_embedding.safetensors")["weight"], table)


class Hostile:
    """Unpickling it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_role_tables_that_do_not_fit_are_refused(tmp_path):
    base, path = write_base(tmp_path / "base"), tmp_path / "role_embedding.pt"
    good = torch.zeros(14, 128)
    bad = [
        good[:13],
        torch.zeros(14, 64),
        good.to(torch.int64),
        good * float("nan"),
        {"a": good, "b": good},
        [good],
        "x",
    ]
    for content in (*bad, Hostile(tmp_path / "touched")):
        torch.save(content, path)
        one_line(call("adapt", "--base", base, "--out", tmp_path / "out", "--role-table", path))
    for raw in (b"", b"PK\x03\x04 no zip", b"\x80\x02."):
        path.write_bytes(raw)
        one_line(call("adapt", "--base", base, "--out", tmp_path / "out", "--role-table", path))
    save_file({"a": good, "b": good.clone()}, tmp_path / "two.safetensors")
    for other, part in (("two.safetensors", "tensors: expected one, found"), (".", "found a directory")):
        one_line(call("adapt", "--base", base, "--out", tmp_path / "out", "--role-table", tmp_path / other), part)
    assert not (tmp_path / "touched").exists() and not list(tmp_path.glob("out*"))


def test_a_base_with_the_paper_s_own_pickle_beside_it(tmp_path):
    """Table as a pickle, delimiters in the tokenizer, a contract: only the table is converted."""
    first = adapted(write_base(tmp_path / "base"), tmp_path / "first", "--role-std", 0.1)
    table = load_file(first / "role_embedding.safetensors")["weight"]
    torch.save(table, first / "role_embedding.pt")
    (first / "role_embedding.safetensors").unlink()
    edit_json(first / "contract.json", caps={"branch": 9, "merge": 8, "answer": 7})
    with refused("role_embedding.pt", "experiments.adapt"):
        load_model(first, numeric("bf16"))
    out = adapted(first, tmp_path / "out", "--role-table", first / "role_embedding.pt")
    assert Contract.load(out).caps == (None, 9, 9, 9, 8, 7)
    assert same_bits(load_file(out / "role_embedding.safetensors")["weight"], table)
    assert same_bits(load_file(out / "model.safetensors")[EMBED], load_file(first / "model.safetensors")[EMBED])
