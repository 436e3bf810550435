"""Steps and requests, made from spans as they arrive: in any order, twice, late or not at all."""

from collections.abc import Sequence
from random import Random

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.schema.derive import request_rows, step_rows
from perfledger.schema.stages import STAGE_COLUMNS, STAGE_NAMES, SUB_STAGE_COLUMNS
from perfledger.schema.tables import REQUESTS, SPANS, STEPS

TRACE, OTHER_TRACE, ENGINE = b"t" * 16, b"u" * 16, b"e" * 16
Row = dict[str, object]


def span_id(number: int) -> bytes:
    return number.to_bytes(8, "big")


def span(number: int, parent: int | None, name: str, start: int, end: int, **more: object) -> Row:
    return {
        "trace_id": TRACE,
        "span_id": span_id(number),
        "parent_span_id": None if parent is None else span_id(parent),
        "name": name,
        "kind": "internal",
        "start_ns": start,
        "end_ns": end,
        "service_name": "llm",
        "received_ns": 0,
        **more,
    }


def root(number: int, start: int, end: int, **more: object) -> Row:
    return span(number, None, "chat", start, end) | {"kind": "server", "operation": "chat"} | more


def step(
    seq: int, start: int, end: int, members: Sequence[tuple[int, str]], **more: object
) -> list[Row]:
    """A step that schedules for 1 ns and samples during its last 2; the requests are in TRACE."""
    number = 10 * seq
    links = [
        {"trace_id": TRACE, "span_id": span_id(request), "phase": phase, "tokens": 3}
        for request, phase in members
    ]
    own: Row = {"trace_id": ENGINE, **more}
    engine: Row = {"replica": "0", "rank": 0, "step_seq": seq, "links": links, **own}
    return [
        span(number, None, "mixed_step", start, end, **engine),
        span(number + 1, number, "schedule", start, start + 1, **own),
        span(number + 2, number, "forward", start + 1, end - 2, **own),
        span(number + 3, number, "sample", end - 2, end, **own),
    ]


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    return pl.DataFrame(SPANS.from_rows(rows))


def derived(rows: Sequence[Row]) -> pl.DataFrame:
    spans = frame(rows)
    return request_rows(spans, step_rows(spans, received_ns=7), received_ns=9)


def stages(row: Row) -> dict[str, object]:
    """The stages and shares that took any time."""
    names = (*STAGE_COLUMNS, *SUB_STAGE_COLUMNS)
    return {name.removesuffix("_ns"): row[name] for name in names if row[name]}


# One request with a prompt in two chunks, a preemption, and a step of somebody else's.
PREEMPTED: list[Row] = [
    root(1, 0, 100, output_tokens=4, input_tokens=7, ttfc_ns=44, model="m", tenant="a"),
    *(span(2, 1, "tokenize", 1, 4), span(3, 1, "queue", 5, 8), span(4, 1, "context", 8, 10)),
    *(span(5, 1, "prefill", 11, 18), span(6, 1, "prefill", 31, 38), span(7, 1, "sample", 38, 40)),
    *(span(8, 1, "decode", 40, 90), span(9, 1, "queue", 51, 60), span(12, 1, "context", 60, 62)),
    *(span(13, 1, "prefill", 63, 70), span(14, 1, "detokenize", 90, 92)),
    span(15, 1, "stream", 92, 99),
    *step(1, 10, 20, [(1, "prefill")]),
    *step(2, 20, 30, [(99, "decode")]),
    *step(3, 30, 40, [(1, "prefill"), (99, "decode")]),
    *step(4, 40, 50, [(1, "decode")]),
    *step(5, 62, 72, [(1, "recompute")]),
    *step(6, 80, 90, [(1, "decode")]),
]


