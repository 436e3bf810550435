"""The GPUs of this machine through NVML: found, read, lost and found again.

A device that is lost is an event, and so is its return; the others go on. NVML sees a device that
came back only when it is opened anew, which can take seconds: that is tried ever less often.
"""

from collections.abc import Iterator
from contextlib import suppress

from perfledger.collectors.device.device_events import ERROR, FOUND, LOST, DeviceEvent
from perfledger.collectors.device.device_metrics import STATUS
from perfledger.collectors.device.gpu import Gpu
from perfledger.collectors.device.nvml_calls import Calls, NvmlFailure
from perfledger.collectors.device.nvml_sources import read_gpu
from perfledger.collectors.host.readings import Reading

MOST_GPUS = 64
_FIRST_RETRY_S, _LONGEST_RETRY_S = 5, 300
_IS_GPU = ("hw.type", "gpu")
_XID = 0x8


class NvmlDevices:
    """All GPUs. `why_not` is why there is none, or ""; `events` is what happened and is not told.

    `unreachable` says of each index without a UUID why it has none; `why_no_events` why the driver
    tells no errors, or "".
    """

    def __init__(self, calls: Calls) -> None:
        self.gpus: dict[str, Gpu] = {}
        self.driver = ""
        self.why_not = "not asked yet"
        self.unreachable: dict[int, str] = {}
        self.events: list[DeviceEvent] = []
        self._calls = calls
        self._uuids: dict[int, str] = {}
        self._is_open = False
        self._retry_s = _FIRST_RETRY_S
        self._next_look_ns: int | None = None
        self.why_no_events = ""

    def look(self, at_ns: int) -> None:
        """Open NVML where it is not, or where a device is missing and it is time to look again."""
        is_due = self._next_look_ns is None or at_ns >= self._next_look_ns
        if is_due and not self._is_whole():
            self._open(at_ns)
            self._next_look_ns = at_ns + self._retry_s * 10**9
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            if self._is_whole():
                self._retry_s = _FIRST_RETRY_S

    def read(self, at_ns: int, *, slow: bool) -> Iterator[tuple[Gpu, dict[bool, list[Reading]]]]:
        """Yield each device and its readings (those of slow sources under True)."""
        self.look(at_ns)
        if self._is_open and slow:
            self._take_error_events(at_ns)
        for gpu in self.gpus.values():
            found: dict[bool, list[Reading]] = {False: [], True: []}
            if not gpu.lost:
                try:
                    found = read_gpu(gpu, at_ns, slow=slow)
                except NvmlFailure as failure:
                    self._lose(gpu, failure.name, at_ns)
                    found = {False: [], True: []}
            if slow or gpu.lost:
                failed = int(gpu.lost != "")
                found[True].append(gpu.reading(STATUS, failed, _IS_GPU, ("hw.state", "failed")))
            yield gpu, found

    def close(self) -> None:
        """Let go of NVML."""
        self._calls.close()

    def _is_whole(self) -> bool:
        return (
            self._is_open and not self.unreachable and not any(g.lost for g in self.gpus.values())
        )

    def _open(self, at_ns: int) -> None:
        if self._is_open:
            with suppress(NvmlFailure):  # there is nothing left to shut
                self._calls.call("nvmlShutdown")
        self._is_open, self.unreachable, self._uuids = False, {}, {}
        self.why_no_events = ""
        try:
            self._calls.call("nvmlInit")
            self._is_open = True
            self.driver = self._calls.call("nvmlSystemGetDriverVersion")
            count = min(self._calls.call("nvmlDeviceGetCount"), MOST_GPUS)
        except NvmlFailure as failure:
            self.why_not = failure.name
            for gpu in self.gpus.values():
                self._lose(gpu, failure.name, at_ns)
            return
        for index in range(count):
            self._find(index, at_ns)
        self.why_not = "" if count else "NVML shows no GPU"
        for gpu in self.gpus.values():
            if gpu.uuid not in self._uuids.values():
                self._lose(gpu, "NOT_FOUND", at_ns)

    def _find(self, index: int, at_ns: int) -> None:
        try:
            self._calls.call("nvmlDeviceGetHandleByIndex", index)
            uuid = self._calls.call("nvmlDeviceGetUUID", index)
            name = self._calls.call("nvmlDeviceGetName", index)
        except NvmlFailure as failure:
            self.unreachable[index] = failure.name
            return
        self._uuids[index] = uuid
        if uuid not in self.gpus:
            self.gpus[uuid] = Gpu(self._calls, index, uuid, name)
            return
        if self.gpus[uuid].lost:
            self.events.append(DeviceEvent(at_ns, FOUND, uuid))
        self.gpus[uuid].found_again(index)

    def _lose(self, gpu: Gpu, why: str, at_ns: int) -> None:
        if not gpu.lost:
            self.events.append(DeviceEvent(at_ns, LOST, gpu.uuid, why))
        gpu.lost = why
        gpu.present.clear()
        gpu.kept.clear()

    def _take_error_events(self, at_ns: int) -> None:
        """Note the driver's error events; where it tells none, do not ask again."""
        if self.why_no_events:
            return
        try:
            found = self._calls.call("nvmlEventSetWait")
        except NvmlFailure as failure:
            self.why_no_events = failure.name
            return
        for index, kind, data in found:
            why = f"XID_{data}" if kind == _XID else "ECC_UNCORRECTED"
            uuid = self._uuids.get(index, "")
            self.events.append(DeviceEvent(at_ns, ERROR, uuid, why))
