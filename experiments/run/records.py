"""The records that travel: manifest, ledger row with its arms and comparisons, summary. One comment per field.

`fields` reads one back, whatever an editor or another version of the code has made of it.
"""

import json
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from minimodel.errors import InputError, refuse

Gates = dict[str, bool]  # verdict by gate name
Drift = dict[str, Any]  # `cache.drift`: exact, differing, elements, max_abs, mean_abs, L2 norms, first_difference
Interval = dict[str, Any]  # `stats.intervals.Proportion`: count, n, rate, wilson_95


class PrefixEntry(TypedDict):
    """A boundary prefix."""

    tokens: NotRequired[list[int]]  # through merge's opening delimiter; absent in a panel
    length: int  # their number
    sha256: str  # of the canonical JSON list of tokens


class PanelRow(PrefixEntry):
    """A row that was frozen before any was decoded."""

    row: str  # its id
    stratum: NotRequired[str]  # what an earlier run found it to be: "divergent" or "exact"


class Panel(TypedDict, total=False):
    """How rows were chosen; frozen in the manifest."""

    rule: str  # the selection rule in words
    wanted: dict[str, int]  # rows that the design wants, by stratum ("rows" where there are no strata)
    available: dict[str, int]  # rows that the source has, by stratum
    rows: list[PanelRow]  # the chosen rows in order
    bank: dict[str, Any]  # sha256 and rows of the bank, sha256 of the ledger that it was read from
    strata_ledger_sha256: str  # of the ledger that the strata were read from
    source_ledger_sha256: str  # of the ledger that the divergent rows were read from
    cells: list[str]  # the numeric contracts of a crossing, by name
    left_out: dict[str, str]  # why this machine cannot run a cell, by name
    incremental: bool  # a recording that adds the incremental arms


class ContractEntries(TypedDict, total=False):
    """The decoding contract; absent for a stock checkpoint."""

    tokens: dict[str, Any]  # `Contract.meaning`
    caps: dict[str, int | None]  # content tokens per block
    visibility: list[list[int]]  # query role x key role
    role_offset: int  # the role table's row of raw role 0


class Manifest(ContractEntries):
    """Everything that decides a row's bits, written before the first row and compared on resume."""

    schema: str  # of the run directory
    experiment: str  # the command's name
    numeric: list[dict[str, Any]]  # `NumericContract.record` per dtype or cell, in order
    environment: dict[str, Any]  # `minimodel.machine.machine_record`
    code_sha256: str  # of the source files that decide a row or a verdict
    checkpoint: dict[str, str]  # SHA-256 by file name
    checkpoint_warnings: NotRequired[list[str]]  # casts that lose bits; notes on a checkpoint that is not the bank's
    tasks_sha256: NotRequired[str | None]  # None for an experiment that reads no tasks
    preflight: NotRequired[int]  # rows that must pass before any later one is decoded
    plan: NotRequired[dict[str, Any]]  # uncertainty, interpretation and greedy decoding, as frozen
    panel: NotRequired[Panel]  # how rows were chosen; empty where all are taken
    stock: NotRequired[dict[str, Any]]  # template, eos_ids and cap of a stock control
    source: NotRequired[str]  # the library that decoded, where it is not this one
    recorder_sha256: NotRequired[str]  # of the code that recorded another library
    left: NotRequired[dict[str, Any]]  # an audit's first run: experiment, rows, ledger_sha256
    right: NotRequired[dict[str, Any]]  # its second run
    row_order: list[str]  # identity of every row (`ledger.row_key`), in order
    information: dict[str, Any]  # paths, command, commit: the one part that may differ on resume


