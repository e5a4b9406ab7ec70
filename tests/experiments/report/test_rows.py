"""The page's list of rows, one row as blocks, and the same on the terminal: everything is the ledger's."""

import copy
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from decode.contract import Contract
from experiments.report.blocks import Paragraph, Passages, Report, RowEntry
from experiments.report.charts import standalone
from experiments.report.page import SCRIPT, render_html
from experiments.report.rows import divergence_drawing, row_entries, row_entry
from experiments.report.runs import ArmPair, read_runs
from experiments.report.texts import Texts, read_texts
from experiments.run.ledger import row_key
from stats.endpoints import first_divergence
from tests.experiments.report.page import HOSTILE, Page
from tests.experiments.runs import call, ledger, one_line
from tests.helpers import edit_json, refused

LIVE, FIXED = ("live", "prefill"), ("incremental", "prefill")


@pytest.fixture(scope="module")
def contract(study):
    return Contract.load(study / "primary")


@pytest.fixture(scope="module")
def matrix(reported):
    return read_runs([reported[0]])[0]


def divergent(run, arms):
    return next(row for row in run.rows if ArmPair(row, arms, "bf16").first is not None)


def test_the_list_says_of_every_row_what_the_ledger_says(reported):
    for path, arms in ((reported[0], LIVE), (reported[2], FIXED)):
        entries, rows = row_entries(read_runs([path])), ledger(path)
        assert [entry.key for entry in entries] == [row_key(row) for row in rows]
        for entry, row in zip(entries, rows):
            pair, sides = row["comparisons"][":".join(arms)], [row["arms"][arm] for arm in arms]
            first = first_divergence(*(side["suffix"] for side in sides))
            assert ("diverged" in entry.flags) == (first is not None) == (f"parts at token {first}" in entry.facts)
            changed = not pair.get("answer_equal", sides[0]["answer"] == sides[1]["answer"])
            assert ("answer" in entry.flags) == changed
            assert entry.order["drift"] == -pair["cache"]["relative_l2"] and "gate" not in entry.flags
            if first is not None:
                margin = min(side["margins"][first] for side in sides)
                assert (entry.order["first"], entry.order["margin"]) == (first, margin)


def test_a_divergent_row_shows_the_equal_part_once_and_both_tokens_marked(reported, contract):
    run = read_runs([reported[2]])[0]
    row = divergent(run, FIXED)
    [suffixes] = [b for b in row_entry(run, row, "x").blocks if isinstance(b, Passages) and b.columns]
    common, *columns = suffixes.passages
    first = ArmPair(row, FIXED, "bf16").first
    decoded = {tuple(arm["suffix"]) for arm in row["arms"].values()}
    assert len(columns) == len(decoded) >= 2
    assert "".join(span.text for span in common.spans) == shown(contract, row["arms"]["incremental"]["suffix"][:first])
    names = [name.strip() for column in columns for name in column.label.split(",")]
    assert sorted(names) == sorted(name.replace("_", " ") for name in row["arms"])
    for column in columns:
        assert column.spans[0].kind == "mark" and "mark" not in [span.kind for span in column.spans[1:]]
    marks = {column.spans[0].text for column in columns}
    assert marks == {shown(contract, suffix[first : first + 1]) for suffix in decoded}


def shown(contract, tokens):
    return "".join(span.text for span in Texts(contract.codec).spans(tokens))


def test_tokens_of_text_read_as_the_codec_reads_them_and_others_are_spelled_out(contract):
    text = "Which one is odd? 12 + 3\n\u00e9\u20ac"
    ids = contract.codec.encode(text)
    assert shown(contract, ids) == text == contract.codec.decode(ids)
    part = [token for token in ids if "\\x" in shown(contract, [token])]
    assert len(part) > 1, "a character of several tokens: each alone is bytes, not text"
    delimiter, undefined = contract.open_ids[4], contract.ordinary.numel() + 5
    found = Texts(contract.codec).spans([ids[0], delimiter, undefined])
    assert [span.kind for span in found] == ["", "special", "special"]
    assert found[1].text == "<|merge|>" and found[2].text == f"[id {undefined}]"
    assert Texts(None).token(7) == "id 7" and Texts(contract.codec).token(None) == "ended"


