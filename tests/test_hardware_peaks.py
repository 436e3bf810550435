"""The datasheet table: dense, one direction, exact names, and nothing for what is not in it."""

import pytest

from perfledger.schema.edges import EDGE
from perfledger.schema.hardware_peaks import PEAKS, peak_of


@pytest.mark.parametrize(
    ("device", "tera_flops", "memory_gb_s", "scale_up_gb_s", "ridge"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 2_039, 300, 153),
        ("NVIDIA H100 80GB HBM3", 989.5, 3_350, 450, 295),
        ("nvidia h100  80gb hbm3", 989.5, 3_350, 450, 295),
        ("NVIDIA H200", 989.5, 4_800, 450, 206),
        ("NVIDIA B200", 2_250, 8_000, 900, 281),
        ("AMD Instinct MI300X", 1_307.4, 5_300, 448, 247),
    ],
)
def test_the_peaks_of_each_device(
    device: str, tera_flops: float, memory_gb_s: int, scale_up_gb_s: int, ridge: int
) -> None:
    peak = peak_of(device)
    assert peak is not None
    assert peak.flops["bfloat16"] == round(tera_flops * 1e12)
    assert peak.bytes_per_s("device_memory") == memory_gb_s * 10**9
    assert peak.bytes_per_s("scale_up") == scale_up_gb_s * 10**9
    assert round(peak.ridge("bfloat16") or 0) == ridge


@pytest.mark.parametrize(
    "device",
    ["", "NVIDIA H100", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090", "H300", "cpu"],
)
def test_a_device_that_is_not_in_the_table_has_no_peak(device: str) -> None:
    assert peak_of(device) is None


def test_every_row_has_its_source_and_names_of_its_own() -> None:
    names = [name.casefold() for peak in PEAKS for name in peak.names]
    assert len(names) == len(set(names))
    for peak in PEAKS:
        assert peak.source and peak.name == peak.names[0]
        assert peak.memory_bytes < peak.memory_bytes_per_s
        assert peak_of(peak.name) is peak


def test_what_a_sheet_does_not_say_is_none() -> None:
    peak = peak_of("NVIDIA H200")
    assert peak is not None
    assert peak.ridge("fp4") is None
    silent = set(EDGE) - {"device_memory", "scale_up", "host_device"}
    assert {edge: peak.bytes_per_s(edge) for edge in silent} == dict.fromkeys(silent)
