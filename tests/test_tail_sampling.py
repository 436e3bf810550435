"""Tail sampling: which traces stay, why, and that counts can be made right afterwards."""

import math
import random
import tomllib
from dataclasses import replace

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.collectors.sampling.recent_traces import RecentTraces
from perfledger.collectors.sampling.sampling_policy import SamplingPolicy
from perfledger.collectors.sampling.tail_sampling import TailSampler
from perfledger.schema.errors import UsageError
from perfledger.schema.tables import SPANS

NONE = SamplingPolicy(share=0.0)
ALL_ONES, HALF_ZERO = b"\xff" * 16, b"\xff" * 9 + b"\x00" * 7
MS = 10**6


def spans(*rows: dict[str, object]) -> pa.Table:
    """A segment: sorted by trace, as the collector writes it."""
    defaults: dict[str, object] = {
        "trace_id": HALF_ZERO,
        "parent_span_id": b"parent-0",
        "name": "work",
        "kind": "internal",
        "start_ns": 10**18,
        "end_ns": 10**18 + MS,
        "status": "unset",
        "received_ns": 10**18,
    }
    filled = [
        {"span_id": (i + 1).to_bytes(8, "big"), **defaults, **row} for i, row in enumerate(rows)
    ]
    return SPANS.from_rows(sorted(filled, key=lambda row: bytes(row["trace_id"])))  # type: ignore[arg-type]


def lasting(milliseconds: float, **fields: object) -> dict[str, object]:
    return {"end_ns": 10**18 + round(milliseconds * MS), **fields}


def decide(policy: SamplingPolicy, segment: pa.Table) -> list[tuple[str, float | None]]:
    """Names and shares of the rows that are kept when a segment is seen and then written."""
    sampler = TailSampler(policy)
    sampler.observe(segment)
    kept, dropped = sampler.keep(segment)
    assert kept.schema.equals(segment.schema) and kept.num_rows + dropped == segment.num_rows
    return list(zip(kept["name"].to_pylist(), kept["kept_share"].to_pylist(), strict=True))


@pytest.mark.parametrize(
    ("policy", "row", "stays"),
    [
        (NONE, {}, False),
        (NONE, {"status": "error"}, True),
        (NONE, {"status": "ok"}, False),
        (NONE, {"error_type": "TimeoutError"}, True),
        (NONE, {"outcome": "ok"}, False),
        (NONE, {"outcome": "refused"}, True),
        (NONE, {"outcome": "aborted"}, True),
        (replace(NONE, slow_ns=5 * MS), lasting(5, parent_span_id=None), False),
        (replace(NONE, slow_ns=5 * MS), lasting(5.1, parent_span_id=None), True),
        (replace(NONE, slow_ns=5 * MS), lasting(5.1, kind="server"), True),
        (replace(NONE, slow_ns=5 * MS), lasting(5.1), False),
        (replace(NONE, slow_stages_ns=(("prefill", 2 * MS),)), lasting(3, name="prefill"), True),
        (replace(NONE, slow_stages_ns=(("prefill", 2 * MS),)), lasting(1, name="prefill"), False),
        (replace(NONE, slow_stages_ns=(("prefill", 2 * MS),)), lasting(3, name="decode"), False),
        (replace(NONE, slow_first_chunk_ns=MS), {"ttfc_ns": MS + 1}, True),
        (replace(NONE, slow_first_chunk_ns=MS), {"ttfc_ns": MS}, False),
        (replace(NONE, tenants=("gold", "vip")), {"tenant": "vip"}, True),
        (replace(NONE, tenants=("gold", "vip")), {"tenant": "tin"}, False),
        (replace(NONE, classes=("interactive",)), {"traffic_class": "interactive"}, True),
        (NONE, {"name": "decode_step"}, True),
        (replace(NONE, sample_engine_steps=True), {"name": "decode_step"}, False),
    ],
)
def test_a_reason_in_one_span_keeps_its_whole_trace_and_no_other(
    policy: SamplingPolicy, row: dict[str, object], stays: bool
) -> None:
    segment = spans(
        {"name": "first"}, {"name": "reason", **row}, {"trace_id": ALL_ONES[::-1][:15] + b"a"}
    )
    names = sorted(name for name, _ in decide(policy, segment))
    assert names == (sorted(["first", row.get("name", "reason")]) if stays else [])
    assert all(share is None for _, share in decide(policy, segment))


