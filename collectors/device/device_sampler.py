"""The device sampler: GPUs, energy of CPU packages and perf's software events, ten times a second.

    asyncio.create_task(run(sink, DeviceSettings(), stop))

Times are monotonic, shown as wall by one anchor, which the resource carries: so they meet the
steps of a service on this host exactly. What this machine does not show is said once in the log
and as 0 in perfledger.device.source.present, with the reason; no metric is ever 0 for want of it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from perfledger.collectors.device import perf_events, rapl
from perfledger.collectors.device.device_events import encode_events
from perfledger.collectors.device.device_metrics import (
    SAMPLER_CPU,
    SAMPLER_LATE,
    SAMPLER_PERIOD,
    SOURCE_PRESENT,
)
from perfledger.collectors.device.device_settings import DeviceSettings
from perfledger.collectors.device.nvml_calls import Calls, Instant, NvmlLibrary
from perfledger.collectors.device.nvml_devices import NvmlDevices
from perfledger.collectors.device.nvml_recording import EndOfRecording, Replay, read_recording
from perfledger.collectors.device.point_batch import PointBatch
from perfledger.collectors.host.host_sampler import host_resource
from perfledger.collectors.host.processor import boot_time_ns
from perfledger.collectors.host.readings import Reading
from perfledger.collectors.host.sampling_loop import run_sampler
from perfledger.collectors.transport.otlp_receiver import Sink
from perfledger.schema.clocks import monotonic_ns, take_anchor

SCOPE_NAME = "perfledger.device"
_HOST = ""
_PRESENCE_EVERY_S = 60

logger = logging.getLogger("perfledger.device")


class Part(NamedTuple):
    """Readings of one device ("" is the host) that were taken together."""

    device: str
    slow: bool
    readings: list[Reading]


class Absence(NamedTuple):
    """A source, and why it is not there ("": it is)."""

    device: str
    source: str
    why_not: str


class DeviceSampler:
    """Samples the devices of one machine."""

    name = "device sampler"
    jitter = 0.0

    def __init__(self, settings: DeviceSettings, calls: Calls | None = None) -> None:
        """Take the devices of this machine, or those that `calls` answers for."""
        self.period_s = settings.period_s
        self.counts: Counter[str] = Counter()
        self.recording = read_recording(settings.replay) if settings.replay else None
        self._settings = settings
        self._calls = calls or (Replay(self.recording) if self.recording else NvmlLibrary())
        self.gpus = NvmlDevices(self._calls)
        # Counters of this machine do not go with the times of a recording.
        live = self.recording is None
        self.rapl = rapl.Rapl() if settings.rapl and live else None
        self.perf = perf_events.SoftwareEvents() if settings.perf and live else None
        self._anchor = take_anchor()
        self._batches: dict[tuple[str, bool], PointBatch] = {}
        self._told: list[Absence] = []
        self._told_ns = 0
        self._slow_ns: int | None = None
        self._reported_ns = monotonic_ns()
        self._at = Instant(self._anchor.monotonic_ns, self._anchor.wall_ns)
        self._over = False
        self._cpu_ns = 0

    def sample(self) -> bytes | None:
        """Read what is due; return the OTLP metrics request of all samples when a report is due."""
        started_ns = time.thread_time_ns()
        try:
            at, parts = self.take()
        except EndOfRecording:
            self._over = True
            return self._report()
        for part in parts:
            self._batch(part.device, part.slow, at.wall_ns).add(part.readings, at.wall_ns)
        is_due = monotonic_ns() - self._reported_ns >= self._settings.report_interval_s * 1e9
        body = self._report() if is_due else None
        self._cpu_ns += time.thread_time_ns() - started_ns
        return body

    def take(self) -> tuple[Instant, list[Part]]:
        """Read what is due. Raises EndOfRecording."""
        now_ns = monotonic_ns()
        at = self._calls.start_sample(Instant(now_ns, self._anchor.to_wall_ns(now_ns)))
        self._at = at
        slow = self._slow_due(at.monotonic_ns)
        parts = []
        if self._settings.gpus:
            for gpu, found in self.gpus.read(at.monotonic_ns, slow=slow):
                parts.append(Part(gpu.uuid, False, found[False]))
                if slow or found[True]:
                    parts.append(Part(gpu.uuid, True, found[True]))
        parts.append(Part(_HOST, False, list(self._host_readings(at.monotonic_ns))))
        if slow:
            parts.append(Part(_HOST, True, list(self._slow_host_readings(at.monotonic_ns))))
            self._count()
        return at, parts

    def absences(self) -> list[Absence]:
        """Return every source that was asked, and why it is not there."""
        found = []
        if self._settings.gpus:
            found.append(Absence(_HOST, "nvml", self.gpus.why_not))
            if self.gpus.gpus:
                found.append(Absence(_HOST, "error_events", self.gpus.why_no_events))
            for gpu in self.gpus.gpus.values():
                states = dict.fromkeys(gpu.present, "") | gpu.absent
                found.append(Absence(gpu.uuid, "device", gpu.lost))
                found += [Absence(gpu.uuid, name, why) for name, why in sorted(states.items())]
            for index, why in self.gpus.unreachable.items():
                found.append(Absence(f"index {index}", "device", why))
        if self.rapl is not None:
            found.append(Absence(_HOST, rapl.SOURCE, self.rapl.why_not))
            found += [Absence(zone, rapl.SOURCE, why) for zone, why in self.rapl.absent.items()]
        if self.perf is not None:
            found.append(Absence(_HOST, perf_events.SOURCE, self.perf.why_not))
        return found

    def events(self) -> bytes | None:
        """Return an OTLP logs request of what happened to devices since, None where nothing."""
        events = self.gpus.events
        if not events:
            return None
        self.gpus.events = []
        self.counts["events"] += len(events)
        for event in events:
            logger.warning("device sampler: %s %s %s", event.device, event.name, event.why)
        return encode_events(events, SCOPE_NAME, self._resource(_HOST), self._to_wall_ns)

    def close(self) -> bytes | None:
        """Return what is still to be said, and let go of the devices."""
        last = self._report()
        self.gpus.close()
        if self.rapl is not None:
            self.rapl.close()
        if self.perf is not None:
            self.perf.close()
        return last

    def ended(self) -> bool:
        """Return whether a recording that was replayed is over."""
        return self._over

    def _slow_due(self, now_ns: int) -> bool:
        interval_ns = self._settings.slow_interval_s * 1e9
        # Half a period early rather than almost a whole one late.
        slack_ns = self.period_s * 1e9 / 2
        if self._slow_ns is not None and now_ns - self._slow_ns < interval_ns - slack_ns:
            return False
        self._slow_ns = now_ns
        return True

    def _host_readings(self, at_ns: int) -> Iterator[Reading]:
        if self.rapl is not None:
            yield from self.rapl.read(at_ns)

    def _slow_host_readings(self, at_ns: int) -> Iterator[Reading]:
        if self.perf is not None:
            try:
                yield from self.perf.read()
            except OSError as error:
                self.perf.why_not = error.strerror or str(error)
                self.perf.close()
        yield Reading(SAMPLER_PERIOD, self.period_s)
        yield Reading(SAMPLER_CPU, self._cpu_ns)
        yield Reading(SAMPLER_LATE, self.counts["late"])
        yield from self._presence(at_ns)

    def _presence(self, at_ns: int) -> Iterator[Reading]:
        """Yield which sources are there: when that changed, and once a minute."""
        absences = self.absences()
        changed = absences != self._told
        if not changed and at_ns - self._told_ns < _PRESENCE_EVERY_S * 10**9:
            return
        if changed:
            self._say(absences)
        self._told, self._told_ns = absences, at_ns
        for device, source, why_not in absences:
            series = (
                ("hw.id", device),
                ("perfledger.device.source", source),
                ("error.type", why_not),
            )
            said = tuple(pair for pair in series if pair[1])
            yield Reading(SOURCE_PRESENT, int(not why_not), said)

    def _say(self, absences: list[Absence]) -> None:
        news = [absence for absence in absences if absence.why_not and absence not in self._told]
        if news:
            each = ", ".join(f"{device} {source} ({why})".strip() for device, source, why in news)
            logger.info("device sampler: none here: %s", each)

    def _count(self) -> None:
        gpus = self.gpus.gpus.values()
        self.counts["devices"] = len(gpus)
        self.counts["devices_lost"] = sum(gpu.lost != "" for gpu in gpus)
        self.counts["counters_restarted"] = sum(gpu.restarts for gpu in gpus)
        self.counts["answers_not_understood"] = sum(gpu.misunderstood for gpu in gpus)

    def _report(self) -> bytes | None:
        self._reported_ns = monotonic_ns()
        return b"".join(batch.encode() for batch in self._batches.values()) or None

    def _batch(self, device: str, slow: bool, wall_ns: int) -> PointBatch:
        key = device, slow
        if key not in self._batches:
            start_ns = wall_ns if key == (_HOST, True) else self._device_start_ns(wall_ns)
            self._batches[key] = PointBatch(SCOPE_NAME, self._resource(device), start_ns)
        return self._batches[key]

    def _device_start_ns(self, wall_ns: int) -> int:
        """Return since when counters of devices count, at the earliest: the boot."""
        if self.recording is not None:
            return wall_ns
        return boot_time_ns(Path("/proc/stat").read_text()) or wall_ns

    def _to_wall_ns(self, at_monotonic_ns: int) -> int:
        return at_monotonic_ns - self._at.monotonic_ns + self._at.wall_ns

    def _resource(self, device: str) -> dict[str, str | int]:
        host = host_resource(Path("/"))
        resource: dict[str, str | int] = {
            "service.name": SCOPE_NAME,
            "service.instance.id": host["host.name"],
            **host,
            "perfledger.clock.monotonic_ns": self._anchor.monotonic_ns,
            "perfledger.clock.wall_ns": self._anchor.wall_ns,
        }
        if self.recording is not None:
            kind = "synthetic" if self.recording.synthetic else "recorded"
            resource["perfledger.device.replay"] = kind
        if device in self.gpus.gpus:
            resource["hw.model"] = self.gpus.gpus[device].name
            resource["hw.driver_version"] = self.gpus.driver
        return resource


async def run(sink: Sink, settings: DeviceSettings, stop: asyncio.Event) -> None:
    """Sample the devices of this machine into `sink` until `stop` is set."""
    await run_sampler(DeviceSampler(settings), sink, stop)
