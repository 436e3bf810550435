"""What DCGM's fields really are, whatever the configuration of dcgm-exporter calls them.

From dcgm_fields.h and DcgmCacheManager.cpp of NVIDIA/DCGM 4.6.0 and default-counters.csv of
dcgm-exporter. DCGM 4.6 renamed many fields; both names are here, and numbers stayed what they were:
GPU_UTIL_RATIO is a percentage all the same. The traps: PROF_*_BYTES are bytes per second, and
NVLINK_BANDWIDTH_TOTAL is a rate too, in 1000 KiB/s, both directions added up, though the exporter's
default calls it a counter (NVIDIA/dcgm-exporter pull request 658).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from perfledger.collectors.device import device_metrics as device
from perfledger.schema.metrics import Metric

_MIB = 2**20
Pairs = tuple[tuple[str, str], ...]


class DcgmField(NamedTuple):
    """One field: `kind` and `unit` (UCUM) of the number on the page, and what it is of ours.

    `metric` in its own unit is the page's number times `times` over `over`. `of_instance`: each MIG
    instance has its own; of all others an instance is told its whole GPU's.
    """

    kind: str
    unit: str
    metric: Metric | None = None
    times: int = 1
    over: int = 1
    attributes: Pairs = ()
    of_instance: bool = False


def _percent(metric: Metric, *attributes: tuple[str, str]) -> DcgmField:
    return DcgmField("gauge", "%", metric, over=100, attributes=attributes)


def _busy(task: str) -> DcgmField:
    return _percent(device.GPU_UTILIZATION, ("hw.gpu.task", task))


def _clock(domain: str) -> DcgmField:
    named = (("perfledger.gpu.clock.domain", domain),)
    return DcgmField("gauge", "MHz", device.CLOCK, times=10**6, attributes=named)


def _activity(unit: str) -> DcgmField:
    named = (("perfledger.gpu.unit", unit),)
    return DcgmField("gauge", "1", device.ACTIVITY, attributes=named, of_instance=True)


def _rate(edge: str, direction: str) -> DcgmField:
    named = (("network.io.direction", direction), ("perfledger.edge", edge))
    return DcgmField("gauge", "By/s", device.IO_RATE, attributes=named)


def _bytes(edge: str, direction: str) -> DcgmField:
    named = (
        ("network.io.direction", direction),
        ("perfledger.device.source", "counter"),
        ("perfledger.edge", edge),
    )
    return DcgmField("counter", "By", device.GPU_IO, attributes=named)


def _errors(kind: str) -> DcgmField:
    return DcgmField("counter", "{error}", device.ERRORS, attributes=(("error.type", kind),))


def _remapped(kind: str) -> DcgmField:
    return DcgmField("counter", "{row}", device.REMAPPED_ROWS, attributes=(("error.type", kind),))


def _throttled(reason: str) -> DcgmField:
    named = (("perfledger.gpu.reason", reason),)
    return DcgmField("counter", "ns", device.THROTTLE_TIME, attributes=named)


def _place(location: str) -> DcgmField:
    return DcgmField(
        "gauge", "Cel", device.TEMPERATURE, attributes=(("hw.sensor_location", location),)
    )


_TOTAL_RATE = DcgmField(
    kind="gauge",
    unit="",  # 1000 KiB/s: UCUM has no word for it
    metric=device.IO_TOTAL_RATE,
    times=1_024_000,
    attributes=(("perfledger.edge", "scale_up"),),
)
_WATTS = DcgmField("gauge", "W")

# By every name that a field has had.
_NAMED: tuple[tuple[str, DcgmField], ...] = (
    (
        "DEV_GPU_UTIL DEV_GPU_UTIL_RATIO",
        _percent(device.GPU_UTILIZATION, ("hw.gpu.task", "general")),
    ),
    ("DEV_ENC_UTIL", _busy("encoder")),
    ("DEV_DEC_UTIL", _busy("decoder")),
    ("DEV_MEM_COPY_UTIL", _percent(device.MEMORY_BUSY)),
    ("DEV_FB_USED", DcgmField("gauge", "MiBy", device.MEMORY_USAGE, _MIB, of_instance=True)),
    ("DEV_FB_TOTAL", DcgmField("gauge", "MiBy", device.MEMORY_LIMIT, _MIB, of_instance=True)),
    ("DEV_FB_FREE DEV_FB_RESERVED", DcgmField("gauge", "MiBy")),
    ("DEV_POWER_USAGE DEV_BOARD_POWER_WATTS", _WATTS._replace(metric=device.POWER)),
    ("DEV_POWER_USAGE_INSTANT DEV_BOARD_POWER_RAW_WATTS", _WATTS),
    ("DEV_POWER_MGMT_LIMIT DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS", _WATTS),
    (
        "DEV_ENFORCED_POWER_LIMIT DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS",
        _WATTS._replace(metric=device.POWER_LIMIT),
    ),
    ("DEV_TOTAL_ENERGY_CONSUMPTION", DcgmField("counter", "mJ", device.ENERGY, over=1000)),
    ("DEV_GPU_TEMP DEV_GPU_TEMP_CELSIUS", _place("gpu")),
    ("DEV_MEMORY_TEMP DEV_MEMORY_TEMP_CELSIUS", _place("memory")),
    ("DEV_SM_CLOCK", _clock("sm")),
    ("DEV_MEM_CLOCK", _clock("memory")),
    ("PROF_SM_ACTIVE PROF_SM_UTIL_RATIO", _activity("sm")),
    ("PROF_SM_OCCUPANCY PROF_SM_OCCUPANCY_RATIO", _activity("occupancy")),
    ("PROF_PIPE_TENSOR_ACTIVE PROF_TENSOR_UTIL_RATIO", _activity("tensor")),
    ("PROF_PIPE_FP64_ACTIVE PROF_FP64_UTIL_RATIO", _activity("fp64")),
    ("PROF_PIPE_FP32_ACTIVE PROF_FP32_UTIL_RATIO", _activity("fp32")),
    ("PROF_PIPE_FP16_ACTIVE PROF_FP16_UTIL_RATIO", _activity("fp16")),
    ("PROF_PIPE_INT_ACTIVE PROF_INT_UTIL_RATIO", _activity("integer")),
    ("PROF_GR_ENGINE_ACTIVE PROF_GR_ENGINE_UTIL_RATIO", DcgmField("gauge", "1")),
    (
        "PROF_DRAM_ACTIVE PROF_DRAM_UTIL_RATIO",
        DcgmField("gauge", "1", device.BANDWIDTH_SHARE, of_instance=True),
    ),
    ("PROF_PCIE_TX_BYTES", _rate("host_device", "transmit")),
    ("PROF_PCIE_RX_BYTES", _rate("host_device", "receive")),
    ("PROF_NVLINK_TX_BYTES", _rate("scale_up", "transmit")),
    ("PROF_NVLINK_RX_BYTES", _rate("scale_up", "receive")),
    ("PROF_PCIE_TX_BYTES_TOTAL", _bytes("host_device", "transmit")),
    ("PROF_PCIE_RX_BYTES_TOTAL", _bytes("host_device", "receive")),
    ("DEV_NVLINK_TX_BYTES_TOTAL", _bytes("scale_up", "transmit")),
    ("DEV_NVLINK_RX_BYTES_TOTAL", _bytes("scale_up", "receive")),
    ("DEV_NVLINK_BANDWIDTH_TOTAL DEV_NVLINK_THROUGHPUT_TOTAL", _TOTAL_RATE),
    ("DEV_PCIE_REPLAY_COUNTER DEV_PCIE_REPLAY_TOTAL", _errors("pcie_replay")),
    ("DEV_ECC_SBE_VOL_TOTAL", _errors("ecc_corrected")),
    ("DEV_ECC_DBE_VOL_TOTAL", _errors("ecc_uncorrected")),
    (
        "DEV_CORRECTABLE_REMAPPED_ROWS DEV_ROW_REMAP_CORRECTABLE_TOTAL",
        _remapped("ecc_corrected"),
    ),
    (
        "DEV_UNCORRECTABLE_REMAPPED_ROWS DEV_ROW_REMAP_UNCORRECTABLE_TOTAL",
        _remapped("ecc_uncorrected"),
    ),
    ("DEV_POWER_VIOLATION", _throttled("power_cap")),
    ("DEV_THERMAL_VIOLATION", _throttled("thermal")),
    ("DEV_SYNC_BOOST_VIOLATION", _throttled("sync_boost")),
    ("DEV_BOARD_LIMIT_VIOLATION", _throttled("board_limit")),
    ("DEV_LOW_UTIL_VIOLATION", _throttled("low_utilization")),
    ("DEV_RELIABILITY_VIOLATION", _throttled("reliability")),
    ("DEV_PCIE_TX_THROUGHPUT DEV_PCIE_RX_THROUGHPUT", DcgmField("gauge", "kBy/s")),
    ("DEV_XID_ERRORS DEV_XID_ERROR", DcgmField("gauge", "")),
)


def _fields() -> Iterator[tuple[str, DcgmField]]:
    for names, field in _NAMED:
        for name in names.split():
            yield f"DCGM_FI_{name}", field
    # A link's share of NVLINK_BANDWIDTH_TOTAL: a rate as well, and no GPU's total.
    for kind in ("BANDWIDTH", "THROUGHPUT"):
        for link in range(18):
            yield f"DCGM_FI_DEV_NVLINK_{kind}_L{link}", DcgmField("gauge", "")


DCGM_FIELDS: Mapping[str, DcgmField] = dict(_fields())
