"""The report: every number is its summary's, every text is escaped, nothing is fetched, and failures are loud."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from experiments.harness.canonical import sha256_file
from experiments.harness.markdown import rate
from experiments.matrix import matrix_summary
from experiments.reporting.document import (
    Alert,
    Figure,
    Link,
    Paragraph,
    Report,
    Section,
    Table,
    Verdict,
    table,
    visible,
)
from experiments.reporting.html import render_html
from experiments.reporting.markdown import render_markdown
from experiments.reporting.svg import available
from tests.experiments.commands import environment
from tests.experiments.runs import call, ledger, one_line, rewrite, run

HOSTILE = "<img src=x onerror=alert(1)>|`a`\"'&amp;</td></table><script>alert(2)</script>\u202e[x](http://e.org)"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """The page's elements: tags must nest, and tables become {caption: rows of cell texts}; where a
    caption returns in another section, also {(heading, caption): rows}.
    """

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []
        self.tables, self.rows, self.cell, self.caption, self.heading = {}, [], None, "", ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tags.append((tag, named))
        self.ids += [named["id"]] if "id" in named else []
        self.links += [named["href"]] if "href" in named else []
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th", "caption", "h2"):
            self.cell = ""

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()
        if tag in ("td", "th"):
            self.rows[-1].append(self.cell)
        elif tag == "caption":
            self.caption = self.cell
        elif tag == "h2":
            self.heading = self.cell
        elif tag == "table":
            self.tables[self.caption] = self.tables[self.heading, self.caption] = self.rows

    def handle_data(self, data):
        self.text.append(data)
        if self.cell is not None:
            self.cell += data


@pytest.fixture(scope="module")
def runs(study, tmp_path_factory):
    """The study's two runs, a transplant and a small replication."""
    root = tmp_path_factory.mktemp("report")
    run(study, "transplant", root / "transplant-bf16", "--dtype", "bf16", "--limit", 3, tasks=False)
    more = ["--dtype", "bf16", "--limit", 2]
    run(study, "replication", root / "replication-bf16", *more, tasks=False, checkpoint="later")
    known = [study / "runs/matrix-bf16", study / "runs/fixed_prefix-bf16-fp32"]
    return [*known, root / "transplant-bf16", root / "replication-bf16"]


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    """(page, Markdown) of the report of all runs."""
    out = tmp_path_factory.mktemp("page")
    done = call("report", *runs, "--out", out, cwd=out)
    assert done.exit_code == 0, done.output
    assert done.output.strip() == f"report: {out / 'report.html'}"
    return (out / "report.html").read_text(), (out / "report.md").read_text()


@pytest.fixture(scope="module")
def page(written):
    return Page(written[0])


def summary_of(path):
    return json.loads((path / "summary.json").read_text())


def flat(value, path=""):
    """Leaves by path, spelled by this test: floats in full, everything else by str."""
    if isinstance(value, dict) and value:
        return [leaf for key, one in value.items() for leaf in flat(one, f"{path}.{key}" if path else key)]
    if isinstance(value, list) and value:
        return [leaf for index, one in enumerate(value) for leaf in flat(one, f"{path}[{index}]")]
    return [[path, repr(value) if isinstance(value, float) else str(value)]]


def test_every_value_of_every_summary_stands_in_the_page(page, runs):
    for path in runs:
        rows = page.tables[f"Every value of {path.name}/summary.json"]
        assert rows[1:] == flat(summary_of(path)), path.name


def test_the_paper_tables_hold_the_summaries_numbers(page, written, runs):
    matrix, fixed, transplant, replication = map(summary_of, runs)
    cells = {row[0]: row[1:] for row in page.tables["Prefill against live"]}
    assert cells["endpoint"] == ["matrix-bf16, bf16"]
    low, high = matrix["suffix_disagreement"]["wilson_95"]
    count, n = matrix["suffix_disagreement"]["count"], matrix["suffix_disagreement"]["n"]
    assert 0 < count < n, "the tiny study must diverge on some rows, or these tests see nothing"
    shown = f"{count}/{n} = {100 * count / n:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    assert cells["suffix disagreement"] == [shown]
    assert f"| suffix disagreement | {shown.replace('[', chr(92) + '[').replace(']', chr(92) + ']')} |" in written[1]
    crossed = {row[0]: row[1:] for row in page.tables["fp32 against bf16 on the same prefixes"]}
    block = fixed["cross_precision"]["suffix_disagreement"]
    assert crossed["suffix disagreement"][:2] == [f"{block['bf16_count']}/{n}", f"{block['fp32_count']}/{n}"]
    assert f"{block['difference_points']:+.1f} points" in crossed["suffix disagreement"][3]
    titles = ("Whole-cache transplants", "Replication on another checkpoint")
    for title, summary in zip(titles, (transplant, replication)):
        shown = rate(summary["endpoints"]["bidirectional_donor_recovery"])
        assert ["bidirectional donor recovery", shown] in page.tables[title, "Endpoints"]
    assert f"Frozen interpretation of replication-bf16: {replication['interpretation']}." in "".join(page.text)


