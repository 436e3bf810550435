"""`perfledger rerun` with real servers: verdict, evidence in the store, refusals, clean ends."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import psutil
import pytest

from perfledger.analyzers.experiments.hypothesis import TOO_FEW_SLOTS
from perfledger.analyzers.experiments.measures import METRIC
from perfledger.analyzers.experiments.plan import Pair, RerunPlan, RunSample, Work
from perfledger.analyzers.experiments.run_telemetry import run_telemetry
from perfledger.analyzers.experiments.verdict import decide
from perfledger.cli import main
from perfledger.instrumented_runtime.targets.process import running
from perfledger.instrumented_runtime.targets.reference import VARIABLES, source_facts
from perfledger.rerun import RerunResult, RerunSettings, rerun, workload_of
from perfledger.rerun_command import print_result
from perfledger.schema.errors import NotComparableError, PerfledgerError, UsageError
from perfledger.schema.manifest import Manifest, compare
from perfledger.schema.store import Store

QUIET_TORCH = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1"}


def settings(store: Path, **changed: object) -> RerunSettings:
    start = RerunSettings("max_num_seqs", (8, 2), str(store), pairs=2, requests=12)
    return replace(start, **{"fixed": {"threads": 1}, **changed})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> RerunResult:
    """Two pairs on the small reference model."""
    seen: list[tuple[int, int]] = []
    store = tmp_path_factory.mktemp("rerun") / "store"
    result = rerun(settings(store), lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    return result


def test_two_pairs_show_the_effect_and_claim_nothing(done: RerunResult) -> None:
    assert done.plan.levels == (2, 8)
    assert [pair.excluded() for pair in done.pairs if not pair.a.disturbances] == [
        None for pair in done.pairs if not pair.a.disturbances
    ]
    assert done.verdict.outcome == "inconclusive"
    assert done.verdict.would_decide[0].startswith("6 pairs or more that count")
    for pair in done.pairs:
        assert pair.a.metrics.keys() == pair.b.metrics.keys() == METRIC.keys()
        assert 1 < pair.a.metrics["batch_width"] <= 2 < pair.b.metrics["batch_width"] <= 8
        queued = (
            pair.a.metrics["queue_steps_per_request"],
            pair.b.metrics["queue_steps_per_request"],
        )
        assert queued[0] > 2 * queued[1]
        steps = [run.metrics["steps_per_output_token"] for run in (pair.a, pair.b)]
        assert 0.5 <= steps[0] < 0.7 and 0.125 <= steps[1] < 0.35
        prompts = sum(a.input_tokens for a in workload_of(done.settings).arrivals) / 12
        assert pair.a.metrics["prefill_tokens_per_request"] == prompts
        assert pair.a.work == pair.b.work
        assert pair.a.work is not None and pair.a.work.errors == 0


def test_every_run_and_the_verdict_are_kept(done: RerunResult) -> None:
    store = Store.at(done.settings.store)
    rows = {row["run_id"]: row for row in store.scan("runs").collect().to_dicts()}
    runs = [run for pair in done.pairs for run in (pair.a, pair.b)]
    assert rows.keys() == {done.run_id, *(run.run_id for run in runs)}
    assert {row["kind"] for row in rows.values()} == {"rerun"}
    for run in runs:
        kept = json.loads(rows[run.run_id]["samples"])
        assert kept["registration"] == done.registration
        assert kept["sample"]["level"] == run.level
        manifest = Manifest.from_json(rows[run.run_id]["manifest"])
        assert manifest.hash() == rows[run.run_id]["manifest_hash"] == run.manifest_hash
        spans = store.scan("spans").filter(pl.col("run_id") == run.run_id).collect()
        roots = spans.filter(pl.col("name") == "text_completion")["kind"].value_counts()
        assert dict(roots.rows()) == {"server": 14, "client": 14}  # 2 of them warm-up
    whole = json.loads(rows[done.run_id]["samples"])
    assert whole == json.loads(json.dumps(done.as_json()))
    assert json.loads(rows[done.run_id]["verdict"])["outcome"] == "inconclusive"


def test_manifests_differ_in_the_variable_only(done: RerunResult) -> None:
    rows = Store.at(done.settings.store).scan("runs").collect()
    manifests = dict(rows.select("run_id", "manifest").rows())
    low, high = (Manifest.from_json(manifests[run.run_id]) for run in vars_of(done.pairs[0]))
    found = compare(low, high, "runtime.max_num_seqs")
    assert (found.levels, [d.field for d in found.refusals]) == ((2, 8), ["runtime.kv_blocks"])
    assert done.comparison == compare(
        low, high, "runtime.max_num_seqs", touches=VARIABLES["max_num_seqs"].touches
    )
    for name in ("model.weights_hash", "model.tokenizer_hash", "workload.hash", "host.cpu_model"):
        assert low.values[name], name
    assert low.values["workload.requests"] == 12


def test_missing_telemetry_is_noticed(done: RerunResult) -> None:
    spans = Store.at(done.settings.store).scan("spans").collect()
    run = spans.filter(pl.col("run_id") == done.pairs[0].a.run_id)
    clients = run.filter(pl.col("kind") == "client").sort("start_ns")
    measured = clients["trace_id"].to_list()[2:]
    whole = run_telemetry(run, measured)
    assert (whole.missing, whole.requests.height) == (None, 12)
    middle = whole.steps["span_id"][whole.steps.height // 2]
    assert run_telemetry(run.filter(pl.col("span_id") != middle), measured).missing == (
        "telemetry of 1 engine steps is missing"
    )
    assert run_telemetry(run.filter(pl.col("kind") != "server"), measured).missing == (
        "telemetry of 0 of 12 requests arrived"
    )


def vars_of(pair: Pair) -> tuple[RunSample, RunSample]:
    return pair.a, pair.b


# --- Refusals and failures ------------------------------------------------------------------


def test_a_second_variable_refuses_after_the_first_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def change_something_else(finished: int, total: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "2"

    with pytest.raises(NotComparableError, match=r"runtime\.environment: OMP_NUM_THREADS 1 -> 2"):
        rerun(settings(tmp_path / "store", requests=2), change_something_else)
    kept = Store.at(str(tmp_path / "store")).scan("runs").collect()
    assert kept.height == 1  # the run that was fine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--levels", "2"], "not two levels: '2'"),
        (["--levels", "a,b"], "not two levels: 'a,b'"),
        (["--levels", "2,2"], "levels (2, 2) are not two different ones"),
        (["--levels", "0,2"], "max_num_seqs 0 is not between 1 and 1024 sequences"),
        (["--variable", "colour"], "cannot vary 'colour'"),
        (["--pairs", "0"], "0 pairs"),
        (["--requests", "0"], "0 requests"),
        (["--workload", "nowhere.csv"], "no such workload file"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rerun", "--store", str(tmp_path / "store"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_model_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-model is not a folder"):
        rerun(settings(tmp_path / "store", model="no-such-model"))


def test_runs_that_fail_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    code = main(["rerun", "--store", str(tmp_path / "s"), "--model", str(folder), "--pairs", "2"])
    assert code in (1, 2)
    assert "broken" in capsys.readouterr().err


def test_ctrl_c_ends_everything_it_started(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "perfledger", "rerun", "--store", str(tmp_path / "s")]
    command += ["--threads", "1", "--pairs", "8"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, env={**os.environ, **QUIET_TORCH}, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while len(descendants(process.pid)) < 4:  # collector, API, engine, exporter
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.decode()) == (130, "perfledger: interrupted\n")
    assert [child for child in children if child.is_running()] == []


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


# --- Children and sources -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("print('why'); exit(2)", UsageError, "it ended with exit code 2:\nwhy"),
        ("exit(3)", PerfledgerError, r"it ended with exit code 3:\n\(it printed nothing\)"),
        ("import time; time.sleep(60)", PerfledgerError, r"it was not ready within 0\.5 s"),
    ],
)
def test_a_child_that_is_never_ready_says_why(
    code: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", code]
    with (
        pytest.raises(error, match=message),
        running("it", command, os.environ, tmp_path / "log") as child,
    ):
        child.wait_for("^ready", 0.5 if "sleep" in code else 20.0)
    assert child.process.poll() is not None


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises(PerfledgerError, match="cannot start it: "),
        running("it", ["/no/such/program"], {}, tmp_path / "log"),
    ):
        pass


def test_commit_and_changes_of_a_checkout(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert source_facts(tmp_path) == {"runtime.commit": "", "runtime.changes": ""}
    git("init")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert source_facts(tmp_path) == {"runtime.commit": None, "runtime.changes": None}
    git("add", "-A")
    git("commit", "-m", "first")
    clean = source_facts(tmp_path)
    assert clean == {"runtime.commit": git("rev-parse", "HEAD"), "runtime.changes": ""}
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    changed = source_facts(tmp_path)
    assert changed["runtime.commit"] == clean["runtime.commit"]
    assert len(str(changed["runtime.changes"])) == 64


def test_variables_are_fields_of_the_manifest() -> None:
    assert list(VARIABLES) == ["max_num_seqs", "max_num_batched_tokens", "block_size", "threads"]
    Manifest.of({variable.field: variable.low for variable in VARIABLES.values()})
    Manifest.of({field: 1 for variable in VARIABLES.values() for field in variable.touches})


def test_a_workload_file_is_fitted_by_declared_factors(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = "".join(f"2023-11-16 18:17:{s:02d}.0000000,{s * 100},40\n" for s in range(1, 9))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    workload = workload_of(settings(tmp_path, workload=path, requests=5))
    assert [a.offset_ns for a in workload.arrivals] == [at * 500_000_000 for at in range(5)]
    assert [a.input_tokens for a in workload.arrivals] == [100, 128, 128, 128, 128]
    assert {a.output_tokens for a in workload.arrivals} == {32}


# --- What it prints -------------------------------------------------------------------------


def printed(result: RerunResult) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        print_result(result)
    return out.getvalue()


def constructed(pairs: int) -> RerunResult:
    """A result of made-up runs."""
    generator = np.random.default_rng(5)

    def sample(level: int, queue: float, cpu: float, width: float) -> RunSample:
        noise = math.exp(0.05 * generator.standard_normal())
        metrics = {
            "queue_ns_per_request": queue * 1e7 * noise,
            "queue_steps_per_request": queue,
            "steps_per_output_token": 1 / width,
            "cpu_ns_per_output_token": cpu * noise,
            "batch_width": width,
            "prefill_tokens_per_request": 40.0,
        }
        work = Work("h", 24, 0, 576)
        return RunSample("r", level, 0, 1, work, metrics)

    plan = RerunPlan("max_num_seqs", (2, 8), pairs, 0, "2 requests", "h")
    made = tuple(
        Pair(i, "a", sample(2, 130.0, 3.1e6, 1.95), sample(8, 20.0, 1.2e6, 7.1))
        for i in range(pairs)
    )
    return RerunResult(
        run_id="rerun-0",
        settings=RerunSettings("max_num_seqs", (2, 8), "./s", pairs=pairs),
        plan=plan,
        hypothesis=TOO_FEW_SLOTS,
        registration=plan.registration(TOO_FEW_SLOTS),
        pairs=made,
        comparison=None,
        symptom=True,
        verdict=decide(TOO_FEW_SLOTS, made),
    )


def test_the_verdict_fits_80_columns() -> None:
    text = printed(constructed(pairs=8))
    print(text)
    assert max(map(len, text.splitlines())) <= 80
    assert text == EXPECTED


@pytest.mark.parametrize("pairs", [1, 6])
def test_few_pairs_print_too(pairs: int, make: Callable[[int], RerunResult] = constructed) -> None:
    text = printed(make(pairs))
    assert max(map(len, text.splitlines())) <= 80
    assert ("INCONCLUSIVE: 1 pairs count" in text) == (pairs == 1)


EXPECTED = """\
"""
