"""Forwarding: a peer that lives gets everything, and no other costs more than its queue."""

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aiohttp import web
from conftest import Collector, free_port, perfledger
from forward_servers import (
    HTTP,
    OWN_ID,
    Handler,
    assert_all_accounted,
    forwarding,
    http_server,
    log_request,
    metric_request,
    numbers,
    quick,
    request,
    settled,
    told,
    until,
)
from otlp_client import stored
from otlp_messages import LOG_RECORDS, METRICS, TRACES

from perfledger.collectors.forward.forward_loop import hops_of, new_instance_id
from perfledger.collectors.forward.forward_queue import REQUEST_COST_BYTES
from perfledger.collectors.forward.forward_target import FORWARDED_BY
from perfledger.collectors.forward.forwarding import Forwarder
from perfledger.collectors.transport.otlp_receiver import Refusal


def test_another_collector_stores_all_that_was_offered(collector: Collector) -> None:
    ports = {"grpc": collector.grpc_port, HTTP: collector.http_port}
    ways = [(protocol, packing) for protocol in ports for packing in ("none", "gzip")]

    async def forward(protocol: str, compression: str, first: int) -> dict[str, int]:
        target = quick(ports[protocol], protocol, compression=compression, timeout_s=20.0)
        async with forwarding(target) as forwarder:
            for number in range(first, first + 100):
                forwarder.offer(TRACES, request(number))
            forwarder.offer(METRICS, metric_request())
            forwarder.offer(LOG_RECORDS, log_request())
            await until(lambda: settled(forwarder))
        return told(forwarder)

    for index, way in enumerate(ways):
        counts = asyncio.run(forward(*way, 1 + 100 * index))
        assert counts == {"forward_offered": 102, "forwarded": 102}
    collector.process.send_signal(signal.SIGTERM)
    assert collector.process.wait(30) == 0
    ids = [int.from_bytes(i, "big") for i in stored(collector.store, "spans")["span_id"]]
    assert sorted(ids) == list(range(1, 401))
    assert stored(collector.store, "points")["name"].to_list() == ["queue_depth"] * 4
    assert len(stored(collector.store, "logs")) == 4


@pytest.mark.parametrize("protocol", ["grpc", HTTP])
def test_what_comes_while_the_peer_is_killed_arrives_when_it_is_back(
    tmp_path: Path, protocol: str
) -> None:
    grpc_port, http_port = free_port(), free_port()
    arguments = ["collect", "--store", str(tmp_path / "store"), "--settle", "1"]
    arguments += ["--otlp-grpc", f"127.0.0.1:{grpc_port}", "--otlp-http", f"127.0.0.1:{http_port}"]
    port = grpc_port if protocol == "grpc" else http_port

    async def forward() -> None:
        async with forwarding(quick(port, protocol, timeout_s=5.0)) as forwarder:
            with perfledger(*arguments, log=tmp_path / "log") as process:
                forwarder.offer(TRACES, request(1))
                await until(lambda: settled(forwarder))
                process.send_signal(signal.SIGKILL)
                process.wait()
            for number in range(100, 200):
                forwarder.offer(TRACES, request(number))
            await until(lambda: forwarder.counts()["forward_retries"] > 3)
            assert forwarder.counts()["forward_waiting"] == 100
            assert forwarder.oldest_s() > 0
            with perfledger(*arguments, log=tmp_path / "log"):
                await until(lambda: settled(forwarder))
        assert told(forwarder, "forward_retries") == {"forward_offered": 101, "forwarded": 101}

    asyncio.run(forward())
    ids = {int.from_bytes(i, "big") for i in stored(tmp_path / "store", "spans")["span_id"]}
    assert ids >= set(range(100, 200))


Raw = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    await asyncio.sleep(3600)


async def never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


