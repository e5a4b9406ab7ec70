"""Every number of the report is its summary's, and leads to the run that it comes from."""

from experiments.report.values import rate
from experiments.run.ledger import leaves, sha256_file
from tests.experiments.runs import ledger, summary_of


def test_every_value_of_every_summary_stands_in_the_page(page, reported):
    for path in reported:
        rows = page.tables[f"Every value of {path.name}/summary.json"]
        values = {
            key: repr(one) if isinstance(one, float) else str(one) for key, one in leaves(summary_of(path)).items()
        }
        assert len(values) > 20 and dict(rows[1:]) == values, path.name


def test_the_paper_tables_hold_the_summaries_numbers(page, markdown, reported):
    matrix, fixed, transplant, replication = map(summary_of, reported)
    cells = {row[0]: row[1:] for row in page.tables["Prefill against live"]}
    assert cells["endpoint"] == ["matrix-bf16, bf16"]
    low, high = matrix["suffix_disagreement"]["wilson_95"]
    count, n = matrix["suffix_disagreement"]["count"], matrix["suffix_disagreement"]["n"]
    assert 0 < count < n, "the tiny study must diverge on some rows, or these tests see nothing"
    shown = f"{count}/{n} = {100 * count / n:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    assert cells["suffix disagreement"] == [shown]
    assert f"| suffix disagreement | {shown.replace('[', chr(92) + '[').replace(']', chr(92) + ']')} |" in markdown
    crossed = {row[0]: row[1:] for row in page.tables["fp32 against bf16 on the same prefixes"]}
    block = fixed["cross_precision"]["suffix_disagreement"]
    assert crossed["suffix disagreement"][:2] == [f"{block['bf16_count']}/{n}", f"{block['fp32_count']}/{n}"]
    assert f"{block['difference_points']:+.1f} points" in crossed["suffix disagreement"][3]
    titles = ("Whole-cache transplants", "Replication on another checkpoint")
    for title, summary in zip(titles, (transplant, replication)):
        shown = rate(summary["endpoints"]["bidirectional_donor_recovery"])
        assert ["bidirectional donor recovery", shown] in page.tables[title, "Endpoints"]
    assert f"Frozen interpretation of replication-bf16: {replication['interpretation']}." in "".join(page.text)


def test_the_tables_of_the_figures_agree_with_ledger_and_summary(page, reported):
    matrix, transplant = summary_of(reported[0]), summary_of(reported[2])
    matched, grids = "Retained live cache against prefill", "Whole-cache transplants"
    histogram = page.tables[matched, "Rows by first differing token"][1:]
    assert sum(int(row[1]) for row in histogram) == matrix["first_divergence"]["n"]
    grid = {row[0]: list(map(int, row[1:])) for row in page.tables[grids, "Rows by the suffix they follow"][1:]}
    for arm, state, order in (
        ("incremental_cache_into_prefill", "prefill recipient, incremental cache", ("donor", "recipient", "neither")),
        ("prefill_cache_into_incremental", "incremental recipient, prefill cache", ("recipient", "donor", "neither")),
    ):
        assert grid[state] == [transplant["grid"][arm][side] for side in order]
    divergent = transplant["endpoints"]["baseline_divergence"]["count"]
    assert grid["incremental recipient, incremental cache"] == [divergent, 0, 0]
    layers = ledger(reported[0])[0]["comparisons"]["live:prefill"]["cache"]["layers"]
    assert len(page.tables[matched, "Median relative L2 by layer"]) == 1 + len(layers)


def test_every_number_column_leads_to_the_run_it_comes_from(page, reported):
    assert len(page.ids) == len(set(page.ids)), "an id stands twice"
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    for path in reported:
        rows = page.tables[f"Where {path.name} comes from"]
        assert ["directory", str(path)] in rows and ["ledger SHA-256", sha256_file(path / "rows.jsonl")] in rows
        assert f"#run-{path.name.replace('_', '-')}" in page.links
