"""The exporter process: the rings of all ranks and the API's records in, OTLP out.

It shares the engines' cores, so it is nice and it sleeps: it wakes when a request has finished,
and at least every POLL_S. It ends, drained and flushed within bounded time, when the API's end of
the channel closes, be it on purpose or because that process died.

OpenTelemetry is imported inside `main` only: the process that starts this one stays light.
"""

import logging
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfledger.instrumented_runtime.finished_spans import FinishedSpan
from perfledger.instrumented_runtime.otel_environment import protocol_of
from perfledger.instrumented_runtime.ring_spans import AllRings
from perfledger.instrumented_runtime.telemetry import (
    MAX_RECORD_BYTES,
    EngineRecord,
    RankRing,
    RequestRecord,
    decode,
)
from perfledger.schema import metrics
from perfledger.schema.clocks import ClockAnchor
from perfledger.schema.errors import PerfledgerError

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.otlp import SpanSender

NICENESS = 5
POLL_S = 0.1
# An engine that outlives the API by a step may still write; when it is quiet for that long, or
# has written for so long, it is not waited for.
QUIET_S, DRAIN_S = 0.3, 2.0
FLUSH_S, METRIC_FLUSH_S = 4.0, 1.0
FAILING_FLUSH_S = 0.5  # when the collector took nothing lately either


class Exporter:
    """What the process holds: both ways in, the state machines, and the sender (None: off)."""

    def __init__(
        self, rings: AllRings, channel: socket.socket, sender: "SpanSender | None"
    ) -> None:
        channel.setblocking(False)
        self.open = True
        self._rings = rings
        self._first = next(iter(rings)).reader  # its header shows what was exported
        self._channel = channel
        self._sender = sender

    def turn(self, timeout_s: float) -> int:
        """Wait for the API at most `timeout_s`, take what there is, and return how much it was.

        The API's records are taken first and fed last: whatever an engine wrote before a
        request ended is in the ring by then, or known to be missing.
        """
        select.select([self._channel] if self.open else [], [], [], timeout_s)
        taken = self._rings.taken
        requests = self._receive()
        for ring in self._rings:
            for spans in ring.read():
                self._pass_on(spans)
        for request in requests:
            self._pass_on(self._rings.finished(request))
        self._publish()
        return self._rings.taken - taken + len(requests)

    def drain(self) -> None:
        """Take what is still being written, then close what is open."""
        now_s = time.monotonic()
        give_up_s, quiet_s = now_s + DRAIN_S, now_s + QUIET_S
        while now_s < min(give_up_s, quiet_s):
            if self.turn(POLL_S / 2):
                quiet_s = time.monotonic() + QUIET_S
            now_s = time.monotonic()
        for ring in self._rings:
            self._pass_on(ring.spans.end())

    def flush(self) -> None:
        """Send what is buffered, for a bounded time, and publish the last counts."""
        if self._sender:
            self._sender.stop(FAILING_FLUSH_S if self._sender.failing else FLUSH_S)
        self._publish()

    def _receive(self) -> list[RequestRecord]:
        received = []
        while self.open:
            try:
                message = self._channel.recv(MAX_RECORD_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                message = b""
            if not message:
                self.open = False
                break
            record, dropped = decode(message)
            if isinstance(record, EngineRecord):
                for spans in self._rings.started(record):  # before any step of that engine
                    self._pass_on(spans)
            else:
                received.append(record)
            self._rings.own_counts[metrics.TELEMETRY_LOST, "socket"] = dropped
        return received

    def _pass_on(self, spans: list[FinishedSpan]) -> None:
        if self._sender:
            self._sender.put(spans)

    def _publish(self) -> None:
        if self._sender:
            exported, lost = self._sender.exported, self._sender.lost
            self._rings.own_counts[metrics.TELEMETRY_EXPORTED, ""] = exported
            self._rings.own_counts[metrics.TELEMETRY_LOST, "export"] = lost
            self._first.publish(exported, lost)


def main(
    rings: Sequence[RankRing],
    channel: socket.socket,
    anchor: ClockAnchor,
    resource: dict[str, str | int],
) -> None:
    """Run the exporter until the other end of `channel` closes; the entry of its process.

    Ends with the error's exit code where the environment asks for what we cannot do (UsageError)
    or where there is no such ring (PerfledgerError).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which then tells us
    os.nice(NICENESS)
    logging.basicConfig(format="perfledger exporter: %(message)s")
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line each try: ours is one
    try:
        with channel:
            _run(AllRings(rings, random.Random()), channel, anchor, resource)
    except PerfledgerError as error:
        print(f"perfledger exporter: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _run(
    rings: AllRings, channel: socket.socket, anchor: ClockAnchor, resource: dict[str, str | int]
) -> None:
    from perfledger.instrumented_runtime import otlp

    traces, points = protocol_of("TRACES", os.environ), protocol_of("METRICS", os.environ)
    described = otlp.build_resource(resource, anchor)
    sender = otlp.SpanSender(otlp.span_exporter(traces), described, anchor) if traces else None
    exporter = Exporter(rings, channel, sender)
    stop_metrics = otlp.start_metrics(points, described, rings) if points else None
    while exporter.open:
        exporter.turn(POLL_S)
    exporter.drain()
    exporter.flush()
    if stop_metrics:
        stop_metrics(FAILING_FLUSH_S if sender and sender.failing else METRIC_FLUSH_S)
