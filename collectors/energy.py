"""Energy counters of this machine: NVML where there is a GPU, RAPL where the kernel shows it.

"None here" is an object too (NoMeter), so callers do not branch; it says why.
NVML: nvmlDeviceGetTotalEnergyConsumption, millijoules since the driver was loaded (Volta and
newer). RAPL: /sys/class/powercap/intel-rapl:N/energy_uj, microjoules, wrapping at
max_energy_range_uj (kernel documentation, power/powercap).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter(Protocol):
    """A counter that only rises. `source` names it; `why_not` says why there is none."""

    @property
    def source(self) -> str: ...

    @property
    def why_not(self) -> str: ...

    def read_joules(self) -> float | None:
        """Return joules since some fixed instant, or None where not measurable."""
        ...


@dataclass(frozen=True)
class NoMeter:
    """There is no counter here."""

    why_not: str
    source: str = ""

    def read_joules(self) -> None:
        """Return None: not measurable, for the reason in `why_not`."""
        return None


@dataclass(frozen=True)
class NvmlMeter:
    """Sum of the total-energy counters of all GPUs that NVML shows. Not run on a device yet."""

    read_millijoules: tuple[Callable[[], int], ...]
    source: str = "nvml total energy"
    why_not: str = ""

    def read_joules(self) -> float:
        """Return the sum over the GPUs."""
        return sum(read() for read in self.read_millijoules) / 1000


class RaplMeter:
    """Sum of the package domains under powercap; wraps are unfolded between two reads."""

    source = "rapl packages"
    why_not = ""

    def __init__(self, packages: list[Path]) -> None:
        self.packages = packages
        self.ranges_uj = [int((p / "max_energy_range_uj").read_text()) for p in packages]
        self.last_uj = [self._read(p) for p in packages]
        self.total_uj = 0

    def read_joules(self) -> float:
        """Return joules since this meter was made; read at least once a wrap (about a minute)."""
        for at, package in enumerate(self.packages):
            now_uj = self._read(package)
            self.total_uj += (now_uj - self.last_uj[at]) % self.ranges_uj[at]
            self.last_uj[at] = now_uj
        return self.total_uj / 1e6

    @staticmethod
    def _read(package: Path) -> int:
        return int((package / "energy_uj").read_text())


def find_meter(powercap: Path = POWERCAP) -> EnergyMeter:
    """Return the best meter of this machine: GPU first, then CPU packages, else NoMeter."""
    nvml = _nvml_meter()
    if isinstance(nvml, NvmlMeter):
        return nvml
    rapl = _rapl_meter(powercap)
    if isinstance(rapl, RaplMeter):
        return rapl
    return NoMeter(f"{nvml.why_not}; {rapl.why_not}")


def _nvml_meter() -> NvmlMeter | NoMeter:
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        readers = [_reader(pynvml.nvmlDeviceGetTotalEnergyConsumption, h) for h in handles]
        for read in readers:
            read()
    except pynvml.NVMLError as error:
        return NoMeter(f"no NVML energy counter ({error})")
    return NvmlMeter(tuple(readers)) if readers else NoMeter("NVML shows no GPU")


def _reader(call: Callable[[object], int], handle: object) -> Callable[[], int]:
    return lambda: call(handle)


def _is_package(zone: Path) -> bool:
    """Return whether a zone is a package: not part of one, and not psys, which holds them all."""
    name = zone / "name"
    return zone.name.count(":") == 1 and not (name.exists() and name.read_text() == "psys\n")


def _rapl_meter(powercap: Path) -> RaplMeter | NoMeter:
    packages = sorted(p for p in powercap.glob("intel-rapl:*") if _is_package(p))
    if not packages:
        return NoMeter(f"no RAPL domain under {powercap}")
    try:
        return RaplMeter(packages)
    except OSError as error:
        return NoMeter(f"RAPL not readable ({error.strerror})")
