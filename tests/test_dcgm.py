"""Pages of dcgm-exporter: true types and units, no sentinels, and our names beside DCGM's.

The page is synthetic (written by hand in the exporter's format); it comes over a real HTTP server
and goes through the scraper and the collector's decoder. One sample is NVIDIA's own, of its README.
"""

import asyncio
import csv
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import polars as pl
import prometheus_client
import pytest
from conftest import running_collector, wait_until
from hypothesis import given
from hypothesis import strategies as st
from otlp_messages import decode
from scraping_pages import PAGES, Point, labels_of, rows_of, value_of

from perfledger.collectors.otlp_rows import Signal
from perfledger.collectors.scraping.config import ScrapeConfig, ScrapeLimits
from perfledger.collectors.scraping.dcgm import NO_VALUE, PREFIX, is_blank, typed
from perfledger.collectors.scraping.dcgm_fields import DCGM_FIELDS
from perfledger.collectors.scraping.exposition import Exposition, parse
from perfledger.collectors.scraping.scraper import Scraper
from perfledger.schema.store import Store

PAGE = PAGES / "dcgm_synthetic.txt"


def read(text: str) -> Exposition:
    return typed(parse(text.encode(), ScrapeLimits(), openmetrics=False, known={}))


def told(rows: list[Point]) -> set[tuple[object, ...]]:
    """Return what we name: name, kind, unit, value, labels."""
    return {
        (row["name"], row["kind"], row["unit"], row["value"], *sorted(labels_of(row)))
        for row in rows
        if str(row["name"]).startswith(("hw.", "perfledger.gpu."))
    }


AA, BB = ("hw.id", "GPU-aa"), ("hw.id", "GPU-bb")
GPU = ("hw.type", "gpu")
OURS = {
    ("perfledger.gpu.clock", "gauge", "Hz", 1.98e9, AA, ("perfledger.gpu.clock.domain", "sm")),
    ("perfledger.gpu.clock", "gauge", "Hz", 3.45e8, BB, ("perfledger.gpu.clock.domain", "sm")),
    ("hw.temperature", "gauge", "Cel", 41.0, BB, ("hw.sensor_location", "memory"), GPU),
    ("hw.temperature", "gauge", "Cel", 63.0, AA, ("hw.sensor_location", "gpu"), GPU),
    ("hw.power", "gauge", "W", 512.25, AA, GPU),
    ("hw.energy", "sum", "J", 987654321.098, AA, GPU),
    ("hw.energy", "sum", "J", 1.5, BB, GPU),  # told for two MIG instances, counted once
    ("hw.gpu.utilization", "gauge", "1", 0.97, ("hw.gpu.task", "general"), AA),
    ("hw.gpu.utilization", "gauge", "1", 0.0, ("hw.gpu.task", "encoder"), AA),
    ("hw.gpu.memory.usage", "gauge", "By", 70000.0 * 2**20, AA),
    ("hw.gpu.memory.usage", "gauge", "By", 12.0 * 2**20, BB, ("perfledger.gpu.instance", "7")),
    ("hw.gpu.memory.usage", "gauge", "By", 13.0 * 2**20, BB, ("perfledger.gpu.instance", "8")),
    ("hw.errors", "sum", "{error}", 2.0, ("error.type", "pcie_replay"), AA, GPU),
    (
        *("perfledger.gpu.io.total_rate", "gauge", "By/s", 201777 * 1_024_000.0),
        *(AA, ("perfledger.edge", "scale_up")),
    ),
    ("perfledger.gpu.memory.bandwidth.share", "gauge", "1", 0.73125, AA),
    ("perfledger.gpu.activity", "gauge", "1", 0.125, AA, ("perfledger.gpu.unit", "tensor")),
    (
        *("perfledger.gpu.io.rate", "gauge", "By/s", 1234567890.0, AA),
        *(("network.io.direction", "transmit"), ("perfledger.edge", "host_device")),
    ),
    (
        *("perfledger.gpu.io.rate", "gauge", "By/s", 99e9, AA),
        *(("network.io.direction", "receive"), ("perfledger.edge", "scale_up")),
    ),
    (
        *("perfledger.gpu.throttle.time", "sum", "ns", 140737488355328000.0, AA),
        ("perfledger.gpu.reason", "power_cap"),
    ),
}
# What DCGM itself calls them: (type as the page says it, what it is), unit.
RAW = {
    "DCGM_FI_DEV_SM_CLOCK": ("gauge", "MHz"),
    "DCGM_FI_DEV_MEMORY_TEMP": ("gauge", "Cel"),
    "DCGM_FI_DEV_GPU_TEMP": ("gauge", "Cel"),
    "DCGM_FI_DEV_POWER_USAGE": ("gauge", "W"),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("sum", "mJ"),
    "DCGM_FI_DEV_GPU_UTIL": ("gauge", "%"),
    "DCGM_FI_DEV_ENC_UTIL": ("gauge", "%"),
    "DCGM_FI_DEV_FB_USED": ("gauge", "MiBy"),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": ("sum", "{error}"),
    "DCGM_FI_DEV_XID_ERRORS": ("gauge", None),
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": ("gauge", None),  # the page says counter
    "DCGM_FI_PROF_DRAM_ACTIVE": ("gauge", "1"),
    "DCGM_FI_PROF_TENSOR_UTIL_RATIO": ("gauge", "1"),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("gauge", "By/s"),  # the page says counter
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("gauge", "By/s"),
    "DCGM_FI_DEV_POWER_VIOLATION": ("sum", "ns"),
    "DCGM_FI_DEV_NEW_THING": ("gauge", None),
}


