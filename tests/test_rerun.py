"""`perfledger rerun` with real servers: verdict, evidence in the store, refusals, clean ends."""

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil
import pytest

from perfledger.analyzers.experiments.hypothesis import TOO_FEW_SLOTS
from perfledger.analyzers.experiments.measures import METRIC, measure
from perfledger.analyzers.experiments.plan import Pair, RerunPlan, RunSample, Work
from perfledger.analyzers.experiments.run_telemetry import run_telemetry
from perfledger.analyzers.experiments.verdict import decide
from perfledger.cli import main
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.targets.process import running
from perfledger.instrumented_runtime.targets.reference import VARIABLES, source_facts
from perfledger.rerun import RerunResult, RerunSettings, require_some, rerun, workload_of
from perfledger.rerun_command import print_result
from perfledger.schema.errors import NotComparableError, PerfledgerError, UsageError
from perfledger.schema.manifest import Manifest, compare
from perfledger.schema.store import Store

QUIET_TORCH = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1"}


def settings(store: Path, **changed: object) -> RerunSettings:
    start = RerunSettings("max_num_seqs", (8, 2), str(store), pairs=1, requests=12)
    return replace(start, **{"fixed": {"threads": 1}, **changed})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Done:
    """What one `perfledger rerun --json` printed, and the store it wrote."""

    store: Store
    said: dict[str, Any]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs, level A before level B."""
        return [pair[arm] for pair in self.said["pairs"] for arm in ("a", "b")]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One pair on the small reference model."""
    store = tmp_path_factory.mktemp("rerun") / "store"
    arguments = ["--variable", "max_num_seqs", "--levels", "8,2", "--threads", "1"]
    arguments += ["--pairs", "1", "--requests", "12", "--store", str(store), "--json"]
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["rerun", *arguments]) == 0
    return Done(Store.at(str(store)), json.loads(out.getvalue()))


def test_one_pair_shows_the_effect_and_claims_nothing(done: Done) -> None:
    verdict = done.said["verdict"]
    assert (done.said["variable"], done.said["levels"]) == ("max_num_seqs", [2, 8])
    assert (done.said["hypothesis"], verdict["outcome"]) == ("too_few_slots", "inconclusive")
    assert verdict["would_decide"][0].startswith("6 pairs or more that count")
    low, high = (run["metrics"] for run in done.runs)
    assert low.keys() == high.keys() == METRIC.keys()
    assert 1 < low["batch_width"] <= 2 < high["batch_width"] <= 8
    assert low["queue_steps_per_request"] > 2 * high["queue_steps_per_request"]
    assert 0.5 <= low["steps_per_output_token"] < 0.7
    assert 0.125 <= high["steps_per_output_token"] < 0.35
    arrivals = workload_of(settings(Path("unused"))).arrivals
    prompt_tokens = sum(arrival.input_tokens for arrival in arrivals)
    assert low["prefill_tokens_per_request"] == prompt_tokens / 12
    work = {"requests": 12, "errors": 0, "output_tokens": sum(a.output_tokens for a in arrivals)}
    assert [run["work"] for run in done.runs] == 2 * [
        {"requests_hash": done.said["plan"]["workload_hash"], **work}
    ]


def test_every_run_and_the_verdict_are_kept(done: Done) -> None:
    rows = {row["run_id"]: row for row in done.store.scan("runs").collect().to_dicts()}
    assert rows.keys() == {done.said["run_id"], *(run["run_id"] for run in done.runs)}
    assert {row["kind"] for row in rows.values()} == {"rerun"}
    for run in done.runs:
        row = rows[run["run_id"]]
        kept = json.loads(row["samples"])
        assert kept["registration"] == done.said["registration"]
        assert kept["sample"]["level"] == run["level"]
        manifest = Manifest.from_json(row["manifest"])
        assert manifest.hash() == row["manifest_hash"] == run["manifest_hash"]
        spans = done.store.scan("spans").filter(pl.col("run_id") == run["run_id"]).collect()
        requests = spans.filter(pl.col("name") == "text_completion")["kind"].value_counts()
        assert dict(requests.rows()) == {"server": 14, "client": 14}  # 2 of them warm-up
    whole = rows[done.said["run_id"]]
    assert json.loads(whole["samples"]) == done.said
    assert json.loads(whole["verdict"]) == done.said["verdict"]


