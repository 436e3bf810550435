"""Records in, spans out: whole span sets of scripted engines, and laws that hold for any engine."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.instrumented_runtime.finished_spans import FinishedSpan
from perfledger.instrumented_runtime.record_spans import RecordSpans
from perfledger.instrumented_runtime.records import (
    LEAVE_REASONS,
    WAIT_REASONS,
    Admit,
    ChoiceEnd,
    Chunk,
    Degrade,
    Kv,
    Leave,
    NoMemory,
    Preempt,
    Record,
    Step,
)
from perfledger.instrumented_runtime.ring import Gap, to_signed
from perfledger.instrumented_runtime.telemetry import EngineRecord, RequestRecord, SpanRecord
from perfledger.schema import metrics
from perfledger.schema.attributes import LINK_ATTRIBUTES, SPAN_ATTRIBUTES

SECOND = 1_000_000_000
Event = Record | Gap | RequestRecord | EngineRecord
# A span as the tests write it: of, name, parent, start, end, attributes without `perfledger.`.
View = tuple[str, str, str, int, int, dict[str, object]]
# A link: request, phase, tokens.
Link = tuple[str, object, object]


def trace_of(request: int) -> int:
    return 0xF000_0000_0000_0000_0000_0000_0000_0000 + request


def root_of(request: int) -> int:
    return 0xA000_0000_0000_0000 + request


def of(span: FinishedSpan) -> str:
    """Return whose trace a span is in."""
    request = span.trace_id - trace_of(0)
    return f"request {request}" if 0 < request < 1_000_000 else "engine"


def admit(request: int, seq: int, queue: int, context: int, end: int, **more: int) -> Admit:
    trace = trace_of(request)
    return Admit(
        request,
        seq,
        to_signed(trace >> 64),
        to_signed(trace & (1 << 64) - 1),
        to_signed(root_of(request)),
        queue,
        context,
        end,
        more.get("prompt_tokens", 4),
        more.get("cached_tokens", 0),
        more.get("wait_reason", 0),
        more.get("sequences", 0),
        more.get("swapped_blocks", 0),
    )


def step(seq: int, start: int, width: int, prefill: int = 0, decode: int = 0) -> Step:
    """A step of 100 ns: scheduled at +10, sampling from +80 to +90. 4 of 9 blocks used."""
    at = (start, start + 10, start + 80, start + 90, start + 100)
    return Step(seq, *at, width, prefill, decode, 1, 4, 9, 70)


def leave(request: int, seq: int, at: int, reason: str, output_tokens: int) -> Leave:
    reason_code, computed = LEAVE_REASONS.index(reason), 3 + output_tokens
    return Leave(request, seq, at, reason_code, output_tokens, computed, 0, 2, 0, 0, 0, 0)


def chunk(request: int, seq: int, tokens: int, recompute: int, last: int) -> Chunk:
    return Chunk(request, seq, tokens, recompute, last, sequences=1, samples=last)


def preempt(request: int, seq: int, at: int) -> Preempt:
    return Preempt(request, seq, at, swapped_blocks=0)


def finished(
    request: int, start: int, end: int, outcome: str = "ok", sent: int | None = None
) -> RequestRecord:
    trace, root = trace_of(request), root_of(request)
    return RequestRecord(request, trace, root, None, "chat", start, end, outcome, {}, [], sent)


def feed(spans: RecordSpans, *events: Event) -> list[FinishedSpan]:
    return [span for event in events for span in spans.feed(event)]


def run(*events: Event) -> list[FinishedSpan]:
    return feed(RecordSpans(Random(1)), *events)


def short(attributes: dict[str, object]) -> dict[str, object]:
    return {name.removeprefix("perfledger."): value for name, value in attributes.items()}


def views(spans: list[FinishedSpan]) -> list[View]:
    names = {span.span_id: span.name for span in spans}
    return [
        (
            of(span),
            span.name,
            _parent(span, names),
            span.start_ns,
            span.end_ns,
            short(dict(span.attributes)),
        )
        for span in spans
    ]


def _parent(span: FinishedSpan, names: dict[int, str]) -> str:
    if span.parent_span_id is None:
        return ""
    if span.parent_span_id == root_of(span.trace_id - trace_of(0)):
        return "root"
    return names.get(span.parent_span_id, str(span.parent_span_id))


def requests_only(spans: list[FinishedSpan]) -> list[View]:
    return [view for view in views(spans) if view[0] != "engine"]


def links(spans: list[FinishedSpan]) -> dict[object, list[Link]]:
    """Return the links of each step, by its number."""
    found = {}
    for span in spans:
        if span.name.endswith("_step"):
            found[span.attributes["perfledger.step.seq"]] = [
                (f"{link.span_id - root_of(0)}", *link.attributes.values()) for link in span.links
            ]
    return found


def test_a_request_in_two_chunks_and_two_tokens() -> None:
    spans = run(
        EngineRecord({"perfledger.device": "cpu"}),
        admit(1, 7, 50, 90, 95, prompt_tokens=6, cached_tokens=1, wait_reason=1),
        chunk(1, 7, 3, 0, 0),
        step(7, 100, 1, prefill=3),
        chunk(1, 8, 2, 0, 1),
        step(8, 200, 1, prefill=2),
        step(9, 300, 1, decode=1),
        leave(1, 9, 405, "length", 2),
        RequestRecord(
            1,
            trace_of(1),
            root_of(1),
            77,
            "text_completion",
            10,
            500,
            "ok",
            {"gen_ai.usage.output_tokens": 2},
            [SpanRecord("tokenize", 20, 40, {"perfledger.tokens": 6})],
            sent_ns=50,
        ),
    )
    engine = {"replica": "0", "rank": 0, "device": "cpu"}
    usual = {"step.waiting": 1, "step.kv_blocks_used": 4, "step.kv_blocks_total": 9}
    usual |= {"step.width": 1, "step.cpu_ns": 70}
    prefill = engine | usual | {"step.decode_tokens": 0}
    decode = engine | usual | {"step.prefill_tokens": 0, "step.decode_tokens": 1, "step.seq": 9}
    cached = {"gen_ai.usage.cache_read.input_tokens": 1}
    of_root = {
        "gen_ai.usage.output_tokens": 2,
        "status": "ok",
        "kv_blocks_held": 2,
        "computed_tokens": 5,
    } | cached
    one = "request 1"
    assert views(spans) == [
        (one, "queue", "root", 50, 90, {"reason": "kv_full"}),
        (one, "context", "root", 90, 95, cached),
        ("engine", "prefill_step", "", 100, 200, prefill | step_of(7, 3)),
        ("engine", "schedule", "prefill_step", 100, 110, {}),
        ("engine", "forward", "prefill_step", 110, 180, {}),
        ("engine", "sample", "prefill_step", 180, 190, {}),
        (one, "prefill", "root", 110, 180, {"tokens": 3, "step.seq": 7}),
        ("engine", "prefill_step", "", 200, 300, prefill | step_of(8, 2)),
        ("engine", "schedule", "prefill_step", 200, 210, {}),
        ("engine", "forward", "prefill_step", 210, 280, {}),
        ("engine", "sample", "prefill_step", 280, 290, {}),
        (one, "prefill", "root", 210, 280, {"tokens": 2, "step.seq": 8}),
        (one, "sample", "root", 280, 290, {"tokens": 1, "step.seq": 8}),
        ("engine", "decode_step", "", 300, 400, decode),
        ("engine", "schedule", "decode_step", 300, 310, {}),
        ("engine", "forward", "decode_step", 310, 380, {}),
        ("engine", "sample", "decode_step", 380, 390, {}),
        (one, "decode", "root", 290, 405, {"reason": "length", "tokens": 1}),
        # The root is a child of the caller's span, which is none of ours.
        (one, "text_completion", "77", 10, 500, of_root),
        (one, "tokenize", "root", 20, 40, {"tokens": 6}),
    ]
    assert links(spans) == {
        7: [("1", "prefill", 3)],
        8: [("1", "prefill", 2)],
        9: [("1", "decode", 1)],
    }
    assert len({span.span_id for span in spans}) == len(spans)
    assert [span.name for span in spans if span.server] == ["text_completion"]


def step_of(seq: int, prefill_tokens: int) -> dict[str, object]:
    return {"step.seq": seq, "step.prefill_tokens": prefill_tokens}


def test_a_step_without_sampling_has_no_sample_child_and_computes_to_its_end() -> None:
    plain = Step(1, 100, 110, 200, 200, 200, 0, 0, 0, 0, 0, 9, 5)
    unset = plain._replace(seq=2, sample_start_ns=0, sample_end_ns=0)
    spans = run(plain, unset)
    assert [view[1:5] for view in views(spans)] == [
        ("decode_step", "", 100, 200),
        ("schedule", "decode_step", 100, 110),
        ("forward", "decode_step", 110, 200),
    ] * 2


def test_a_step_that_found_no_memory_has_not_been() -> None:
    spans = run(
        admit(1, 1, 10, 20, 25),
        chunk(1, 1, 4, 0, 1),
        admit(2, 1, 10, 26, 27),
        chunk(2, 1, 90, 0, 1),
        NoMemory(2, 1, 60, 5_000, -1, 7, 9, 6),
        leave(2, 1, 61, "out_of_memory", 0),
        step(2, 100, 0),  # the other one is planned again later
        chunk(1, 3, 4, 0, 1),
        step(3, 200, 1, prefill=4),
        leave(1, 3, 305, "length", 1),
    )
    held = {"step.seq": 1, "memory.process_bytes": 5_000, "kv_blocks_held": 6}
    held |= {"step.kv_blocks_used": 7, "step.kv_blocks_total": 9}
    of_requests = [view for view in requests_only(spans) if view[1] not in ("queue", "context")]
    assert of_requests == [
        ("request 2", "out_of_memory", "root", 60, 60, held),
        ("request 1", "prefill", "root", 210, 280, {"tokens": 4, "step.seq": 3}),
        ("request 1", "sample", "root", 280, 290, {"tokens": 1, "step.seq": 3}),
    ]
    assert links(spans) == {2: [], 3: [("1", "prefill", 4)]}


def test_a_preempted_request_waits_again_and_is_computed_again() -> None:
    spans = run(
        admit(1, 1, 10, 20, 25),
        chunk(1, 1, 4, 0, 1),
        step(1, 100, 1, prefill=4),
        preempt(1, 2, 205),
        step(2, 200, 1, decode=1),
        admit(1, 3, 205, 302, 304, wait_reason=2),
        chunk(1, 3, 5, 1, 1),
        step(3, 300, 1, prefill=5),
        step(4, 400, 1, decode=1),
        leave(1, 4, 505, "stop", 3),
        finished(1, 0, 600),
    )
    cached = {"gen_ai.usage.cache_read.input_tokens": 0}
    assert [view[1:] for view in requests_only(spans)] == [
        ("queue", "root", 10, 20, {"reason": "admission"}),
        ("context", "root", 20, 25, cached),
        ("prefill", "root", 110, 180, {"tokens": 4, "step.seq": 1}),
        ("sample", "root", 180, 190, {"tokens": 1, "step.seq": 1}),
        ("queue", "root", 205, 302, {"reason": "preempted"}),
        ("context", "root", 302, 304, cached),
        ("prefill", "root", 310, 380, {"tokens": 5, "step.seq": 3, "reason": "preempted"}),
        ("decode", "root", 190, 505, {"reason": "stop", "tokens": 2}),
        ("chat", "", 0, 600, {"status": "ok", "kv_blocks_held": 2, "computed_tokens": 6} | cached),
    ]
    assert links(spans) == {
        1: [("1", "prefill", 4)],
        2: [],
        3: [("1", "recompute", 5)],
        4: [("1", "decode", 1)],
    }


def test_aborted_between_steps_while_prefilling_it_has_no_token() -> None:
    spans = run(
        admit(1, 1, 10, 20, 25),
        chunk(1, 1, 3, 0, 0),
        step(1, 100, 1, prefill=3),
        leave(1, 1, 250, "client_disconnect", 0),
        step(2, 300, 0),
        finished(1, 0, 240, "aborted"),
    )
    cached = {"gen_ai.usage.cache_read.input_tokens": 0}
    why = {"status": "aborted", "reason": "client_disconnect"}
    why |= {"kv_blocks_held": 2, "computed_tokens": 3}
    assert [view[1:] for view in requests_only(spans)] == [
        ("queue", "root", 10, 20, {"reason": "admission"}),
        ("context", "root", 20, 25, cached),
        ("prefill", "root", 110, 180, {"tokens": 3, "step.seq": 1}),
        ("chat", "", 0, 240, why | cached),
    ]
    assert links(spans) == {1: [("1", "prefill", 3)], 2: []}


def test_an_answer_of_one_token_has_no_decode_span() -> None:
    spans = run(
        admit(1, 1, 10, 20, 25),
        chunk(1, 1, 4, 0, 1),
        step(1, 100, 1, prefill=4),
        leave(1, 1, 205, "stop", 1),
    )
    assert [view[1] for view in requests_only(spans)] == ["queue", "context", "prefill", "sample"]


def test_aborted_while_waiting_for_the_first_time() -> None:
    """The engine has no record with its ids, so its wait is told when the API's record comes."""
    left_first = run(
        leave(1, 0, 90, "client_disconnect", 0), finished(1, 0, 95, "aborted", sent=20)
    )
    said_first = run(
        finished(1, 0, 95, "aborted", sent=20), leave(1, 0, 90, "client_disconnect", 0)
    )
    why = {"status": "aborted", "reason": "client_disconnect"}
    assert views(left_first) == [
        ("request 1", "chat", "", 0, 95, why),
        ("request 1", "queue", "root", 20, 90, {"reason": "admission"}),
    ]
    assert views(said_first) == [
        ("request 1", "chat", "", 0, 95, {"status": "aborted"}),
        ("request 1", "queue", "root", 20, 95, {"reason": "admission"}),
    ]


