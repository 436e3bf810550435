"""NVML as calls by name with plain answers, so that they can be recorded and played again.

A device is named by its index. Numbers and meanings of errors: nvmlReturn_t of NVML's API
reference; the binding is nvidia-ml-py (import name pynvml), loaded when first needed.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from perfledger.schema.errors import PerfledgerError

if TYPE_CHECKING:
    from perfledger.collectors.device.gpm import GpmReader

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND = 3, 4, 6, 13
TIMEOUT, LIBRARY_NOT_FOUND, GPU_IS_LOST = 10, 12, 15
ERRORS = {
    1: "UNINITIALIZED",
    2: "INVALID_ARGUMENT",
    NOT_SUPPORTED: "NOT_SUPPORTED",
    NO_PERMISSION: "NO_PERMISSION",
    5: "ALREADY_INITIALIZED",
    NOT_FOUND: "NOT_FOUND",
    7: "INSUFFICIENT_SIZE",
    8: "INSUFFICIENT_POWER",
    9: "DRIVER_NOT_LOADED",
    TIMEOUT: "TIMEOUT",
    11: "IRQ_ISSUE",
    LIBRARY_NOT_FOUND: "LIBRARY_NOT_FOUND",
    FUNCTION_NOT_FOUND: "FUNCTION_NOT_FOUND",
    14: "CORRUPTED_INFOROM",
    GPU_IS_LOST: "GPU_IS_LOST",
    16: "RESET_REQUIRED",
    17: "OPERATING_SYSTEM",
    18: "LIB_RM_VERSION_MISMATCH",
    19: "IN_USE",
    20: "MEMORY",
    21: "NO_DATA",
    999: "UNKNOWN",
}
# After these nothing of the device can be read until NVML was opened again.
_LOSING = frozenset((1, 9, GPU_IS_LOST, 16, 18))
# Members of pynvml's structures cost a microsecond each to read: those of each sample are unpacked.
# nvmlFieldValue_t: field, scope, timestamp, latency, type, error and the value's union.
_FIELD = Struct("@IIqqiI8s")
# That union by NVML_VALUE_TYPE_*: double, unsigned int, long and long long, long long, int, short.
_VALUES = tuple(Struct(f"@{code}") for code in "dILQqiH")
_UTILIZATION = Struct("@II")
UNSIGNED_INT = 1
# Of a device's events, those of errors: double bit ECC errors and critical Xids.
_ERROR_EVENTS = 0x2 | 0x8


class NvmlFailure(PerfledgerError):
    """NVML said no."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.name = ERRORS.get(code, f"ERROR_{code}")
        super().__init__(f"NVML: {self.name}")

    @property
    def means_lost(self) -> bool:
        """Return whether the device is gone, and not only what was asked for."""
        return self.code in _LOSING


class Instant(NamedTuple):
    """One moment on both clocks."""

    monotonic_ns: int
    wall_ns: int


class Calls(Protocol):
    """Something that answers as NVML does."""

    def start_sample(self, at: Instant) -> Instant:
        """Say that a sample starts; return when it is held to be (a replay's own time)."""
        ...

    def call(self, function: str, *arguments: Any) -> Any:
        """Return the plain answer of a function of NVML. Raises NvmlFailure."""
        ...

    def close(self) -> None:
        """Let go of the library, or the file."""
        ...


