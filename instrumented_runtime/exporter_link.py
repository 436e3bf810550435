"""The API's side of telemetry: the rings, the exporter process, and what was lost on the way."""

import asyncio
import itertools
import sys
import uuid
from collections.abc import Mapping
from typing import Protocol

from perfledger.instrumented_runtime.child_processes import end, spawn_exporter
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.ring import Ring
from perfledger.instrumented_runtime.telemetry import (
    EngineRecord,
    RankRing,
    RequestRecord,
    TelemetrySender,
    open_channel,
)
from perfledger.schema.clocks import take_anchor

FLUSH_S = 10.0  # for the exporter to send what it has, once all else has ended


class Telemetry(Protocol):
    """Where records go."""

    def ring_name(self, replica: str, rank: int) -> str | None:
        """Return the ring that a rank writes to; None: it does not record."""

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

    def ring_name(self, replica: str, rank: int) -> str | None:
        """See Telemetry."""
        return None

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
    """A ring for each rank of each replica, a channel for the API, and the exporter process that
    reads them all. A restarted rank goes on in the ring of the one before."""

    def __init__(self, options: RuntimeOptions) -> None:
        places = itertools.product(range(options.replicas), range(options.layout.world))
        self._rings = {
            (str(replica), rank): Ring.create(options.ring_slots) for replica, rank in places
        }
        near, self._far = open_channel()
        self._sender = TelemetrySender(near)
        self._anchor = take_anchor()
        self._resource = resource_of(options)
        self._running = self._stopping = False

    def ring_name(self, replica: str, rank: int) -> str | None:
        """See Telemetry."""
        return self._rings[replica, rank].name

    def start(self) -> None:
        """See Telemetry."""
        rings = [RankRing(ring.name, *place) for place, ring in self._rings.items()]
        self._process = spawn_exporter(rings, self._far, self._anchor, self._resource)
        self._running = True
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._ended)

    def send(self, record: RequestRecord | EngineRecord) -> None:
        """See Telemetry."""
        self._sender.send(record)

    def report(self) -> Mapping[str, object]:
        """See Telemetry."""
        rings = list(self._rings.values())
        dropped = sum(ring.counts().dropped for ring in rings)
        never_read = 0 if self._running else sum(ring.unread for ring in rings)
        exported = rings[0].counts()
        return {
            "exporter": "running" if self._running else "ended",
            "dropped": dropped + self._sender.dropped + never_read,
            "exported": exported.exported,
            "export_failed": exported.export_failed,
        }

    def stop(self) -> Mapping[str, object]:
        """See Telemetry."""
        self._stopping = True
        self._sender.close()
        end(self._process, FLUSH_S)
        self._running = False
        report = self.report()
        for ring in self._rings.values():
            ring.close()
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