def test_the_tables_of_the_figures_agree_with_ledger_and_summary(page, runs):
    matrix, transplant = summary_of(runs[0]), summary_of(runs[2])
    matched, grids = "Retained live cache against prefill", "Whole-cache transplants"
    histogram = page.tables[matched, "Rows by first differing token"][1:]
    assert sum(int(row[1]) for row in histogram) == matrix["first_divergence"]["n"]
    grid = {row[0]: list(map(int, row[1:])) for row in page.tables[grids, "Rows by the suffix they follow"][1:]}
    for arm, (state, order) in {
        "incremental_cache_into_prefill": ("prefill recipient, incremental cache", ("donor", "recipient", "neither")),
        "prefill_cache_into_incremental": ("incremental recipient, prefill cache", ("recipient", "donor", "neither")),
    }.items():
        assert grid[state] == [transplant["grid"][arm][side] for side in order]
    divergent = transplant["endpoints"]["baseline_divergence"]["count"]
    assert grid["incremental recipient, incremental cache"] == [divergent, 0, 0]
    assert len(page.tables[matched, "Median relative L2 by layer"]) == 1 + len(
        ledger(runs[0])[0]["comparisons"]["live:prefill"]["cache"]["layers"]
    )


def test_every_number_column_leads_to_the_run_it_comes_from(page, runs):
    assert len(page.ids) == len(set(page.ids)), "an id stands twice"
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    for path in runs:
        rows = page.tables[f"Where {path.name} comes from"]
        assert ["directory", str(path)] in rows and ["ledger SHA-256", sha256_file(path / "rows.jsonl")] in rows
        assert f"#run-{path.name.replace('_', '-')}" in page.links


def test_the_page_fetches_nothing_and_runs_nothing(written):
    html, page = written[0], Page(written[0])
    assert not re.search(r"https?:|//|@import|(?<![-\w])src\s*=|javascript:|data:", html)
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object", "embed", "foreignobject"}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "default-src 'none'" in html


def test_the_page_reads_without_seeing_it(written):
    page = Page(written[0])
    drawings = [named for tag, named in page.tags if tag == "svg"]
    assert all(named["role"] == "img" and len(named["aria-label"]) > 40 for named in drawings)
    assert [tag for tag, _ in page.tags].count("figure") == [tag for tag, _ in page.tags].count("figcaption") > 5
    assert all(named.get("scope") in ("row", "col") for tag, named in page.tags if tag == "th")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))


@pytest.mark.skipif(not available(), reason="matplotlib is not installed")
def test_drawings_use_the_readers_colours_and_the_same_runs_give_the_same_bytes(runs, written, tmp_path):
    assert "<svg" in written[0] and "var(--first)" in written[0] and "](figures/matrix-rates.svg)" in written[1]
    drawings = "".join(re.findall(r"<svg.*?</svg>", written[0], re.DOTALL))
    assert "#1f5fa9" not in drawings, "a colour of the light palette was left in a drawing"
    done = call("report", *runs, "--out", tmp_path, cwd=tmp_path)
    assert done.exit_code == 0
    assert ((tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()) == written
    assert (tmp_path / "figures/matrix-rates.svg").read_text().startswith("<svg ")


def test_without_matplotlib_the_page_has_every_table_and_no_drawing(runs, written, tmp_path):
    blocked = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv[0] = 'report'\n"
        "from experiments.report import main; main()"
    )
    command = [sys.executable, "-c", blocked, *map(str, runs), "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "report.html").read_text()
    assert "<svg" not in html and not (tmp_path / "figures").exists()
    assert Page(html).tables == Page(written[0]).tables


def test_hostile_text_is_text_in_every_kind_of_block():
    data = table(HOSTILE, ["a", Link(HOSTILE, "there")], [[HOSTILE, HOSTILE]])
    blocks = (
        *(Paragraph(HOSTILE), Alert(HOSTILE), Verdict(HOSTILE), data),
        *(Figure("plain", HOSTILE, HOSTILE, data, None), Figure("drawn", HOSTILE, HOSTILE, data, "<svg></svg>")),
        Table(HOSTILE, ("x",), ((HOSTILE,),), folded=True),
    )
    report = Report(HOSTILE, (Section(HOSTILE, "there", blocks),))
    page = Page(render_html(report))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    shown = visible(HOSTILE)
    assert "\u202e" not in shown and r"\u202e" in shown
    assert page.tables[shown][1] == [shown] and "".join(page.text).count(shown) > 8
    markdown = render_markdown(report)
    assert "<script" not in re.sub(r"\\<", "", markdown) and "[x](" not in re.sub(r"\\[\[\]]", "", markdown)
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}, "a cell broke its row"


