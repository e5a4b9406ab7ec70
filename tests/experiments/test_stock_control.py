"""stock_control on a tiny stock checkpoint: plain chat generations by copies, their end, and what is refused."""

import pytest
import torch

from cache.kv import KVCache
from decode.greedy import alone
from decode.record import causal_sha256
from experiments.run.control import chat_steps, selected_logprob
from experiments.stock_control import LIMIT
from minimodel import load_model
from minimodel.attention import ATTENTION_KERNELS
from minimodel.selfcheck import copies_fault
from tests.conftest import numeric
from tests.experiments.runs import ROWS, call, inputs, manifest_of, one_line, open_finished, run
from tests.helpers import flip_bit, write_lines
from tests.tiny import write_checkpoint

BF16 = ("--dtype", "bf16")
STOP = (256, 270)


@pytest.fixture(scope="module")
def model(stock_directory):
    return load_model(stock_directory, numeric("bf16"))


def test_a_run_holds_what_the_release_has_a_column_for(every_run):
    manifest, rows, summary = open_finished(every_run["stock_control"])
    assert manifest["experiment"] == summary["experiment"] == "stock_control" and "visibility" not in manifest
    assert manifest["stock"]["cap"] == LIMIT == 512 and manifest["stock"]["eos_ids"] == [270, 256]
    assert "<|im_start|>user\n{question}" in manifest["stock"]["template"]
    # the limit cuts the panel, and not the tasks that it is chosen from
    assert manifest["panel"]["available"] == {"rows": ROWS} and len(rows) == 2
    lengths = {entry["row"]: entry["length"] for entry in manifest["panel"]["rows"]}
    assert [row["row"] for row in rows] == list(lengths) == sorted(lengths, key=lengths.__getitem__)
    for row in rows:
        assert row["comparisons"]["pair:pair_replica"]["logprobs"]["exact"]
        for arm in row["arms"].values():
            assert len(arm["tokens"]) == LIMIT or arm["tokens"][-1] in STOP
            assert not set(arm["tokens"][:-1]) & set(STOP)
            assert all(p <= 0 for p in arm["logprobs"]) and all(m >= 0 for m in arm["margins"])


@pytest.mark.parametrize("copies", [1, 2])
def test_a_generation_is_the_decoders_greedy_continuation(model, copies):
    """Against a loop of its definition: the prompt in one call, then each token alone, all ids eligible."""
    model.numeric.apply()
    prompt, limit = [269, 10, 11, 12, 270, 269, 13], 9
    found = alone(chat_steps(model, prompt, copies, (), limit))
    cache, fed, tokens, logprobs = KVCache.for_model(model, copies, 40), prompt, [], []
    with torch.inference_mode():
        for _ in range(limit):
            positions = torch.arange(len(cache), len(cache) + len(fed)).repeat(copies, 1)
            hidden = model(torch.tensor([fed] * copies), None, positions, None, cache)
            logits = model.logits(hidden[:, -1:])[:, 0]
            tokens.append(int(logits[0].argmax()))
            logprobs.append(selected_logprob(logits, tokens[-1]))
            fed = tokens[-1:]
    assert (found.tokens, found.logprobs) == (tuple(tokens), tuple(logprobs)) and found.chosen_by_logits
    assert found.functional_sha256 == causal_sha256([*prompt, *tokens[:-1]]) and found.synchronised


def test_a_stop_token_ends_a_generation_and_is_its_last_token(model):
    model.numeric.apply()
    free = alone(chat_steps(model, [269, 10, 11], 2, (), 12))
    end = next(i for i in range(3, 12) if free.tokens[i] not in free.tokens[:i])
    stopped = alone(chat_steps(model, [269, 10, 11], 2, (free.tokens[end], 256), 12))
    assert stopped.tokens == free.tokens[: end + 1] and stopped.logprobs == free.logprobs[: end + 1]


def test_a_template_file_is_taken_as_it_is(study, tmp_path):
    (tmp_path / "chat.txt").write_text("<|im_start|>{question}|{choices}<|im_end|>\n")
    more = ("--limit", 1, "--template", tmp_path / "chat.txt", "--eos", "<|endoftext|>")
    run(study, "stock_control", tmp_path / "run", *BF16, *more, checkpoint="stock")
    stock = manifest_of(tmp_path / "run")["stock"]
    assert stock["template"].endswith("<|im_end|>\n") and stock["eos_ids"] == [256]


def test_an_adapted_checkpoint_and_a_long_prompt_are_refused(study, tmp_path):
    done = call("stock_control", *BF16, *inputs(study), cwd=tmp_path)
    one_line(done, "expected a stock checkpoint", "experiments.batch_control")
    task = {"id": "long", "question": "x" * 600, "choices": ["a", "b"], "answer": "A"}
    path = write_lines(tmp_path / "long.jsonl", task)
    given = inputs(study, "--tasks", path, tasks=False, checkpoint="stock")
    one_line(call("stock_control", *BF16, *given, cwd=tmp_path), "'long'", "context 1024")
    write_checkpoint(tmp_path / "narrow", config={"vocab_size": 270}, stock=True)
    given = inputs(study, "--checkpoint", tmp_path / "narrow")
    line = "--eos: expected ids below vocab_size 270, found 270"
    one_line(call("stock_control", *BF16, *given, cwd=tmp_path), line)
    (tmp_path / "chat.txt").write_bytes(b"{question}\xff")
    given = inputs(study, "--template", tmp_path / "chat.txt", checkpoint="stock")
    one_line(call("stock_control", *BF16, *given, cwd=tmp_path), "chat.txt: expected UTF-8 text")
    assert not (tmp_path / "runs").exists()


def test_a_kernel_that_spoils_one_copy_is_refused_before_the_first_row(study, tmp_path, monkeypatch):
    kernel = ATTENTION_KERNELS["repeat_kv"]

    def attend(query, *rest):
        out = kernel(query, *rest).clone()
        if len(out) > 1:
            flip_bit(out, (1, 0, 0, 3))
        return out

    given = [*BF16, *inputs(study, "--limit", 1, checkpoint="stock")]
    with monkeypatch.context() as patch:
        patch.setitem(ATTENTION_KERNELS, "repeat_kv", attend)
        copies_fault.cache_clear()
        one_line(call("stock_control", *given, cwd=tmp_path), "two equal copies get different bits")
    assert not (tmp_path / "runs").exists()
    copies_fault.cache_clear()