def test_without_the_runs_checkpoint_the_ids_are_shown_and_it_is_said(matrix, tmp_path, study):
    manifest = json.loads(json.dumps(matrix.manifest))
    texts = read_texts(manifest)
    assert texts.missing == () and set(texts.tasks) == {row["row"] for row in matrix.rows}
    shutil.copytree(study / "primary", tmp_path / "other")
    edit_json(tmp_path / "other/contract.json", caps={"branch": 5})
    for place in (tmp_path / "other", tmp_path / "gone"):
        manifest["information"]["checkpoint"] = str(place)
        texts = read_texts(manifest)
        assert texts.contract is texts.codec is None and str(place) in texts.missing[0]
    manifest["information"]["tasks"] = str(tmp_path / "none.jsonl")
    run = replace(matrix, manifest=manifest)
    assert len(run.texts.missing) == 2
    with refused("expected its tokenizer; ", str(tmp_path / "gone")):
        divergence_drawing(run, divergent(run, LIVE))
    passages = [b for b in row_entry(run, divergent(run, LIVE), "x").blocks if isinstance(b, Passages)]
    ids = " ".join(map(str, run.rows[0]["prefix"]["tokens"][:3]))
    assert any(block.passages[0].spans[0].text.startswith(ids) for block in passages)


def entry(number, *more):
    flags, blocks = frozenset({"diverged"} if number % 2 else ()), [Paragraph(HOSTILE), *more]
    return RowEntry(HOSTILE, f"{HOSTILE}{number}", f"row-{number}", [HOSTILE], flags, {"first": 1.5}, blocks)


def test_rows_beyond_the_limits_stand_in_script_files_beside_the_page():
    rows = [entry(n, Paragraph("x" * 50_000)) for n in range(230)]
    page, files = render_html(Report("t", (), rows))
    assert len(page) < 5_000_000
    loaded = re.findall(r'data-file="([^"]+)"', page)
    assert set(loaded) == set(files) and len(loaded) == 230 - page.count("x" * 50_000) > 29
    anchors = set()
    for text in files.values():
        assert text.startswith("stageReplayRow(")
        anchor, body = json.loads(f"[{text.removeprefix('stageReplayRow(').removesuffix(');' + chr(10))}]")
        assert "x" * 50_000 in body and "<img" not in body and "<script" not in body
        anchors.add(anchor)
    assert anchors < {row.anchor for row in rows} and len(anchors) == len(loaded)
    few, none = render_html(Report("t", (), rows[:20]))
    assert none == {} and "data-file=" not in few.replace(SCRIPT, "")


def test_a_page_of_hostile_rows_stays_a_list():
    page = Page(render_html(Report("t", (), (entry(0), entry(1))))[0])
    items = [named for tag, named in page.tags if tag == "li" and "data-flags" in named]
    assert [item["data-flags"] for item in items] == ["none", "diverged"]
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 1 and "img" not in tags and tags.count("details") == 2


def test_show_prints_one_row_and_names_what_there_is(matrix, reported, tmp_path):
    row = divergent(matrix, LIVE)
    done = call("show", matrix.path, row["row"], "--svg", tmp_path / "one.svg", cwd=tmp_path)
    assert done.exit_code == 0, done.output
    first = ArmPair(row, LIVE, "bf16").first
    assert f"part at token {first} after the boundary" in done.output and done.output.count(">>>") >= 2
    assert "expected answer" in done.output
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")
    equal = next(row["row"] for row in matrix.rows if ArmPair(row, LIVE, "bf16").first is None)
    for run, *more, refusal in (
        (matrix.path, "nothing", "found 0; rows:"),
        (reported[1], row["row"], "found 2; rows: bf16/"),
        (matrix.path, equal, "--svg", tmp_path / "two.svg", "expected suffixes that part"),
    ):
        one_line(call("show", run, *more, cwd=tmp_path), refusal)
    assert not (tmp_path / "two.svg").exists()


def test_texts_of_a_drawing_are_data(matrix):
    row = copy.deepcopy(divergent(matrix, LIVE))
    for arm in row["arms"].values():
        arm["answer_text"] = "\u202e" + HOSTILE
    drawing = divergence_drawing(matrix, row)
    assert "<img" not in drawing and "<script" not in drawing and drawing.count(r"\u202e&lt;img") == 2
    ElementTree.fromstring(standalone(drawing))


def test_a_row_of_every_experiment_can_be_shown_as_text(every_run, tmp_path):
    for name, path in every_run.items():
        row = row_key(ledger(path)[0])
        done = call("show", path, row, cwd=tmp_path)
        assert done.exit_code == 0 and "Gates of this row" in done.output, (name, done.output)
        assert "Token ids are shown" not in done.output, name
        entries = row_entries(read_runs([path]))
        assert len(entries) == len(ledger(path)) and all(one.facts for one in entries)
    done = call("report", *every_run.values(), "--out", tmp_path / "out", cwd=tmp_path)
    assert done.exit_code == 0, done.output
