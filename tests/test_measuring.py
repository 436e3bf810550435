"""record and measure: known gaps come back, raw samples are kept, nothing is made up."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfledger import measure, record
from perfledger.collectors.energy import NoMeter, RaplMeter, find_meter
from perfledger.measuring import Sample, _summarize
from perfledger.schema.errors import NoDataError, UsageError
from perfledger.schema.manifest import Manifest
from perfledger.schema.store import Store

EXAMPLE = Path(__file__).parent.parent / "examples" / "record_and_measure.py"


def test_the_summary_of_known_samples_is_exact() -> None:
    samples = (
        Sample((900, 901), 950, None, warmup=True),
        Sample((100, 110, 130), 140, None, warmup=False),
        Sample((200, 210, 240, 270), 280, None, warmup=False),
    )
    found = _summarize(samples, NoMeter("no counter"))
    assert (found.ttft_ns, found.itl_p50_ns, found.itl_p95_ns) == (150, 20, 30)
    assert found.tokens_per_s == 7 / (400 / 1e9)
    assert (found.joules_per_token, found.joules_note) == (None, "not measurable: no counter")
    assert (found.output_tokens, found.samples) == ((3, 4), samples)


def test_one_token_has_no_itl() -> None:
    found = _summarize((Sample((5,), 6, 2.0, warmup=False),), NoMeter(""))
    assert (found.itl_p50_ns, found.itl_p95_ns, found.joules_per_token) == (None, None, 2.0)


def test_a_counter_that_did_not_move_is_not_zero_joules(tmp_path: Path) -> None:
    meter = RaplMeter([package(tmp_path, 5)])
    found = _summarize((Sample((5,), 6, 0.0, warmup=False),), meter)
    assert found.joules_per_token is None
    assert "did not move" in found.joules_note


def test_a_run_is_kept_with_its_manifest_and_raw_samples(tmp_path: Path) -> None:
    def generate() -> Iterator[str]:
        for token in ("a", "b", "c"):
            time.sleep(0.002)
            yield token

    with record("toy", "int8", 7, 3, "a drawing", 0.5, store=str(tmp_path), run_id="r1") as run:
        result = measure(run, generate, repeat=2, warmup=1)
    assert result.ttft_ns >= 2_000_000
    (row,) = Store.at(str(tmp_path)).scan("runs").collect().to_dicts()
    manifest = Manifest.from_json(row["manifest"])
    asked = {
        "model.name": "toy",
        "model.quantization": "int8",
        "workload.prompt_tokens": 7,
        "workload.output_limit": 3,
        "workload.sampling": "temperature=0.5",
        "device.names": ["a drawing"],
        "run.id": "r1",
    }
    assert {name: manifest.values[name] for name in asked} == asked
    assert row["manifest_hash"] == manifest.hash()
    kept = json.loads(row["samples"])
    assert (row["run_id"], row["kind"], kept["failed"]) == ("r1", "record", "")
    (measurement,) = kept["measurements"]
    assert [sample["warmup"] for sample in measurement] == [True, False, False]
    assert all(len(sample["token_times_ns"]) == 3 for sample in measurement)


def test_a_run_that_failed_is_kept_as_failed(tmp_path: Path) -> None:
    with (
        pytest.raises(NoDataError, match="no token"),
        record("t", "q", 1, 1, store=str(tmp_path)) as run,
    ):
        measure(run, lambda: [])
    (row,) = Store.at(str(tmp_path)).scan("runs").collect().to_dicts()
    assert json.loads(row["samples"]) == {"failed": "NoDataError", "measurements": [[]]}


def test_samples_made_before_an_error_are_kept(tmp_path: Path) -> None:
    calls = iter([[1, 2], [1], None])
    opened = record("t", "q", 1, 1, store=str(tmp_path))
    with pytest.raises(UsageError, match="returned NoneType"), opened as run:
        measure(run, lambda: next(calls))  # type: ignore[arg-type]
    (row,) = Store.at(str(tmp_path)).scan("runs").collect().to_dicts()
    kept = json.loads(row["samples"])
    assert kept["failed"] == "UsageError"
    assert [len(s["token_times_ns"]) for s in kept["measurements"][0]] == [2, 1]


def test_a_closed_run_measures_no_more(tmp_path: Path) -> None:
    with record("t", "q", 1, 1, store=str(tmp_path)) as run:
        pass
    with pytest.raises(UsageError, match="closed"):
        measure(run, lambda: [1])


def test_impossible_counts_are_refused(tmp_path: Path) -> None:
    for model, prompt, output in (("t", -1, 1), ("t", 1, "5"), ("", 1, 1), (None, 1, 1)):
        with pytest.raises(UsageError):
            record(model, "q", prompt, output, store=str(tmp_path))  # type: ignore[arg-type]
    with record("t", "q", 1, 1, store=str(tmp_path)) as run, pytest.raises(UsageError):
        measure(run, lambda: [1], repeat=0)


def package(folder: Path, microjoules: int) -> Path:
    path = folder / "intel-rapl:0"
    path.mkdir(exist_ok=True)
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text("1000000\n")
    return path


def test_rapl_is_summed_across_a_wrap(tmp_path: Path) -> None:
    at = package(tmp_path, 999_000)
    meter = find_meter(tmp_path)
    assert meter.source == "rapl packages"
    package(tmp_path, 1_000)
    assert meter.read_joules() == pytest.approx(0.002)
    assert at.exists()


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    meter = find_meter(tmp_path)
    assert meter.read_joules() is None
    assert "no RAPL domain" in meter.why_not


def test_the_example_runs(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-P", str(EXAMPLE), str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["TTFT", "ITL", "ITL", "output", "energy", "kept"]
    assert Store.at(str(tmp_path)).scan("runs").collect().height == 1
