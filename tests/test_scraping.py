"""The scraper against real HTTP servers: real pages, restarts, slow and hostile targets."""

import asyncio
import gzip
import json
import ssl
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import prometheus_client
import pytest
from aiohttp import web
from conftest import free_port
from debian_packages import program
from otlp_messages import METRICS, decode
from prometheus_client.parser import text_string_to_metric_families as text_format
from scraping_pages import PAGES, expected_points, labels_of, points, rows_of, value_of

from perfledger.collectors.otlp_rows import Signal
from perfledger.collectors.scraping.config import ScrapeConfig, ScrapeLimits
from perfledger.collectors.scraping.fetching import open_session
from perfledger.collectors.scraping.job import share
from perfledger.collectors.scraping.scraper import Scraper
from perfledger.collectors.scraping.targets import make_target
from perfledger.collectors.transport.otlp_receiver import Refusal, overloaded
from perfledger.schema.errors import UsageError

NOW_NS = 1_796_100_000_000_000_000
SECRET = "s3cret-token"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class KeptRequests:
    """A sink that keeps requests; `refusing` and `failing` say what it does instead."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.refusals = 0
        self.held_bytes = 0
        self.most_held_bytes = 0
        self.refusing = False
        self.failing = False

    def check_room(self) -> None:
        if self.refusing:
            raise overloaded()

    def reserve(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)

    def release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes

    def refused(self, refusal: Refusal) -> None:
        self.refusals += 1

    async def export(self, signal: Signal, body: bytes) -> object:
        assert signal is METRICS
        if self.failing:
            raise RuntimeError("a defect")
        self.requests.append(body)
        return decode(signal, body)

    def of(self, instance: str) -> list[list[dict[str, object]]]:
        """Return the rows of each scrape of a target, in order."""
        found = [rows_of(request) for request in self.requests]
        return [rows for rows in found if rows[0]["service_instance_id"] == instance]


@asynccontextmanager
async def serving(answer: Answer, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Run an HTTP server; yield HOST:PORT."""
    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    yield "{}:{}".format(*runner.addresses[0][:2])
    await runner.cleanup()