class Kept:
    """A sink that keeps requests."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []

    def check_room(self) -> None: ...
    def reserve(self, size_bytes: int) -> None: ...
    def release(self, size_bytes: int) -> None: ...
    def refused(self, refusal: object) -> None: ...

    async def export(self, signal: Signal, body: bytes) -> object:
        self.requests.append(body)
        return decode(signal, body)

    async def more(self, count: int) -> list[Point]:
        """Wait for so many more pages; return the rows of the last one."""
        enough = len(self.requests) + count
        async with asyncio.timeout(60):
            while len(self.requests) < enough:
                await asyncio.sleep(0.02)
        return rows_of(self.requests[enough - 1])


@asynccontextmanager
async def scraping(port: int) -> AsyncIterator[Kept]:
    """Scrape a real server while the body runs."""
    config = ScrapeConfig(job="dcgm", targets=(f"127.0.0.1:{port}",), interval_s=0.1, timeout_s=20)
    sink, stop = Kept(), asyncio.Event()
    running = asyncio.create_task(Scraper((config,)).run(sink, stop))
    try:
        yield sink
    finally:
        stop.set()
        await running


@contextmanager
def serving_file(path: Path) -> Iterator[int]:
    """Run a web server that answers with a page as dcgm-exporter does; yield its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(path.read_bytes())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def page_rows() -> list[Point]:
    """Return the rows that the synthetic page becomes on its way over HTTP."""

    async def main(port: int) -> list[Point]:
        async with scraping(port) as sink:
            return await sink.more(1)

    with serving_file(PAGE) as port:
        return asyncio.run(main(port))


def test_a_page_gets_types_units_and_our_names() -> None:
    rows = page_rows()
    assert told(rows) == OURS
    raw = {
        str(row["name"]): (row["kind"], row["unit"] or None)
        for row in rows
        if str(row["name"]).startswith(PREFIX)
    }
    assert raw == RAW
    assert value_of(rows, "perfledger.scrape.rejected", reason=NO_VALUE) == 5
    assert value_of(rows, "other_bytes") == float(2**63)
    assert max(float(str(row["value"])) for row in rows if row["name"] != "other_bytes") < 2**62


def test_a_collector_keeps_a_page_as_points(tmp_path: Path) -> None:
    config = tmp_path / "perfledger.toml"
    with serving_file(PAGE) as port:
        config.write_text(
            f'[[scrape]]\njob = "dcgm"\ntargets = ["127.0.0.1:{port}"]\ninterval_s = 0.2\n'
        )
        with running_collector(tmp_path, "--config", str(config)) as collector:
            points = Store.at(str(collector.store))
            wait_until(lambda: points.visible("points") != [], 60, "points")
    names = pl.col("name").str.starts_with("hw.") | pl.col("name").str.starts_with("perfledger.gpu")
    rows = points.scan("points").filter(names).sort("time_ns").collect()
    assert {row["service_name"] for row in rows.to_dicts()} == {"dcgm"}
    assert told(rows.to_dicts()) == OURS


def test_no_sample_stands_for_two_and_none_is_lost() -> None:
    """Twice the SM clock for two containers, each MIG instance's energy: raw they all stay."""
    rows = page_rows()
    lines = [line for line in PAGE.read_text().splitlines() if not line.startswith("#")]
    kept = [row for row in rows if str(row["name"]).startswith((PREFIX, "other"))]
    assert len(kept) == len(lines) - 5
    assert not [row for row in rows if row["name"] == "perfledger.scrape.rejected"][1:]