def test_a_preempted_request_row_by_row() -> None:
    (row,) = derived(PREEMPTED).to_dicts()
    times = dict.fromkeys(STAGE_COLUMNS + SUB_STAGE_COLUMNS, 0)
    assert row == {
        **dict.fromkeys(REQUESTS.names(), None),
        **times,
        "trace_id": TRACE,
        "span_id": span_id(1),
        "service_name": "llm",
        "replica": "0",
        "operation": "chat",
        "model": "m",
        "tenant": "a",
        "status": "ok",
        "input_tokens": 7,
        "output_tokens": 4,
        "arrival_ns": 0,
        "end_ns": 100,
        "e2e_ns": 100,
        "ttft_ns": 40,
        "ttfc_ns": 44,
        "longest": "host_gap",
        "sample_ns": 2 + 2 + 2 + 2 + 2,
        "prefill_ns": 7 + 7 + 7,
        "prefill_recompute_ns": 7,
        "decode_ns": 7 + 7,
        "tokenize_ns": 3,
        "queue_ns": 3 + 9,
        "context_ns": 2 + 2,
        "host_gap_ns": 1 + 10 + 1 + 1 + 1 + 1 + 9,
        "host_gap_schedule_ns": 1 + 1 + 1 + 1 + 1 + 1,
        "host_gap_other_step_ns": 9,
        "host_gap_rest_ns": 1 + 8,
        "detokenize_ns": 2,
        "stream_ns": 7,
        "unattributed_ns": 1 + 1 + 1,
        "steps": 5,
        "preemptions": 1,
        "token_times_ns": [40, 50, 72, 90],
        "version": 1,
        "received_ns": 9,
    }
    assert sum(row[name] for name in STAGE_COLUMNS) == row["e2e_ns"]


def test_steps_row_by_row() -> None:
    counts = [
        {"key": "perfledger.step.width", "int": 2},
        {"key": "perfledger.step.prefill_tokens", "int": 3},
        {"key": "perfledger.step.cpu_ns", "int": 5},
    ]
    rows = step(3, 30, 40, [(1, "prefill"), (99, "decode")], attributes=counts)
    rows.append(span(50, None, "decode_step", 50, 60, trace_id=ENGINE, replica="0"))
    made = step_rows(frame(rows), received_ns=7)
    assert made.to_arrow().cast(STEPS.arrow()).schema == STEPS.arrow()
    whole = dict.fromkeys(STEPS.names(), None)
    with_children, alone = made.sort("start_ns").to_dicts()
    assert with_children == {
        **whole,
        "service_name": "llm",
        "replica": "0",
        "rank": 0,
        "step_seq": 3,
        "trace_id": ENGINE,
        "span_id": span_id(30),
        "kind": "mixed_step",
        "start_ns": 30,
        "schedule_end_ns": 31,
        "sample_start_ns": 38,
        "sample_end_ns": 40,
        "end_ns": 40,
        "width": 2,
        "prefill_tokens": 3,
        "cpu_ns": 5,
        "members": [
            {"trace_id": TRACE, "span_id": span_id(1), "phase": "prefill", "tokens": 3},
            {"trace_id": TRACE, "span_id": span_id(99), "phase": "decode", "tokens": 3},
        ],
        "received_ns": 7,
    }
    assert alone == {
        **whole,
        "service_name": "llm",
        "replica": "0",
        "rank": 0,
        "step_seq": 0,
        "trace_id": ENGINE,
        "span_id": span_id(50),
        "kind": "decode_step",
        "start_ns": 50,
        "schedule_end_ns": 50,
        "end_ns": 60,
        "received_ns": 7,
    }


COUNTS = ("width", "prefill_tokens", "decode_tokens", "waiting", "kv_blocks_used")
STEP_COUNTS = (*COUNTS, "kv_blocks_total", "cpu_ns")
ANY_INT64 = st.integers(-(2**63), 2**63 - 1)
HOSTILE = st.one_of(ANY_INT64, st.sampled_from([2**31, 2**31 - 1, -(2**31) - 1, 2**40]))


@settings(max_examples=50, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(STEP_COUNTS, HOSTILE)), HOSTILE, HOSTILE)
def test_a_count_that_its_column_cannot_hold_is_not_known(
    told: dict[str, int], seq: int, tokens: int
) -> None:
    attributes = [{"key": f"perfledger.step.{name}", "int": n} for name, n in told.items()]
    foreign = step(1, 0, 10, [(1, "decode")], attributes=attributes)
    foreign[0]["step_seq"] = seq
    foreign[0]["links"][0]["tokens"] = tokens
    counts = ("output_tokens", "input_tokens", "deadline_ms", "ttfc_ns")
    spans = frame([*foreign, root(1, 0, 40, **dict.fromkeys(counts, tokens))])
    (made,) = step_rows(spans, received_ns=7).to_dicts()
    width = told.get("width")
    held = width if width is not None and -(2**31) <= width < 2**31 else None
    assert {name: made[name] for name in STEP_COUNTS} == {
        **dict.fromkeys(STEP_COUNTS),
        **told,
        "width": held,
    }
    assert (made["step_seq"], made["members"][0]["tokens"]) == (seq, tokens)
    assert derived(spans.to_dicts()).select("decode_ns", *counts).rows() == [(7, *[tokens] * 4)]