class NvmlLibrary:
    """The library of this machine. Not run on a device yet."""

    def __init__(self) -> None:
        self._is_open = False
        self._handles: dict[int, Any] = {}
        self._gpm: dict[int, GpmReader] = {}
        self._events: Any = None

    @cached_property
    def _nvml(self) -> Any:
        import pynvml

        return pynvml

    def start_sample(self, at: Instant) -> Instant:
        """Return `at`: this is live."""
        return at

    def call(self, function: str, *arguments: Any) -> Any:
        """Call NVML. Raises NvmlFailure."""
        try:
            own = getattr(self, f"_{function}", None)
            return self._plainly(function, *arguments) if own is None else own(*arguments)
        except self._nvml.NVMLError as error:
            raise NvmlFailure(int(error.value)) from error
        except self._nvml.NVMLLibraryMismatchError as error:
            raise NvmlFailure(FUNCTION_NOT_FOUND) from error

    def close(self) -> None:
        """Shut NVML down, where it was opened."""
        if self._is_open:
            with suppress(self._nvml.NVMLError):
                self._nvmlShutdown()

    def _plainly(self, function: str, *arguments: Any) -> Any:
        found = getattr(self._nvml, function, None)
        if found is None:
            raise NvmlFailure(FUNCTION_NOT_FOUND)
        if function.startswith("nvmlDevice") and arguments:
            arguments = (self._handles[arguments[0]], *arguments[1:])
        return _PLAIN.get(function, _same)(found(*arguments))

    def _forget(self) -> None:
        for reader in self._gpm.values():
            with suppress(self._nvml.NVMLError):  # its device is lost: so are its samples
                reader.close()
        if self._events is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
        self._gpm.clear()
        self._handles.clear()
        self._events = None

    def _nvmlInit(self) -> None:
        self._nvml.nvmlInit()
        self._is_open = True

    def _nvmlShutdown(self) -> None:
        self._is_open = False
        self._forget()
        self._nvml.nvmlShutdown()

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> None:
        self._handles[index] = self._nvml.nvmlDeviceGetHandleByIndex(index)

    def _nvmlDeviceGetTopologyCommonAncestor(self, index: int, other: int) -> int:
        handles = self._handles[index], self._handles[other]
        return int(self._nvml.nvmlDeviceGetTopologyCommonAncestor(*handles))

    def _nvmlDeviceGetMemoryInfo_v2(self, index: int) -> list[int]:
        nvml = self._nvml
        found = nvml.nvmlDeviceGetMemoryInfo(self._handles[index], version=nvml.nvmlMemory_v2)
        return [found.total, found.reserved, found.free, found.used]

    def _nvmlDeviceGetFieldValues(self, index: int, fields: list[list[int]]) -> list[list[Any]]:
        asked = [(number, scope) for number, scope in fields]
        found = self._nvml.nvmlDeviceGetFieldValues(self._handles[index], asked)
        return [_field_value(*parts[4:]) for parts in _FIELD.iter_unpack(found)]

    def _nvmlGpmMetricsGet(self, index: int, metrics: list[int]) -> Any:
        from perfledger.collectors.device.gpm import GpmReader

        if index not in self._gpm:
            self._gpm[index] = GpmReader(self._nvml, self._handles[index], metrics)
        return self._gpm[index].read()

    def _nvmlEventSetWait(self) -> list[list[int]]:
        """Return the events that are waiting as [index, kind, data]; waits for none."""
        nvml = self._nvml
        if self._events is None:
            self._events = self._registered_events()
        found: list[list[int]] = []
        while len(found) < 64:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if error.value == TIMEOUT:
                    break
                raise
            index = nvml.nvmlDeviceGetIndex(event.device)
            found.append([index, int(event.eventType), int(event.eventData)])
        return found

    def _registered_events(self) -> Any:
        """Return a set that events of the devices come to, of those that have any."""
        nvml, failures = self._nvml, []
        events = nvml.nvmlEventSetCreate()
        for handle in self._handles.values():
            try:
                kinds = nvml.nvmlDeviceGetSupportedEventTypes(handle) & _ERROR_EVENTS
                nvml.nvmlDeviceRegisterEvents(handle, kinds, events)
            except nvml.NVMLError as error:
                failures.append(error)
        if len(failures) == len(self._handles):
            nvml.nvmlEventSetFree(events)
            raise failures[0] if failures else NvmlFailure(NOT_FOUND)
        return events


def _field_value(kind: int, error: int, value: bytes) -> list[Any]:
    """Return [error, type, value] of a field; the value is None where there is an error."""
    if error or not 0 <= kind < len(_VALUES):
        return [error or NOT_SUPPORTED, kind, None]
    return [0, kind, _VALUES[kind].unpack_from(value)[0]]


def _bus_id(found: Any) -> str:
    name = found.busId
    return name.decode() if isinstance(name, bytes) else str(name)


def _same(answer: Any) -> Any:
    return answer


# Structures as lists; other answers are numbers and texts already.
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "nvmlDeviceGetUtilizationRates": lambda found: list(_UTILIZATION.unpack(found)),
    "nvmlDeviceGetMemoryInfo": lambda found: [found.total, 0, found.free, found.used],
    "nvmlDeviceGetPciInfo": _bus_id,
    "nvmlDeviceGetNvLinkRemotePciInfo": _bus_id,
    "nvmlDeviceGetRemappedRows": list,
    "nvmlDeviceGetMigMode": list,
    "nvmlDeviceGetComputeRunningProcesses": lambda found: [[p.pid, p.usedGpuMemory] for p in found],
    "nvmlDeviceGetProcessUtilization": lambda found: [
        [sample.pid, sample.timeStamp, sample.smUtil] for sample in found
    ],
}
