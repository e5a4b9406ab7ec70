"""Partial transplants: the sites, whose trajectory a suffix follows, the counts, and the command as a user calls it."""

import dataclasses
import shutil

import pytest

import experiments.carrier.__main__ as carrier
from cache import build_incremental, build_prefill, compare, transplant
from decode.greedy import alone, greedy_suffix
from experiments.carrier.__main__ import Carrier
from experiments.carrier.sites import sites
from experiments.carrier.tables import carrier_summary
from experiments.report.summaries import run_report
from experiments.run.inputs import Prefix, panel_record
from experiments.run.progress import Progress
from minimodel.roles import ROLE_NAMES
from stats.donors import DONORS, INTO_PREFILL, follows
from tests.experiments.runs import ledger, one_line, open_finished, rewrite, run

FP32 = ("--dtype", "fp32")
BF16 = ("--dtype", "bf16")


def test_sites_partition_layers_tensors_blocks_and_heads(three):
    config, state = three.model.config, three.live.state
    found = {site.name: site for site in sites(config, state)}
    assert len(found) == len(sites(config, state)), "two sites share a name"
    assert found["first_2"].layers == (0, 1) and found["last_1"].layers == (2,)
    blocks = [site.positions for name, site in found.items() if site.family == "block"]
    assert sorted(slot for slots in blocks for slot in slots) == list(range(len(state)))
    merge = found[f"block_{ROLE_NAMES[4]}"].positions
    assert merge == (len(state) - 1,), "merge holds its opening delimiter alone"
    assert found["head_1"].heads == (1,) and found["layer_1_values"].tensors == "v"


@pytest.mark.parametrize("name", ["keys", "layer_1", "first_2", "head_0", "block_branch_2", "layer_0_values", "empty"])
def test_a_site_changes_its_own_places_and_no_other(three, name):
    """Against the two sources: inside the site the donor's bits, outside the recipient's."""
    site = next(site for site in sites(three.model.config, three.live.state) if site.name == name)
    mixed = transplant(three.prefill, three.incremental, site.layers, site.tensors, site.positions, site.heads)
    slots = list(range(len(three.live.state))) if site.positions is None else list(site.positions)
    heads = [0, 1] if site.heads is None else list(site.heads)
    triples = zip(mixed.cache.tensors(), three.prefill.cache.tensors(), three.incremental.cache.tensors())
    for (layer, tensor, got), (_, _, recipient), (_, _, donor) in triples:
        wanted = recipient.clone()
        if (site.layers is None or layer in site.layers) and tensor[0] in site.tensors:
            for head in heads:
                wanted[:, head, slots] = donor[:, head, slots]
        assert wanted.equal(got), f"layer {layer} {tensor}"


def test_a_suffix_follows_donor_recipient_or_neither(three):
    suffix = greedy_suffix(three.model, three.prefill)
    other = dataclasses.replace(suffix, tokens=(*suffix.tokens[:-1], suffix.tokens[-1] ^ 1))
    third = dataclasses.replace(suffix, tokens=(*suffix.tokens[:-1], suffix.tokens[-1] ^ 2))
    assert follows(suffix.tokens, suffix.tokens, other.tokens) == "donor"
    assert follows(other.tokens, suffix.tokens, other.tokens) == "recipient"
    assert follows(third.tokens, suffix.tokens, other.tokens) == "neither"


def test_a_row_has_every_site_in_both_directions_and_says_when_the_baselines_agree(three):
    state = three.live.state
    prefix = Prefix("r", state.tokens, state.sha256())
    row = alone(Carrier(three.model, [prefix], [state], {}).row(0, Progress(1, 0, quiet=True).row("a")))
    names = [site.name for site in sites(three.model.config, state)]
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


def entry(side: str) -> dict:
    return {"follows": side, "suffix_sha256": "", "leaves_recipient_at": None}


def synthetic_row(name: str, flips_at: int, layers: int = 4) -> dict:
    """The donor's suffix from `flips_at` first layers on, and never from the last layers but all of them."""
    one = {"whole": entry("donor"), "empty": entry("recipient")}
    for k in range(1, layers):
        one[f"first_{k}"] = entry("donor" if k >= flips_at else "neither")
        one[f"last_{k}"] = entry("recipient")
    for i in range(layers):
        one[f"layer_{i}"] = entry("recipient")
    return {
        "row": name,
        "gates": {"prefix": True},
        "passed": True,
        "prefix": {"length": 9},
        "comparisons": {},
        "sites": dict.fromkeys(DONORS, one),
    }


def test_counts_and_the_smallest_layer_range_follow_the_rule():
    rows = [synthetic_row("a", 1), synthetic_row("b", 3), synthetic_row("c", 4)]
    panel = panel_record(
        "rule", {"divergent": 3}, {"divergent": 3}, [{"row": r, "stratum": "divergent"} for r in "abc"]
    )
    summary = carrier_summary("bf16", panel, rows)
    into_prefill = INTO_PREFILL
    assert summary["sites"]["first_2"][into_prefill]["donor"]["count"] == 1
    assert summary["sites"]["first_2"][into_prefill]["neither"]["count"] == 2
    assert summary["smallest"]["first"][into_prefill] == [1, 3, 4]
    assert summary["smallest"]["last"][into_prefill] == [4, 4, 4]
    manifest = {"experiment": "carrier", "numeric": [], "environment": {}, "checkpoint": {}, "tasks_sha256": None}
    assert "first 2" in run_report(manifest, summary)


@pytest.fixture(scope="module")
def finished(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("carrier") / "run"
    run(study, "carrier", out, *BF16, tasks=False)
    return out


def test_a_run_takes_the_divergent_rows_and_the_whole_cache_carries_them(study, finished):
    manifest, rows, summary = open_finished(finished)
    source = open_finished(study / "runs/fixed_prefix-bf16-fp32")[1]
    assert rows and {row["row"] for row in rows} <= {row["row"] for row in source}
    assert [row["row"] for row in rows] == manifest["row_order"] and summary["passed"]
    for row in rows:
        assert list(row["gates"]) == carrier.Carrier.gates() and row["arms"].keys() == {"incremental", "prefill"}
        assert {row["sites"][direction]["empty"]["follows"] for direction in DONORS} == {"recipient"}
    for direction in DONORS:
        assert summary["sites"]["empty"][direction]["donor"]["count"] == 0
        assert summary["sites"]["whole"][direction]["donor"]["n"] == len(rows)


def test_a_row_that_does_not_diverge_fails_its_gate(study, tmp_path):
    """The BF16 panel decoded in FP32, where both suffixes are one."""
    run(study, "carrier", tmp_path / "run", *FP32, "--limit", 1, tasks=False, expected=3)
    (row,) = ledger(tmp_path / "run")
    assert "divergent" in [gate for gate, passed in row["gates"].items() if not passed]


def test_a_source_without_a_divergent_row_is_refused_in_one_line(study, tmp_path):
    shutil.copytree(study / "runs/fixed_prefix-bf16-fp32", tmp_path / "source")
    rows = ledger(tmp_path / "source")
    for row in rows:
        for comparison in row["comparisons"].values():
            comparison["suffix"] = {"exact": True, "first_divergence": None}
    rewrite(tmp_path / "source", rows)
    done = run(study, "carrier", tmp_path / "run", *BF16, "--source", tmp_path / "source", tasks=False, expected=2)
    assert "expected at least one BF16 row with divergent suffixes, found none" in one_line(done)