class ArmEntry(TypedDict, total=False):
    """One continuation. A stock or batch control has the last three fields and `margins` alone."""

    suffix: list[int]  # tokens after the boundary, delimiters included
    suffix_sha256: str  # of the canonical JSON list of them
    merge: list[int]  # content tokens of the merge block
    answer: list[int]  # content tokens of the answer block
    answer_text: str  # the answer block, decoded
    scored: str | None  # the letter or number that the answer states; absent in a run that reads no answers
    correct: bool  # whether it is the expected one; absent likewise
    cache_sha256: str  # of the boundary's K/V: dtype, shape and bytes
    logits_sha256: str  # of the boundary's logits
    argmax: int  # eligible argmax of the boundary's logits
    margin: float  # its logit minus the next eligible one
    margins: list[float | None]  # per token; None where it is forced
    boundary_state_sha256: str  # functional record of the prefix
    suffix_state_sha256: str  # functional record of prefix and suffix
    geometry: dict[str, Any]  # shape, stride, dtype and devices of the K/V tensors, and their number
    logits_geometry: dict[str, Any]  # shape, stride, dtype and device of the logits
    post_decode_length: int  # tokens in the working cache after the suffix
    copies: int  # physical copies that were decoded
    tokens: list[int]  # everything generated
    tokens_sha256: str  # of the canonical JSON list of them
    logprobs: list[float | None]  # log-probability per token; None where it is forced
    state_sha256: str  # functional record of prompt and tokens


class SuffixPair(TypedDict):
    """Two suffixes compared."""

    exact: bool  # token for token
    first_divergence: int | None  # index of the first differing token
    tops: list[float | None]  # both arms' best logit there; None where a token is forced or missing


class SequencePair(TypedDict, total=False):
    """Two generations compared, in tokens or in log-probabilities."""

    exact: bool  # equal in every bit
    first_divergence: int | None  # index of the first difference
    max_abs_aligned: float  # largest difference of log-probabilities where both have one, whatever the tokens
    max_abs_shared: float  # the same before the first differing token


class Comparison(TypedDict, total=False):
    """One pair of arms. A stock or batch control has the last two fields alone."""

    cache: Drift  # K and V of all layers
    logits: Drift  # boundary logits
    suffix: SuffixPair  # tokens after the boundary
    merge_equal: bool  # merge blocks, token for token
    answer_tokens_equal: bool  # answer blocks, token for token
    answer_equal: bool  # stated letters or numbers; where both state none, the tokens. Scored arms only
    correct_equal: bool  # both correct or both wrong. Scored arms only
    argmax_equal: bool  # eligible argmax of the boundary logits
    tokens: SequencePair  # everything generated
    logprobs: SequencePair  # of the chosen tokens


class RowExtra(TypedDict, total=False):
    """What one experiment adds to its rows."""

    dtype: str  # fixed_prefix: the precision of this row
    cell: str  # causes: DTYPE/ATTENTION/LINEAR
    prefix_margins: list[float | None]  # matrix: margin per prefix token; None where it is forced
    boundary_length: int | None  # bridge: tokens of every boundary's cache; None where they differ
    saved_prefix: dict[str, Any]  # bridge: length and sha256 in the bank, agrees, first_divergence
    raw_argmax: dict[str, int]  # transplants: argmax over the whole vocabulary by native arm
    donor: dict[str, bool]  # transplants: divergent, each direction's recovery, recovers_both, novel
    stratum: str  # transplant: "divergent" or "exact" in the run that the row was chosen from
    stratum_reproduced: bool  # transplant: whether this run's own baselines are that too; an endpoint
    oracle: dict[str, Any]  # causes: distance of each arm to FP64, the nearer arm, the oracle's margin
    chunks: dict[str, Any]  # causes: drift of prefill by tokens per call
    sites: dict[str, Any]  # carrier: {DIRECTION: {SITE: follows, suffix_sha256, leaves_recipient_at}}
    input: PrefixEntry  # stock and batch control: the prompt
    left_row_sha256: str  # audit: of the left run's row
    right_row_sha256: str  # audit: of the right run's row
    joined: dict[str, str]  # audit: {arm of the left run: arm of the right run}
    leaves: dict[str, Any]  # audit: {SECTION: number of shared, scalar and unshared leaves}
    differing: list[str]  # audit: paths of the first leaves that differ
    differing_leaves: int  # audit: how many do