def test_a_refused_request_waited_for_no_engine() -> None:
    spans = run(finished(1, 0, 95, "refused"))
    assert views(spans) == [("request 1", "chat", "", 0, 95, {"status": "refused"})]


def test_aborted_while_preempted_its_last_wait_is_told() -> None:
    spans = run(
        admit(1, 1, 10, 20, 25),
        chunk(1, 1, 4, 0, 1),
        step(1, 100, 1, prefill=4),
        preempt(1, 2, 205),
        leave(1, 2, 270, "shutdown", 1),
    )
    assert requests_only(spans)[-1][1:] == ("queue", "root", 205, 270, {"reason": "preempted"})


def test_choices_are_one_request_with_several_tokens_a_step() -> None:
    state = RecordSpans(Random(1))
    spans = feed(
        state,
        admit(1, 1, 10, 20, 25),
        Chunk(1, 1, 4, 0, 1, sequences=3, samples=3),
        step(1, 100, 1, prefill=4),
        step(2, 200, 3, decode=3),
        ChoiceEnd(1, 2, 305, sequences=2, decoding=1),
        step(3, 400, 2, decode=2),
        preempt(1, 4, 505),
        admit(1, 5, 505, 510, 515, wait_reason=2),
        # Two sequences are computed again and sample nothing, then both decode.
        Chunk(1, 5, 9, 9, 1, sequences=2, samples=0),
        step(5, 600, 2, prefill=9),
        step(6, 700, 2, decode=2),
        leave(1, 6, 805, "length", 10),
    )
    assert links(spans) == {
        1: [("1", "prefill", 4)],
        2: [("1", "decode", 3)],
        3: [("1", "decode", 2)],
        5: [("1", "recompute", 9)],
        6: [("1", "decode", 2)],
    }
    told = [view[1:] for view in requests_only(spans)]
    assert ("sample", "root", 180, 190, {"tokens": 3, "step.seq": 1}) in told
    assert told[-1] == ("decode", "root", 190, 805, {"tokens": 7, "reason": "length"})
    assert state.counts[metrics.TOKENS, "output"] == 10


