"""Requests into the log: in groups, all or nothing, each answered for itself, always counted."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from collect_pipeline import LIMITS, Pipeline, adds_up, logs, metrics, pipeline, run
from otlp_client import span, traces, wait_until

from perfledger.collectors.otlp_rows import LOGS, METRICS, TRACES, Outcome, Signal
from perfledger.collectors.transport.otlp_receiver import Refusal


def one_span(number: int, **fields: object) -> tuple[Signal, bytes]:
    return TRACES, traces(span(number, **fields))


def statuses(answers: list[Outcome | Refusal]) -> list[int]:
    return [one.http_status if isinstance(one, Refusal) else 200 for one in answers]


async def behind_the_gate(
    parts: Pipeline, *requests: tuple[Signal, bytes]
) -> list["asyncio.Task[Outcome | Refusal]"]:
    """Submit one request that is stuck at the disk, and others that gather meanwhile."""
    parts.log.gate.clear()
    parts.log.reached.clear()
    first = asyncio.create_task(parts.submit(*one_span(1)))
    while not parts.log.reached.is_set():
        await asyncio.sleep(0.01)
    others = [asyncio.create_task(parts.submit(*request)) for request in requests]
    await asyncio.sleep(0.05)
    return [first, *others]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Pipeline]:
    with pipeline(tmp_path) as opened:
        yield opened


# --- Groups -------------------------------------------------------------------------------


def test_what_gathers_while_the_disk_syncs_shares_the_next_sync(parts: Pipeline) -> None:
    async def work() -> list[Outcome | Refusal]:
        requests = [one_span(number) for number in range(2, 152)]
        tasks = await behind_the_gate(parts, *requests)
        assert not any(task.done() for task in tasks)  # nothing is synced
        parts.log.gate.set()
        return list(await asyncio.gather(*tasks))

    assert set(statuses(run(work()))) == {200}
    assert parts.log.appends == [1, 64, 64, 22]
    assert parts.counts.read()["spans_waiting"] == 151


def test_a_large_request_does_not_wait_for_more(parts: Pipeline) -> None:
    large = TRACES, traces(*(span(n, name="x" * 100_000) for n in range(1, 91)))

    async def work() -> list[Outcome | Refusal]:
        tasks = await behind_the_gate(parts, large, large, *[one_span(200)] * 3)
        parts.log.gate.set()
        return list(await asyncio.gather(*tasks))

    assert set(statuses(run(work()))) == {200}
    assert parts.log.appends == [1, 1, 1, 3]


def test_all_signals_go_through_one_group_and_come_back_as_they_were(
    tmp_path: Path, parts: Pipeline
) -> None:
    requests = [one_span(2), (METRICS, metrics(1.0, 2.0)), (LOGS, logs(9)), (TRACES, b"")]

    async def work() -> list[Outcome | Refusal]:
        tasks = await behind_the_gate(parts, *requests)
        parts.log.gate.set()
        return list(await asyncio.gather(*tasks))

    answers = run(work())
    assert statuses(answers) == [200] * 5
    assert all(answer.response().ByteSize() == 0 for answer in answers)
    assert parts.log.appends == [1, 3]  # what holds nothing is not logged
    segment = parts.log.cut()
    assert [(one.kind, bytes(one.body)) for one in segment.records()][1:] == [
        (0, requests[0][1]),
        (1, requests[1][1]),
        (2, requests[2][1]),
    ]


# --- Refusals -----------------------------------------------------------------------------


def test_a_log_at_its_limit_refuses_leaves_nothing_and_takes_again(tmp_path: Path) -> None:
    with pipeline(tmp_path, log_bytes=20_000) as parts:
        answers = []
        while 503 not in statuses(answers):
            number = len(answers) + 1
            answers += parts.send((TRACES, traces(span(number, name="x" * 2_000))))
            assert adds_up(parts.counts.read())
        taken = len(answers) - 1
        assert answers[-1].retry_s == 1
        refused = parts.counts.read()
        assert (refused["spans_received"], refused["spans_waiting"]) == (taken, taken)
        assert refused["write_failures"] == 1
        assert statuses(parts.send(one_span(900))) == [200]  # a small one fits still
        parts.store_all()
        assert statuses(parts.send(one_span(901, name="x" * 2_000))) == [200]
        parts.store_all()
        ids = parts.store.collect("spans")["span_id"].to_list()
        expected = [*range(1, taken + 1), 900, 901]
        assert sorted(int.from_bytes(one, "big") for one in ids) == expected
        assert adds_up(parts.counts.read())


def test_all_of_a_group_that_the_log_refuses_is_refused(tmp_path: Path) -> None:
    with pipeline(tmp_path, log_bytes=5_000) as parts:

        async def work() -> list[Outcome | Refusal]:
            large = TRACES, traces(span(3, name="x" * 9_000))
            tasks = await behind_the_gate(parts, one_span(2), large, (METRICS, metrics(1.0)))
            parts.log.gate.set()
            return list(await asyncio.gather(*tasks))

        assert statuses(run(work())) == [200, 503, 503, 503]
        counts = parts.counts.read()
        assert (counts["spans_received"], counts["points_received"]) == (1, 0)
        parts.store_all()
        assert parts.store.collect("spans").height == 1
        assert parts.store.files("points") == []


def test_bytes_that_are_no_request_are_400_and_hurt_no_other(parts: Pipeline) -> None:
    bad = [(TRACES, b"\xff" * 9), (METRICS, b"\xff" * 9), (LOGS, b"\xff" * 9)]

    async def work() -> list[Outcome | Refusal]:
        tasks = await behind_the_gate(parts, one_span(2), *bad, (METRICS, metrics(1.0)))
        parts.log.gate.set()
        return list(await asyncio.gather(*tasks))

    assert statuses(run(work())) == [200, 200, 400, 400, 400, 200]
    assert parts.log.appends == [1, 2]
    assert parts.counts.read()["defects"] == 0


def test_a_defect_of_ours_answers_500_and_hurts_no_other(parts: Pipeline) -> None:
    def defective(*_: object) -> Iterator[object]:
        yield from [{"name": "a row of a request that fails further on"}]
        raise KeyError("PRIVATE")

    broken = replace(METRICS, rows=defective)

    async def work() -> list[Outcome | Refusal]:
        requests = [one_span(2), (broken, metrics(1.0)), (METRICS, metrics(2.0))]
        tasks = await behind_the_gate(parts, *requests)
        parts.log.gate.set()
        return list(await asyncio.gather(*tasks))

    assert statuses(run(work())) == [200, 200, 500, 200]
    counts = parts.counts.read()
    assert (counts["defects"], counts["points_received"], counts["spans_received"]) == (1, 1, 2)
    parts.store_all()
    assert parts.store.collect("points")["value"].to_list() == [2.0]


def test_a_log_that_fails_for_a_defect_keeps_no_rows_either(
    parts: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    parts.log.close()
    assert statuses(parts.send(one_span(1), (METRICS, metrics(1.0)))) == [500, 500]
    counts = parts.counts.read()
    assert counts["defects"] >= 1 and counts["spans_received"] == counts["points_received"] == 0
    assert parts.ingest.held_bytes < 100_000
    assert "taking requests failed: ValueError" in caplog.text


# --- Senders that go away, and the end ----------------------------------------------------


@pytest.mark.parametrize("gone", [[1], [2], [1, 3], [1, 2, 3]])
def test_a_sender_that_goes_away_hurts_no_other(parts: Pipeline, gone: list[int]) -> None:
    async def work() -> list[object]:
        tasks = await behind_the_gate(parts, *(one_span(n) for n in (2, 3, 4)))
        for at in gone:
            tasks[at].cancel()
        await asyncio.sleep(0.05)
        parts.log.gate.set()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    answers = run(work())
    assert [isinstance(one, Outcome) for one in answers] == [at not in gone for at in range(4)]
    counts = parts.counts.read()
    assert (counts["defects"], counts["spans_accepted"]) == (0, 4 - len(gone))
    assert statuses(parts.send(one_span(9))) == [200]


def test_a_sender_that_goes_away_during_the_sync_has_been_taken(parts: Pipeline) -> None:
    async def work() -> object:
        (first, second) = await behind_the_gate(parts, one_span(2))
        first.cancel()
        await asyncio.sleep(0.05)
        parts.log.gate.set()
        return await second

    assert isinstance(run(work()), Outcome)
    counts = parts.counts.read()
    assert (counts["defects"], counts["spans_waiting"]) == (0, 2)


def test_at_the_end_what_was_submitted_is_answered_and_nothing_else_is_taken(
    parts: Pipeline,
) -> None:
    async def work() -> list[Outcome | Refusal]:
        tasks = await behind_the_gate(parts, one_span(2), one_span(3))
        stopping = asyncio.create_task(asyncio.to_thread(parts.ingest.stop))
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(parts.submit(*one_span(4))))
        parts.log.gate.set()
        await stopping
        return list(await asyncio.gather(*tasks))

    answers = run(work())
    assert statuses(answers) == [200, 200, 200, 503]
    assert answers[-1].retry_s == 1
    assert parts.counts.read()["spans_waiting"] == 3


# --- When a segment is cut ----------------------------------------------------------------


def test_a_segment_is_cut_by_its_age_or_by_its_size(tmp_path: Path) -> None:
    limits = replace(LIMITS, segment_s=0.2)
    with pipeline(tmp_path, limits=limits) as parts:
        parts.send(one_span(1))
        assert parts.ingest.next_cut() is None
        assert parts.ingest.oldest_s() is not None
        wait_until(lambda: parts.ingest.next_cut() is not None, 5)
        assert parts.ingest.oldest_s() is None
    limits = replace(LIMITS, segment_bytes=50_000)
    with pipeline(tmp_path / "other", limits=limits) as parts:
        for number in range(1, 40):
            parts.send((TRACES, traces(span(number, name="x" * 2_000))))
        sizes = []
        while cut := parts.ingest.next_cut():
            sizes.append(cut[1].spans.rows)
        assert len(sizes) >= 1 and sum(sizes) < 39
        assert parts.log.segments == len(sizes) + 1


def test_an_event_loop_can_ask_for_room_while_the_disk_syncs(parts: Pipeline) -> None:
    async def work() -> int:
        tasks = await behind_the_gate(parts, one_span(2))
        held = parts.ingest.held_bytes  # would wait for ever, were it behind the sync
        assert parts.counts.read()["spans_received"] == 0
        parts.log.gate.set()
        await asyncio.gather(*tasks)
        return held

    assert run(work(), 20) > 0
