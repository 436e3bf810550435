"""A controlled rerun, wired: target, load, collector and store around the plan and its verdict.

`rerun(settings)` is what the command and the demo call.
"""

import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import polars as pl

from perfledger.analyzers.experiments.hypothesis import Hypothesis, hypothesis_about
from perfledger.analyzers.experiments.measures import measure, observe
from perfledger.analyzers.experiments.plan import Pair, RerunPlan, RunSample, run_pairs
from perfledger.analyzers.experiments.run_telemetry import RunTelemetry, run_telemetry
from perfledger.analyzers.experiments.verdict import Verdict, as_json, decide
from perfledger.collecting import collecting
from perfledger.instrumented_runtime.load.formats import read_workload
from perfledger.instrumented_runtime.load.workload import Arrival, Scaling, Workload, scale
from perfledger.instrumented_runtime.targets.reference import VARIABLES, ReferenceTarget
from perfledger.instrumented_runtime.targets.succession import Succession
from perfledger.rerun_runs import WARM_UP_REQUESTS, Runs, write_row
from perfledger.schema.errors import PerfledgerError, UsageError
from perfledger.schema.manifest import Comparison
from perfledger.schema.store import Store

# A workload file is fitted to a small machine by these declared factors.
FILE_SCALING = Scaling(max_input=128, max_output=32)
FILE_SPAN_NS = 2_000_000_000


@dataclass(frozen=True)
class RerunSettings:
    """What to vary, on what, how often. `workload` None is a burst of requests."""

    variable: str
    levels: tuple[int, int]
    store: str
    namespace: str = "default"
    pairs: int = 8
    model: str = "reference-small"
    requests: int = 24
    workload: Path | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)  # other variables, by name
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
    comparison: Comparison | None  # of the manifests of the two levels
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
    plan, workload = plan_of(settings)
    hypothesis = hypothesis_about(plan.variable)
    store = Store.at(settings.store, settings.namespace)
    with (
        tempfile.TemporaryDirectory(prefix="perfledger-rerun-") as logs,
        collecting(settings.store, settings.namespace, Path(logs)) as endpoint,
        Succession() as servers,
    ):
        runs = Runs(
            experiment=f"rerun-{secrets.token_hex(4)}",
            plan=plan,
            registration=plan.registration(hypothesis),
            variable=VARIABLES[plan.variable],
            workload=workload,
            target=ReferenceTarget(settings.model, endpoint, settings.fixed),
            servers=servers,
            store=store,
            logs=Path(logs),
        )
        pairs = run_pairs(plan, runs.run_once, after_run)
    result = _conclude(settings, hypothesis, runs, pairs)  # by now all telemetry is written
    content, created_ns = result.as_json(), min(pair.a.started_ns for pair in pairs)
    write_row(store, result.run_id, created_ns, content, verdict=content["verdict"])
    return result


def plan_of(settings: RerunSettings) -> tuple[RerunPlan, Workload]:
    """Return the plan and the requests of every run. Raises UsageError for what cannot be."""
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
    return plan, workload


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


def _conclude(
    settings: RerunSettings, hypothesis: Hypothesis | None, runs: Runs, pairs: list[Pair]
) -> RerunResult:
    """Read the telemetry of all runs and decide."""
    telemetry = _telemetry(runs)
    measured = tuple(p.completed(lambda run: _measured(run, telemetry)) for p in pairs)
    require_some(measured)
    return RerunResult(
        run_id=runs.experiment,
        settings=settings,
        plan=runs.plan,
        hypothesis=hypothesis,
        registration=runs.registration,
        pairs=measured,
        comparison=runs.comparison,
        symptom=_symptom(hypothesis, runs.plan, measured, telemetry),
        verdict=decide(hypothesis, measured),
    )


def _telemetry(runs: Runs) -> dict[str, RunTelemetry]:
    ids = list(runs.traces)
    spans = runs.store.scan("spans").filter(pl.col("run_id").is_in(ids)).collect()
    by_run = {run_id: spans.filter(pl.col("run_id") == run_id) for run_id in ids}
    return {run_id: run_telemetry(by_run[run_id], runs.traces[run_id]) for run_id in ids}


def _measured(run: RunSample, telemetry: Mapping[str, RunTelemetry]) -> RunSample:
    if run.failure or run.run_id not in telemetry:
        return run
    found = telemetry[run.run_id]
    if found.missing:
        return replace(run, failure=found.missing)
    return replace(run, metrics=measure(found.steps, found.requests))


def _symptom(
    hypothesis: Hypothesis | None,
    plan: RerunPlan,
    pairs: tuple[Pair, ...],
    telemetry: Mapping[str, RunTelemetry],
) -> bool | None:
    """Return whether most runs at level A show the symptom; None where they cannot tell."""
    if hypothesis is None:
        return None
    slots = plan.levels[0] if plan.variable == "max_num_seqs" else None
    seen = [telemetry[pair.a.run_id] for pair in pairs if pair.excluded() is None]
    answers = [
        hypothesis.symptom_holds(observe(run.steps, run.requests, slots=slots)) for run in seen
    ]
    if not answers or None in answers:
        return None
    return answers.count(True) * 2 > len(answers)


def require_some(pairs: tuple[Pair, ...]) -> None:
    """Raise PerfledgerError where failed runs left no pair at all."""
    failures = [run.failure for pair in pairs for run in (pair.a, pair.b) if run.failure]
    if failures and all(pair.excluded() for pair in pairs):
        raise PerfledgerError(
            f"{len(failures)} of {2 * len(pairs)} runs failed, the first one so: {failures[0]}",
            fix="start the same server with `perfledger serve` and look",
        )