def test_a_swapped_request_decodes_again_without_a_chunk() -> None:
    spans = run(
        admit(1, 1, 10, 20, 25),
        chunk(1, 1, 4, 0, 1),
        step(1, 100, 1, prefill=4),
        Preempt(1, 2, 205, swapped_blocks=1),
        step(2, 200, 0),
        admit(1, 3, 205, 302, 304, wait_reason=2, sequences=1, swapped_blocks=1),
        step(3, 300, 1, decode=1),
        Leave(1, 3, 405, 0, 2, 5, 0, 2, 3, 1, 2, 0b101),
        finished(1, 0, 500),
    )
    assert links(spans) == {1: [("1", "prefill", 4)], 2: [], 3: [("1", "decode", 1)]}
    cached = {"gen_ai.usage.cache_read.input_tokens": 0}
    told = [view[1:] for view in requests_only(spans)]
    assert ("context", "root", 302, 304, cached | {"kv_blocks_swapped": 1}) in told
    account = {"kv_blocks_held": 2, "computed_tokens": 5, "kv_blocks_evicted": 3}
    account |= {"kv_blocks_copied": 1}
    account |= {"kv_blocks_swapped": 2, "degraded": "shrink-chunk,cap-max-tokens"}
    assert told[-1] == ("chat", "", 0, 500, {"status": "ok"} | cached | account)


