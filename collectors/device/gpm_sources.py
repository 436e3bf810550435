"""What GPM tells of a GPU: activity of its units, and bytes over its edges (Hopper and newer).

Numbers of metrics: nvmlGpmMetricId_t. Rates there are MiB/s, the others percent.
"""

from collections.abc import Iterator
from math import isfinite

from perfledger.collectors.device.device_metrics import ACTIVITY, BANDWIDTH_SHARE, GPU_IO
from perfledger.collectors.device.gpu import Gpu, share
from perfledger.collectors.device.nvml_calls import NvmlFailure
from perfledger.collectors.host.readings import Reading

_UNITS = tuple(
    ("perfledger.gpu.unit", name)
    for name in ("sm", "occupancy", "integer", "tensor", "fp64", "fp32", "fp16")
)
_DRAM = 10
_PCIE = {20: "transmit", 21: "receive"}
_NVLINK = {61: "transmit", 60: "receive"}
# The first ones are those of _UNITS, in its order.
METRICS = [2, 3, 4, 5, 11, 12, 13, _DRAM, *_PCIE, *_NVLINK]
_AT = {metric: at for at, metric in enumerate(METRICS)}
_BY_GPM = ("perfledger.device.source", "gpm")


def gpm(gpu: Gpu) -> Iterator[Reading]:
    """Yield activity and the share of the memory's bandwidth; a metric that fails is left out."""
    found = gpu.ask_once("nvmlGpmMetricsGet", METRICS)
    if found is None:  # there is no sample before this one
        return
    values = found["values"]
    error, percent = values[_AT[_DRAM]]
    if error:
        raise NvmlFailure(error)
    yield gpu.reading(BANDWIDTH_SHARE, share(percent, "bandwidth"))
    for (error, percent), unit in zip(values, _UNITS, strict=False):
        if not error:
            yield gpu.reading(ACTIVITY, share(percent, unit[1]), unit)


def gpm_pcie(gpu: Gpu) -> Iterator[Reading]:
    """Yield bytes over PCIe since the first sample."""
    return _bytes(gpu, _PCIE, "host_device")


def gpm_nvlink(gpu: Gpu) -> Iterator[Reading]:
    """Yield bytes over all NVLinks since the first sample."""
    return _bytes(gpu, _NVLINK, "scale_up")


def _bytes(gpu: Gpu, metrics: dict[int, str], edge: str) -> Iterator[Reading]:
    found = gpu.ask_once("nvmlGpmMetricsGet", METRICS)
    if found is None:
        return
    for metric, direction in metrics.items():
        error, mebibytes_per_s = found["values"][_AT[metric]]
        if error:
            raise NvmlFailure(error)
        if not isfinite(mebibytes_per_s) or mebibytes_per_s < 0:
            raise ValueError(f"a rate is {mebibytes_per_s:g} MiB/s")
        key = f"gpm {metric}"
        gained = mebibytes_per_s * 2**20 * found["interval_ns"] / 1e9
        gpu.kept[key] = gpu.kept.get(key, 0.0) + gained
        yield gpu.reading(
            GPU_IO,
            round(gpu.kept[key]),
            ("network.io.direction", direction),
            ("perfledger.edge", edge),
            _BY_GPM,
        )