def test_a_real_server_that_restarts_its_counter_and_loses_a_value() -> None:
    """Real Prometheus text over a real HTTP server: prometheus_client's."""
    registry = prometheus_client.CollectorRegistry()
    gauge = partial(prometheus_client.Gauge, labelnames=["gpu", "UUID"], registry=registry)
    # A configuration that calls the energy a gauge: it is a counter all the same.
    energy = gauge("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "mJ")
    power = gauge("DCGM_FI_DEV_POWER_USAGE", "W")
    energy.labels("0", "GPU-aa").set(5_000)
    power.labels("0", "GPU-aa").set(300)

    async def main(port: int) -> list[list[Point]]:
        async with scraping(port) as sink:
            pages = [await sink.more(1)]
            energy.labels("0", "GPU-aa").set(8_000)
            pages.append(await sink.more(2))  # the first may have been asked for before
            energy.labels("0", "GPU-aa").set(1_000)  # the driver was loaded anew
            power.labels("0", "GPU-aa").set(9223372036854775794)
            await sink.more(2)
            return [*pages, await sink.more(1)]

    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    try:
        pages = asyncio.run(main(server.server_port))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    first, grown, anew = ({str(row["name"]): row for row in rows} for rows in pages)
    told = [
        (page["hw.energy"]["kind"], page["hw.energy"]["value"]) for page in (first, grown, anew)
    ]
    assert told == [("sum", 5.0), ("sum", 8.0), ("sum", 1.0)]
    assert first["hw.energy"]["start_ns"] == grown["hw.energy"]["start_ns"]
    # It began anew, and not before the last time that it was seen higher.
    assert anew["hw.energy"]["start_ns"] >= grown["hw.energy"]["time_ns"]
    assert first["hw.power"]["value"] == 300.0 and "hw.power" not in anew
    rejected = value_of(pages[-1], "perfledger.scrape.rejected", reason=NO_VALUE)
    assert isinstance(rejected, float) and rejected >= 2


def test_the_sample_that_nvidia_shows(shared_data: Path) -> None:
    """Its README's page has "not supported" as a temperature, and lines that are no page."""
    page = read((shared_data / "hardware" / "readme_sample.prom").read_text())
    names = {family.header.name: family for family in page.families}
    assert [s.value for s in names["DCGM_FI_DEV_MEMORY_TEMP"].samples[""]] == []
    (clock, _) = names["perfledger.gpu.clock"].samples[""]
    uuid = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
    assert (clock.value, dict(clock.series.labels)["hw.id"]) == (139e6, uuid)
    assert "hw.temperature" not in names and page.rejected[NO_VALUE] == 1


def test_every_number_of_the_default_configuration_has_a_type(shared_data: Path) -> None:
    """Of the exporter's default counters only those are unknown that are no quantity."""
    text = (shared_data / "hardware" / "default-counters.csv").read_text()
    rows = csv.reader(line for line in text.splitlines() if line and not line.startswith("#"))
    asked = {row[0].strip(): row[1].strip() for row in rows}
    numbers = {name: kind for name, kind in asked.items() if kind != "label"}
    unknown = {name for name in numbers if name not in DCGM_FIELDS}
    assert unknown == {"DCGM_FI_DEV_VGPU_LICENSE_STATUS", "DCGM_FI_DEV_ROW_REMAP_FAILURE"}
    wrong = {
        name
        for name, kind in numbers.items()
        if name in DCGM_FIELDS and DCGM_FIELDS[name].kind != kind
    }
    assert wrong == {"DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"}


@pytest.mark.parametrize("name", sorted(DCGM_FIELDS))
def test_every_field_scales_to_its_metric(name: str) -> None:
    field = DCGM_FIELDS[name]
    page = read(f'# TYPE {name} counter\n{name}{{UUID="G"}} 3\n')
    raw, *ours = page.families
    assert (raw.header.type, raw.header.unit) == (field.kind, field.unit)
    if field.metric is None:
        assert ours == []
        return
    (family,) = ours
    assert (family.header.name, family.header.unit) == (field.metric.name, field.metric.unit)
    (sample,) = family.samples[""]
    assert sample.value == 3 * field.times / field.over
    declared = {key.strip() for key in field.metric.attribute.split(",")}
    assert {key for key, _ in sample.series.labels} <= declared


BLANKS = [*(2**47 + why for why in range(4)), *(2**63 - 16 + why for why in range(4))]


@given(st.one_of(st.sampled_from(BLANKS), st.integers(0, 2**62), st.floats(0, 1e18)))
def test_only_what_dcgm_calls_blank_is_dropped(value: float) -> None:
    assert is_blank(float(value)) == (float(value) in {float(blank) for blank in BLANKS})


def test_what_is_not_one_gpus_keeps_its_own_name_only() -> None:
    """A link's rate, a switch's temperature, a Grace CPU's power: not a GPU's total."""
    page = read(
        'DCGM_FI_PROF_NVLINK_TX_BYTES{nvlink="1",gpu="0",UUID="GPU-aa"} 5\n'
        'DCGM_FI_DEV_POWER_USAGE{cpu="0"} 5\nDCGM_FI_DEV_GPU_TEMP{UUID=""} 5\n'
    )
    assert [family.header.name for family in page.families] == [
        *("DCGM_FI_PROF_NVLINK_TX_BYTES", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP")
    ]


def test_other_pages_stay_as_they_are(shared_data: Path) -> None:
    text = (shared_data / "engines" / "vllm_0.32" / "after.txt").read_bytes()
    page = parse(text, ScrapeLimits(), openmetrics=False, known={})
    assert typed(page) is page


def test_a_page_that_lies_about_its_types_is_survived() -> None:
    """A field of DCGM as a histogram: no field of ours is made of it."""
    page = read(
        "# TYPE DCGM_FI_DEV_GPU_TEMP histogram\n"
        'DCGM_FI_DEV_GPU_TEMP_bucket{UUID="G",le="+Inf"} 4\n'
        'DCGM_FI_DEV_GPU_TEMP_count{UUID="G"} 4\n'
    )
    (family,) = page.families
    assert family.header.type == "histogram"
