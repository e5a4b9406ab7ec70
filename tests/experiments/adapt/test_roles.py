"""The role table: neutral to the last bit, converted from a file, and refused where it does not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from decode import Contract
from minimodel import load_model
from minimodel.bits import bits, same_bits
from tests.conftest import numeric
from tests.experiments.adapt.bases import EMBED, adapted, run, write_base
from tests.helpers import edit_json, refused


def test_negative_zeros_are_neutral_and_positive_ones_are_not(tmp_path: Path) -> None:
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


def test_a_pickle_is_converted_with_weights_only_loading(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    table = torch.randn(20, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for content in (table, {"weight": table}, {"role_embedding.weight": torch.nn.Parameter(table)}):
        torch.save(content, tmp_path / "role_embedding.pt")
        out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
        adapted(base, out, "--role-table", tmp_path / "role_embedding.pt")
        assert same_bits(load_file(out / "role_embedding.safetensors")["weight"], table)
    save_file({"anything": table}, tmp_path / "role.safetensors")
    adapted(base, tmp_path / "other", "--role-table", tmp_path / "role.safetensors")


class Hostile:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.path,))


def test_role_tables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
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
        result = run("--base", base, "--out", tmp_path / "out", "--role-table", path)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    for raw in (b"", b"PK\x03\x04 no zip", b"\x80\x02."):
        path.write_bytes(raw)
        assert run("--base", base, "--out", tmp_path / "out", "--role-table", path).exit_code == 2
    assert not (tmp_path / "touched").exists() and not list(tmp_path.glob("out*"))


def test_a_base_with_the_paper_s_own_pickle_beside_it(tmp_path: Path) -> None:
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