def test_nothing_makes_no_rows() -> None:
    assert derived([]).schema == pl.DataFrame(REQUESTS.arrow().empty_table()).schema
    assert derived([]).is_empty()
    assert derived(step(1, 0, 10, [(1, "decode")])).is_empty()


@settings(max_examples=30, deadline=None)
@given(st.integers(0))
def test_order_and_repetition_of_spans_do_not_matter(seed: int) -> None:
    random = Random(seed)
    rows = [*PREEMPTED, root(20, 3, 50), span(21, 20, "queue", 4, 9), *PREEMPTED[::3]]
    random.shuffle(rows)
    assert derived(rows).equals(derived([*PREEMPTED, root(20, 3, 50), span(21, 20, "queue", 4, 9)]))


def test_only_the_first_rank_of_a_replica_counts() -> None:
    other_rank = step(7, 0, 100, [(1, "decode")], rank=1, trace_id=b"f" * 16)
    assert derived(PREEMPTED + other_rank).equals(derived(PREEMPTED))


# --- Which spans belong to a request ------------------------------------------------------------


def test_many_requests_in_one_trace_and_one_inside_another() -> None:
    rows = [
        *(root(1, 0, 100), span(2, 1, "queue", 0, 10)),
        # A request that request 1 made of another service, through its client.
        *(span(3, 1, "chat", 20, 60, kind="client"), root(4, 25, 55, parent_span_id=span_id(3))),
        span(5, 4, "queue", 30, 50),
        *(root(6, 0, 40), span(7, 6, "tokenize", 0, 40)),
        # The same ids in another trace.
        root(1, 0, 8, trace_id=OTHER_TRACE),
        span(2, 1, "queue", 0, 8, trace_id=OTHER_TRACE),
    ]
    made = derived(rows).sort("trace_id", "span_id").to_dicts()
    assert [(row["trace_id"], row["span_id"], stages(row)) for row in made] == [
        (TRACE, span_id(1), {"queue": 10, "unattributed": 90}),
        (TRACE, span_id(4), {"queue": 20, "unattributed": 10}),
        (TRACE, span_id(6), {"tokenize": 40}),
        (OTHER_TRACE, span_id(1), {"queue": 8}),
    ]


def test_steps_tell_equal_span_ids_of_different_traces_apart() -> None:
    links = [
        {"trace_id": trace_id, "span_id": span_id(1), "phase": "prefill", "tokens": 3}
        for trace_id in (TRACE, OTHER_TRACE)
    ]
    both, one = step(1, 10, 20, []), step(2, 20, 30, [(1, "decode")])
    both[0]["links"] = links
    made = derived([root(1, 0, 40), root(1, 5, 40, trace_id=OTHER_TRACE), *both, *one])
    assert made.select("trace_id", "steps", "prefill_ns", "decode_ns").rows() == [
        (TRACE, 2, 7, 7),
        (OTHER_TRACE, 1, 7, 0),
    ]


def test_spans_below_spans_below_a_request() -> None:
    chain = [span(n, n - 1, "work", 0, 9) for n in range(2, 40)]
    deep = span(40, 39, "queue", 2, 6)
    assert [stages(row) for row in derived([root(1, 0, 9), *chain, deep]).to_dicts()] == [
        {"queue": 4, "unattributed": 5}
    ]


def test_a_request_of_another_instance_is_also_a_stage_of_the_one_above() -> None:
    inner = root(2, 1, 6, name="prefill", parent_span_id=span_id(1))
    made = derived([root(1, 0, 9), inner, span(3, 2, "queue", 1, 3)])
    assert [stages(row) for row in made.sort("span_id").to_dicts()] == [
        {"prefill": 5, "unattributed": 4},
        {"queue": 2, "unattributed": 3},
    ]


def test_parents_in_a_circle_or_unknown_belong_to_nobody() -> None:
    rows = [
        root(1, 0, 9),
        *(span(2, 3, "queue", 0, 9), span(3, 2, "queue", 0, 9), span(4, 4, "queue", 0, 9)),
        *(span(5, 77, "queue", 0, 9), span(6, None, "queue", 0, 9)),
    ]
    assert [stages(row) for row in derived(rows).to_dicts()] == [{"unattributed": 9}]


def test_of_two_roots_with_one_id_the_one_that_ends_last_counts() -> None:
    rows = [root(1, 0, 9), root(1, 2, 30, outcome="aborted"), root(1, 2, 8)]
    made = derived(rows).to_dicts()
    assert [(row["arrival_ns"], row["end_ns"], row["status"]) for row in made] == [
        (2, 30, "aborted")
    ]