def test_kv_events_are_told_by_the_step_they_happened_in() -> None:
    state = RecordSpans(Random(1))
    spans = feed(
        state, Kv(1, 2, 0, 1, 0, 0), step(1, 100, 0), Kv(2, 0, 3, 0, 1, 4), step(3, 200, 0)
    )
    told = [view[5] for view in views(spans) if view[1] == "decode_step"]
    assert {name: told[0][name] for name in told[0] if name.startswith("step.kv_s")} == {
        "step.kv_stored": 2
    }
    assert told[0]["step.kv_copied"] == 1
    # The record of step 2 is lost: nothing is said of the blocks by another step.
    assert not any(name in told[1] for name in ("step.kv_evicted", "step.kv_swapped_in"))
    events = {name: n for (metric, name), n in state.counts.items() if metric is metrics.KV_EVENTS}
    assert events == {"stored": 2, "copied": 1, "evicted": 3, "swapped_out": 1, "swapped_in": 4}


def test_degrading_is_a_span_of_the_engine() -> None:
    spans = run(Degrade(50, 3, 1, 3200), Degrade(90, 3, 0, 1400))
    engine = {"replica": "0", "rank": 0, "degrade.step": "shed-low-priority"}
    assert views(spans) == [
        ("engine", "degrade", "", 50, 50, engine | {"degrade.on": True, "degrade.pressure": 3.2}),
        ("engine", "degrade", "", 90, 90, engine | {"degrade.on": False, "degrade.pressure": 1.4}),
    ]


