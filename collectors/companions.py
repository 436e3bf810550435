"""What runs beside the receivers in the collector's process: scrapers, samplers, the forwarder.

Each is off until its table of the configuration says something. Their telemetry goes in as a
sender's does: through the same limits, deny-list and log.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from perfledger.collectors.defects import tell_defect
from perfledger.collectors.sampling.sampling_policy import SamplingPolicy
from perfledger.collectors.sampling.tail_sampling import TailSampler
from perfledger.schema.errors import PerfledgerError

if TYPE_CHECKING:
    from perfledger.collectors.device.device_sampler import DeviceSampler
    from perfledger.collectors.forward.forwarding import Forwarder
    from perfledger.collectors.host.host_sampler import HostSampler
    from perfledger.collectors.host.wait_sampler import WaitSampler
    from perfledger.collectors.scraping.scraper import Scraper
    from perfledger.collectors.transport.otlp_receiver import Sink

log = logging.getLogger("perfledger.collect")


@dataclass(frozen=True)
class Companions:
    """What the configuration asks for."""

    scraper: "Scraper | None" = None
    host: "HostSampler | None" = None
    waits: "WaitSampler | None" = None
    devices: "DeviceSampler | None" = None
    forwarder: "Forwarder | None" = None
    sampling: SamplingPolicy | None = None
    samplers: list[TailSampler] = field(default_factory=list)

    @classmethod
    def from_tables(cls, tables: Mapping[str, object], own_id: str, folder: Path) -> Self:
        """Read the tables of a configuration in `folder`. Raises UsageError, which names a key."""
        sampling = _table(tables, "sampling")
        return cls(
            _scraper(tables.get("scrape"), folder),
            _host(_table(tables, "host")),
            _waits(_table(tables, "wait_states")),
            _devices(_table(tables, "device"), folder),
            _forwarder(_table(tables, "forward"), own_id, folder),
            SamplingPolicy.from_toml(sampling) if sampling else None,
        )

    def tail_sampler(self) -> TailSampler | None:
        """Return a sampler for one namespace."""
        if self.sampling is None:
            return None
        self.samplers.append(TailSampler(self.sampling))
        return self.samplers[-1]

    def counts(self) -> Counter[str]:
        """Return what happened so far, by name."""
        found: Counter[str] = Counter()
        if self.scraper is not None:
            found += self.scraper.counts()
        if self.forwarder is not None:
            found += self.forwarder.counts()
        for tail_sampler in self.samplers:
            found += tail_sampler.counts()
        named = (("host", self.host), ("wait", self.waits), ("device", self.devices))
        for name, sampler in named:
            if sampler is not None:
                found += Counter({f"{name}_{k}": n for k, n in sampler.counts.items()})
        return found

    async def collect(self, sink: "Sink", stop: asyncio.Event) -> None:
        """Sample and scrape into `sink` until `stop`. Raises UsageError on what cannot be used."""
        from perfledger.collectors.host.sampling_loop import run_sampler

        tasks = []
        if self.scraper is not None:
            tasks.append(_contained("scraping", self.scraper.run(sink, stop)))
        if self.host is not None:
            tasks.append(_contained("sampling the host", run_sampler(self.host, sink, stop)))
        if self.waits is not None:
            tasks.append(_contained("sampling waits", run_sampler(self.waits, sink, stop)))
        if self.devices is not None:
            tasks.append(_contained("sampling devices", run_sampler(self.devices, sink, stop)))
        await asyncio.gather(*tasks)

    async def forward(self, stop: asyncio.Event) -> None:
        """Forward until `stop`."""
        if self.forwarder is not None:
            await _contained("forwarding", self.forwarder.run(stop))


async def _contained(what: str, work: Awaitable[None]) -> None:
    """Let a defect of a companion end that one alone; the receivers go on."""
    try:
        await work
    except PerfledgerError:
        raise
    except Exception as error:
        tell_defect(what, error)


# What is not asked for is not imported: a start should take a second or two.


def _scraper(tables: object, folder: Path) -> "Scraper | None":
    if not tables:
        return None
    from perfledger.collectors.scraping.config import read_scrapes
    from perfledger.collectors.scraping.scraper import Scraper

    return Scraper(read_scrapes(tables, folder))


def _host(table: Mapping[str, object]) -> "HostSampler | None":
    if not table:
        return None
    from perfledger.collectors.host.host_sampler import HostSampler
    from perfledger.collectors.host.host_settings import HostSettings

    return HostSampler(HostSettings.from_toml(table))


def _waits(table: Mapping[str, object]) -> "WaitSampler | None":
    if not table:
        return None
    from perfledger.collectors.host.wait_sampler import WaitSampler
    from perfledger.collectors.host.wait_settings import WaitSettings

    return WaitSampler(WaitSettings.from_toml(table))


def _devices(table: Mapping[str, object], folder: Path) -> "DeviceSampler | None":
    if not table:
        return None
    from perfledger.collectors.device.device_sampler import DeviceSampler
    from perfledger.collectors.device.device_settings import DeviceSettings

    return DeviceSampler(DeviceSettings.from_toml(table, folder))


def _forwarder(table: Mapping[str, object], own_id: str, folder: Path) -> "Forwarder | None":
    if not table:
        return None
    from perfledger.collectors.forward.forward_target import ForwardTarget
    from perfledger.collectors.forward.forwarding import Forwarder

    return Forwarder(ForwardTarget.from_toml(table, folder), own_id)


def _table(tables: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = tables.get(name)
    return found if isinstance(found, Mapping) else {}
