"""GPM, NVML's performance counters of Hopper and newer: a value is the mean between two samples.

NVML's API reference, "GPM Functions". Not run on a device yet.
"""

from struct import Struct
from typing import Any

from perfledger.collectors.device.nvml_calls import NOT_SUPPORTED, NvmlFailure
from perfledger.schema.clocks import monotonic_ns

# nvmlGpmMetric_t: id, error, value, and three names that are not read. Members of the structure
# cost a microsecond each to read by pynvml.
_METRIC = Struct("@IId24x")


class GpmReader:
    """Takes a sample of one device at each reading, and compares it with the one before."""

    def __init__(self, nvml: Any, handle: Any, metrics: list[int]) -> None:
        """Allocate two samples. Raises NvmlFailure where the device has no GPM."""
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise NvmlFailure(NOT_SUPPORTED)
        self._nvml, self._handle = nvml, handle
        self._before, self._now = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._taken_ns: int | None = None
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(metrics)
        for at, number in enumerate(metrics):
            self._request.metrics[at].metricId = number
        first = type(self._request).metrics.offset
        memory = memoryview(self._request).cast("B")
        self._metrics = memory[first : first + len(metrics) * _METRIC.size]

    def read(self) -> dict[str, Any] | None:
        """Return the interval and [error, value] of each metric; None at the first reading."""
        self._nvml.nvmlGpmSampleGet(self._handle, self._now)
        before_ns, self._taken_ns = self._taken_ns, monotonic_ns()
        self._before, self._now = self._now, self._before
        if before_ns is None:
            return None
        # After the swap `_now` is the older one: it is overwritten at the next reading.
        self._request.sample1, self._request.sample2 = self._now, self._before
        self._nvml.nvmlGpmMetricsGet(self._request)
        values = [[error, value] for _, error, value in _METRIC.iter_unpack(self._metrics)]
        return {"interval_ns": self._taken_ns - before_ns, "values": values}

    def close(self) -> None:
        """Free the samples."""
        for sample in (self._before, self._now):
            self._nvml.nvmlGpmSampleFree(sample)