# --- lost records ---


def test_a_gap_is_a_span_between_the_records_around_it() -> None:
    spans = run(step(1, 100, 0), Gap(3), Gap(2), chunk(9, 2, 1, 0, 0), step(2, 300, 1, decode=1))
    lost = {"replica": "0", "rank": 0, "dropped": 5}
    assert [view for view in views(spans) if view[1] == "telemetry_dropped"] == [
        ("engine", "telemetry_dropped", "", 200, 400, lost)
    ]


def test_a_gap_at_the_end_is_told_too() -> None:
    state = RecordSpans(Random(1))
    feed(state, step(1, 100, 0), Gap(3))
    lost = {"replica": "0", "rank": 0, "dropped": 3}
    assert views(state.end()) == [("engine", "telemetry_dropped", "", 200, 200, lost)]


def test_without_its_admit_a_request_is_ignored_and_counted() -> None:
    state = RecordSpans(Random(1))
    spans = feed(
        state,
        Gap(1),
        chunk(1, 1, 4, 0, 1),
        step(1, 100, 1, prefill=4),
        preempt(1, 2, 205),
        leave(1, 2, 206, "error", 1),
        finished(1, 0, 210, "error", sent=5),  # not "never admitted": its ADMIT may be lost
    )
    assert requests_only(spans) == [("request 1", "chat", "", 0, 210, {"status": "error"})]
    assert links(spans) == {1: []}
    assert state.counts[metrics.TELEMETRY_LOST, "unmatched"] == 2


def test_without_the_step_of_its_first_token_its_decode_has_no_start() -> None:
    spans = run(
        admit(1, 1, 10, 20, 25),
        chunk(1, 1, 4, 0, 1),
        Gap(1),
        step(2, 200, 1, decode=1),
        leave(1, 2, 305, "length", 2),
    )
    assert [view[1] for view in requests_only(spans)] == ["queue", "context"]
    assert links(spans) == {2: [("1", "decode", 1)]}


def test_without_its_leave_a_request_ends_with_the_record_of_the_api() -> None:
    state = RecordSpans(Random(1))
    spans = feed(
        state,
        admit(1, 1, 10, 20, 25),
        chunk(1, 1, 4, 0, 1),
        step(1, 100, 1, prefill=4),
        step(2, 200, 1, decode=1),
        Gap(1),
        finished(1, 0, 350),
        step(3, 400, 1, decode=1),
        step(4, 350 + SECOND, 1, decode=1),
        step(5, 351 + SECOND, 0),
    )
    told = [("1", "decode", 1)]
    assert links(spans) == {1: [("1", "prefill", 4)], 2: told, 3: told, 4: told, 5: []}
    assert requests_only(spans)[-1][1:] == ("decode", "root", 190, 450 + SECOND, {})
    assert state.end() == []


