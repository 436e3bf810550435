"""Which processes compute on a GPU: who contends for it. Ids are those of the host."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean

from perfledger.collectors.device.device_metrics import (
    PROCESS_MEMORY,
    PROCESS_UTILIZATION,
    PROCESSES,
)
from perfledger.collectors.device.gpu import Gpu, share
from perfledger.collectors.device.nvml_calls import NOT_FOUND, NvmlFailure
from perfledger.collectors.host.readings import Reading

# Of more only the number is told: each is a series.
MOST_PROCESSES = 64
_LAST_SEEN = "process utilization seen until, us"


def processes(gpu: Gpu) -> Iterator[Reading]:
    """Yield the processes and the memory that each holds, where NVML may tell it."""
    found = gpu.ask("nvmlDeviceGetComputeRunningProcesses")
    yield gpu.reading(PROCESSES, len(found))
    for pid, used_bytes in sorted(found)[:MOST_PROCESSES]:
        if used_bytes is not None:
            yield gpu.reading(PROCESS_MEMORY, used_bytes, ("process.pid", pid))


def process_utilization(gpu: Gpu) -> Iterator[Reading]:
    """Yield each process's share of time since the last asking, from NVML's own samples."""
    since_us = int(gpu.kept.get(_LAST_SEEN, 0))
    try:
        samples = gpu.ask("nvmlDeviceGetProcessUtilization", since_us)
    except NvmlFailure as failure:
        if failure.code == NOT_FOUND:  # no process ran since
            return
        raise
    shares: dict[int, list[float]] = defaultdict(list)
    for pid, at_us, percent in samples:
        gpu.kept[_LAST_SEEN] = max(gpu.kept.get(_LAST_SEEN, 0), at_us)
        shares[pid].append(share(percent, "use by a process"))
    for pid in sorted(shares)[:MOST_PROCESSES]:
        yield gpu.reading(PROCESS_UTILIZATION, fmean(shares[pid]), ("process.pid", pid))
