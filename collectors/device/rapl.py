"""Energy of CPU packages and their DRAM: RAPL, where the kernel shows it.

/sys/class/powercap/intel-rapl:N (kernel documentation, power/powercap): microjoules that wrap at
max_energy_range_uj. AMD's are there too. Since Linux 5.10 only root may read them. Zones inside a
package, as its cores, and psys, which holds everything, are left out: they would count twice.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perfledger.collectors.device.device_metrics import ENERGY
from perfledger.collectors.device.rising_counter import RisingCounter
from perfledger.collectors.host.readings import Attributes, Reading

POWERCAP = Path("/sys/class/powercap")
SOURCE = "rapl"
_MOST_MICROJOULES_PER_S = 5e9  # 5 kW: more than a package draws


@dataclass(frozen=True)
class Zone:
    """A zone whose counter is open, since opening it costs more than reading it."""

    name: str
    file: int
    series: Attributes
    counter: RisingCounter

    def microjoules(self, at_ns: int) -> int | None:
        """Return what was used, None in the sample in which the count starts anew."""
        return self.counter.total(int(os.pread(self.file, 64, 0)), at_ns)


class Rapl:
    """All zones that count. `why_not` is why there is none, or ""; `absent` is of single zones."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self.zones: list[Zone] = []
        self.absent: dict[str, str] = {}
        folders = sorted(powercap.glob("intel-rapl:*"))
        for folder in folders:
            try:
                self._open(folder)
            except (OSError, ValueError) as error:
                self.absent[folder.name] = _reason(error)
        self.why_not = ""
        if not self.zones:
            reasons = sorted(set(self.absent.values()))
            self.why_not = "; ".join(reasons) or "the kernel shows no RAPL zone"

    def read(self, at_ns: int) -> Iterator[Reading]:
        """Yield the joules of each zone."""
        for zone in list(self.zones):
            try:
                used = zone.microjoules(at_ns)
            except (OSError, ValueError) as error:
                self.absent[zone.name] = _reason(error)
                self._drop(zone)
                continue
            if used is not None:
                yield Reading(ENERGY, used / 1e6, zone.series)

    def close(self) -> None:
        """Close the files."""
        for zone in list(self.zones):
            self._drop(zone)

    def _open(self, folder: Path) -> None:
        name = (folder / "name").read_text("utf-8", "replace").strip()
        kind = "memory" if name == "dram" else "cpu" if name.startswith("package") else ""
        if not kind:
            return
        range_microjoules = int((folder / "max_energy_range_uj").read_text())
        file = os.open(folder / "energy_uj", os.O_RDONLY | os.O_CLOEXEC)
        series = (("hw.id", folder.name), ("hw.type", kind), ("hw.name", name))
        counter = RisingCounter(range_microjoules, _MOST_MICROJOULES_PER_S)
        self.zones.append(Zone(folder.name, file, series, counter))

    def _drop(self, zone: Zone) -> None:
        os.close(zone.file)
        self.zones.remove(zone)


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "not understood"