def altered(path, to, change):
    """A copy of a matrix run with changed rows, its summary made anew."""
    shutil.copytree(path, to)
    rows = ledger(to)
    change(rows)
    rewrite(to, rows)
    manifest = json.loads((to / "manifest.json").read_text())
    manifest["row_order"] = [row["row"] for row in rows]
    (to / "manifest.json").write_text(json.dumps(manifest))
    (to / "summary.json").write_text(json.dumps(matrix_summary("bf16", rows)))
    return to


def test_a_failed_gate_is_loud_and_its_row_id_harmless(runs, tmp_path):
    def fail(rows):
        rows[0]["row"] = HOSTILE
        rows[0]["gates"]["replica_live"] = rows[0]["passed"] = False

    bad = altered(runs[0], tmp_path / "matrix-bad", fail)
    done = call("report", bad, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.exit_code == 3 and "FAILED: matrix-bad: row" in done.output
    page = Page((tmp_path / "out/report.html").read_text())
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert ("p", {"class": "alert"}) in page.tags and ("p", {"class": "verdict"}) not in page.tags
    gates = {row[0]: row[1] for row in page.tables["Integrity gates, rows passed"]}
    n = len(ledger(bad))
    assert gates["replica live"] == f"{n - 1}/{n} FAILED" and gates["argmax"] == f"{n}/{n}"
    assert "**FAILED:** matrix-bad: row" in (tmp_path / "out/report.md").read_text()


def test_an_unfinished_run_gives_no_numbers(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "matrix-cut")
    lines = (tmp_path / "matrix-cut/rows.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "matrix-cut/rows.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:50])
    done = call("report", tmp_path / "matrix-cut", "--out", tmp_path / "out", cwd=tmp_path)
    assert done.exit_code == 3 and f"unfinished, 2 of {len(lines)} rows" in done.output
    page = Page((tmp_path / "out/report.html").read_text())
    assert "Prefill against live" not in page.tables


@pytest.mark.parametrize(
    ("break_it", "parts"),
    [
        (lambda run: (run / "manifest.json").unlink(), ("expected a run directory", "no manifest")),
        (lambda run: edit(run, passed=False, gates={}), ("summary.json: gates",)),
        (lambda run: edit(run, rows=1), ("summary.json: rows",)),
        (lambda run: damage(run), ("line 1", "damage")),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(runs, tmp_path, break_it, parts):
    shutil.copytree(runs[0], tmp_path / "run")
    break_it(tmp_path / "run")
    message = one_line(call("report", tmp_path / "run", "--out", tmp_path / "out", cwd=tmp_path))
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()


def edit(run, **changes):
    (run / "summary.json").write_text(json.dumps({**summary_of(run), **changes}))


def damage(run):
    rows = (run / "rows.jsonl").read_text()
    (run / "rows.jsonl").write_text(rows.replace('"index":0', '"index":7', 1))


def test_the_same_run_twice_and_an_empty_folder_are_refused(runs, tmp_path):
    assert "each run once" in one_line(call("report", runs[0], runs[0], cwd=tmp_path))
    assert "python -m experiments.study" in one_line(call("report", cwd=tmp_path))


def test_an_experiment_never_heard_of_is_reported_whole(runs, tmp_path):
    bad = altered(runs[0], tmp_path / "novel", lambda rows: None)
    manifest = json.loads((bad / "manifest.json").read_text())
    (bad / "manifest.json").write_text(json.dumps({**manifest, "experiment": "novelty"}))
    kept = {key: summary_of(bad)[key] for key in ("dtype", "rows", "passed", "failed_rows", "gates")}
    share = {"count": 1, "n": 4, "rate": 0.25, "wilson_95": [0.0456, 0.6994]}
    more = {"sites": {"layer 0": {"donor": share}}, "list": [{"a": 1, "b": None}, {"a": 2.5}], "note": "as <b>told</b>"}
    (bad / "summary.json").write_text(json.dumps({"experiment": "novelty", **kept, **more}))
    assert call("report", bad, "--out", tmp_path / "out", cwd=tmp_path).exit_code == 0
    page = Page((tmp_path / "out/report.html").read_text())
    assert page.tables["Sites"][1] == ["layer 0, donor", "1/4 = 25.0 % [4.6, 69.9]"]
    assert page.tables["list, novel"] == [["a", "b"], ["1", "none"], ["2.5", ""]]
    assert page.tables["Values"][1] == ["note", "as <b>told</b>"]