class RowBody(RowExtra):
    """The part of a row that its experiment writes."""

    prefix: NotRequired[PrefixEntry]  # absent in a row that failed closed
    failure: NotRequired[str]  # why a row failed closed: no arm of it is used
    arms: dict[str, ArmEntry]  # by name; empty in a row that failed closed
    comparisons: dict[str, Comparison]  # by "LEFT:RIGHT"


class Row(RowBody):
    """One line of rows.jsonl."""

    row: str  # its id
    index: int  # its place in the manifest's `row_order`
    gates: Gates  # all False in a row that failed closed
    passed: bool  # whether every gate holds
    timing: NotRequired["Timing"]  # in a partial ledger alone
    row_sha256: NotRequired[str]  # of the line without this field


class Timing(TypedDict):
    """One line of timing.jsonl: a file beside the ledger, so that two runs write the same ledger."""

    row: str  # identity, as in `row_order`
    seconds: NotRequired[float]  # the row's own work and its share of common steps
    arms: NotRequired[dict[str, float]]  # the same by arm
    seconds_since_start: NotRequired[float]  # audit: when the row was written
    rank: NotRequired[int]  # who decoded it, under torchrun
    world_size: NotRequired[int]  # of how many


class PairEndpoints(TypedDict, total=False):
    """The endpoints of one comparison over the rows that hold it; `n` in each says how many those are."""

    comparison: str  # "LEFT:RIGHT"
    compared_rows: int  # rows that hold it; where 0, nothing below is there
    suffix_disagreement: Interval  # suffixes that differ
    merge_disagreement: Interval  # merge blocks that differ
    answer_tokens_disagreement: Interval  # answer blocks that differ, token for token
    answer_disagreement: Interval  # stated letters or numbers that differ; scored arms only
    correctness_disagreement: Interval  # correct against wrong; scored arms only
    accuracy: dict[str, Any]  # {ARM: {correct, n}}, difference in points with bootstrap and McNemar; scored arms only
    first_divergence: dict[str, Any]  # n, median, min, max over diverging rows
    first_token_divergence_rows: int  # rows whose suffixes differ in the first token after the boundary
    cache: dict[str, Any]  # exact_rows, and medians of relative_l2, max_abs, mean_abs
    logits: dict[str, Any]  # the same of the boundary logits
    argmax_equal_rows: int  # rows with one eligible argmax at the boundary


class Endpoints(PairEndpoints, total=False):
    """What experiments add to the head of their summaries."""

    panel: dict[str, dict[str, int]]  # wanted, available, selected, each by stratum
    dtypes: list[str]  # fixed_prefix: precisions in order
    precisions: dict[str, "Summary"]  # fixed_prefix: a summary like a matrix's by precision
    cross_precision: dict[str, Any] | None  # fixed_prefix: `cross_precision`; None for one precision
    identity: dict[str, Interval]  # bridge: rows with equal bits of live and incremental: cache, logits, suffix, all
    saved_prefix_agreement: Interval  # bridge: newly reached prefixes that are the saved ones
    saved_prefix_length: dict[str, int]  # bridge: min, max
    endpoints: dict[str, Any]  # transplants: the registered endpoints, each on its own eligible rows
    grid: dict[str, dict[str, int]]  # transplants: {ARM: {donor, recipient, neither}} over divergent rows
    strata: dict[str, dict[str, Any]]  # transplant: {STRATUM: {rows, reproduced}}
    own_checkpoint: bool  # replication: whether the bank's own checkpoint was decoded
    interpretation: str | None  # replication: the frozen label; None where a gate failed
    interpretation_rule: dict[str, int]  # replication: least_divergent, least_exact
    input_length: dict[str, int]  # controls: min, max of the prompts
    token_disagreement: Interval  # controls: generations that differ in a token
    logprob_disagreement: Interval  # controls: generations that differ in a log-probability
    first_token_divergence: dict[str, Any]  # controls: n, median, min, max in tokens after the prompt
    first_logprob_divergence: dict[str, Any]  # controls: the same of log-probabilities
    max_abs_aligned: float | None  # controls: the largest of all rows
    max_abs_shared: float | None  # controls: the largest of all rows
    left_out: dict[str, str]  # causes: why this machine cannot run a cell, by name
    cells: dict[str, Any]  # causes: endpoints by cell
    verdicts: dict[str, Any]  # causes: {DTYPE: {cache, suffix: {FACTOR: {necessary, sufficient, evidence}}}}
    chunks: dict[str, Any]  # causes: {CELL: {CHUNK: rows, exact_rows, medians}}
    oracle: dict[str, Any]  # causes: {CELL: median distances to FP64, the nearer arm, equal argmaxes}
    alone: dict[str, Any]  # causes: {DTYPE: {OPERATION: {rows, differing}}}
    margins: dict[str, Any]  # causes: {CELL: how first divergences relate to small margins}
    sites: dict[str, Any]  # carrier: {SITE: {DIRECTION: {donor, recipient, neither}}}, each an Interval
    smallest: dict[str, Any]  # carrier: {first, last: {DIRECTION: fewest layers that give the donor's suffix per row}}
    left: dict[str, Any]  # audit: experiment, rows and ledger_sha256 of the first run
    right: dict[str, Any]  # audit: of the second
    only_left: list[str]  # audit: rows that the first run alone has
    only_right: list[str]  # audit: rows that the second alone has
    order_equal: bool  # audit: whether common rows stand in one order
    joined: dict[str, str]  # audit: {arm of the first run: arm of the second}
    leaves: dict[str, Any]  # audit: {SECTION: {shared: [min, max], scalars: [min, max], unshared}}
    not_joined: list[str]  # audit: precisions of one run alone
    surface: list[str]  # audit: what differs between the numeric surfaces; recorded, not a gate


