"""A controlled rerun, wired: target, load, collector and store around the plan and its verdict.

`rerun(settings)` is what the command and the demo call.
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import polars as pl

from perfledger.analyzers.experiments.hypothesis import Hypothesis, hypothesis_about
from perfledger.analyzers.experiments.measures import measure, observe
from perfledger.analyzers.experiments.plan import Pair, RerunPlan, RunSample, Work, run_pairs
from perfledger.analyzers.experiments.run_telemetry import RunTelemetry, run_telemetry
from perfledger.analyzers.experiments.verdict import Verdict, as_json, decide
from perfledger.collecting import collecting
from perfledger.instrumented_runtime.load.formats import read_workload
from perfledger.instrumented_runtime.load.open_loop import run_load
from perfledger.instrumented_runtime.load.plan import LoadPlan, LoadResult
from perfledger.instrumented_runtime.load.results import load_manifest, spans_table
from perfledger.instrumented_runtime.load.workload import Arrival, Scaling, Workload, scale
from perfledger.instrumented_runtime.targets.reference import (
    VARIABLES,
    ReferenceTarget,
    RunningServer,
    Variable,
    serving,
)
from perfledger.schema.errors import NotComparableError, PerfledgerError, UsageError
from perfledger.schema.host_facts import HostCounters, device_facts, host_facts
from perfledger.schema.manifest import Comparison, Manifest, Value, canonical_json, compare
from perfledger.schema.store import Store
from perfledger.schema.tables import RUNS

WARM_UP_REQUESTS = 2
# Of the busy CPU time; above it a run was disturbed. Quiet virtual machines stay below 1 %.
STOLEN_LIMIT = 0.10
# A workload file is fitted to a small machine by these declared factors.
FILE_SCALING = Scaling(max_input=128, max_output=32)
FILE_SPAN_NS = 2_000_000_000


@dataclass(frozen=True)
class RerunSettings:
    """What to vary, on what, how often. `workload` None is a burst of equal requests."""

    variable: str
    levels: tuple[int, int]
    store: str
    namespace: str = "default"
    pairs: int = 8
    model: str = "reference-small"
    requests: int = 24
    workload: Path | None = None
    fixed: Mapping[str, int] | None = None  # other variables, by name
    seed: int = 0


@dataclass(frozen=True)
class RerunResult:
    """The verdict with everything it stands on."""

    run_id: str
    settings: RerunSettings
    plan: RerunPlan
    hypothesis: Hypothesis | None
    registration: str  # hash of plan and hypothesis, fixed before the first run
    pairs: tuple[Pair, ...]
    comparison: Comparison | None  # of the first two manifests whose levels differ
    symptom: bool | None  # whether the suspicion's symptom was seen at level A
    verdict: Verdict

    def as_json(self) -> dict[str, object]:
        """Return JSON objects only."""
        comparison = self.comparison
        return {
            "run_id": self.run_id,
            "variable": self.plan.variable,
            "levels": list(self.plan.levels),
            "hypothesis": self.hypothesis.name if self.hypothesis else None,
            "registration": self.registration,
            "symptom_at_a": self.symptom,
            "verdict": as_json(self.verdict),
            "unknown_fields": list(comparison.unknown) if comparison else [],
            "confidence": comparison.confidence if comparison else None,
            "plan": asdict(self.plan),
            "pairs": [asdict(pair) for pair in self.pairs],
        }


def rerun(
    settings: RerunSettings, after_run: Callable[[int, int], None] = lambda done, total: None
) -> RerunResult:
    """Run the pairs and decide; `after_run(done, total)` is called after each run.

    Writes a row of `runs` for each run and one for the verdict. Raises UsageError for settings
    that cannot be, NotComparableError where runs differ in more than the variable, and
    PerfledgerError where failed runs leave nothing to say.
    """
    variable = VARIABLES.get(settings.variable)
    if variable is None:
        known = ", ".join(VARIABLES)
        raise UsageError(f"cannot vary {settings.variable!r}", fix=f"one of: {known}")
    low, high = sorted(variable.checked(level) for level in settings.levels)
    workload = workload_of(settings)
    plan = RerunPlan(
        variable=variable.name,
        levels=(low, high),
        pairs=settings.pairs,
        seed=settings.seed,
        warm_up=f"{WARM_UP_REQUESTS} requests",
        workload_hash=workload.sha256(),
    )
    with tempfile.TemporaryDirectory(prefix="perfledger-rerun-") as folder:
        logs = Path(folder)
        experiment = _Experiment(settings, plan, variable, workload, logs)
        with collecting(settings.store, settings.namespace, logs) as endpoint:
            experiment.otlp_endpoint = endpoint
            pairs = run_pairs(plan, experiment.run_once, after_run)
    return experiment.conclude(pairs)


def workload_of(settings: RerunSettings) -> Workload:
    """Return the requests of every run: the file's first ones, or a burst of unequal lengths."""
    if settings.requests < 1:
        raise UsageError(f"{settings.requests} requests", fix="--requests 24")
    if settings.workload is None:
        arrivals = tuple(
            Arrival(0, input_tokens=24 + 16 * (at % 3), output_tokens=16 + 8 * (at % 3))
            for at in range(settings.requests)
        )
        return Workload("burst", f"{settings.requests} requests at once", arrivals)
    whole = read_workload(settings.workload, settings.requests)
    factor = min(1.0, FILE_SPAN_NS / whole.span_ns) if whole.span_ns else 1.0
    return scale(whole, replace(FILE_SCALING, time_scale=factor))