def test_a_share_of_one_changes_nothing() -> None:
    segment = spans({}, {"status": "error"}, {"trace_id": ALL_ONES})
    sampler = TailSampler(SamplingPolicy())
    sampler.observe(segment)
    assert sampler.keep(segment) == (segment, 0)
    assert not +sampler.counts()


def test_chance_is_a_threshold_on_the_last_56_bits() -> None:
    # OpenTelemetry: share 0.25 is th:c, which keeps R >= 0xc0000000000000.
    edge = b"\x00" * 9 + bytes.fromhex("c0000000000000")
    below = b"\xff" * 9 + bytes.fromhex("bfffffffffffff")
    assert SamplingPolicy(share=0.25).threshold == 0xC0000000000000
    segment = spans({"trace_id": edge, "name": "edge"}, {"trace_id": below, "name": "below"})
    assert decide(SamplingPolicy(share=0.25), segment) == [("edge", 0.25)]


@pytest.mark.parametrize(
    ("trace_state", "expected"),
    [
        (None, [0.5]),
        ("vendor=1", [0.5]),
        ("ot=th:c", [None]),  # the sender kept a quarter: none of it could be dropped here
        ("ot=th:8", [None]),
        ("a=b,ot=th:4;x:y", [0.5 / 0.75]),
        ("ot=rv:7fffffffffffff", []),
        ("ot=rv:80000000000000;th:4", [0.5 / 0.75]),
        ("ot=rv:90000000000000;th:c", [0.5]),  # a threshold above the randomness is void
        ("ot=th:zz;rv:123", [0.5]),
        ("not=th:c", [0.5]),
    ],
)
def test_what_the_sender_sampled_before_is_respected(
    trace_state: str | None, expected: list[float | None]
) -> None:
    segment = spans({"trace_id": ALL_ONES, "trace_state": trace_state})
    assert [share for _, share in decide(SamplingPolicy(share=0.5), segment)] == expected


def test_an_error_that_comes_late_keeps_what_follows() -> None:
    sampler = TailSampler(NONE)
    early, late, after = spans({}, {}), spans({"status": "error"}), spans({}, {})
    sampler.observe(early)
    assert sampler.keep(early)[1] == 2
    sampler.observe(late)
    sampler.observe(after)
    assert [sampler.keep(late)[1], sampler.keep(after)[1]] == [0, 0]
    assert sampler.keep(after)[0]["kept_share"].null_count == 2
    assert +sampler.counts() == {"sampling_spans_error": 1, "sampling_traces_kept_late": 1}


def test_an_error_seen_before_a_segment_is_written_keeps_all_of_it() -> None:
    sampler = TailSampler(NONE)
    early, late = spans({}, {}), spans({"status": "error"})
    sampler.observe(early)
    sampler.observe(late)
    assert [sampler.keep(early)[1], sampler.keep(late)[1]] == [0, 0]
    assert sampler.counts()["sampling_traces_kept_late"] == 0


def test_memory_is_bounded_and_what_is_forgotten_is_counted() -> None:
    sampler = TailSampler(replace(NONE, remembered_traces=1000))
    first = spans({"trace_id": (1).to_bytes(16, "big"), "status": "error"})
    sampler.observe(first)
    many = spans(*({"trace_id": i.to_bytes(16, "big"), "status": "error"} for i in range(2, 3002)))
    sampler.observe(many)
    assert sampler.keep(first)[1] == 1
    kept = sampler.keep(many)[0].num_rows
    assert 750 <= kept <= 1000
    assert sampler.counts()["sampling_traces_forgotten"] == 3001 - kept