@asynccontextmanager
async def speaking(speak: Speak) -> AsyncIterator[str]:
    """Run a server that speaks as it likes after it was asked."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await speak(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    yield "{}:{}".format(*server.sockets[0].getsockname()[:2])
    server.close()


@asynccontextmanager
async def scraping(sink: KeptRequests, *configs: ScrapeConfig) -> AsyncIterator[Scraper]:
    """Scrape while the body runs; ending must not wait for a target."""
    scraper = Scraper(configs, refresh_s=0.05, clock_ns=lambda: NOW_NS)
    stop = asyncio.Event()
    running = asyncio.create_task(scraper.run(sink, stop))
    try:
        yield scraper
    finally:
        stop.set()
        async with asyncio.timeout(20):
            await running
    assert sink.held_bytes == 0


async def until(ready: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not ready():
            await asyncio.sleep(0.02)


def job(*targets: str, name: str = "llm", **settings: object) -> ScrapeConfig:
    said = {"interval_s": 0.1, "timeout_s": 20, **settings}
    return ScrapeConfig(job=name, targets=targets, **said)  # type: ignore[arg-type]


def page(body: bytes, content_type: str = "text/plain; version=0.0.4") -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Type": content_type})

    return answer


def test_a_real_page_of_vllm_arrives_whole(shared_data: Path) -> None:
    body = (shared_data / "engines" / "vllm_0.32" / "after.txt").read_bytes()
    asked: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(dict(request.headers))
        headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
        return web.Response(body=gzip.compress(body), headers=headers)

    async def main() -> None:
        async with serving(answer) as target, scraping(sink, job(target)):
            await until(lambda: sink.requests)

    sink = KeptRequests()
    asyncio.run(main())
    assert points(sink.requests[0]) == expected_points(text_format(body.decode()), NOW_NS)
    rows = rows_of(sink.requests[0])
    assert (value_of(rows, "up"), value_of(rows, "scrape_samples_scraped")) == (1.0, 519.0)
    accept = [kind.split(";")[0] for kind in asked[0]["Accept"].split(",")]
    assert accept[:2] == ["application/openmetrics-text", "text/plain"]
    assert asked[0]["Accept-Encoding"] == "gzip"
    assert "Authorization" not in asked[0] and "Cookie" not in asked[0]


def test_a_real_client_library_is_scraped_across_a_restart() -> None:
    def start(tokens: int) -> tuple[object, object]:
        registry = prometheus_client.CollectorRegistry()
        counter = prometheus_client.Counter("tokens", "Tokens", registry=registry)
        counter.inc(tokens, exemplar={"trace_id": "ab" * 16})
        server, thread = prometheus_client.start_http_server(port, "127.0.0.1", registry)
        return server, thread

    async def main() -> Counter[str]:
        async with scraping(sink, job(f"127.0.0.1:{port}")) as scraper:
            for tokens in (9, 5):
                server, thread = await asyncio.to_thread(start, tokens)
                await until(lambda: value_seen(float(tokens)))  # noqa: B023
                server.shutdown()  # type: ignore[attr-defined]
                server.server_close()  # type: ignore[attr-defined]
                thread.join()  # type: ignore[attr-defined]
                await until(lambda: value_of(rows_of(sink.requests[-1]), "up") == 0.0)
            return scraper.counts()

    def value_seen(value: float) -> bool:
        return value in [
            row["value"]
            for request in sink.requests[-1:]
            for row in rows_of(request)
            if row["name"] == "tokens_total"
        ]

    sink, port = KeptRequests(), free_port()
    counts = asyncio.run(main())
    points_seen = [
        (row["value"], row["start_ns"])
        for request in sink.requests
        for row in rows_of(request)
        if row["name"] == "tokens_total"
    ]
    # Each life: its value from its own start, then a mark that it is not told any more.
    lives = list(dict.fromkeys(points_seen))
    assert [value for value, _ in lives] == [9.0, None, 5.0]
    assert lives[0][1] < lives[2][1] < NOW_NS  # type: ignore[operator]
    assert counts["scrape_resets"] == 1
    assert counts["scrapes_failed"] >= 2
    assert any(b"\xab" * 16 in request for request in sink.requests)


async def _half_open(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def _drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"a 1\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def _endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"# HELP a " + b"x" * 60_000 + b"\n")
        await writer.drain()


def _says(answer: bytes) -> Speak:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return speak


def _gzip_answer(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


BOMB = gzip.compress(b"0" * 200_000_000, 9)
OK = b"HTTP/1.1 200 OK\r\n"
HOSTILE: dict[str, tuple[Speak, str]] = {
    "half-open": (_half_open, "timeout"),
    "drip": (_drip, "timeout"),
    "endless": (_endless, "too_large"),
    "bomb": (_says(_gzip_answer(BOMB)), "too_large"),
    "many members": (_says(_gzip_answer(gzip.compress(b"") * 1000)), "encoding"),
    "not gzip": (_says(_gzip_answer(b"a 1\n")), "encoding"),
    "half a gzip": (_says(_gzip_answer(gzip.compress(b"a 1\n")[:-4])), "encoding"),
    "zstd": (_says(OK + b"Content-Encoding: zstd\r\n\r\na 1\n"), "encoding"),
    "cut": (_says(OK + b"Content-Length: 99\r\n\r\na 1\n"), "connection"),
    "no http": (_says(b"\x00\xff garbage\r\n\r\n"), "connection"),
    "endless header": (_says(b"HTTP/1.1 200 OK\r\nA: " + b"x" * 1_000_000), "connection"),
    "garbage": (_says(OK + b"\r\n" + bytes(range(256)) * 99), "not_metrics"),
    "html": (_says(OK + b"\r\n<html>\n<p>Hello\n"), "not_metrics"),
    "error": (_says(b"HTTP/1.1 500 No\r\n\r\na 1\n"), "http_500"),
    "redirect": (_says(b"HTTP/1.1 302 F\r\nLocation: http://127.0.0.1:9/\r\n\r\n"), "http_302"),
    "no end": (_says(OK + b"Content-Type: application/openmetrics-text\r\n\r\na 1\n"), "truncated"),
    "too many": (_says(OK + b"\r\n" + b"".join(b"a%d 1\n" % i for i in range(99))), ""),
}
HOSTILE["too many"] = (HOSTILE["too many"][0], "too_many_series")


def test_hostile_targets_are_down_and_harm_no_other() -> None:
    limits = ScrapeLimits(max_bytes=1_000_000, max_series=50)

    async def main() -> Counter[str]:
        configs = []
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            for name, (speak, reason) in HOSTILE.items():
                target = await stack.enter_async_context(speaking(speak))
                timeout_s = 0.5 if reason == "timeout" else 20
                configs.append(job(target, name=name, timeout_s=timeout_s, limits=limits))
            configs.append(job(f"127.0.0.1:{free_port()}", name="refused"))
            healthy = await stack.enter_async_context(serving(page(b"ok 1\n")))
            configs.append(job(healthy, name="healthy"))
            async with scraping(sink, *configs) as scraper:
                await until(lambda: len({row_job(r) for r in sink.requests}) == len(configs))
                seen = len(sink.of(healthy))
                await until(lambda: len(sink.of(healthy)) >= seen + 3)
                return scraper.counts()

    def row_job(request: bytes) -> object:
        return rows_of(request)[0]["service_name"]

    sink = KeptRequests()
    counts = asyncio.run(main())
    failures: dict[object, set[str]] = {}
    for request in sink.requests:
        rows = rows_of(request)
        reasons = {
            dict(labels_of(row))["error.type"]
            for row in rows
            if row["name"] == "perfledger.scrape.failures"
        }
        assert value_of(rows, "up") == (0.0 if reasons else 1.0)
        failures.setdefault(row_job(request), set()).update(reasons)
    expected = {name: {reason} for name, (_, reason) in HOSTILE.items()}
    assert failures == {**expected, "refused": {"connection"}, "healthy": set()}
    assert counts["scrape_defects"] == 0
    assert sink.most_held_bytes < 4 * limits.max_bytes


def test_a_full_store_loses_scrapes_and_says_how_many() -> None:
    async def main() -> Counter[str]:
        sink.refusing = True
        async with serving(page(b"ok 1\n")) as target, scraping(sink, job(target)) as scraper:
            await until(lambda: sink.refusals >= 2)
            sink.refusing = False
            await until(lambda: len(sink.requests) >= 2)
            return scraper.counts()

    sink = KeptRequests()
    counts = asyncio.run(main())
    assert counts["scrapes_refused"] == sink.refusals >= 2
    assert counts["scrapes"] >= counts["scrapes_refused"] + 2
    assert value_of(rows_of(sink.requests[0]), "ok") == 1.0


def test_a_defect_of_the_sink_is_counted_and_scraping_goes_on() -> None:
    async def main() -> Counter[str]:
        sink.failing = True
        async with serving(page(b"ok 1\n")) as target, scraping(sink, job(target)) as scraper:
            await until(lambda: scraper.counts()["scrape_defects"] >= 2)
            sink.failing = False
            await until(lambda: sink.requests)
            return scraper.counts()

    sink = KeptRequests()
    assert asyncio.run(main())["scrapes_failed"] == 0


def test_targets_come_and_go_with_their_file(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"

    def write(*targets: str) -> None:
        other = tmp_path / "new"
        other.write_text(json.dumps([{"targets": targets, "labels": {"zone": "a"}}]))
        other.replace(file)

    async def main() -> None:
        config = job(files=(str(file),))
        async with serving(page(b"a 1\n")) as first, serving(page(b"b 1\n")) as second:
            async with scraping(sink, config) as scraper:
                await until(lambda: scraper.counts()["scrapes"] == 0)
                write(first)
                await until(lambda: sink.of(first))
                write(second)
                await until(lambda: sink.of(second))
                assert scraper.counts()["scrape_targets"] == 1
                file.write_text("{")
                await until(lambda: scraper.counts()["scrape_discovery_failures"])
                seen = len(sink.of(second))
                await until(lambda: len(sink.of(second)) > seen)
            told = {row["name"]: row["value"] for row in sink.of(first)[-1]}
            own = ("up", "scrape_duration_seconds", "scrape_samples_scraped")
            assert told == dict.fromkeys(("a", *own))
            (resource,) = {row["resource_attributes"] for row in sink.of(second)[0]}
            assert json.loads(str(resource))["zone"] == "a"

    sink = KeptRequests()
    asyncio.run(main())


def test_a_bearer_token_is_read_anew_for_each_scrape(tmp_path: Path) -> None:
    file = tmp_path / "token"
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Authorization"])
        return web.Response(text="ok 1\n")

    async def main() -> None:
        async with serving(answer) as target:
            config = job(target, bearer_token_file=file)
            async with scraping(sink, config):
                await until(lambda: sink.requests)
                assert asked == []
                for token in (SECRET, "another"):
                    file.write_text(f"{token}\n")
                    await until(lambda: f"Bearer {token}" in asked)  # noqa: B023
                file.write_text("two\nlines")
                seen = len(asked)
                await until(lambda: reasons(sink.requests[-1])["bearer_token_file"] > 1)
                assert len(asked) <= seen + 1

    def reasons(request: bytes) -> Counter[str]:
        return Counter(
            {
                dict(labels_of(row))["error.type"]: int(str(row["value"]).removesuffix(".0"))
                for row in rows_of(request)
                if row["name"] == "perfledger.scrape.failures"
            }
        )

    sink = KeptRequests()
    asyncio.run(main())
    assert set(reasons(sink.requests[-1])) == {"bearer_token_file"}
    assert not any(SECRET.encode() in request for request in sink.requests)


def test_a_ca_file_that_cannot_be_used_is_a_usage_error(tmp_path: Path) -> None:
    async def main() -> None:
        open_session(job("h:1", ca_file=tmp_path / "none.pem"))

    with pytest.raises(UsageError, match="ca_file"):
        asyncio.run(main())


def test_tls_is_verified_with_the_ca_file(tmp_path: Path) -> None:
    openssl = program("openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=engine"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    subprocess.run([openssl, *made, "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def main() -> None:
        async with serving(page(b"ok 1\n"), context) as target:
            known = job(f"https://{target}/metrics", name="known", ca_file=certificate)
            unknown = job(target, name="unknown", scheme="https")
            async with scraping(sink, known, unknown):
                await until(lambda: len({row["service_name"] for row in first_rows()}) == 2)

    def first_rows() -> list[dict[str, object]]:
        return [rows_of(request)[0] for request in sink.requests]

    sink = KeptRequests()
    asyncio.run(main())
    ups = {(rows[0]["service_name"], value_of(rows, "up")) for rows in map(rows_of, sink.requests)}
    assert ups == {("known", 1.0), ("unknown", 0.0)}
    (reason,) = {
        dict(labels_of(row))["error.type"]
        for request in sink.requests
        for row in rows_of(request)
        if row["name"] == "perfledger.scrape.failures"
    }
    assert reason == "tls"


def test_a_page_of_openmetrics_is_told_from_its_content_type() -> None:
    body = (PAGES / "registry.openmetrics.txt").read_bytes()

    async def main() -> None:
        answer = page(body, "application/openmetrics-text; version=1.0.0; charset=utf-8")
        async with serving(answer) as target, scraping(sink, job(target)):
            await until(lambda: sink.requests)

    sink = KeptRequests()
    asyncio.run(main())
    kinds = {row["name"]: row["kind"] for row in rows_of(sink.requests[0])}
    assert (kinds["build_info"], kinds["ttft_seconds"]) == ("sum", "histogram")


def test_a_real_node_exporter() -> None:
    target = f"127.0.0.1:{free_port()}"
    command = [program("prometheus-node-exporter"), f"--web.listen-address={target}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def main() -> Counter[str]:
        async with scraping(sink, job(target, interval_s=0.5)) as scraper:
            await until(lambda: len(ups()) >= 2)
            return scraper.counts()

    def ups() -> list[list[dict[str, object]]]:
        return [rows for rows in sink.of(target) if value_of(rows, "up") == 1.0]

    sink = KeptRequests()
    try:
        counts = asyncio.run(main())
    finally:
        process.terminate()
        process.wait()
    rows = ups()[-1]
    assert counts["scrape_rejected"] == counts["scrape_defects"] == 0
    told = {row["name"]: row["kind"] for row in rows}
    assert told["node_cpu_seconds_total"] == "sum"
    assert told["node_memory_MemTotal_bytes"] == "gauge"
    assert told["go_gc_duration_seconds"] == "summary"
    samples = value_of(rows, "scrape_samples_scraped")
    # All but the creation times; a summary's five quantiles, sum and count are six rows here.
    assert isinstance(samples, float) and 300 < len(rows) <= samples + 6


def test_the_targets_of_a_job_are_not_asked_all_at_once() -> None:
    config = ScrapeConfig(job="llm")
    moments = [share(make_target(config, f"10.0.0.{host}:8000", {})) for host in range(200)]
    assert all(0 <= moment < 1 for moment in moments)
    in_each_fifth = Counter(int(moment * 5) for moment in moments)
    assert all(in_each_fifth[fifth] > 10 for fifth in range(5))
