"""Partial transplants: the sites, whose trajectory a suffix follows, the counts, and the command as a user calls it."""

from types import SimpleNamespace

from cache import build_incremental, build_prefill, compare
from decode.greedy import alone, greedy_suffix
from experiments.carrier import Carrier, sites
from experiments.report.summaries import run_report
from experiments.run.progress import Progress
from experiments.run.tasks import Prefix
from minimodel.roles import ROLE_NAMES
from stats.donors import DONORS, INTO_PREFILL
from tests.experiments.runs import altered, call, inputs, one_line, open_finished


def test_sites_partition_layers_tensors_blocks_and_heads(three):
    state = three.live.state
    found = sites(three.model.config, state)
    assert found["first_2"]["layers"] == (0, 1) and found["last_1"]["layers"] == (2,)
    blocks = [site["positions"] for name, site in found.items() if name.startswith("block_")]
    assert sorted(slot for slots in blocks for slot in slots) == list(range(len(state)))
    merge = found[f"block_{ROLE_NAMES[4]}"]["positions"]
    assert merge == (len(state) - 1,), "merge holds its opening delimiter alone"
    assert [found[name] for name in ("whole", "empty", "keys")] == [{}, {"layers": ()}, {"tensors": "k"}]
    assert found["head_1"] == {"heads": (1,)} and found["layer_1_values"] == {"layers": (1,), "tensors": "v"}


def test_a_row_has_every_site_in_both_directions_and_says_when_the_baselines_agree(three):
    state = three.live.state
    row = alone(Carrier(three.model, [Prefix("r", ())], [state], {}).row(0, Progress(1, 0, quiet=True).row("a")))
    names = list(sites(three.model.config, state))
    for direction in DONORS:
        assert list(row["sites"][direction]) == names
        donor = row["arms"][direction.split("_cache_into_")[0]]
        assert row["sites"][direction]["whole"]["suffix_sha256"] == donor["suffix_sha256"]
    assert row["gates"]["empty_follows_recipient"] or not row["gates"]["divergent"]
    assert row["gates"]["storage_disjoint"] and row["gates"]["functional_state"] and row["gates"]["prefix"]
    incremental, prefill = build_incremental(three.model, state), build_prefill(three.model, state)
    assert not compare(incremental.cache, prefill.cache).exact
    same = greedy_suffix(three.model, incremental).tokens == greedy_suffix(three.model, prefill).tokens
    assert row["gates"]["divergent"] is not same


def synthetic_row(name, flips_at, layers=4):
    """The donor's suffix from `flips_at` first layers on, and never from the last layers but all of them."""
    sides = {"whole": "donor", "empty": "recipient"}
    for k in range(1, layers):
        sides |= {f"first_{k}": "donor" if k >= flips_at else "neither", f"last_{k}": "recipient"}
    sides |= {f"layer_{i}": "recipient" for i in range(layers)}
    places = {way: {site: {"follows": side} for site, side in sides.items()} for way in DONORS}
    row = {"row": name, "gates": {"prefix": True}, "passed": True, "prefix": {"length": 9}}
    return {**row, "comparisons": {}, "sites": places}


def test_counts_and_the_smallest_layer_range_follow_the_rule():
    rows = [synthetic_row("a", 1), synthetic_row("b", 3), synthetic_row("c", 4)]
    panel = {"wanted": {"divergent": 3}, "available": {"divergent": 3}, "rows": [{"row": r} for r in "abc"]}
    summary = Carrier(SimpleNamespace(numeric=SimpleNamespace(dtype="bf16")), [], [], panel).summarise(rows)
    counts = {side: block["count"] for side, block in summary["sites"]["first_2"][INTO_PREFILL].items()}
    assert counts == {"donor": 1, "recipient": 0, "neither": 2}
    assert summary["smallest"]["first"][INTO_PREFILL] == [1, 3, 4]
    assert summary["smallest"]["last"][INTO_PREFILL] == [4, 4, 4]
    manifest = {"experiment": "carrier", "numeric": [], "environment": {}, "checkpoint": {}, "tasks_sha256": None}
    assert "first 2" in run_report(manifest, summary)


def test_a_run_takes_the_divergent_rows_and_the_whole_cache_carries_them(study, every_run):
    _, rows, summary = open_finished(every_run["carrier"])
    source = open_finished(study / "runs/fixed_prefix-bf16-fp32")[1]
    assert rows and {row["row"] for row in rows} <= {row["row"] for row in source}
    for row in rows:
        assert {row["sites"][direction]["empty"]["follows"] for direction in DONORS} == {"recipient"}
    for direction in DONORS:
        assert summary["sites"]["empty"][direction]["donor"]["count"] == 0
        assert summary["sites"]["whole"][direction]["donor"]["n"] == len(rows)


def test_a_source_without_a_divergent_row_is_refused_in_one_line(study, tmp_path):
    def agree(rows):
        for comparison in (one for row in rows for one in row["comparisons"].values()):
            comparison["suffix"] = {"exact": True, "first_divergence": None}

    source = altered(study / "runs/fixed_prefix-bf16-fp32", tmp_path / "source", agree)
    given = inputs(study, "--dtype", "bf16", "--source", source, tasks=False)
    done = call("carrier", *given, cwd=tmp_path)
    one_line(done, "expected at least one BF16 row with divergent suffixes, found none")
