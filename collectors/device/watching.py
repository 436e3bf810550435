"""Watch this machine's devices for a while, or a recording of some, and say what was seen."""

import time
from dataclasses import dataclass, field

from perfledger.collectors.device.device_events import DeviceEvent
from perfledger.collectors.device.device_sampler import Absence, DeviceSampler
from perfledger.collectors.device.nvml_recording import EndOfRecording
from perfledger.collectors.device.nvml_sources import missing
from perfledger.collectors.host.readings import Attributes, Reading
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.metrics import Metric

Series = tuple[str, Attributes]
_WHOLE = ("nvml", "error_events", "device", "rapl", "perf")  # the others are sources of one GPU


@dataclass
class Seen:
    """A series: its first and last value. A counter that started anew begins there."""

    metric: Metric
    attributes: Attributes
    first: int | float
    last: int | float
    times: int = 1

    @property
    def change(self) -> int | float | None:
        """Return what a counter gained; None of a gauge, and of one that was read only once."""
        is_known = self.metric.kind == "counter" and self.times > 1
        return self.last - self.first if is_known else None


@dataclass
class Watched:
    """What devices said. Devices are named by their UUIDs, and "" is the host.

    `absences` are all sources that were asked; `unmet` those that have no stand-in either.
    """

    samples: int = 0
    first_ns: int = 0
    last_ns: int = 0
    series: dict[str, dict[Series, Seen]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    driver: str = ""
    absences: list[Absence] = field(default_factory=list)
    unmet: list[Absence] = field(default_factory=list)
    events: list[DeviceEvent] = field(default_factory=list)

    def add(self, device: str, readings: list[Reading]) -> None:
        """Note readings of a device."""
        known = self.series.setdefault(device, {})
        for metric, value, attributes in readings:
            key = metric.name, attributes
            seen = known.get(key)
            if seen is None or (metric.kind == "counter" and value < seen.last):
                known[key] = Seen(metric, attributes, value, value)
            else:
                seen.last = value
                seen.times += 1


def watch(sampler: DeviceSampler, seconds: float) -> Watched:
    """Sample for some seconds, or to the end of a recording, and close the sampler."""
    watched = Watched()
    end_ns = monotonic_ns() + round(seconds * 1e9)
    try:
        while True:
            at, parts = sampler.take()
            watched.first_ns = watched.first_ns or at.monotonic_ns
            watched.last_ns = at.monotonic_ns
            watched.samples += 1
            for part in parts:
                watched.add(part.device, part.readings)
            if sampler.recording is None:
                if monotonic_ns() >= end_ns:
                    break
                time.sleep(sampler.period_s)
    except EndOfRecording:
        pass
    finally:
        sampler.close()
    watched.absences = sampler.absences()
    watched.unmet = [one for one in watched.absences if one.why_not and one.source in _WHOLE]
    for uuid, gpu in sampler.gpus.gpus.items():
        watched.unmet += [Absence(uuid, name, why) for name, why in missing(gpu).items()]
    watched.events = list(sampler.gpus.events)
    watched.models = {uuid: gpu.name for uuid, gpu in sampler.gpus.gpus.items()}
    watched.driver = sampler.gpus.driver
    return watched
