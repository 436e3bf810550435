"""Telemetry of a training run: a ring for each rank, and the exporter process that reads them."""

import uuid
from typing import NamedTuple

from perfledger.instrumented_runtime.child_processes import end, spawn_exporter
from perfledger.instrumented_runtime.ring import Ring
from perfledger.instrumented_runtime.telemetry import (
    AttributeValue,
    EngineRecord,
    RankRing,
    TelemetrySender,
    open_channel,
)
from perfledger.instrumented_runtime.training.messages import Joined
from perfledger.instrumented_runtime.training.options import TrainOptions
from perfledger.schema.clocks import take_anchor

FLUSH_S = 10.0  # for the exporter to send what it has, once all ranks have ended


class TelemetryReport(NamedTuple):
    """What became of the run's telemetry."""

    dropped: int  # records
    exported: int  # spans
    lost: int  # spans that no collector took


class RunTelemetry:
    """Of one run, from its start to `stop`."""

    def __init__(self, options: TrainOptions) -> None:
        self._layout = str(options.layout)
        self._rings = [Ring.create(options.ring_slots) for _ in range(options.layout.world)]
        near, far = open_channel()
        self._sender = TelemetrySender(near)
        rings = [RankRing(ring.name, rank=rank) for rank, ring in enumerate(self._rings)]
        self._process = spawn_exporter(rings, far, take_anchor(), _resource_of(options))

    def ring_name(self, rank: int) -> str:
        """Return the ring that a rank writes to."""
        return self._rings[rank].name

    def joined(self, rank: Joined) -> None:
        """Say what every span of a rank's steps carries."""
        attributes: dict[str, AttributeValue] = {
            "perfledger.device": rank.device,
            "perfledger.dtype": "float32",
            "perfledger.layout": self._layout,
        }
        self._sender.send(EngineRecord(attributes, rank=rank.rank))

    def stop(self) -> TelemetryReport:
        """Let the exporter send the rest, in a bounded time."""
        self._sender.close()
        end(self._process, FLUSH_S)
        counts = [ring.counts() for ring in self._rings]
        unread = sum(ring.unread for ring in self._rings)
        for ring in self._rings:
            ring.close()
        dropped = sum(one.dropped for one in counts) + unread + self._sender.dropped
        return TelemetryReport(dropped, counts[0].exported, counts[0].export_failed)


def _resource_of(options: TrainOptions) -> dict[str, str | int]:
    return {
        "service.name": options.service_name,
        "service.instance.id": str(uuid.uuid4()),
        "perfledger.run.id": options.run_id,
    }