@settings(deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 300), unique=True, max_size=60), max_size=30),
    limit=st.integers(4, 120),
)
def test_recent_traces_hold_the_newest_and_count_the_rest(
    batches: list[list[int]], limit: int
) -> None:
    memory, order = RecentTraces(limit), dict[int, None]()
    for batch in batches:
        memory.add(np.array(sorted(batch), np.uint64))
        for key in sorted(batch):
            order.pop(key, None)
            order[key] = None
        held = set(np.flatnonzero(memory.holds(np.arange(301, dtype=np.uint64))).tolist())
        assert len(held) <= len(memory) <= limit
        assert set(list(order)[-(limit // 4) :]) <= held <= set(order)
    assert memory.forgotten >= len(order) - len(memory)


def random_trace_ids(count: int, seed: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(16) for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_a_smaller_share_keeps_a_subset_and_collectors_agree(seed: int) -> None:
    segment = spans(*({"trace_id": trace_id} for trace_id in random_trace_ids(2000, seed)))
    half, again, tenth = (
        set(TailSampler(SamplingPolicy(share=share)).keep(segment)[0]["trace_id"].to_pylist())
        for share in (0.5, 0.5, 0.1)
    )
    assert half == again and tenth < half


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    share=st.floats(0.02, 0.9),
    seed=st.integers(0, 10**6),
    errors=st.floats(0, 0.2),
    segments=st.integers(1, 4),
)
def test_the_estimated_count_is_unbiased(
    share: float, seed: int, errors: float, segments: int
) -> None:
    """Over traces of 1 to 9 spans in several segments, some with an error at any place.

    The estimate of each trace is size / share with probability share, so the variance of the sum
    is at most sum(size^2) (1 - share) / share; five standard deviations are allowed.
    """
    source = random.Random(seed)
    rows: list[list[dict[str, object]]] = [[] for _ in range(segments)]
    sizes = []
    for trace_id in random_trace_ids(1500, seed):
        sizes.append(source.randint(1, 9))
        bad = source.randrange(sizes[-1]) if source.random() < errors else -1
        for index in range(sizes[-1]):
            status = "error" if index == bad else "ok"
            source.choice(rows).append({"trace_id": trace_id, "status": status})
    sampler, estimate = TailSampler(SamplingPolicy(share=share)), 0.0
    for segment in (spans(*some) for some in rows if some):
        sampler.observe(segment)
        kept, _ = sampler.keep(segment)
        estimate += sum(1 / (one or 1.0) for one in kept["kept_share"].to_pylist())
    deviation = math.sqrt(sum(size**2 for size in sizes) * (1 - share) / share)
    assert abs(estimate - sum(sizes)) < 5 * deviation


def test_over_many_seeds_the_estimate_has_no_bias() -> None:
    ratios = []
    for seed in range(200):
        segment = spans(*({"trace_id": trace_id} for trace_id in random_trace_ids(300, seed)))
        kept, _ = TailSampler(SamplingPolicy(share=0.1)).keep(segment)
        ratios.append(sum(1 / share for share in kept["kept_share"].to_pylist()) / 300)
    # 60,000 traces at a share of 0.1: one standard deviation is 1.2 %.
    assert abs(np.mean(ratios) - 1) < 0.04


def engine(steps: int, trace_id: bytes = HALF_ZERO) -> list[dict[str, object]]:
    """Steps of one engine with three children each, and one of its spans that is no step."""
    rows: list[dict[str, object]] = [{"name": "telemetry_dropped", "parent_span_id": None}]
    for step in range(steps):
        step_id = random.Random(step).randbytes(8)
        rows.append({"name": "decode_step", "span_id": step_id, "parent_span_id": None})
        for child in ("schedule", "forward", "sample"):
            rows.append({"name": child, "parent_span_id": step_id})
    return [{**row, "trace_id": trace_id} for row in rows]


def test_an_engines_trace_is_kept_as_requests_link_to_it() -> None:
    segment = spans(*engine(50), *({"trace_id": i} for i in random_trace_ids(50, 1)))
    assert [share for _, share in decide(NONE, segment)] == [None] * 201


def test_engine_steps_can_be_sampled_each_with_its_children() -> None:
    policy = SamplingPolicy(share=0.25, sample_engine_steps=True)
    segment = spans(*engine(400))
    sampler = TailSampler(policy)
    sampler.observe(segment)
    kept = pl.DataFrame(pl.from_arrow(sampler.keep(segment)[0]))
    steps = kept.filter(pl.col("name") == "decode_step")
    children = kept.filter(pl.col("name").is_in(["schedule", "forward", "sample"]))
    assert 60 < len(steps) < 140
    assert kept["kept_share"].to_list() == [0.25] * len(kept)
    assert len(children) == 3 * len(steps)
    assert set(children["parent_span_id"]) == set(steps["span_id"])


def test_an_error_in_a_sampled_step_keeps_that_step_alone() -> None:
    policy = SamplingPolicy(share=0.0, sample_engine_steps=True)
    rows = engine(20)
    rows[3] = {**rows[3], "status": "error"}
    assert sorted(decide(policy, spans(*rows))) == [
        ("decode_step", None),
        ("forward", None),
        ("sample", None),
        ("schedule", None),
    ]


@pytest.mark.parametrize("cut", [0, 1, 7, 100])
def test_slices_and_chunks_are_decided_like_the_whole(cut: int) -> None:
    ids = [i for i in random_trace_ids(60, 5) for _ in range(3)]
    states = [None, "error", "ok"]
    segment = spans(*({"trace_id": i, "status": states[n % 31 % 3]} for n, i in enumerate(ids)))
    odd = pa.concat_tables([segment.slice(0, cut), segment.slice(cut)])
    policy = SamplingPolicy(share=0.3)
    assert decide(policy, odd) == decide(policy, segment)
    shuffled = segment.take(np.random.default_rng(2).permutation(len(segment)))
    assert sorted(map(str, decide(policy, shuffled))) == sorted(map(str, decide(policy, segment)))
    empty = segment.slice(0, 0)
    assert decide(policy, empty) == []


def test_the_table_in_toml() -> None:
    text = """
    share = 0.1
    slow_ms = 2000
    slow_first_chunk_ms = 500
    tenants = ["gold"]
    classes = ["interactive"]
    wait_s = 3
    sample_engine_steps = true
    remembered_traces = 5000
    slow_stages_ms = {prefill = 200, kv_transfer = 1.5}
    """
    assert SamplingPolicy.from_toml(tomllib.loads(text)) == SamplingPolicy(
        share=0.1,
        slow_ns=2000 * MS,
        slow_first_chunk_ns=500 * MS,
        slow_stages_ns=(("prefill", 200 * MS), ("kv_transfer", 1_500_000)),
        tenants=("gold",),
        classes=("interactive",),
        sample_engine_steps=True,
        wait_s=3.0,
        remembered_traces=5000,
    )
    assert SamplingPolicy.from_toml({}) == SamplingPolicy()


def test_a_slow_stage_that_no_span_of_ours_is_named_after_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("prefill", "queue", "mixed_step", "chat"):
        SamplingPolicy.from_toml({"slow_stages_ms": {name: 200}})
    assert caplog.messages == []
    policy = SamplingPolicy.from_toml(
        {"slow_stages_ms": {"prefil": 200, "queue": 9, "host_gap": 1}}
    )
    assert [name for name, _ in policy.slow_stages_ns] == ["prefil", "queue", "host_gap"]
    (said,) = caplog.messages
    assert said.startswith("[sampling.slow_stages_ms]: prefil, host_gap: no span of Perfledger")
    assert said.endswith(
        "known are sample, prefill, decode, encode, adapter_load, kv_transfer, context, queue,"
        " route, template, tokenize, stream, detokenize, chat, decode_step, mixed_step,"
        " prefill_step, text_completion"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("share = 1.5", "share must be a number from 0 to 1"),
        ("share = nan", "share must be a number from 0 to 1"),
        ("share = true", "share must be a number from 0 to 1"),
        ('slow_ms = "2s"', "slow_ms must be a number"),
        ("slow_stages_ms = {prefill = -1}", "slow_stages_ms.prefill must be a number"),
        ('tenants = "gold"', "tenants must be a list of texts"),
        ("remembered_traces = 10", "remembered_traces must be a whole number from 1000"),
        ("sample_engine_steps = 1", "sample_engine_steps must be true or false"),
        ("shares = 1", "unknown setting: shares"),
    ],
)
def test_a_mistake_in_toml_is_named(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingPolicy.from_toml(tomllib.loads(text))
    assert said in str(caught.value) and "[sampling]" in str(caught.value)
