"""The host sampler: CPU, pressure, memory, disk, network and control group, once a second.

    asyncio.create_task(run(sink, HostSettings(), stop))

What this machine does not show is said once in the log, and with each slow source as 0 in
perfledger.host.source.present; no metric is ever zero for want of a source.
"""

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from pathlib import Path

from perfledger.collectors.host.ethtool import DriverCounters
from perfledger.collectors.host.host_files import HostFiles
from perfledger.collectors.host.host_metrics import SAMPLER_CPU, SAMPLER_LATE, SOURCE_PRESENT
from perfledger.collectors.host.host_settings import HostSettings
from perfledger.collectors.host.host_sources import SOURCES, Machine
from perfledger.collectors.host.processor import boot_time_ns
from perfledger.collectors.host.readings import PointStream, Reading
from perfledger.collectors.host.sampling_loop import run_sampler
from perfledger.collectors.transport.otlp_receiver import Sink
from perfledger.schema.clocks import read_boot_id

SCOPE_NAME = "perfledger.host"

_SOURCE_SERIES = [(source, (("perfledger.host.source", source.name),)) for source in SOURCES]

logger = logging.getLogger("perfledger.host")


def host_resource(root: Path) -> dict[str, str]:
    """Return host name and boot id of the machine whose /proc is below `root`."""
    hostname = root / "proc/sys/kernel/hostname"
    name = hostname.read_text("utf-8", "replace").strip() if hostname.exists() else ""
    return {
        "host.name": name or socket.gethostname(),
        "perfledger.clock.boot_id": read_boot_id(root / "proc/sys/kernel/random/boot_id"),
    }


class HostSampler:
    """Samples one machine. `absent` says of each source that is not here why not."""

    name = "host sampler"
    jitter = 0.0

    def __init__(self, settings: HostSettings) -> None:
        self.period_s = settings.interval_s
        self.counts: Counter[str] = Counter()
        self.absent: dict[str, str] = {}
        root = settings.root
        drivers = DriverCounters() if root == Path("/") else None
        self._machine = Machine(HostFiles(root), settings, drivers)
        self._resource = host_resource(root)
        self._streams: dict[bool, PointStream] = {}
        self._slow_ns: int | None = None
        self._cpu_ns = 0

    def sample(self) -> bytes:
        """Read every source that is due; return the OTLP metrics request that says it."""
        started_ns = time.thread_time_ns()
        time_ns = time.time_ns()
        slow_due = self.slow_due(time.monotonic_ns())
        readings = {slow: self.read(slow) for slow in (True, False) if slow_due or not slow}
        if not self._streams:
            self._streams = {slow: self._new_stream(time_ns) for slow in (True, False)}
            self._say_absent()
        readings[False] += self._own_readings()
        if slow_due:
            readings[True] += self._presence()
        # Each stream has the same series from sample to sample, and is rebuilt when one changes.
        body = b"".join(self._streams[slow].encode(readings[slow], time_ns) for slow in readings)
        self._cpu_ns += time.thread_time_ns() - started_ns
        return body

    def slow_due(self, now_ns: int) -> bool:
        """Return whether slow sources are due at a monotonic time, and if so, note that."""
        interval_ns = self._machine.settings.slow_interval_s * 1e9
        if self._slow_ns is not None and now_ns - self._slow_ns < interval_ns:
            return False
        self._slow_ns = now_ns
        self._machine.files.look_again()
        return True

    def read(self, slow: bool) -> list[Reading]:
        """Return the readings of the slow sources, or of the others."""
        readings: list[Reading] = []
        for source in SOURCES:
            if source.slow is not slow:
                continue
            try:
                found = list(source.read(self._machine))
                why_not = "" if found else "nothing to tell"
            except OSError as error:
                found, why_not = [], error.strerror or str(error)
            except (ValueError, IndexError) as error:  # a kernel that writes it in another way
                found, why_not = [], f"not understood: {error}"
                self.counts["sources_not_understood"] += 1
            self.absent.pop(source.name, None)
            if why_not:
                self.absent[source.name] = why_not
            readings += found
        self.counts["sources_absent"] = len(self.absent)
        return readings

    def close(self) -> None:
        """Close files."""
        self._machine.files.close()
        if self._machine.drivers is not None:
            self._machine.drivers.close()

    def ended(self) -> bool:
        """Return False: a host does not end."""
        return False

    def _own_readings(self) -> list[Reading]:
        """Return what sampling costs."""
        return [
            Reading(SAMPLER_CPU, self._cpu_ns),
            Reading(SAMPLER_LATE, self.counts["late"]),
        ]

    def _presence(self) -> list[Reading]:
        return [
            Reading(SOURCE_PRESENT, 0 if source.name in self.absent else 1, series)
            for source, series in _SOURCE_SERIES
        ]

    def _say_absent(self) -> None:
        if self.absent:
            each = ", ".join(f"{name} ({why})" for name, why in self.absent.items())
            logger.info("host sampler: none here: %s", each)

    def _new_stream(self, time_ns: int) -> PointStream:
        boot_ns = boot_time_ns(self._machine.files.text_or_none("proc/stat") or "")
        resource = {
            "service.name": "perfledger.host",
            "service.instance.id": self._resource["host.name"],
            **self._resource,
        }
        return PointStream(SCOPE_NAME, resource, boot_ns or time_ns)


async def run(sink: Sink, settings: HostSettings, stop: asyncio.Event) -> None:
    """Sample this host into `sink` until `stop` is set."""
    await run_sampler(HostSampler(settings), sink, stop)


def one_sample(settings: HostSettings) -> str:
    """Return what the host says right now, a line a series, and what it does not show."""
    sampler = HostSampler(settings)
    lines = []
    for metric, value, attributes in sampler.read(False) + sampler.read(True):
        where = ",".join(f"{key.rpartition('.')[2]}={text}" for key, text in attributes)
        lines.append(f"{metric.name}{{{where}}} {_shown(value)} {metric.unit}")
    sampler.close()
    lines += [f"none here: {name} ({why})" for name, why in sampler.absent.items()]
    return os.linesep.join(lines)


def _shown(value: int | float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
