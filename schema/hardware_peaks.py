"""What datasheets promise of accelerators: dense rates, one direction, with the source of each.

A measured ceiling is preferred to these wherever there is one (`ceilings.py`). A device that is
not in the table has no peak: none is guessed from a similar name.

Traps that this table avoids: vendors print matrix rates with 2:4 sparsity (twice the dense ones)
and links in both directions together (twice what one transfer can use).
"""

from collections.abc import Mapping
from dataclasses import dataclass

TERA, GIGA = 1_000_000_000_000, 1_000_000_000


@dataclass(frozen=True)
class Peak:
    """One device. Rates are per second; `flops` are dense multiply-adds counted as two, by dtype.

    `names` are what NVML, torch or the ROCm tools call it, compared exactly but for case and
    repeated spaces. None is "the sheet does not say".
    """

    names: tuple[str, ...]
    flops: Mapping[str, int]
    memory_bytes_per_s: int
    memory_bytes: int
    scale_up_bytes_per_s: int | None  # of all links, one direction
    host_device_bytes_per_s: int | None  # one direction
    source: str

    @property
    def name(self) -> str:
        """Return the name that output shows."""
        return self.names[0]

    def bytes_per_s(self, edge: str) -> int | None:
        """Return the peak of an edge (a name in edges.py), None where the sheet has none."""
        return {
            "device_memory": self.memory_bytes_per_s,
            "scale_up": self.scale_up_bytes_per_s,
            "host_device": self.host_device_bytes_per_s,
        }.get(edge)

    def ridge(self, dtype: str) -> float | None:
        """Return the FLOPs per byte from which on memory is no longer the bound (Williams 2009)."""
        rate = self.flops.get(dtype)
        return None if rate is None else rate / self.memory_bytes_per_s


def _teraflops(**rates: float) -> dict[str, int]:
    return {dtype: round(rate * TERA) for dtype, rate in rates.items()}


_A100 = _teraflops(float64=9.7, float32=19.5, tf32=156, float16=312, bfloat16=312, int8=624)
_H100_SXM = _teraflops(
    float64=34, float32=67, tf32=494.5, float16=989.5, bfloat16=989.5, fp8=1979, int8=1979
)
_H100_PCIE = _teraflops(
    float64=26, float32=51, tf32=378, float16=756.5, bfloat16=756.5, fp8=1513, int8=1513
)
_NVL = _teraflops(
    float64=30, float32=60, tf32=417.5, float16=835.5, bfloat16=835.5, fp8=1670.5, int8=1670.5
)
_B200 = _teraflops(tf32=1100, float16=2250, bfloat16=2250, fp8=4500, int8=4500, fp4=9000)
_MI300X = _teraflops(
    float64=81.7,
    float32=163.4,
    tf32=653.7,
    float16=1307.4,
    bfloat16=1307.4,
    fp8=2614.9,
    int8=2614.9,
)
_PCIE_4, _PCIE_5 = 32 * GIGA, 64 * GIGA
_A100_SHEET = "NVIDIA A100 Tensor Core GPU datasheet (nvidia.com/en-us/data-center/a100)"
_H100_SHEET = "NVIDIA H100 Tensor Core GPU datasheet (nvidia.com/en-us/data-center/h100)"
_H200_SHEET = "NVIDIA H200 Tensor Core GPU datasheet (nvidia.com/en-us/data-center/h200)"
_B200_SHEET = "NVIDIA Blackwell architecture technical brief, HGX B200, and DGX B200 datasheet"
_MI300X_SHEET = "AMD Instinct MI300X data sheet (amd.com/en/products/accelerators/instinct)"

PEAKS: tuple[Peak, ...] = (
    Peak(
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", "NVIDIA A100-SXM-80GB"),
        _A100,
        2_039 * GIGA,
        80 * GIGA,
        300 * GIGA,
        _PCIE_4,
        _A100_SHEET,
    ),
    Peak(
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        _A100,
        1_555 * GIGA,
        40 * GIGA,
        300 * GIGA,
        _PCIE_4,
        _A100_SHEET,
    ),
    Peak(
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        _A100,
        1_935 * GIGA,
        80 * GIGA,
        300 * GIGA,  # with an NVLink bridge to one other
        _PCIE_4,
        _A100_SHEET,
    ),
    Peak(
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM5 80GB", "H100-SXM5-80GB"),
        _H100_SXM,
        3_350 * GIGA,
        80 * GIGA,
        450 * GIGA,
        _PCIE_5,
        _H100_SHEET,
    ),
    Peak(
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        _H100_PCIE,
        2_000 * GIGA,
        80 * GIGA,
        300 * GIGA,  # with an NVLink bridge to one other
        _PCIE_5,
        "NVIDIA H100 PCIe product brief (PB-11133-001)",
    ),
    Peak(
        ("NVIDIA H100 NVL", "H100 NVL"),
        _NVL,
        3_900 * GIGA,
        94 * GIGA,
        300 * GIGA,  # with an NVLink bridge to one other
        _PCIE_5,
        _H100_SHEET,
    ),
    Peak(
        ("NVIDIA H200", "NVIDIA H200 141GB HBM3e", "H200-SXM5-141GB"),
        _H100_SXM,
        4_800 * GIGA,
        141 * GIGA,
        450 * GIGA,
        _PCIE_5,
        _H200_SHEET,
    ),
    Peak(
        ("NVIDIA H200 NVL", "H200 NVL"),
        _NVL,
        4_800 * GIGA,
        141 * GIGA,
        450 * GIGA,  # with an NVLink bridge to up to three others
        _PCIE_5,
        _H200_SHEET,
    ),
    Peak(
        ("NVIDIA B200", "NVIDIA B200 180GB HBM3e"),
        _B200,
        8_000 * GIGA,
        180 * GIGA,
        900 * GIGA,
        _PCIE_5,
        _B200_SHEET,
    ),
    Peak(
        ("AMD Instinct MI300X", "AMD Instinct MI300X OAM", "MI300X"),
        _MI300X,
        5_300 * GIGA,
        192 * GIGA,
        448 * GIGA,  # seven Infinity Fabric links of 64 GB/s
        _PCIE_5,
        _MI300X_SHEET,
    ),
)


def _plain(name: str) -> str:
    return " ".join(name.casefold().split())


_BY_NAME = {_plain(name): peak for peak in PEAKS for name in peak.names}


def peak_of(device: str) -> Peak | None:
    """Return the datasheet's peaks of a device by its name, or None: no peak is invented.

    A part of a device (MIG) has another name and so none of the whole device's peaks.
    """
    return _BY_NAME.get(_plain(device))