def test_manifests_differ_in_the_variable_only(done: Done) -> None:
    rows = dict(done.store.scan("runs").collect().select("run_id", "manifest").rows())
    low, high = (Manifest.from_json(rows[run["run_id"]]) for run in done.runs)
    variable = VARIABLES["max_num_seqs"]
    found = compare(low, high, variable.field, touches=variable.touches)
    assert (found.levels, found.refusals) == ((2, 8), ())
    assert [difference.field for difference in found.touched] == ["runtime.kv_blocks"]
    assert (found.confidence, list(found.unknown)) == (
        done.said["confidence"],
        done.said["unknown_fields"],
    )
    for name in ("model.weights_hash", "model.tokenizer_hash", "workload.hash", "host.cpu_model"):
        assert low.values[name], name
    assert (low.values["workload.requests"], low.values["runtime.threads"]) == (12, 1)


def test_missing_telemetry_is_noticed(done: Done) -> None:
    run_id = done.runs[0]["run_id"]
    run = done.store.scan("spans").filter(pl.col("run_id") == run_id).collect()
    clients = run.filter(pl.col("kind") == "client").sort("start_ns")
    measured = clients["trace_id"].to_list()[2:]
    whole = run_telemetry(run, measured)
    assert (whole.missing, whole.requests.height) == (None, 12)
    assert measure(whole.steps, whole.requests) == done.runs[0]["metrics"]
    middle = whole.steps["span_id"][whole.steps.height // 2]
    assert run_telemetry(run.filter(pl.col("span_id") != middle), measured).missing == (
        "telemetry of 1 engine steps is missing"
    )
    assert run_telemetry(run.filter(pl.col("kind") != "server"), measured).missing == (
        "telemetry of 0 of 12 requests arrived"
    )


# --- Refusals and failures ------------------------------------------------------------------


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to take one away")
def test_a_second_variable_refuses(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)

    def take_a_core_away(finished: int, total: int) -> None:
        os.sched_setaffinity(0, {min(cores)})

    try:
        with pytest.raises(NotComparableError) as refused:
            rerun(settings(tmp_path / "store", requests=2), take_a_core_away)
    finally:
        os.sched_setaffinity(0, cores)
    assert "\n  host.affinity: " in str(refused.value)
    assert "\n  topology.placement: " in str(refused.value)  # the server's, which follows
    assert str(refused.value).count("\n  ") == 3  # those, and what to try
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


def test_a_checkpoint_that_does_not_load_ends_it_before_a_second_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(resolve("reference-small"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    arguments = ["--store", str(tmp_path / "s"), "--model", str(folder), "--pairs", "5"]
    assert main(["rerun", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("perfledger: serve ended with exit code 2:")
    assert said.count("cannot read model.safetensors") == 1
    assert Store.at(str(tmp_path / "s")).scan("runs").collect().is_empty()


def test_runs_that_all_fail_leave_nothing_to_say() -> None:
    failed = RunSample("r", 2, 0, 1, failure="did not start")
    with pytest.raises(PerfledgerError, match="2 of 2 runs failed, the first one so: did not"):
        require_some((Pair(0, "a", failed, replace(failed, level=8)),))


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
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.decode()) == (130, "perfledger: interrupted\n")
    assert [child for child in children if still_runs(child)] == []


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def still_runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # nobody may reap orphans here
    except psutil.NoSuchProcess:
        return False


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
max_num_seqs 2 against 8, reference-small, 24 requests a run, 8 of 8 pairs count
metric, median of runs        at 2     at 8  change, % (95 %)      p  MDE
──────────────────────────  ──────  ───────  ────────────────  ─────  ───
queue_ns_per_request         1.3 s   197 ms  -85 (-86 to -84)  0.008  8.8
queue_steps_per_request        130       20       -85 (exact)
steps_per_output_token       0.513    0.141       -73 (exact)
cpu_ns_per_output_token     3.1 ms  1.18 ms  -62 (-64 to -59)  0.008  8.8
batch_width                   1.95      7.1      +264 (exact)
prefill_tokens_per_request      40       40      +0.0 (exact)

metric                                 predicted        result
──────────────────────────  ────────────────────  ────────────
queue_ns_per_request        falls by 30% or more   not decided
queue_steps_per_request     falls by 30% or more  as predicted
steps_per_output_token      falls by 30% or more  as predicted
cpu_ns_per_output_token     falls by 20% or more  as predicted
batch_width                 rises by 30% or more  as predicted
prefill_tokens_per_request                 stays         quiet

verdict       SUPPORTED: all 3 predictions that can be decided hold
hypothesis    requests wait because the batch has too few slots, not because the
              device is full
symptom       seen at max_num_seqs 2
decided on    CPU time, counts and tokens only (A/A gate not run; not decided:
              queue_ns_per_request)
would decide  queue_ns_per_request: an A/A gate of 10 pairs on this machine and
              workload (not in this version)
kept          rerun-0, its runs and their spans in ./s
"""