class _Experiment:
    """The runs made so far, and what they share."""

    def __init__(
        self,
        settings: RerunSettings,
        plan: RerunPlan,
        variable: Variable,
        workload: Workload,
        logs: Path,
    ) -> None:
        self.otlp_endpoint = ""
        self._settings = settings
        self._plan = plan
        self._variable = variable
        self._workload = workload
        self._logs = logs
        self._store = Store.at(settings.store, settings.namespace)
        self._id = f"rerun-{secrets.token_hex(4)}"
        self._hypothesis = hypothesis_about(variable.name)
        self._registration = plan.registration(self._hypothesis)
        self._manifests: dict[int, Manifest] = {}  # the first of each level
        self._comparison: Comparison | None = None
        self._traces: dict[str, list[bytes]] = {}  # measured requests of each run
        self._runs = 0

    def run_once(self, level: int) -> RunSample:
        """Start a fresh server at a level, load it, end it; a failure is returned, said."""
        self._runs += 1
        run_id = f"{self._id}-{self._runs:02d}"
        started_ns = time.time_ns()
        try:
            return self._run(run_id, level)
        except (UsageError, NotComparableError):
            raise  # no other run would go better
        except PerfledgerError as error:
            failed = RunSample(run_id, level, started_ns, time.time_ns(), failure=str(error))
            self._keep(failed, None)
            return failed

    def _run(self, run_id: str, level: int) -> RunSample:
        target = ReferenceTarget(
            self._settings.model, self.otlp_endpoint, self._settings.fixed or {}
        )
        log = self._logs / f"{run_id}.log"
        with serving(target, self._variable, level, run_id=run_id, log=log) as server:
            host = host_facts()
            before = HostCounters.read()
            load = LoadPlan(
                url=server.url,
                workload=self._workload,
                run_id=run_id,
                seed=self._plan.seed,
                warm_up=WARM_UP_REQUESTS,
            )
            result = asyncio.run(run_load(load))
            disturbances = before.disturbances(HostCounters.read(), limit=STOLEN_LIMIT)
            manifest = self._manifest(server, host, result)
        self._check(manifest, level)
        sample = replace(_sample(run_id, level, result), disturbances=disturbances)
        sample = replace(sample, manifest_hash=manifest.hash())
        self._traces[run_id] = [request.trace_id for request in result.measured]
        self._store.write("spans", spans_table(result, result.samples))
        self._keep(sample, manifest)
        return sample

    def _manifest(
        self, server: RunningServer, host: Mapping[str, Value], result: LoadResult
    ) -> Manifest:
        asked = {k: v for k, v in load_manifest(result).values.items() if v is not None}
        planned: dict[str, Value] = {"method.repetitions": self._plan.pairs}
        return Manifest.of({**asked, **host, **device_facts(), **server.facts, **planned})

    def _check(self, manifest: Manifest, level: int) -> None:
        """Hold a run's manifest against the first of its level and the first of the other."""
        first = self._manifests.setdefault(level, manifest)
        compare(first, manifest, None).require()
        low, high = (self._manifests.get(level) for level in self._plan.levels)
        if low and high:
            field, touches = self._variable.field, self._variable.touches
            self._comparison = compare(low, high, field, touches=touches).require()

    def _keep(self, sample: RunSample, manifest: Manifest | None) -> None:
        """Write the run's row at once: a crash later on loses none of it."""
        content = {"registration": self._registration, "sample": asdict(sample)}
        self._write_row(sample.run_id, sample.started_ns, content, manifest, None)

    def _write_row(
        self,
        run_id: str,
        created_ns: int,
        samples: object,
        manifest: Manifest | None,
        verdict: object,
    ) -> None:
        row: dict[str, object] = {
            "run_id": run_id,
            "kind": "rerun",
            "created_ns": created_ns,
            "manifest": manifest.to_json() if manifest else None,
            "manifest_hash": manifest.hash() if manifest else None,
            "samples": canonical_json(samples),
            "verdict": canonical_json(verdict) if verdict else None,
            "received_ns": time.time_ns(),
        }
        self._store.write(RUNS.name, RUNS.from_rows([row]))

    def conclude(self, pairs: list[Pair]) -> RerunResult:
        """Read the telemetry of all runs, decide, and write the verdict's row."""
        telemetry = {run_id: self._telemetry(run_id) for run_id in self._traces}
        measured = tuple(p.completed(lambda run: _measured(run, telemetry)) for p in pairs)
        _require_some(measured)
        result = RerunResult(
            run_id=self._id,
            settings=self._settings,
            plan=self._plan,
            hypothesis=self._hypothesis,
            registration=self._registration,
            pairs=measured,
            comparison=self._comparison,
            symptom=self._symptom(measured, telemetry),
            verdict=decide(self._hypothesis, measured),
        )
        content = result.as_json()
        created_ns = min(pair.a.started_ns for pair in pairs)
        self._write_row(self._id, created_ns, content, None, content["verdict"])
        return result

    def _telemetry(self, run_id: str) -> RunTelemetry:
        spans = self._store.scan("spans").filter(pl.col("run_id") == run_id).collect()
        return run_telemetry(spans, self._traces[run_id])

    def _symptom(
        self, pairs: tuple[Pair, ...], telemetry: Mapping[str, RunTelemetry]
    ) -> bool | None:
        """Return whether most runs at level A show the symptom; None where they cannot tell."""
        if self._hypothesis is None:
            return None
        slots = self._plan.levels[0] if self._variable.name == "max_num_seqs" else None
        known = [telemetry[pair.a.run_id] for pair in pairs if pair.excluded() is None]
        answers = [
            self._hypothesis.symptom_holds(observe(run.steps, run.requests, slots=slots))
            for run in known
        ]
        if not answers or None in answers:
            return None
        return answers.count(True) * 2 > len(answers)