class Summary(Endpoints):
    """summary.json: the head, and beside it the experiment's endpoints."""

    experiment: str  # the command's name
    dtype: str  # or several, joined
    rows: int  # in the ledger
    passed: bool  # whether every gate of every row holds
    failed_rows: list[str]  # identities
    gates: dict[str, dict[str, int]]  # by gate name: rows that pass it (passed), all rows (of)
    no_result: str | None  # why the endpoints are no result, and over how many rows they were computed
    prefix_length: dict[str, float] | None  # median, min, max


class Fields(dict[str, Any]):
    """A JSON object of a file. A field that it lacks is an InputError, because a run of another version wrote it."""

    def __init__(self, source: Path | str, value: dict[str, Any]) -> None:
        super().__init__(value)
        self.source = source

    def __missing__(self, key: str) -> Any:
        raise InputError(
            f"{self.source}: expected the field {key!r}, found none; the run was written by another version of the code"
        )


def fields(value: Any, kind: Any, source: Path | str) -> Any:
    """Returns a record that was read from a file, with every object as `Fields`.

    InputError where a part is not of the type that `kind`, a record or a list of records, declares.
    """
    if fault := misfit(value, kind):
        raise InputError(f"{source}: {fault}; it was edited, or written by another version of the code")
    return json.loads(json.dumps(value), object_hook=partial(Fields, source))


def misfit(value: Any, kind: Any, at: str = "") -> str:
    """Returns 'PATH: expected TYPE, found VALUE' for the first part that is not of its declared type; empty where all
    are. A field that no record declares may hold anything, and a missing one is none of another type."""
    if kind is Any:
        return ""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        faults = [misfit(value, one, at) for one in inner]
        return "" if "" in faults else faults[0]
    declared = _hints(kind) if is_typeddict(kind) else None
    wanted = origin if declared is None else dict
    if type(value) is not wanted and (wanted, type(value)) != (float, int):
        return str(refuse(at.lstrip("."), wanted.__name__, value))
    parts: Iterable[tuple[str, Any, Any]] = ()
    if wanted is dict:
        parts = ((f"{at}.{key}", one, declared.get(key, Any) if declared else inner[1]) for key, one in value.items())
    elif wanted is list:
        parts = ((f"{at}[{index}]", one, inner[0]) for index, one in enumerate(value))
    return next(filter(None, (misfit(one, own, where) for where, one, own in parts)), "")


_hints = cache(get_type_hints)