def test_without_its_leave_and_the_record_of_the_api_a_narrower_batch_ends_it() -> None:
    spans = run(
        admit(1, 1, 10, 20, 25),
        chunk(1, 1, 4, 0, 1),
        step(1, 100, 1, prefill=4),
        Gap(1),
        admit(2, 2, 110, 210, 220),
        chunk(2, 2, 4, 0, 1),
        step(2, 200, 1, prefill=4),
        step(3, 400 + 9 * SECOND, 1, decode=1),
        step(4, 500 + 10 * SECOND, 1, decode=1),
    )
    both = [("1", "decode", 1), ("2", "decode", 1)]
    assert links(spans) == {
        1: [("1", "prefill", 4)],
        2: [("1", "decode", 1), ("2", "prefill", 4)],
        3: both,
        4: [("2", "decode", 1)],
    }


def test_the_end_closes_what_a_killed_engine_left_open() -> None:
    state = RecordSpans(Random(1))
    feed(
        state,
        admit(1, 1, 10, 20, 25),
        chunk(1, 1, 4, 0, 1),
        step(1, 100, 1, prefill=4),
        step(2, 200, 1, decode=1),
        finished(1, 0, 350, "error"),
    )
    assert views(state.end()) == [("request 1", "decode", "root", 190, 300, {})]


# --- metrics ---


def test_counters_and_gauges() -> None:
    state = RecordSpans(Random(1))
    feed(
        state,
        admit(1, 1, 10, 20, 25, prompt_tokens=9, cached_tokens=5),
        admit(2, 1, 10, 20, 25),
        chunk(1, 1, 4, 0, 1),
        chunk(2, 1, 3, 0, 0),
        step(1, 100, 2, prefill=7),
        preempt(2, 2, 205),
        step(2, 200, 1, decode=1),
        Gap(2),
        admit(2, 3, 205, 302, 304, wait_reason=2),
        chunk(2, 3, 4, 4, 1),
        step(3, 300, 2, prefill=4, decode=1),
        leave(1, 3, 405, "stop", 3),
        leave(2, 3, 406, "out_of_memory", 1),
        finished(1, 0, 410),
        finished(2, 0, 411, "error"),
        finished(3, 0, 412, "aborted"),
        finished(4, 0, 413, "refused"),
    )
    assert state.counts == Counter(
        {
            (metrics.STEPS, ""): 3,
            (metrics.ENGINE_CPU, ""): 210,
            (metrics.TOKENS, "input"): 8,
            (metrics.TOKENS, "cached"): 5,
            (metrics.TOKENS, "output"): 4,
            (metrics.RECOMPUTED_TOKENS, ""): 4,
            (metrics.PREEMPTIONS, ""): 1,
            (metrics.OUT_OF_MEMORY, ""): 1,
            (metrics.REQUESTS, "ok"): 1,
            (metrics.REQUESTS, "error"): 1,
            (metrics.REQUESTS, "aborted"): 1,
            (metrics.REQUESTS, "refused"): 1,
            (metrics.ERRORS, "unknown"): 1,
            (metrics.ABORTS, "unknown"): 1,
            (metrics.TELEMETRY_LOST, "ring"): 2,
        }
    )
    assert state.gauges == {
        metrics.QUEUE_LENGTH: 1,
        metrics.BATCH_WIDTH: 2,
        metrics.KV_BLOCKS_USED: 4,
        metrics.KV_BLOCKS_TOTAL: 9,
    }


# --- laws, for any engine that keeps to records.py ---