def _sample(run_id: str, level: int, result: LoadResult) -> RunSample:
    requests = result.measured
    if result.ended != "finished" or result.unsent:
        raise PerfledgerError(f"the load ended early: {result.ended}, {result.unsent} not sent")
    answered = [request for request in requests if not request.error]
    if not answered:
        first = f"{requests[0].error} {requests[0].detail}".strip()
        raise PerfledgerError(f"every request failed, the first one so: {first}")
    if any(request.output_tokens is None for request in answered):
        raise PerfledgerError("the server told no token counts")
    work = Work(
        requests_hash=result.plan.workload.sha256(),
        requests=len(requests),
        errors=len(requests) - len(answered),
        output_tokens=sum(request.output_tokens or 0 for request in answered),
    )
    wall = result.anchor.to_wall_ns
    ended_ns = wall(max(request.end_ns for request in requests))
    return RunSample(run_id, level, wall(result.started_ns), ended_ns, work)


def _measured(run: RunSample, telemetry: Mapping[str, RunTelemetry]) -> RunSample:
    if run.failure or run.run_id not in telemetry:
        return run
    found = telemetry[run.run_id]
    if found.missing:
        return replace(run, failure=found.missing)
    return replace(run, metrics=measure(found.steps, found.requests))


def _require_some(pairs: tuple[Pair, ...]) -> None:
    """Raise PerfledgerError where failed runs left no pair at all."""
    failures = [run.failure for pair in pairs for run in (pair.a, pair.b) if run.failure]
    if failures and all(pair.excluded() for pair in pairs):
        raise PerfledgerError(
            f"{len(failures)} of {2 * len(pairs)} runs failed, the first one so: {failures[0]}",
            fix="start the same server with `perfledger serve` and look",
        )
