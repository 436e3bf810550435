"""The demo as a user runs it, on the small checkpoint: every part at once, and what it leaves."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from perfledger import analyzers
from perfledger.analyzers.attribution import attribute
from perfledger.schema.stages import STAGE_COLUMNS
from perfledger.schema.store import Store

# The whole demo runs before the first of these tests; a busy machine takes minutes for it.
pytestmark = pytest.mark.timeout(900)

QUIET_TORCH = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
WORKLOAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:0{at % 10}.{at}000000,{100 + 40 * at},{4 + 2 * at}\n" for at in range(10)
)


def demo(*arguments: str) -> list[str]:
    return [
        sys.executable,
        "-P",
        "-m",
        "perfledger",
        "demo",
        "--model",
        "reference-small",
        *arguments,
    ]


@dataclass(frozen=True)
class Finished:
    """A demo that has ended."""

    store: Path
    output: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "workload.csv").write_text(WORKLOAD)
    store = folder / "store"
    run = subprocess.run(
        demo("--workload", str(folder / "workload.csv"), "--store", str(store), "--pairs", "6"),
        capture_output=True,
        text=True,
        env={**os.environ, **QUIET_TORCH},
        timeout=800,
    )
    assert run.returncode == 0, run.stderr + run.stdout
    return Finished(store, run.stdout)


def test_it_says_where_the_time_went_and_a_verdict_in_80_columns(finished: Finished) -> None:
    lines = finished.output.splitlines()
    assert [line for line in lines if re.match(r"\d/4 ", line)] == [
        line for line in lines if line[:3] in ("1/4", "2/4", "3/4", "4/4")
    ]
    assert any(line.startswith("p95: the longest stage is ") for line in lines)
    assert any(line.startswith(("verdict ", "verdict\t")) for line in lines)
    shown = [line for line in lines if str(finished.store) not in line and "→" not in line]
    assert max(len(line) for line in shown) <= 80
    assert str(finished.store / "report.html") in finished.output
    assert str(finished.store / "trace.json") in finished.output


def test_the_stages_of_every_request_add_up_and_little_is_unattributed(
    finished: Finished,
) -> None:
    requests = attribute(analyzers.open(str(finished.store))).requests
    assert requests.height > 10
    totals = requests.select(*STAGE_COLUMNS).sum_horizontal()
    assert totals.to_list() == requests["e2e_ns"].to_list()
    assert requests["unattributed_ns"].sum() <= 0.03 * requests["e2e_ns"].sum()


def test_the_stored_requests_are_those_recomputed(finished: Finished) -> None:
    found = attribute(analyzers.open(str(finished.store)))
    assert (found.completeness.differing, found.completeness.id_conflicts) == (0, 0)
    assert found.completeness.losses() == []


def test_every_run_is_kept_with_raw_samples(finished: Finished) -> None:
    runs = Store.at(str(finished.store)).scan("runs").collect()
    kinds = dict(runs.group_by("kind").len().iter_rows())
    assert kinds == {"load": 1, "rerun": 13}
    (verdict,) = [json.loads(v) for v in runs["verdict"].to_list() if v is not None]
    assert verdict["outcome"] in ("supported", "refuted", "inconclusive")


def test_the_trace_loads(finished: Finished) -> None:
    document = json.loads((finished.store / "trace.json").read_text())
    names = {event["name"] for event in document["traceEvents"] if event["ph"] == "X"}
    expected = {"chat", "template", "tokenize", "queue", "context", "prefill", "decode", "stream"}
    assert expected <= names


def test_the_report_is_whole_in_a_browser_and_asks_for_nothing(finished: Finished) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        assert os.environ.get("CI") != "true", "chromium is missing; .ci/run installs it"
        pytest.skip("no chromium here")
    page = finished.store / "report.html"
    text = page.read_text()
    assert not re.search(r"""(?:src|href)\s*=|url\(|<script|@import""", text)
    run = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            f"--user-data-dir={finished.store}/browser",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    for heading in (
        "Where the time went",
        "Time to first token",
        "What moved, and over what",
        "Under which roof",
        "Energy",
        "The rerun",
        "Definitions",
    ):
        assert heading in run.stdout
    # Five of the requests and the verdict; the ledger's two are for a page and for a phone each.
    assert len(re.findall("<svg", run.stdout)) == 5 + 2 * 2
    assert "nothing to draw" not in run.stdout


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        demo("--store", str(tmp_path / "store"), "--no-rerun"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **QUIET_TORCH},
    )
    yield process
    process.kill()
    process.wait()


def test_ctrl_c_ends_all_that_it_started(started: subprocess.Popen[bytes]) -> None:
    root = psutil.Process(started.pid)
    family: set[psutil.Process] = set()
    deadline = time.monotonic() + 60
    while len(family) < 4 and time.monotonic() < deadline:  # collector, API, engine, exporter
        family |= set(root.children(recursive=True))
        time.sleep(0.1)
    assert len(family) >= 4
    started.send_signal(signal.SIGINT)
    assert started.wait(40) == 130
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


def test_a_workload_that_cannot_be_read_ends_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("when,how_long\n1,2\n")
    run = subprocess.run(
        demo("--workload", str(path), "--store", str(tmp_path / "store")),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2
    assert "bad.csv" in run.stderr
    assert not (tmp_path / "store").exists()
