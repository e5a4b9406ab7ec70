"""The page: nothing is fetched, nothing runs, it reads without being seen, and hostile text stays text."""

import itertools
import re

from experiments.report.blocks import (
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
from experiments.report.html import render_html
from experiments.report.markdown import render_markdown
from tests.experiments.report.page import HOSTILE, Page


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


def test_hostile_text_is_text_in_every_kind_of_block():
    data = table(HOSTILE, ["a", Link(HOSTILE, "there")], [[HOSTILE, HOSTILE]])
    blocks = (
        *(Paragraph(HOSTILE), Alert(HOSTILE), Verdict(HOSTILE), data),
        Figure("drawn", HOSTILE, HOSTILE, data, "<svg></svg>"),
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