def test_what_is_a_request() -> None:
    rows = [
        root(1, 0, 9, operation=None),  # by its name
        root(2, 0, 9, name="POST", operation="chat"),
        root(3, 0, 9, name="llm_request", operation=None, model="m"),
        root(4, 0, 9, name="GET /health", operation=None),
        root(5, 0, 9, kind="client"),
        root(6, 0, 9, name="POST", operation="text_completion"),
        root(7, 0, 9, name="POST", operation="generate_content"),
        # Another operation is none, whatever its name and model.
        *(
            root(10 + at, 0, 9, operation=other, model="m")
            for at, other in enumerate(("execute_tool", "invoke_agent", "embeddings", "", "x"))
        ),
    ]
    made = derived(rows).sort("span_id")
    assert made.select("span_id", "operation").rows() == [
        (span_id(1), "chat"),
        (span_id(2), "chat"),
        (span_id(3), None),
        (span_id(6), "text_completion"),
        (span_id(7), "generate_content"),
    ]


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ({}, "ok"),
        ({"status": "ok"}, "ok"),
        ({"status": "error"}, "error"),
        ({"status": "error", "outcome": "aborted"}, "aborted"),
        ({"outcome": "refused"}, "refused"),
        ({"outcome": "nonsense", "status": "error"}, "error"),
    ],
)
def test_status(told: Row, status: str) -> None:
    assert derived([root(1, 0, 9, **told)])["status"].to_list() == [status]


# --- Times of tokens ----------------------------------------------------------------------------


def times(rows: Sequence[Row]) -> tuple[object, object]:
    (row,) = derived(rows).to_dicts()
    return row["ttft_ns"], row["token_times_ns"]


def test_a_chunk_that_is_not_the_last_gives_no_token() -> None:
    chunks = [*step(1, 0, 10, [(1, "prefill")]), *step(2, 10, 20, [(1, "prefill")])]
    decode = step(3, 20, 30, [(1, "decode")])
    own = [span(4, 1, "sample", 18, 20)]
    assert times([root(1, 0, 40), *own, *chunks, *decode]) == (20, [20, 30])
    # Without its own span a chunk before a decode was the last one …
    assert times([root(1, 0, 40), *chunks, *decode]) == (20, [20, 30])
    # … and without a decode the root tells whether there was a token at all.
    assert times([root(1, 0, 40, output_tokens=1), *chunks]) == (20, [20])
    assert times([root(1, 0, 40, output_tokens=0), *chunks]) == (None, None)
    assert times([root(1, 0, 40), *chunks]) == (None, None)
    assert times([root(1, 0, 40), *own, *chunks]) == (20, [20])


def test_a_recomputed_end_counts_where_a_token_is_missing() -> None:
    steps = [*step(1, 0, 10, [(1, "prefill")]), *step(2, 20, 30, [(1, "recompute")])]
    own = span(4, 1, "sample", 8, 10)
    assert times([root(1, 0, 40, output_tokens=2), own, *steps]) == (10, [10, 30])
    assert times([root(1, 0, 40, output_tokens=1), own, *steps]) == (10, [10])
    assert times([root(1, 0, 40), own, *steps]) == (10, [10])


def test_the_first_token_is_known_though_its_step_was_lost() -> None:
    rows = [root(1, 0, 40), span(4, 1, "sample", 8, 10), *step(2, 20, 30, [(1, "decode")])]
    assert times(rows) == (10, [10, 30])


def test_several_answers_get_their_tokens_at_one_time() -> None:
    rows = [root(1, 0, 40), *step(1, 0, 10, [(1, "decode"), (1, "decode")])]
    assert times(rows) == (10, [10])


def test_never_scheduled() -> None:
    assert times([root(1, 0, 40), span(2, 1, "queue", 1, 40)]) == (None, None)


def test_a_step_without_a_sample_child_gives_no_token() -> None:
    rows = [row for row in step(1, 0, 10, [(1, "decode")]) if row["name"] != "sample"]
    assert times([root(1, 0, 40), *rows]) == (None, None)


def test_the_first_sample_lies_within_the_request() -> None:
    assert times([root(1, 5, 40), span(2, 1, "sample", 50, 60)]) == (35, [60])
    assert times([root(1, 5, 40), span(2, 1, "sample", 0, 3)]) == (0, [3])


def test_stages_are_listed_in_the_order_of_the_declaration() -> None:
    assert derived(PREEMPTED).columns == REQUESTS.names()
    assert [f"{name}_ns" for name in STAGE_NAMES] == list(STAGE_COLUMNS)
