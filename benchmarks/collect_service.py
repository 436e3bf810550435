"""How the collector serves: acknowledgement, visibility to readers, memory over time, start-up."""

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from collect_cost import send
from collect_servers import Server, collector, listens, wait_until
from numpy.typing import NDArray
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from otlp_load import HttpConnection, Load, RunningLoad

PROBE = "visibility probe"
_PROBE_EVERY_S = 0.5
_POLL_S = 0.05
_SEEN_WITHIN_S = 60.0
_RECENT_NS = 60 * 10**9


def acknowledgement(
    folder: Path, bodies: Path, spans_per_s: float, seconds: float, spans_a_request: int
) -> dict[str, Any]:
    """Return ms until acknowledgement at a rate, over each protocol, at open loop.

    `from_due` counts from when a request was due, waiting for a free connection included.
    """
    found: dict[str, Any] = {"spans_per_s": spans_per_s, "fdatasync_4k_ms": sync_ms(folder.parent)}
    for protocol in ("grpc", "http"):
        with collector(folder / protocol) as server:
            send(server, protocol, bodies, requests=24)
            server.settle()
            rate = spans_per_s / spans_a_request
            acks = send(server, protocol, bodies, seconds=seconds, rate=rate, connections=8)
        assert len(acks.refusals) == 0, acks.refusals[:3]
        found[protocol] = {
            "requests": len(acks.number),
            "from_due_ms": quantiles(acks.latency_ms()),
            "from_send_ms": quantiles(acks.answer_ms()),
        }
        print(f"  {protocol} at {spans_per_s:,.0f} spans/s: {found[protocol]['from_due_ms']}")
    return found


def quantiles(values: NDArray[np.float64] | list[float]) -> dict[str, float]:
    cuts = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: round(float(np.quantile(values, cut)), 3) for name, cut in cuts.items()}


def sync_ms(folder: Path, times: int = 60) -> dict[str, float]:
    """Return how long this disk takes now to append 4 KB durably."""
    path, taken = folder / "sync-probe", []
    with open(path, "wb", buffering=0) as file:
        for _ in range(times):
            start_ns = time.perf_counter_ns()
            file.write(os.urandom(4096))
            os.fdatasync(file.fileno())
            taken.append((time.perf_counter_ns() - start_ns) / 1e6)
    path.unlink()
    return quantiles(taken)


# --- Visibility -----------------------------------------------------------------------------------


def visibility(
    folder: Path, bodies: Path, spans_per_s: float, probes: int, spans_a_request: int
) -> dict[str, Any]:
    """Return s from the acknowledgement of a span until a reader of the store finds it."""
    with collector(folder) as server:
        rate = spans_per_s / spans_a_request
        plan = Load("http", server.ports["http"], bodies, seed=60_000, rate=rate)
        with RunningLoad(plan, bodies.with_name("acks.npz")) as load:
            load.start()
            time.sleep(1)
            lags = [_lag_s(server) for _ in range(probes)]
            load.stop()
            load.result()
    print(f"  visible after {quantiles(lags)} s")
    return {"spans_per_s": spans_per_s, "seconds": quantiles(lags), "each": lags}


def _lag_s(server: Server) -> float:
    time.sleep(random.uniform(0, 2 * _PROBE_EVERY_S))
    span_id, sent_ns = random.randbytes(8), time.time_ns()
    connection = HttpConnection(server.ports["http"])
    while not (answer := connection.send(bytearray(probe(span_id)))).acknowledged:
        assert answer.retry_s is not None, answer
        time.sleep(answer.retry_s)
    acknowledged_ns = time.monotonic_ns()
    connection.close()
    wait_until(lambda: _sees(server, span_id, sent_ns), _SEEN_WITHIN_S, "the probe's span")
    return (time.monotonic_ns() - acknowledged_ns) / 1e9


def probe(span_id: bytes) -> bytes:
    """Return a request of one span."""
    now_ns = time.time_ns()
    span = Span(
        trace_id=span_id * 2,
        span_id=span_id,
        name=PROBE,
        start_time_unix_nano=now_ns - 1000,
        end_time_unix_nano=now_ns,
    )
    group = ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])
    return bytes(ExportTraceServiceRequest(resource_spans=[group]).SerializeToString())


def _sees(server: Server, span_id: bytes, sent_ns: int) -> bool:
    assert server.store is not None
    time.sleep(_POLL_S)
    rows = server.store.scan("spans", since_ns=sent_ns - _RECENT_NS)
    wanted = (pl.col("name") == PROBE) & (pl.col("span_id") == span_id)
    return rows.filter(wanted).select("span_id").collect().height == 1


# --- Memory ---------------------------------------------------------------------------------------


def memory(folder: Path, bodies: Path, minutes: float) -> dict[str, Any]:
    """Return what the collector holds in memory each second of a flat-out load, and its peak."""
    with collector(folder) as server:
        plan = Load("grpc", server.ports["grpc"], bodies, seed=60_001, seconds=60 * minutes)
        idle = server.rss_bytes()
        with RunningLoad(plan, bodies.with_name("acks.npz")) as load:
            load.start()
            series = _each_second(server.rss_bytes, 60 * minutes)
            acks = load.result()
        wait_until(lambda: server.rows() >= acks.spans, 180, "the last file")
        peak = server.peak_rss_bytes()
    found = {
        "minutes": minutes,
        "spans": acks.spans,
        "spans_per_s": acks.spans / minutes / 60,
        "retries": len(acks.refusals),
        "idle_bytes": idle,
        "peak_bytes": peak,
        "growth_bytes_per_minute": growth(series[len(series) // 3 :]),
        "rss_bytes_each_second": series,
    }
    print(f"  peak {peak / 2**20:,.0f} MiB at {found['spans_per_s']:,.0f} spans/s")
    return found


def _each_second(read: Callable[[], int], seconds: float) -> list[int]:
    start, values = time.monotonic(), []
    while time.monotonic() - start < seconds:
        values.append(read())
        time.sleep(max(0.0, start + len(values) - time.monotonic()))
    return values


def growth(series: list[int]) -> float | None:
    """Return the slope of values taken each second, a minute; null for fewer than three."""
    if len(series) < 3:
        return None
    return float(60 * np.polyfit(np.arange(len(series)), series, 1)[0])


# --- Start-up -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Seconds from the start of the process."""

    listening_s: float
    acknowledged_s: float


def start_up(folder: Path, later: int) -> dict[str, Any]:
    """Return s until the ports answer and a span is acknowledged, without and with caches."""
    cache = str(folder / "cache")
    starts = [_start(folder / f"start-{number}", cache) for number in range(later + 1)]
    first, *others = starts
    found = {
        "first": vars(first),
        "later_acknowledged_s": statistics.median(one.acknowledged_s for one in others),
        "later": [vars(one) for one in others],
    }
    print(f"  first {first.acknowledged_s:.1f} s, later {found['later_acknowledged_s']:.1f} s")
    return found


def _start(folder: Path, cache: str) -> Start:
    start = time.monotonic()
    with collector(folder, PERFLEDGER_CACHE=cache) as server:
        assert all(listens(port) for port in server.ports.values())
        listening = time.monotonic() - start
        connection = HttpConnection(server.ports["http"])
        while not connection.send(bytearray(probe(random.randbytes(8)))).acknowledged:
            time.sleep(0.02)
        acknowledged = time.monotonic() - start
        connection.close()
    return Start(listening, acknowledged)
