"""`record` and `measure`: the ledger's two calls for people's own generation code.

    with record(model="my-7b", quant="int8", prompt_tokens=512, output_tokens=64) as run:
        result = measure(run, lambda: my_model.stream(prompt))
    print(result.ttft_ns, result.itl_p50_ns, result.tokens_per_s)

The run with all its raw samples becomes one row of the store's `runs` table.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Self

import orjson

from perfledger.collectors.energy import EnergyMeter, find_meter
from perfledger.collectors.topology.reading import read_topology
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import NoDataError, UsageError
from perfledger.schema.host_facts import device_facts, host_facts
from perfledger.schema.manifest import Manifest, Value
from perfledger.schema.quantiles import quantile
from perfledger.schema.store import DEFAULT_STORE, Store
from perfledger.schema.tables import RUNS


@dataclass(frozen=True)
class Sample:
    """One generation: when each token came, ns after its start. Warm-ups are kept, marked."""

    token_times_ns: tuple[int, ...]
    end_ns: int
    joules: float | None
    warmup: bool


@dataclass(frozen=True)
class Measurement:
    """What `measure` found. Medians and quantiles over the samples that are not warm-up.

    TTFT: call to first token. ITL: gap between two tokens of one generation, pooled over the
    samples, null with fewer than two tokens. Tokens/s: all tokens over all time to the last token.
    """

    ttft_ns: float
    itl_p50_ns: float | None
    itl_p95_ns: float | None
    tokens_per_s: float
    joules_per_token: float | None
    joules_note: str
    output_tokens: tuple[int, ...]
    samples: tuple[Sample, ...]


@dataclass
class Recording:
    """An open run. Closing it writes its row; an exception inside is recorded with it."""

    run_id: str
    store: Store
    manifest: Manifest
    samples: list[list[Sample]] = field(default_factory=list)  # one list a call of `measure`
    closed: bool = False
    meter: EnergyMeter = field(default_factory=find_meter)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed="" if kind is None else kind.__name__)

    def close(self, failed: str = "") -> None:
        """Write the run, its manifest and its raw samples, also those of a call that failed."""
        self.closed = True
        measurements = [[asdict(sample) for sample in call] for call in self.samples]
        samples = {"failed": failed, "measurements": measurements}
        row: dict[str, object] = {
            "run_id": self.run_id,
            "kind": "record",
            "created_ns": time.time_ns(),
            "manifest": self.manifest.to_json(),
            "manifest_hash": self.manifest.hash(),
            "samples": orjson.dumps(samples).decode(),
            "received_ns": time.time_ns(),
        }
        self.store.write(RUNS.name, RUNS.from_rows([row]))


def record(
    model: str,
    quant: str,
    prompt_tokens: int,
    output_tokens: int,
    hardware: str | None = None,
    temperature: float = 0.0,
    *,
    store: str | None = None,
    run_id: str | None = None,
) -> Recording:
    """Open a run under these conditions; the rest of its manifest is collected from this host.

    `hardware` None is found out. `store` defaults to PERFLEDGER_STORE, else ./perfledger-data.
    Raises UsageError for a model without a name or counts that cannot be.
    """
    if not isinstance(model, str) or not model:
        raise UsageError(f"not the name of a model: {model!r}")
    for name, count, least in (
        ("prompt_tokens", prompt_tokens, 0),
        ("output_tokens", output_tokens, 1),
    ):
        if not isinstance(count, int) or count < least:
            raise UsageError(f"{name} is {count!r}, but must be a whole number from {least}")
    run_id = run_id or f"record-{secrets.token_hex(6)}"
    declared: dict[str, Value] = {
        "run.id": run_id,
        "run.started_ns": time.time_ns(),
        "model.name": model,
        "model.quantization": quant,
        "workload.prompt_tokens": prompt_tokens,
        "workload.output_limit": output_tokens,
        "workload.sampling": f"temperature={temperature}",
    }
    if hardware is not None:
        declared["device.names"] = [hardware]
    machine = host_facts() | device_facts() | read_topology().facts()
    manifest = Manifest.of({**machine, **declared})
    where = store or os.environ.get("PERFLEDGER_STORE", DEFAULT_STORE)
    return Recording(run_id, Store.at(where), manifest)


def measure(
    run: Recording, generate: Callable[[], Iterable[object]], *, repeat: int = 5, warmup: int = 1
) -> Measurement:
    """Time `generate` (it returns an iterable of tokens) `warmup + repeat` times.

    Raises UsageError where that cannot be or the run is closed, NoDataError where a generation
    gives no token. Samples made before an error are kept with the run.
    """
    if repeat < 1 or warmup < 0:
        raise UsageError(f"repeat is {repeat} (1 or more), warmup is {warmup} (0 or more)")
    if run.closed:
        raise UsageError("the run is closed", where=run.run_id, fix="measure inside its with block")
    samples: list[Sample] = []
    run.samples.append(samples)
    for at in range(warmup + repeat):
        samples.append(_sample(run, generate, at < warmup))
    return _summarize(tuple(samples), run.meter)


def _sample(run: Recording, generate: Callable[[], Iterable[object]], warmup: bool) -> Sample:
    joules_before = run.meter.read_joules()
    start_ns = monotonic_ns()
    tokens = generate()
    if not isinstance(tokens, Iterable):
        kind = type(tokens).__name__
        raise UsageError(f"the generation returned {kind}", fix="return an iterable of tokens")
    times_ns = tuple(monotonic_ns() - start_ns for _ in tokens)
    end_ns = monotonic_ns() - start_ns
    joules_after = run.meter.read_joules()
    if not times_ns:
        raise NoDataError("the generation gave no token", where=f"run {run.run_id}")
    known = joules_before is not None and joules_after is not None
    joules = joules_after - joules_before if known else None  # type: ignore[operator]
    return Sample(times_ns, end_ns, joules, warmup)


def _summarize(samples: tuple[Sample, ...], meter: EnergyMeter) -> Measurement:
    counted = [sample for sample in samples if not sample.warmup]
    tokens = sum(len(sample.token_times_ns) for sample in counted)
    gaps_ns = [
        later - earlier
        for sample in counted
        for earlier, later in zip(sample.token_times_ns, sample.token_times_ns[1:], strict=False)
    ]
    joules, note = _energy(counted, meter)
    return Measurement(
        ttft_ns=quantile([s.token_times_ns[0] for s in counted], 0.5),
        itl_p50_ns=quantile(gaps_ns, 0.5) if gaps_ns else None,
        itl_p95_ns=quantile(gaps_ns, 0.95) if gaps_ns else None,
        tokens_per_s=tokens / (sum(s.token_times_ns[-1] for s in counted) / 1e9),
        joules_per_token=None if joules is None else joules / tokens,
        joules_note=note,
        output_tokens=tuple(len(s.token_times_ns) for s in counted),
        samples=samples,
    )


def _energy(counted: list[Sample], meter: EnergyMeter) -> tuple[float | None, str]:
    """Sum the counter's deltas; a counter that did not move says so instead of 0 joules."""
    deltas = [sample.joules for sample in counted if sample.joules is not None]
    if len(deltas) < len(counted):
        return None, f"not measurable: {meter.why_not}"
    if sum(deltas) <= 0:
        return None, f"not measurable: {meter.source} did not move; the run is too short for it"
    return sum(deltas), f"{meter.source}, over the generations only"
