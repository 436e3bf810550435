"""What is read of a GPU: one function a source, from NVML's answers to readings.

A source raises NvmlFailure where it cannot be read and ValueError where it makes no sense; its
metrics are then absent, never 0. Numbers of fields (NVML_FI_DEV_*) and bits are those of nvml.h;
only fields are used whose number is the same in all versions of it. Units there: mW, mJ, MHz,
KiB and ns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from perfledger.collectors.device.device_metrics import (
    BANDWIDTH_LIMIT,
    CLOCK,
    CLOCK_LIMIT,
    ENERGY,
    ERRORS,
    GPU_IO,
    GPU_UTILIZATION,
    MEMORY_BUSY,
    MEMORY_LIMIT,
    MEMORY_USAGE,
    PCIE_GENERATION,
    PCIE_RATE,
    PCIE_WIDTH,
    POWER,
    POWER_LIMIT,
    REMAPPED_ROWS,
    TEMPERATURE,
    THROTTLE_TIME,
    THROTTLED,
)
from perfledger.collectors.device.gpm_sources import gpm, gpm_nvlink, gpm_pcie
from perfledger.collectors.device.gpu import Field, Gpu, Wrap, share
from perfledger.collectors.device.gpu_processes import process_utilization, processes
from perfledger.collectors.device.nvml_calls import UNSIGNED_INT, NvmlFailure
from perfledger.collectors.host.readings import Reading

IS_GPU = ("hw.type", "gpu")
OVER_PCIE = ("perfledger.edge", "host_device")
OVER_NVLINK = ("perfledger.edge", "scale_up")
BY_COUNTER = ("perfledger.device.source", "counter")
SENT, RECEIVED = (("network.io.direction", word) for word in ("transmit", "receive"))

_ENERGY, _POWER_INSTANT, _MEMORY_TEMPERATURE = Field(83), Field(186), Field(82)
_PCIE = {SENT: Field(197), RECEIVED: Field(198)}
_ALL_LINKS = 2**32 - 1
_NVLINK = {SENT: Field(138, _ALL_LINKS), RECEIVED: Field(139, _ALL_LINKS)}
_MOST_LINKS = 18
_NVLINK_LINKS = {
    direction: [Field(number, link) for link in range(_MOST_LINKS)]
    for direction, number in ((SENT, 202), (RECEIVED, 204))
}
# A 32-bit counter of bytes goes round in 67 ms at the 64 GB/s of 16 lanes of PCIe 5. Those are on
# devices with GPM, which is asked first; 16 lanes of PCIe 4 carry 32 GB/s.
_MOST_PCIE_BYTES_PER_S = 40e9
# "Perf policy" counters: how long clocks were held down.
_HELD_DOWN = {
    Field(74): "power_cap",
    Field(75): "thermal",
    Field(76): "sync_boost",
    Field(77): "board_limit",
    Field(79): "reliability",
}
# nvmlClocksEventReasons that hold clocks down; idle and the user's own settings do not.
_REASONS = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}
_CLOCKS = {1: "sm", 2: "memory"}
_CORRECTED, _UNCORRECTED = 0, 1
_SINCE_LOAD = 0  # NVML_VOLATILE_ECC


@dataclass(frozen=True)
class Source:
    """One source. A slow one is read less often; one `instead_of` another only where that fails."""

    name: str
    read: Callable[[Gpu], Iterator[Reading]]
    slow: bool = False
    instead_of: str = ""
    fields: tuple[Field, ...] = ()


def _energy(gpu: Gpu) -> Iterator[Reading]:
    return _joules(gpu, gpu.field(_ENERGY)[1])


def _energy_call(gpu: Gpu) -> Iterator[Reading]:
    return _joules(gpu, gpu.ask_number("nvmlDeviceGetTotalEnergyConsumption"))


def _joules(gpu: Gpu, millijoules: int) -> Iterator[Reading]:
    return gpu.counted(ENERGY, millijoules, IS_GPU, ("hw.name", gpu.name), per_unit=1000)


def _power(gpu: Gpu) -> Iterator[Reading]:
    yield gpu.reading(POWER, gpu.field(_POWER_INSTANT)[1] / 1000, IS_GPU)


def _power_call(gpu: Gpu) -> Iterator[Reading]:
    yield gpu.reading(POWER, gpu.ask_number("nvmlDeviceGetPowerUsage") / 1000, IS_GPU)


def _utilization(gpu: Gpu) -> Iterator[Reading]:
    of_gpu, of_memory = gpu.ask("nvmlDeviceGetUtilizationRates")
    yield gpu.reading(GPU_UTILIZATION, share(of_gpu, "use"), ("hw.gpu.task", "general"))
    yield gpu.reading(MEMORY_BUSY, share(of_memory, "use of memory"))


def _memory(gpu: Gpu) -> Iterator[Reading]:
    return _memory_readings(gpu, "nvmlDeviceGetMemoryInfo_v2")


def _memory_old(gpu: Gpu) -> Iterator[Reading]:
    """Before version 2 what the driver reserves counts as used."""
    return _memory_readings(gpu, "nvmlDeviceGetMemoryInfo")


def _memory_readings(gpu: Gpu, function: str) -> Iterator[Reading]:
    total, _, _, used = gpu.ask(function)
    if not 0 <= used <= total:
        raise ValueError(f"{used} of {total} bytes are used")
    yield gpu.reading(MEMORY_USAGE, used)
    yield gpu.reading(MEMORY_LIMIT, total)


def _clocks(gpu: Gpu) -> Iterator[Reading]:
    for number, domain in _CLOCKS.items():
        megahertz = gpu.ask_number("nvmlDeviceGetClockInfo", number)
        yield gpu.reading(CLOCK, megahertz * 10**6, ("perfledger.gpu.clock.domain", domain))


def _clock_limits(gpu: Gpu) -> Iterator[Reading]:
    for number, domain in _CLOCKS.items():
        megahertz = gpu.ask_number("nvmlDeviceGetMaxClockInfo", number)
        yield gpu.reading(CLOCK_LIMIT, megahertz * 10**6, ("perfledger.gpu.clock.domain", domain))


def _bandwidth_limit(gpu: Gpu) -> Iterator[Reading]:
    hertz = gpu.ask_number("nvmlDeviceGetMaxClockInfo", 2) * 10**6
    bits = gpu.ask_number("nvmlDeviceGetMemoryBusWidth")
    if hertz * bits:
        yield gpu.reading(BANDWIDTH_LIMIT, hertz * 2 * bits // 8)


def _throttle(gpu: Gpu) -> Iterator[Reading]:
    return _throttle_readings(gpu, "nvmlDeviceGetCurrentClocksEventReasons")


def _throttle_old(gpu: Gpu) -> Iterator[Reading]:
    """The name of the same function before driver 535."""
    return _throttle_readings(gpu, "nvmlDeviceGetCurrentClocksThrottleReasons")


def _throttle_readings(gpu: Gpu, function: str) -> Iterator[Reading]:
    bits = gpu.ask_number(function)
    for bit, reason in _REASONS.items():
        yield gpu.reading(THROTTLED, int(bool(bits & bit)), ("perfledger.gpu.reason", reason))


def _throttle_time(gpu: Gpu) -> Iterator[Reading]:
    for field, held_ns in gpu.fields(_HELD_DOWN).items():
        reason = ("perfledger.gpu.reason", _HELD_DOWN[field])
        yield from gpu.counted(THROTTLE_TIME, held_ns, reason)


def _pcie(gpu: Gpu) -> Iterator[Reading]:
    for direction, field in _PCIE.items():
        kind, count = gpu.field(field)
        wrap = Wrap(2**32, _MOST_PCIE_BYTES_PER_S) if kind == UNSIGNED_INT else None
        yield from gpu.counted(GPU_IO, count, direction, OVER_PCIE, BY_COUNTER, wrap=wrap)


def _nvlink(gpu: Gpu) -> Iterator[Reading]:
    for direction, field in _NVLINK.items():
        kibibytes = gpu.field(field)[1]
        yield from gpu.counted(GPU_IO, kibibytes * 1024, direction, OVER_NVLINK, BY_COUNTER)


def _nvlink_links(gpu: Gpu) -> Iterator[Reading]:
    """Links that each count for themselves, as NVLink 5 does."""
    for direction, fields in _NVLINK_LINKS.items():
        count = sum(gpu.fields(fields).values())
        yield from gpu.counted(GPU_IO, count, direction, OVER_NVLINK, BY_COUNTER)


def _pcie_window(gpu: Gpu) -> Iterator[Reading]:
    """Each call waits for 20 ms, and sees only those."""
    for number, direction in enumerate((SENT, RECEIVED)):
        kilobytes_per_s = gpu.ask_number("nvmlDeviceGetPcieThroughput", number)
        yield gpu.reading(PCIE_RATE, kilobytes_per_s * 1000, direction)


def _pcie_link(gpu: Gpu) -> Iterator[Reading]:
    yield gpu.reading(PCIE_GENERATION, gpu.ask_number("nvmlDeviceGetCurrPcieLinkGeneration"))
    yield gpu.reading(PCIE_WIDTH, gpu.ask_number("nvmlDeviceGetCurrPcieLinkWidth"))


def _temperature(gpu: Gpu) -> Iterator[Reading]:
    where = ("hw.sensor_location", "gpu")
    yield gpu.reading(TEMPERATURE, gpu.ask_number("nvmlDeviceGetTemperature", 0), IS_GPU, where)


def _memory_temperature(gpu: Gpu) -> Iterator[Reading]:
    where = ("hw.sensor_location", "memory")
    yield gpu.reading(TEMPERATURE, gpu.field(_MEMORY_TEMPERATURE)[1], IS_GPU, where)


def _power_limit(gpu: Gpu) -> Iterator[Reading]:
    yield gpu.reading(POWER_LIMIT, gpu.ask_number("nvmlDeviceGetEnforcedPowerLimit") / 1000)


def _ecc(gpu: Gpu) -> Iterator[Reading]:
    for kind, name in ((_CORRECTED, "ecc_corrected"), (_UNCORRECTED, "ecc_uncorrected")):
        count = gpu.ask_number("nvmlDeviceGetTotalEccErrors", kind, _SINCE_LOAD)
        yield from gpu.counted(ERRORS, count, IS_GPU, ("error.type", name))


def _pcie_replays(gpu: Gpu) -> Iterator[Reading]:
    count = gpu.ask_number("nvmlDeviceGetPcieReplayCounter")
    return gpu.counted(ERRORS, count, IS_GPU, ("error.type", "pcie_replay"))


def _remapped_rows(gpu: Gpu) -> Iterator[Reading]:
    corrected, uncorrected, _, _ = gpu.ask("nvmlDeviceGetRemappedRows")
    for name, rows in (("ecc_corrected", corrected), ("ecc_uncorrected", uncorrected)):
        yield gpu.reading(REMAPPED_ROWS, rows, ("error.type", name))


# In this order: one `instead_of` another comes after it.
SOURCES = (
    Source("energy", _energy, fields=(_ENERGY,)),
    Source("energy_call", _energy_call, instead_of="energy"),
    Source("power", _power, fields=(_POWER_INSTANT,)),
    Source("power_call", _power_call, instead_of="power"),
    Source("utilization", _utilization),
    Source("memory", _memory, slow=True),
    Source("memory_old", _memory_old, slow=True, instead_of="memory"),
    Source("gpm", gpm),
    Source("gpm_pcie", gpm_pcie),
    Source("pcie", _pcie, instead_of="gpm_pcie", fields=tuple(_PCIE.values())),
    Source("nvlink", _nvlink, fields=tuple(_NVLINK.values())),
    Source(
        "nvlink_links",
        _nvlink_links,
        instead_of="nvlink",
        fields=tuple(field for fields in _NVLINK_LINKS.values() for field in fields),
    ),
    Source("gpm_nvlink", gpm_nvlink, instead_of="nvlink_links"),
    Source("clocks", _clocks, slow=True),
    Source("clock_limits", _clock_limits, slow=True),
    Source("bandwidth_limit", _bandwidth_limit, slow=True),
    Source("throttle", _throttle, slow=True),
    Source("throttle_old", _throttle_old, slow=True, instead_of="throttle"),
    Source("throttle_time", _throttle_time, slow=True, fields=tuple(_HELD_DOWN)),
    Source("pcie_window", _pcie_window, slow=True, instead_of="pcie"),
    Source("pcie_link", _pcie_link, slow=True),
    Source("temperature", _temperature, slow=True),
    Source("memory_temperature", _memory_temperature, slow=True, fields=(_MEMORY_TEMPERATURE,)),
    Source("power_limit", _power_limit, slow=True),
    Source("ecc", _ecc, slow=True),
    Source("pcie_replays", _pcie_replays, slow=True),
    Source("remapped_rows", _remapped_rows, slow=True),
    Source("processes", processes, slow=True),
    Source("process_utilization", process_utilization, slow=True),
)

_FAST = tuple(source for source in SOURCES if not source.slow)
# These answers change seldom, as when a permission is given.
_LASTING = frozenset(("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND"))
RETRY_S = 30


def read_gpu(gpu: Gpu, at_ns: int, *, slow: bool) -> dict[bool, list[Reading]]:
    """Return the readings of a device, those of slow sources apart.

    What could not be read is tried again where slow sources are due: what the device or the driver
    does not have, or does not allow, seldom. Raises NvmlFailure where the device is lost.
    """
    gpu.start_sample(at_ns)
    if slow:
        _forget_absences(gpu)
    sources = SOURCES if slow else _FAST
    known = gpu.present.copy()
    if not gpu.fetch_all([field for s in sources if s.name in known for field in s.fields]):
        known.clear()
    found: dict[bool, list[Reading]] = {False: [], True: []}
    for source in sources:
        if source.name not in gpu.absent and not _has_better(gpu, source):
            found[source.slow] += _read(gpu, source, source.name in known)
    return found


def _forget_absences(gpu: Gpu) -> None:
    if gpu.at_ns >= gpu.retry_ns:
        gpu.absent.clear()
        gpu.retry_ns = gpu.at_ns + RETRY_S * 10**9
    for name in [name for name, why in gpu.absent.items() if why not in _LASTING]:
        del gpu.absent[name]


def _read(gpu: Gpu, source: Source, is_fetched: bool) -> list[Reading]:
    """Return the readings of one source; why there are none is noted."""
    try:
        if source.fields and not is_fetched:
            gpu.fetch(source.fields)
        found = list(source.read(gpu))
    except NvmlFailure as failure:
        if failure.means_lost:
            raise
        why_not = failure.name
    except (ValueError, TypeError) as error:
        why_not = f"not understood: {error}"
        gpu.misunderstood += 1
    else:
        gpu.present.add(source.name)
        return found
    gpu.present.discard(source.name)
    gpu.absent[source.name] = why_not
    return []


def _has_better(gpu: Gpu, source: Source) -> bool:
    """Return whether what this source stands in for can be read."""
    return source.instead_of != "" and source.instead_of not in gpu.absent


def missing(gpu: Gpu) -> dict[str, str]:
    """Return why what has no stand-in cannot be read, by the name of the first choice."""
    choices: dict[str, list[str]] = {}
    first_of: dict[str, str] = {}
    for source in SOURCES:
        first = first_of.get(source.instead_of, source.name)
        first_of[source.name] = first
        choices.setdefault(first, []).append(source.name)
    return {
        first: gpu.absent[first]
        for first, names in choices.items()
        if first in gpu.absent and gpu.present.isdisjoint(names)
    }
