"""The page: nothing is fetched, only its own script runs, it reads without being seen, and hostile text stays text."""

import base64
import hashlib
import itertools
import re

from experiments.report import blocks as kinds
from experiments.report.blocks import Link, Passage, Report, Section, Span, Table, visible
from experiments.report.page import render_html
from experiments.report.plain import render_markdown, render_text
from tests.experiments.report.page import HOSTILE, Page


def test_the_page_fetches_nothing_and_runs_its_own_script_alone(written, page):
    html = (written / "report.html").read_text()
    assert not re.search(r"https?:|//|@import|(?<![-\w])src\s*=|javascript:|data:", html)
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    assert not {tag for tag, _ in page.tags} & {"img", "link", "iframe", "object", "embed", "foreignobject"}
    [script] = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#x27;sha256-{digest}&#x27;" in html or f"script-src 'sha256-{digest}'" in html
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "default-src 'none'" in html


def test_the_page_reads_without_seeing_it(page):
    drawings = [named for tag, named in page.tags if tag == "svg"]
    assert all(named["role"] == "img" and len(named["aria-label"]) > 40 for named in drawings)
    assert [tag for tag, _ in page.tags].count("figure") == [tag for tag, _ in page.tags].count("figcaption") > 5
    assert all(named.get("scope") in ("row", "col") for tag, named in page.tags if tag == "th")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_hostile_text_is_text_in_every_kind_of_block():
    data = Table(HOSTILE, ["a", Link(HOSTILE, "there")], [[HOSTILE, HOSTILE]])
    blocks = (
        *(kinds.Paragraph(HOSTILE), kinds.Alert(HOSTILE), kinds.Verdict(HOSTILE), data),
        kinds.Figure("drawn", HOSTILE, data, lambda: "<svg></svg>"),
        Table(HOSTILE, ["x"], [[HOSTILE]], folded=True),
        kinds.Passages(HOSTILE, [Passage(HOSTILE, [Span(HOSTILE, kind) for kind in ("", "mark", "special")])]),
    )
    report = Report(HOSTILE, [Section(HOSTILE, "there", blocks)])
    assert "\u202e" not in render_text(report.blocks) and "\x1b" not in render_text([kinds.Paragraph("\x1b[31m")])
    page = Page(render_html(report)[0])
    assert [tag for tag, _ in page.tags].count("script") == 1 and "img" not in {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    shown = visible(HOSTILE)
    assert "\u202e" not in shown and r"\u202e" in shown
    assert page.tables[shown][1] == [shown] and "".join(page.text).count(shown) > 8
    markdown = render_markdown(report)
    assert "<script" not in re.sub(r"\\<", "", markdown) and "[x](" not in re.sub(r"\\[\[\]]", "", markdown)
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}, "a cell broke its row"
