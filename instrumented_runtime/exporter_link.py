"""The API's side of telemetry: the ring, the exporter process, and what was lost on the way."""

import asyncio
import sys
import uuid
from collections.abc import Mapping
from typing import Protocol

from perfledger.instrumented_runtime.child_processes import end, spawn_exporter
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.ring import Ring
from perfledger.instrumented_runtime.telemetry import (
    EngineRecord,
    RequestRecord,
    TelemetrySender,
    open_channel,
)
from perfledger.schema.clocks import take_anchor

FLUSH_S = 10.0  # for the exporter to send what it has, once all else has ended


class Telemetry(Protocol):
    """Where records go."""

    ring_name: str | None

    def start(self) -> None:
        """Start what sends them, from the running event loop."""

    def send(self, record: RequestRecord | EngineRecord) -> None:
        """Take a record; never waits, never raises."""

    def report(self) -> Mapping[str, object]:
        """Return the counters for /health."""

    def stop(self) -> Mapping[str, object]:
        """Send the rest and end, in a bounded time; return the last report."""


class NoTelemetry:
    """--no-telemetry: records go nowhere."""

    ring_name: str | None = None

    def start(self) -> None:
        """See Telemetry."""

    def send(self, record: RequestRecord | EngineRecord) -> None:
        """See Telemetry."""

    def report(self) -> Mapping[str, object]:
        """See Telemetry."""
        return {"exporter": "off", "dropped": 0, "exported": 0, "export_failed": 0}

    def stop(self) -> Mapping[str, object]:
        """See Telemetry."""
        return self.report()


class ExporterLink:
    """A ring for the engine, a channel for the API, and the exporter process that reads both."""

    def __init__(self, options: RuntimeOptions) -> None:
        self._ring = Ring.create(options.ring_slots)
        near, self._far = open_channel()
        self._sender = TelemetrySender(near)
        self._anchor = take_anchor()
        self._resource = resource_of(options)
        self.ring_name: str | None = self._ring.name
        self._running = self._stopping = False

    def start(self) -> None:
        """See Telemetry."""
        self._process = spawn_exporter(self._ring.name, self._far, self._anchor, self._resource)
        self._running = True
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._ended)

    def send(self, record: RequestRecord | EngineRecord) -> None:
        """See Telemetry."""
        self._sender.send(record)

    def report(self) -> Mapping[str, object]:
        """See Telemetry."""
        counts = self._ring.counts()
        never_read = 0 if self._running else self._ring.unread
        return {
            "exporter": "running" if self._running else "ended",
            "dropped": counts.dropped + self._sender.dropped + never_read,
            "exported": counts.exported,
            "export_failed": counts.export_failed,
        }

    def stop(self) -> Mapping[str, object]:
        """See Telemetry."""
        self._stopping = True
        self._sender.close()
        end(self._process, FLUSH_S)
        self._running = False
        report = self.report()
        self._ring.close()
        return report

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join(0)  # leave no zombie
        self._running = False
        if not self._stopping:
            print("perfledger: the exporter ended: serving goes on unrecorded", file=sys.stderr)


def resource_of(options: RuntimeOptions) -> dict[str, str | int]:
    """Return what the options say of one runtime; the exporter adds the clock of its anchor."""
    return {
        "service.name": options.service_name,
        "service.instance.id": str(uuid.uuid4()),
        "perfledger.run.id": options.run_id,
    }
