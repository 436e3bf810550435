"""The runs of one experiment: each a fresh server under the same load, kept with its manifest."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from perfledger.analyzers.experiments.plan import RerunPlan, RunSample, Work
from perfledger.collectors.topology.reading import read_topology
from perfledger.instrumented_runtime.load.open_loop import run_load
from perfledger.instrumented_runtime.load.plan import LoadPlan, LoadResult
from perfledger.instrumented_runtime.load.results import load_manifest, spans_table
from perfledger.instrumented_runtime.load.workload import Workload
from perfledger.instrumented_runtime.targets.reference import (
    ReferenceTarget,
    RunningServer,
    Variable,
    serving,
)
from perfledger.instrumented_runtime.targets.succession import Succession
from perfledger.schema.errors import NotComparableError, PerfledgerError, UsageError
from perfledger.schema.host_facts import HostCounters, device_facts, host_facts
from perfledger.schema.manifest import Comparison, Manifest, Value, canonical_json, compare
from perfledger.schema.store import Store
from perfledger.schema.tables import RUNS

WARM_UP_REQUESTS = 2
# Of the busy CPU time; a run that lost more to other machines was disturbed.
STOLEN_LIMIT = 0.10


@dataclass
class Runs:
    """Makes runs and remembers what they must share."""

    experiment: str  # id, the prefix of each run's
    plan: RerunPlan
    registration: str
    variable: Variable
    workload: Workload
    target: ReferenceTarget
    servers: Succession
    store: Store
    logs: Path
    count: int = 0
    comparison: Comparison | None = None  # of the first manifests of both levels
    manifests: dict[int, Manifest] = field(default_factory=dict)  # the first of each level
    traces: dict[str, list[bytes]] = field(default_factory=dict)  # measured requests, by run

    def run_once(self, level: int) -> RunSample:
        """Start a fresh server at a level and load it; a failure is said in the sample.

        Raises what no further run would change: UsageError and NotComparableError.
        """
        self.count += 1
        run_id = f"{self.experiment}-{self.count:02d}"
        started_ns = time.time_ns()
        try:
            return self._run(run_id, level)
        except (UsageError, NotComparableError):
            raise
        except PerfledgerError as error:
            failed = RunSample(run_id, level, started_ns, time.time_ns(), failure=str(error))
            self._keep(failed, None)
            return failed

    def _run(self, run_id: str, level: int) -> RunSample:
        log = self.logs / f"{run_id}.log"
        server = self.servers.next(
            serving(self.target, self.variable, level, run_id=run_id, log=log)
        )
        host = host_facts() | read_topology(pid=server.child.process.pid).facts()
        before = HostCounters.read()
        result = asyncio.run(run_load(self._load(server.url, run_id)))
        disturbances = before.disturbances(HostCounters.read(), limit=STOLEN_LIMIT)
        manifest = self._manifest(server, host, result)
        self._check(manifest, level)
        sample = sample_of(level, result)
        sample = replace(sample, disturbances=disturbances, manifest_hash=manifest.hash())
        self.traces[run_id] = [request.trace_id for request in result.measured]
        self.store.write("spans", spans_table(result, result.samples))
        self._keep(sample, manifest)
        return sample

    def _load(self, url: str, run_id: str) -> LoadPlan:
        return LoadPlan(
            url=url,
            workload=self.workload,
            run_id=run_id,
            seed=self.plan.seed,
            warm_up=WARM_UP_REQUESTS,
        )

    def _manifest(
        self, server: RunningServer, host: Mapping[str, Value], result: LoadResult
    ) -> Manifest:
        asked = {k: v for k, v in load_manifest(result).values.items() if v is not None}
        planned: dict[str, Value] = {"method.repetitions": self.plan.pairs}
        return Manifest.of({**asked, **host, **device_facts(), **server.facts, **planned})

    def _check(self, manifest: Manifest, level: int) -> None:
        """Hold a run's manifest against the first of its level, and the levels' against it."""
        first = self.manifests.setdefault(level, manifest)
        compare(first, manifest, None).require()
        low, high = (self.manifests.get(level) for level in self.plan.levels)
        if low and high:
            variable = self.variable
            found = compare(low, high, variable.field, touches=variable.touches)
            self.comparison = found.require()

    def _keep(self, sample: RunSample, manifest: Manifest | None) -> None:
        """Write the run's row at once: a crash later on loses none of it."""
        content = {"registration": self.registration, "sample": asdict(sample)}
        write_row(self.store, sample.run_id, sample.started_ns, content, manifest=manifest)


def sample_of(level: int, result: LoadResult) -> RunSample:
    """Return what the client measured of a run. Raises PerfledgerError where it is no run."""
    if result.ended != "finished" or result.unsent:
        raise PerfledgerError(f"the load ended early: {result.ended}, {result.unsent} not sent")
    requests = result.measured
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
    return RunSample(result.plan.run_id, level, wall(result.started_ns), ended_ns, work)


def write_row(
    store: Store,
    run_id: str,
    created_ns: int,
    samples: object,
    *,
    manifest: Manifest | None = None,
    verdict: object = None,
) -> None:
    """Write one row of `runs`."""
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
    store.write(RUNS.name, RUNS.from_rows([row]))