class Engine:
    """Makes up a run: random admissions, chunks, preemptions and aborts, with the truth beside."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 1000
        self.seq = 0
        self.records: list[Record] = []
        self.truth: dict[object, list[Link]] = {}
        self.tokens: Counter[int] = Counter()  # sampled, by request
        self.running: dict[int, int] = {}  # tokens left to compute; 0: decoding
        self.waiting: list[int] = []
        self.preempted: dict[int, int] = {}  # when
        self.next_request = 1

    def tick(self) -> int:
        self.now += self.random.randint(1, 50)
        return self.now

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        for request in [*self.running, *self.preempted]:
            self.leave(request, "shutdown")

    def step(self) -> None:
        self.seq += 1
        start = self.tick()
        for _ in range(self.random.randint(0, 2)):
            self.waiting.append(self.next_request)
            self.next_request += 1
        for request in [one for one in self.running if self.random.random() < 0.05]:
            self.records.append(preempt(request, self.seq, self.tick()))
            self.preempted[request] = self.now
            del self.running[request]
            self.waiting.insert(0, request)
        while self.waiting and len(self.running) < 4 and self.random.random() < 0.7:
            self.admit(self.waiting.pop(0))
        self.compute(start)
        for request in [one for one in self.running if self.random.random() < 0.15]:
            self.leave(request, self.random.choice(LEAVE_REASONS))

    def admit(self, request: int) -> None:
        again = self.preempted.pop(request, None)
        start, end = self.tick(), self.tick()
        reason = WAIT_REASONS.index("preempted" if again else "admission")
        queued = again or start - 5
        self.records.append(admit(request, self.seq, queued, start, end, wait_reason=reason))
        self.running[request] = self.random.randint(1, 6) + (1000 if again else 0)

    def compute(self, start: int) -> None:
        links: list[Link] = []
        prefill = decode = 0
        for request, left in self.running.items():
            if left == 0:
                links.append((str(request), "decode", 1))
                decode += 1
                self.tokens[request] += 1
            elif self.random.random() < 0.8:  # else no budget for it in this step
                recompute, left = left > 1000, left % 1000
                tokens = self.random.randint(1, left)
                last = int(tokens == left)
                self.records.append(chunk(request, self.seq, tokens, recompute * tokens, last))
                links.append((str(request), "recompute" if recompute else "prefill", tokens))
                prefill += tokens
                self.tokens[request] += last
                self.running[request] = 0 if last else left - tokens + 1000 * recompute
        times = start, self.tick(), self.tick(), self.tick(), self.tick()
        self.records.append(Step(self.seq, *times, len(links), prefill, decode, 0, 0, 9, 1))
        self.truth[self.seq] = links

    def leave(self, request: int, reason: str) -> None:
        self.running.pop(request, None)
        tokens = self.tokens[request]
        self.records.append(leave(request, self.seq, self.tick(), reason, tokens))


def as_sets(of_steps: dict[object, list[Link]]) -> dict[object, list[Link]]:
    return {seq: sorted(members) for seq, members in of_steps.items()}


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 60))
def test_links_are_the_batch_and_tokens_are_exact(seed: int, steps: int) -> None:
    engine = Engine(Random(seed))
    engine.run(steps)
    state = RecordSpans(Random(seed))
    spans = feed(state, *engine.records)
    assert as_sets(links(spans)) == as_sets(engine.truth)
    assert state.counts[metrics.TOKENS, "output"] == engine.tokens.total()
    decoded = {s.trace_id: s for s in spans if s.name == "decode"}
    sampled = [s for s in spans if s.name == "sample" and of(s) != "engine"]
    assert {s.trace_id for s in sampled} == {
        trace_of(request) for request, count in engine.tokens.items() if count
    }
    for first in sampled:  # decode starts where the first sample ended
        if first.trace_id in decoded:
            assert decoded[first.trace_id].start_ns == first.end_ns
    assert state.end() == []


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), loss=st.floats(0, 1), said=st.floats(0, 1))
def test_lost_records_link_no_request_for_ever(seed: int, loss: float, said: float) -> None:
    engine, random = Engine(Random(seed)), Random(seed + 1)
    engine.run(30)
    state = RecordSpans(Random(seed))
    dropped = 0
    for record in engine.records:
        if random.random() < loss:
            state.feed(Gap(1))
            dropped += 1
        else:
            state.feed(record)
    for request in range(1, engine.next_request):
        if random.random() < said:  # the API's records may be lost too
            state.feed(finished(request, 0, engine.now))
    later = engine.now + 20 * SECOND
    feed(state, step(900, engine.now + 1, 0))
    spans = feed(state, step(901, later, 0), step(902, later + 200, 0))
    assert links(spans) == {901: [], 902: []}
    assert state.counts[metrics.TELEMETRY_LOST, "ring"] == dropped


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_only_declared_attributes_are_written(seed: int) -> None:
    engine = Engine(Random(seed))
    engine.run(20)
    records = [finished(n, 0, 10**6, "aborted", 5) for n in range(1, engine.next_request)]
    spans = run(*engine.records[:40], Gap(1), *engine.records[40:], *records)
    declared = {attribute.name for attribute in SPAN_ATTRIBUTES}
    assert {name for span in spans for name in span.attributes} <= declared
    assert {name for span in spans for link in span.links for name in link.attributes} <= {
        attribute.name for attribute in LINK_ATTRIBUTES
    }