def saying(start: bytes, again: bytes = b"", pause_s: float = 0.0) -> Raw:
    """A peer that says the start of an answer, then the rest for ever."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(start)
        while again:
            writer.write(again)
            await writer.drain()
            await asyncio.sleep(pause_s)
        await writer.drain()
        writer.close()

    return answer


OK = b"HTTP/1.1 200 OK\r\n"


HOSTILE = {
    "hangs": (hang, "old"),
    "never reads": (never_read, "old"),
    "closes": (close_at_once, "old"),
    "garbage": (saying(b"\x00\xff\x16\x03 not http\r\n\r\n"), "old"),
    "endless headers": (saying(OK, b"x-more: " + b"y" * 1000 + b"\r\n"), "old"),
    "one endless header": (saying(OK + b"x-more: ", b"y" * 1000), "old"),
    "drips its headers": (saying(OK, b"x", 0.05), "old"),
    "endless 100 Continue": (saying(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 50), "old"),
    "redirects": (
        saying(b"HTTP/1.1 307 T\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"),
        "refused",
    ),
    "huge answer": (saying(OK + b"content-length: 99999999999\r\n\r\n", b"y" * 65536), "taken"),
    "endless answer": (
        saying(OK + b"transfer-encoding: chunked\r\n\r\n", b"ffff\r\n" + b"y" * 65535 + b"\r\n"),
        "taken",
    ),
    "drips its answer": (saying(OK + b"content-length: 999\r\n\r\n", b"y", 0.05), "taken"),
    "answers nonsense": (saying(OK + b"content-length: 3\r\n\r\n\xff\xff\xff"), "taken"),
    "wants very late": (
        saying(b"HTTP/1.1 503 x\r\nretry-after: 999999999999\r\ncontent-length: 0\r\n\r\n"),
        "old",
    ),
    "wants nonsense": (
        saying(b"HTTP/1.1 503 x\r\nretry-after: \xff, 1 Foo\r\ncontent-length: 0\r\n\r\n"),
        "old",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_peer_costs_its_own_queue_only(name: str) -> None:
    behaviour, fate = HOSTILE[name]
    good: list[int] = []

    async def take(request: web.Request) -> web.Response:
        good.extend(numbers(await request.read()))
        return web.Response()

    async def forward() -> dict[str, int]:
        server = await asyncio.start_server(behaviour, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        bad_target = quick(port, timeout_s=0.4, max_age_s=1.0)
        async with (
            http_server(take) as good_port,
            forwarding(bad_target) as bad,
            forwarding(quick(good_port)) as other,
        ):
            for number in range(1, 41):
                bad.offer(TRACES, request(number))
                other.offer(TRACES, request(number))
            await until(lambda: settled(other))
            await until(lambda: settled(bad))
        server.close()
        return told(bad, "forward_retries", "forward_answers_unreadable")

    counts = asyncio.run(forward())
    expected = "forwarded" if fate == "taken" else f"forward_dropped_{fate}"
    assert counts == {"forward_offered": 40, expected: 40}
    assert sorted(good) == list(range(1, 41))


@pytest.mark.parametrize("behaviour", [hang, close_at_once, saying(b"\x00" * 100, b"\x00" * 1000)])
def test_a_hostile_grpc_peer_costs_its_own_queue_only(behaviour: Raw) -> None:
    async def forward() -> dict[str, int]:
        server = await asyncio.start_server(behaviour, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with forwarding(quick(port, "grpc", timeout_s=0.4, max_age_s=1.0)) as forwarder:
            for number in range(1, 41):
                forwarder.offer(TRACES, request(number))
            await until(lambda: settled(forwarder))
        server.close()
        return told(forwarder, "forward_retries")

    assert asyncio.run(forward()) == {"forward_offered": 40, "forward_dropped_old": 40}


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_holds_all_requests_back(as_date: bool) -> None:
    times: list[float] = []

    async def handle(_: web.Request) -> web.Response:
        times.append(time.time())
        if len(times) > 1:
            return web.Response()
        at = time.gmtime(time.time() + 2)
        wish = time.strftime("%a, %d %b %Y %H:%M:%S GMT", at) if as_date else "1"
        return web.Response(status=503, headers={"Retry-After": wish})

    async def forward() -> None:
        async with http_server(handle) as port, forwarding(quick(port)) as forwarder:
            forwarder.offer(TRACES, request(1))
            await until(lambda: len(times) == 1)
            await asyncio.sleep(0.1)
            forwarder.offer(TRACES, request(2))
            await until(lambda: settled(forwarder))
        assert forwarder.counts()["forwarded"] == 2

    asyncio.run(forward())
    assert min(times[1:]) - times[0] >= 0.95


def test_requests_that_wait_go_together_and_a_bad_one_falls_alone() -> None:
    bodies: list[list[int]] = []

    async def handle(request: web.Request) -> web.Response:
        bodies.append(numbers(await request.read()))
        return web.Response(status=400 if 7 in bodies[-1] else 200)

    async def forward() -> dict[str, int]:
        async with http_server(handle) as port:
            forwarder, stop = Forwarder(quick(port, concurrency=1), OWN_ID), asyncio.Event()
            for number in range(1, 21):
                forwarder.offer(TRACES, request(number))
            running = asyncio.create_task(forwarder.run(stop))
            await until(lambda: settled(forwarder))
            for number in (21, 22):
                forwarder.offer(TRACES, request(number))
            stop.set()
            await running
            return told(forwarder)

    counts = asyncio.run(forward())
    assert counts == {"forward_offered": 22, "forwarded": 21, "forward_dropped_refused": 1}
    assert bodies == [list(range(1, 21)), *([number] for number in range(1, 21)), [21, 22]]


def test_a_full_queue_drops_what_comes_and_keeps_what_it_has() -> None:
    body = request(1)

    async def forward() -> dict[str, int]:
        ten_bytes = 10 * (len(body) + REQUEST_COST_BYTES)
        target = quick(free_port(), queue_bytes=ten_bytes, drain_s=0.0)
        async with forwarding(target) as forwarder:
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(lambda _: forwarder.offer(TRACES, body), range(800)))
            forwarder.offer(TRACES, body * 1000)
            assert forwarder.counts()["forward_queue_bytes"] == ten_bytes
            assert_all_accounted(forwarder)
        forwarder.offer(TRACES, body)
        return told(forwarder, "forward_retries")

    assert asyncio.run(forward()) == {
        "forward_offered": 802,
        "forward_dropped_full": 791,
        "forward_dropped_stopped": 11,
    }


def test_threads_may_offer_while_it_runs_and_stops() -> None:
    seen: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        seen.extend(numbers(await request.read()))
        return web.Response()

    async def forward() -> Forwarder:
        async with http_server(handle) as port, forwarding(quick(port)) as forwarder:
            threads = [threading.Thread(target=offer_some, args=(forwarder, t)) for t in range(4)]
            for thread in threads:
                thread.start()
            await until(lambda: forwarder.counts()["forwarded"] > 50)
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        assert_all_accounted(forwarder)
        return forwarder

    counts = asyncio.run(forward()).counts()
    assert counts["forward_offered"] == 2000
    assert len(seen) == len(set(seen)) >= counts["forwarded"] > 50


def offer_some(forwarder: Forwarder, thread: int) -> None:
    for number in range(500):
        forwarder.offer(TRACES, request(1 + thread * 500 + number))


def test_only_the_signals_asked_for_are_forwarded() -> None:
    forwarder = Forwarder(quick(1, signals=("metrics",)), OWN_ID)
    forwarder.offer(TRACES, request(1))
    forwarder.offer(METRICS, b"")
    assert told(forwarder) == {}
    forwarder.offer(METRICS, metric_request())
    assert forwarder.counts()["forward_waiting"] == 1


def test_each_request_is_dropped_at_its_own_age() -> None:
    async def forward() -> dict[str, int]:
        async with forwarding(quick(free_port(), max_age_s=0.8, drain_s=0.0)) as forwarder:
            forwarder.offer(TRACES, request(1))
            await asyncio.sleep(0.3)
            forwarder.offer(TRACES, request(2))
            await until(lambda: forwarder.counts()["forward_dropped_old"] == 1)
            assert forwarder.counts()["forward_waiting"] == 1
        return told(forwarder, "forward_retries")

    counts = asyncio.run(forward())
    assert counts == {
        "forward_offered": 2,
        "forward_dropped_old": 1,
        "forward_dropped_stopped": 1,
    }


def test_at_a_stop_what_waits_is_still_sent_for_a_while() -> None:
    seen: list[int] = []

    async def slow(request: web.Request) -> web.Response:
        seen.extend(numbers(await request.read()))
        await asyncio.sleep(0.1)
        return web.Response()

    async def forward() -> dict[str, int]:
        target_of = dict(concurrency=1, batch_bytes=1)
        async with http_server(slow) as port:
            async with forwarding(quick(port, **target_of, drain_s=10.0)) as forwarder:
                for number in range(8):
                    forwarder.offer(TRACES, request(1 + number))
            assert told(forwarder) == {"forward_offered": 8, "forwarded": 8}
            async with forwarding(quick(port, **target_of, drain_s=0.35)) as forwarder:
                for number in range(100):
                    forwarder.offer(TRACES, request(100 + number))
            return told(forwarder)

    counts = asyncio.run(forward())
    assert seen[:8] == list(range(1, 9))
    assert counts["forward_offered"] == 100
    assert counts["forwarded"] + counts["forward_dropped_stopped"] == 100
    assert counts["forward_dropped_stopped"] > 90


def test_a_circle_of_collectors_ends_after_one_round() -> None:
    """Two collectors forward to each other: each takes a request once."""
    ids, taken = [new_instance_id(), new_instance_id()], [0, 0]
    forwarders: list[Forwarder] = []

    def collector(which: int) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            body = await request.read()
            try:
                hops = hops_of(request.headers.get(FORWARDED_BY), ids[which])
            except Refusal as refusal:
                return web.Response(status=refusal.http_status)
            taken[which] += 1
            forwarders[which].offer(TRACES, body, hops)
            return web.Response()

        return handle

    async def forward() -> None:
        async with http_server(collector(0)) as first, http_server(collector(1)) as second:
            forwarders.extend([Forwarder(quick(second), ids[0]), Forwarder(quick(first), ids[1])])
            stop = asyncio.Event()
            running = [asyncio.create_task(one.run(stop)) for one in forwarders]
            forwarders[0].offer(TRACES, request(1))
            await until(lambda: forwarders[1].counts()["forward_dropped_refused"] == 1)
            stop.set()
            await asyncio.gather(*running)

    asyncio.run(forward())
    assert taken == [0, 1]


def test_the_way_of_a_request() -> None:
    other = "b" * 16
    assert hops_of(None, OWN_ID) == hops_of("", OWN_ID) == ()
    assert hops_of(f"{other}, {'c' * 16}", OWN_ID) == (other, "c" * 16)
    assert hops_of(f"nonsense\r\n,{other},{'z' * 16}", OWN_ID) == (other,)
    for loop in (OWN_ID, f"{other},{OWN_ID}", ",".join(f"{n:016x}" for n in range(9))):
        with pytest.raises(Refusal) as caught:
            hops_of(loop, OWN_ID)
        assert (caught.value.http_status, caught.value.retry_s) == (508, None)
    assert new_instance_id() != new_instance_id()
