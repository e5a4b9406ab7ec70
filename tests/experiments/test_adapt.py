"""Adapting a public directory: the base's bits stay, delimiters get rows, nothing is written that would not load."""

import hashlib
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from cache.kv import KVCache
from decode import Contract, State
from decode.contract import CLOSE, OPEN
from experiments import adapt, matrix
from experiments.adapting.stream import Planned, Span, with_rows, write_stream
from minimodel import Decoder, load_model
from minimodel.numbers import bits, same_bits
from minimodel.safetensors_file import table_of_contents
from tests.conftest import numeric
from tests.helpers import edit_json, refused
from tests.tiny import CONFIG, TASK, random_weights

CAPS = ("--branch-cap", 6, "--merge-cap", 6, "--answer-cap", 4)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(adapt.main, [str(a) for a in arguments])


def adapted(base: Path, out: Path, *more: object) -> Path:
    result = run("--base", base, "--out", out, *CAPS, *more)
    assert result.exit_code == 0, result.output
    return out


def write_base(directory: Path, spare: int = 0, dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Path:
    """A public-like base: bytes, <|endoftext|>, <|im_start|>, <|im_end|>; `spare` rows beyond the tokenizer."""
    from tokenizers import decoders, models, pre_tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(n, special=True) for n in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {**CONFIG, "vocab_size": 259 + spare, "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(config).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def shard(directory: Path, out: Path) -> Path:
    """The same checkpoint in two shards with an index, every other tensor in each."""
    shutil.copytree(directory, out)
    weights = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for index, file in enumerate(files):
        save_file({n: t for i, (n, t) in enumerate(sorted(weights.items())) if i % 2 == index}, out / file)
    placed = {name: files[i % 2] for i, name in enumerate(sorted(weights))}
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return out


@torch.inference_mode()
def plain_run(model: Decoder, tokens: list[int], whole: bool) -> dict[str, torch.Tensor]:
    """Hidden states, logits and K/V under an ordinary causal mask; an adapted checkpoint is shown all six roles."""
    ids = torch.tensor([tokens])
    roles = None if model.role_embedding is None else torch.arange(len(tokens))[None] % 6
    positions, cache = torch.arange(len(tokens))[None], KVCache.for_model(model, 1, len(tokens))
    logits, states = [], []
    for part in [slice(0, len(tokens))] if whole else [slice(t, t + 1) for t in range(len(tokens))]:
        hidden = model(ids[:, part], None if roles is None else roles[:, part], positions[:, part], None, cache)
        states.append(hidden)
        logits.append(model.logits(hidden))
    held = {f"layer {layer} {name}": tensor for layer, name, tensor in cache.tensors()}
    return {**held, "hidden": torch.cat(states, 1), "logits": torch.cat(logits, 1)}


def widened(base: Path, out: Path, rows: int) -> Path:
    """The base with a head (and, tied, an embedding) of `rows` rows, the new ones zero: products of one shape."""
    shutil.copytree(base, out)
    weights = load_file(out / "model.safetensors")
    for name in (EMBED, HEAD):
        if name in weights:
            more = torch.zeros(rows - weights[name].shape[0], weights[name].shape[1], dtype=weights[name].dtype)
            weights[name] = torch.cat((weights[name], more))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    edit_json(out / "config.json", vocab_size=rows)
    return out


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("spare", "tied"), [(0, False), (0, True), (20, False), (5, True)])
def test_zero_role_rows_under_a_causal_mask_give_the_base_s_bits(
    tmp_path: Path, dtype: str, spare: int, tied: bool
) -> None:
    base = write_base(tmp_path / "base", spare, numeric(dtype).torch_dtype, tied)
    out = adapted(base, tmp_path / "out")
    rows = max(259 + spare, 259 + 12)
    wide = widened(base, tmp_path / "wide", rows)
    before, before_wide, after = (load_model(path, numeric(dtype)) for path in (base, wide, out))
    assert after.config.vocab_size == rows and before.role_embedding is None and after.role_embedding is not None
    tokens = [(7 * i * i + 3) % 257 for i in range(40)]
    for whole in (True, False):
        left, wide_left, right = (plain_run(model, tokens, whole) for model in (before, before_wide, after))
        for name in left:
            if name != "logits":
                assert same_bits(left[name], right[name]), f"{name} whole={whole}"
        # a head of more rows is another product, which may have other bits in the old columns (FP32 here has)
        mine, theirs = (side["logits"][..., :259].contiguous() for side in (right, wide_left))
        assert same_bits(mine, theirs), f"logits whole={whole}"
        if spare >= 12:
            assert same_bits(mine, left["logits"][..., :259].contiguous()), f"logits of the base itself whole={whole}"
    # the control: one role row that is not zero
    other = adapted(base, tmp_path / "random", "--role-std", 0.02)
    moved = plain_run(load_model(other, numeric(dtype)), tokens, True)
    assert not same_bits(moved["layer 0 key"], plain_run(before, tokens, True)["layer 0 key"])


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


def test_a_sharded_base_gives_the_same_file(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    whole = adapted(base, tmp_path / "whole")
    parts = adapted(shard(base, tmp_path / "shards"), tmp_path / "parts")
    left, right = (load_file(path / "model.safetensors") for path in (whole, parts))
    assert set(left) == set(right) and all(same_bits(left[name], right[name]) for name in left)
    again = shard(whole, tmp_path / "again")  # an adapted checkpoint may be sharded too
    one, two = (load_model(path, numeric("bf16")) for path in (whole, again))
    tokens = list(range(30))
    assert all(
        same_bits(a, b) for a, b in zip(plain_run(one, tokens, True).values(), plain_run(two, tokens, True).values())
    )


def test_the_matrix_runs_on_it_and_blocks_can_close(tmp_path: Path) -> None:
    out = adapted(write_base(tmp_path / "base"), tmp_path / "out", "--role-std", 0.3, "--role-seed", 4)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({**TASK, "id": "a", "answer": "C"}) + "\n")
    arguments = ["--dtype", "bf16", "--checkpoint", out, "--tasks", tmp_path / "tasks.jsonl", "--out", tmp_path / "run"]
    result = CliRunner().invoke(matrix.main, [str(a) for a in (*arguments, "--threads", 1, "--quiet")])
    assert result.exit_code == 0 and "gates all passed" in result.stdout, result.output


def test_digests_template_and_typed_delimiters(tmp_path: Path) -> None:
    out = adapted(write_base(tmp_path / "base"), tmp_path / "out", "--template", "Q: {question}|{choices}")
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    contract = Contract.load(out)
    assert contract.caps == (None, 6, 6, 6, 6, 4)
    state = State.prompt(contract, "<|merge|> and <|im_end|>", ["a"])
    assert contract.codec.decode(state.tokens[1:-1]) == "Q: <|merge|> and <|im_end|>|A. a"
    assert not set(state.tokens[1:-1]) & {*contract.open_ids, *contract.close_ids, 258}


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


def test_bad_bases_and_options_are_one_line_and_leave_nothing(tmp_path: Path, tiny_directory: Path) -> None:
    base = write_base(tmp_path / "base")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    faults = [
        (["--base", tiny_directory], "adapted checkpoint"),
        (["--base", tmp_path / "none"], "found nothing"),
        (["--base", base, "--open-like", "<|nope|>"], "--open-like"),
        (["--base", base, "--template", "no place"], "prompt_template"),
        (["--base", base, "--out", tmp_path / "full"], "empty directory"),
        (["--base", base, "--role-table", tmp_path / "none.pt"], "found nothing"),
        (["--base", base, "--role-table", tmp_path / "none.pt", "--role-std", 1], "--role-std"),
    ]
    for arguments, part in faults:
        result = run("--out", tmp_path / "out", *arguments)
        assert result.exit_code == 2 and part in result.stderr and result.stderr.count("\n") == 1, result.output
    data = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(data[:-2])
    assert "damaged" in run("--base", base, "--out", tmp_path / "out").stderr
    (base / "model.safetensors").write_bytes(data)
    edit_json(base / "config.json", vocab_size=258)  # fewer rows than the tokenizer's ids
    assert run("--base", base, "--out", tmp_path / "out").exit_code == 2
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.part").exists()


@settings(max_examples=12)
@given(st.integers(1, 9), st.integers(0, 4), st.data())
def test_rows_are_moved_as_bytes(
    tmp_path_factory: pytest.TempPathFactory, rows: int, more: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    matrix_ = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
    save_file({"m": matrix_, "n": torch.ones(5, dtype=torch.bfloat16)}, folder / "a.safetensors")
    entries = table_of_contents(folder / "a.safetensors")
    replaced = data.draw(st.sets(st.integers(0, rows - 1)))
    sources = {k: data.draw(st.integers(0, rows - 1)) for k in (*replaced, *range(rows, rows + more))}
    plan = {"n": Planned.copied(entries["n"]), "m": with_rows(entries["m"], rows + more, sources)}
    digest = write_stream(folder / "b.safetensors", plan)
    assert digest == hashlib.sha256((folder / "b.safetensors").read_bytes()).hexdigest()
    found = load_file(folder / "b.safetensors")
    expected = torch.stack([matrix_[sources.get(k, k)] for k in range(rows + more)])
    assert same_bits(found["m"], expected) and same_bits(found["n"], torch.ones(5, dtype=torch.bfloat16))


@pytest.mark.slow
def test_copying_holds_a_buffer_and_not_the_weights(tmp_path: Path) -> None:
    size = 1 << 30
    with open(tmp_path / "raw", "wb") as file:
        file.truncate(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_stream(tmp_path / "big.safetensors", {"t": Planned("BF16", (size // 2,), (Span(tmp_path / "raw", 0, size),))})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
    assert table_of_contents(tmp_path / "big.safetensors")["t"].shape == (size // 2,)
