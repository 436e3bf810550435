"""Joules of tokens and requests: bounds that hold, sums that conserve, and nothing invented."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvml_sessions import FIRST, SECOND, replaying
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from perfledger import analyzers
from perfledger.analyzers.counter_curve import Curve
from perfledger.analyzers.energy import CounterEnergy, Joules, energy_by, energy_of
from perfledger.analyzers.energy_counters import NO_COUNTER, EnergyCounter
from perfledger.analyzers.served_steps import Served, StepMembers
from perfledger.collectors.attribute_values import AttributeReader
from perfledger.collectors.lenient_messages import lenient
from perfledger.collectors.otlp_points import point_rows
from perfledger.energy_summary import print_energy
from perfledger.schema.derive import request_rows, step_rows
from perfledger.schema.store import Store
from perfledger.schema.tables import POINTS, REQUESTS, SPANS, STEPS

MS = 1_000_000
BASE = 1_790_000_000_000 * MS
Row = dict[str, object]


def near(joules: float) -> object:
    return pytest.approx(joules, abs=1e-9)


def exactly(joules: float) -> Joules:
    return Joules(near(joules), near(joules), near(joules))  # type: ignore[arg-type]


# --- A machine whose power is known at every ms, and the truth counted ms by ms


@dataclass(frozen=True)
class Step:
    """A step of a machine; times in ms, `members` are (request, tokens) of a phase."""

    engine: int
    start: int
    end: int
    prefill: tuple[tuple[int, int], ...]
    decode: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.prefill + self.decode)

    @property
    def prefill_share(self) -> float:
        return sum(tokens for _, tokens in self.prefill) / self.tokens


@dataclass(frozen=True)
class Machine:
    """Watts of each ms, the ms of updates and reads of its counter, and what ran on it."""

    watts: list[float]
    updates: list[int]
    reads: list[int]
    steps: list[Step]
    requests: int

    def counter(self) -> EnergyCounter:
        used = np.concatenate([[0.0], np.cumsum(self.watts) / 1000])
        seen = np.searchsorted(self.updates, self.reads, side="right") - 1
        shown = used[np.array(self.updates)[seen]]
        reads = BASE + np.array(self.reads, np.int64) * MS
        return EnergyCounter("GPU-1", "gpu", "H200", "host", "", Curve.of(reads, shown))

    def served(self) -> Served:
        rows = [
            (request, at, tokens, phase == "prefill")
            for at, step in enumerate(self.steps)
            for phase, members in (("prefill", step.prefill), ("decode", step.decode))
            for request, tokens in members
        ]
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        prefill = np.array([sum(t for _, t in s.prefill) for s in self.steps])
        decode = np.array([sum(t for _, t in s.decode) for s in self.steps])
        span = [
            [s for s in self.steps if any(r == n for r, _ in s.prefill + s.decode)]
            for n in range(self.requests)
        ]
        arrival = [min((s.start for s in mine), default=0) for mine in span]
        left = [max((s.end for s in mine), default=0) for mine in span]
        return Served(
            from_ns=BASE,
            to_ns=BASE + len(self.watts) * MS,
            engine=np.array([s.engine for s in self.steps]),
            step_seq=np.arange(len(self.steps)),
            start_ns=BASE + np.array([s.start for s in self.steps]) * MS,
            end_ns=BASE + np.array([s.end for s in self.steps]) * MS,
            prefill_tokens=prefill,
            decode_tokens=decode,
            prefill_share=prefill / (prefill + decode),
            member_tokens=prefill + decode,
            members=StepMembers(*columns[:3], columns[3].astype(np.bool_)),
            arrival_ns=BASE + np.array(arrival) * MS,
            left_ns=BASE + np.array(left) * MS,
            output_tokens=np.full(self.requests, 10),
        )

    def owned(self) -> list[tuple[int, int]]:
        """Each step's time: a step that decodes owns what is since its engine's step before."""
        found, last = [], dict[int, int]()
        for at, step in enumerate(self.steps):
            # Steps are numbered over all engines: one of another engine between is a lost step.
            before = [n for n in range(at) if self.steps[n].engine == step.engine][-1:]
            goes_on = bool(step.decode) and before == [at - 1]
            found.append((last[step.engine] if goes_on else step.start, step.end))
            last[step.engine] = step.end
        return found

    def covered(self) -> range:
        """From the first read to the last before the last rise was seen."""
        used = np.concatenate([[0.0], np.cumsum(self.watts) / 1000])
        seen = [used[max(u for u in self.updates if u <= read)] for read in self.reads]
        changed = [n for n in range(1, len(seen)) if seen[n] != seen[n - 1]]
        return range(self.reads[0], self.reads[changed[-1] - 1]) if changed else range(0)

    def truth(self) -> tuple[dict[str, float], dict[int, float]]:
        """Return the joules of the parts and of the requests, ms by ms."""
        parts = dict.fromkeys(("prefill", "decode", "waiting", "idle", "left_out"), 0.0)
        requests = dict.fromkeys(range(self.requests), 0.0)
        owned, covered = self.owned(), self.covered()
        served = self.served()
        flights = [
            range((a - BASE) // MS, (b - BASE) // MS)
            for a, b in zip(served.arrival_ns.tolist(), served.left_ns.tolist(), strict=True)
        ]
        for ms in covered:
            joules = self.watts[ms] / 1000
            running = [n for n, (start, end) in enumerate(owned) if start <= ms < end]
            if not running:
                parts["waiting" if any(ms in one for one in flights) else "idle"] += joules
            for number in running:
                step, (start, end) = self.steps[number], owned[number]
                mine = joules / len(running)
                if start < covered.start or end > covered.stop:
                    parts["left_out"] += mine
                    continue
                parts["prefill"] += mine * step.prefill_share
                parts["decode"] += mine * (1 - step.prefill_share)
                for request, tokens in step.prefill + step.decode:
                    requests[request] += mine * tokens / step.tokens
        return parts, requests

    def whole(self) -> list[int]:
        """The requests that have steps, all of them enclosed."""
        covered, owned = self.covered(), self.owned()
        found = []
        for request in range(self.requests):
            mine = [
                owned[n]
                for n, s in enumerate(self.steps)
                if any(r == request for r, _ in s.prefill + s.decode)
            ]
            if mine and all(covered.start <= a and b <= covered.stop for a, b in mine):
                found.append(request)
        return found


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    requests = draw(st.integers(1, 4))
    member = st.tuples(st.integers(0, requests - 1), st.integers(1, 9))
    members = st.lists(member, max_size=3).map(tuple)
    steps, end = [], [0, 0]
    for _ in range(draw(st.integers(1, 10))):
        engine = draw(st.integers(0, 1))
        prefill, decode = draw(members), draw(members)
        if not prefill + decode:
            prefill = ((0, 1),)
        start = end[engine] + draw(st.integers(0, 20))
        end[engine] = start + draw(st.integers(0, 30))
        steps.append(Step(engine, start, end[engine], prefill, decode))
    length = max(end) + draw(st.integers(1, 40))
    watts = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500)), min_size=1))
    every = [float(w) for ms, w in watts for _ in range(ms)]
    updates = np.cumsum(draw(st.lists(st.integers(1, 60), min_size=1, max_size=40)))
    reads = np.cumsum(draw(st.lists(st.integers(1, 40), min_size=2, max_size=40)))
    return Machine(
        watts=(every * length)[:length],
        updates=[0, *(u for u in updates.tolist() if u <= length)],
        reads=[r for r in reads.tolist() if r <= length] or [0],
        steps=steps,
        requests=requests,
    )


def assert_bounded(found: Joules, truth: float) -> None:
    assert found.at_least - 1e-6 <= truth <= found.at_most + 1e-6
    assert found.at_least - 1e-6 <= found.estimate <= found.at_most + 1e-6


@given(machines())
def test_the_truth_lies_within_the_bounds_and_the_parts_add_up(machine: Machine) -> None:
    found = energy_by(machine.counter(), machine.served())
    covered = machine.covered()
    if isinstance(found, str):
        assert not len(covered)
        return
    assert found.covered_ns == len(covered) * MS
    parts, requests = machine.truth()
    for name, joules in parts.items():
        assert_bounded(found.parts[name].joules, joules)
    assert_bounded(found.total, sum(parts.values()))
    each = sum(part.joules.estimate for part in found.parts.values())
    assert each == pytest.approx(found.total.estimate, abs=1e-9)
    assert sum(part.time_ns for part in found.parts.values()) == pytest.approx(
        found.covered_ns, abs=len(found.parts)
    )
    whole = machine.whole()
    if found.requests is None:
        assert not whole
        return
    assert found.requests.requests == len(whole)
    assert_bounded(found.requests.per_request, sum(requests[n] for n in whole) / len(whole))
    assert found.requests.distribution.mean == pytest.approx(
        found.requests.per_request.estimate, abs=1e-9
    )


@given(machines())
def test_requests_that_are_all_counted_have_the_joules_of_the_steps(machine: Machine) -> None:
    last = len(machine.watts)
    watts = [100.0] * (last + 4)
    every_ms = list(range(last + 5))
    found = energy_by(
        Machine(watts, every_ms, every_ms, machine.steps, machine.requests).counter(),
        machine.served(),
    )
    assert isinstance(found, CounterEnergy)
    steps = found.parts["prefill"].joules.estimate + found.parts["decode"].joules.estimate
    assert found.requests is not None
    assert found.requests.requests * found.requests.per_request.estimate == pytest.approx(steps)
    assert (found.parts["left_out"].time_ns, found.steps_counted) == (0, len(machine.steps))


# --- Through the store: spans as they come, rows as they are derived, points of a sampler


def point(ms: int, joules: float, **more: object) -> Row:
    device: Row = {"key": "hw.id", "text": "GPU-1"}, {"key": "hw.type", "text": "gpu"}  # type: ignore[assignment]
    return {
        "time_ns": BASE + ms * MS,
        "start_ns": BASE - 1000 * MS,
        "name": "hw.energy",
        "unit": "J",
        "kind": "sum",
        "temporality": "cumulative",
        "monotonic": True,
        "value": joules,
        "service_name": "perfledger.device",
        "attributes": list(device),
        "resource_attributes": json.dumps({"host.name": "a", "perfledger.clock.boot_id": "boot"}),
        "received_ns": BASE,
        **more,
    }


def span(trace: int, number: int, name: str, start: int, end: int, **more: object) -> Row:
    return {
        "trace_id": trace.to_bytes(16, "big"),
        "span_id": number.to_bytes(8, "big"),
        "name": name,
        "kind": "internal",
        "start_ns": BASE + start * MS,
        "end_ns": BASE + end * MS,
        "run_id": "run-1",
        "service_name": "llm",
        "boot_id": "boot",
        "received_ns": BASE,
        **more,
    }


def request(number: int, start: int, end: int, output_tokens: int) -> Row:
    told: Row = {"kind": "server", "operation": "chat", "output_tokens": output_tokens}
    return span(number, 1, "chat", start, end, **told)


def step(seq: int, start: int, end: int, **members: tuple[tuple[int, int], ...]) -> Row:
    """A step; `members` are (request, tokens) by phase."""
    links = [
        {
            "trace_id": number.to_bytes(16, "big"),
            "span_id": (1).to_bytes(8, "big"),
            "phase": phase,
            "tokens": tokens,
        }
        for phase, those in members.items()
        for number, tokens in those
    ]
    counts = [
        {
            "key": f"perfledger.step.{phase}_tokens",
            "int": sum(tokens for _, tokens in members.get(phase, ())),
        }
        for phase in ("prefill", "decode")
    ]
    kind = "mixed" if len(members) == 2 else next(iter(members))
    more: Row = {"links": links, "attributes": counts, "replica": "0", "rank": 0}
    return span(99, seq, f"{kind}_step", start, end, step_seq=seq, **more)


# Request 1 is prefilled in [100, 200), both in [200, 300), both decode in [310, 400).
SPANS_OF_TWO = [
    request(1, 50, 410, 3),
    request(2, 150, 420, 2),
    step(1, 100, 200, prefill=((1, 30),)),
    step(2, 200, 300, decode=((1, 1),), prefill=((2, 3),)),
    step(3, 310, 400, decode=((1, 1), (2, 1))),
]


def write(folder: Path, points: Sequence[Row], spans: Sequence[Row] = SPANS_OF_TWO) -> Path:
    store = Store(folder)
    rows = SPANS.from_rows(spans)
    made = step_rows(pl.DataFrame(rows), received_ns=BASE)
    requests = request_rows(pl.DataFrame(rows), made, received_ns=BASE)
    store.write("spans", rows)
    store.write("steps", made.to_arrow().cast(STEPS.arrow()))
    store.write("requests", requests.to_arrow().cast(REQUESTS.arrow()))
    if points:
        store.write("points", POINTS.from_rows(points))
    return folder


def watts_at(ms: int) -> float:
    """100 W, and 300 W while the engine works."""
    return 300.0 if 100 <= ms < 400 else 100.0


def joules_at(ms: int) -> float:
    return 1000 + sum(watts_at(at) for at in range(ms)) / 1000


EVERY_10_MS = [point(ms, joules_at(ms)) for ms in range(0, 601, 10)]


def only(folder: Path) -> CounterEnergy:
    found = energy_of(analyzers.open(str(folder)).where(run="run-1"))
    assert found.not_measurable == ()
    (one,) = found.counters
    return one


def test_prefill_decode_waiting_and_idle_of_a_known_machine(tmp_path: Path) -> None:
    one = only(write(tmp_path, EVERY_10_MS))
    told = (one.counter, one.device, one.host, one.reads, one.read_every_ns, one.rises_every_ns)
    assert told == ("GPU-1", "gpu", "a", 61, 10 * MS, 10 * MS)
    counted = (one.window_ns, one.covered_ns, one.steps, one.steps_counted, one.breaks, one.refused)
    assert counted == (370 * MS, 370 * MS, 3, 3, 0, 0)
    parts = {
        name: (part.joules.estimate, part.time_ns, part.watts, part.tokens)
        for name, part in one.parts.items()
    }
    # The mixed step's 30 J are split 3 to 1; the last step owns the 10 ms before it.
    assert parts == {
        "prefill": (near(30 + 22.5), 175 * MS, near(300), 33),
        "decode": (near(7.5 + 30), 125 * MS, near(300), 3),
        "waiting": (near(7), 70 * MS, near(100), None),
        "idle": (0, 0, None, None),
        "left_out": (near(0), 0, None, None),
    }
    assert one.parts["decode"].per_token is not None
    assert one.parts["decode"].per_token.estimate == near(12.5)
    assert one.total.estimate == near(97)
    assert one.requests is not None
    assert (one.requests.requests, one.requests.output_tokens) == (2, 5)
    assert one.requests.per_request.estimate == near((30 + 30 + 30) / 2)
    assert one.requests.prefill_per_request == near((30 + 22.5) / 2)
    assert one.requests.decode_per_request == near((7.5 + 30) / 2)
    assert (one.requests.distribution.n, one.requests.distribution.p50) == (2, near(45))


def test_a_counter_slower_than_the_steps_says_how_little_it_knows(tmp_path: Path) -> None:
    slow = [point(ms, joules_at(ms // 200 * 200)) for ms in range(0, 1201, 100)]
    one = only(write(tmp_path, slow))
    decode = one.parts["decode"].joules
    assert (one.read_every_ns, one.rises_every_ns) == (100 * MS, 200 * MS)
    assert decode.at_least == near(0)
    assert decode.at_most > 37.5 > decode.at_least
    assert one.total.at_least < 97 < one.total.at_most


def test_a_longer_range_shows_what_idling_takes(tmp_path: Path) -> None:
    write(tmp_path, EVERY_10_MS)
    selection = analyzers.open(str(tmp_path)).where(
        run="run-1", from_ns=BASE, to_ns=BASE + 500 * MS
    )
    (one,) = energy_of(selection).counters
    assert one.parts["idle"].joules == Joules(near(13), near(11), near(15))  # type: ignore[arg-type]
    assert one.parts["idle"].watts == near(100)


def test_a_run_of_clients_has_the_energy_of_the_requests_that_they_made(tmp_path: Path) -> None:
    load: Row = {"kind": "client", "run_id": "load-1", "service_name": "load"}
    clients = [span(number, 7, "chat", 40, 430, **load) for number in (1, 2)]
    write(tmp_path, EVERY_10_MS, [*SPANS_OF_TWO, *clients])
    of_clients, of_service = (
        energy_of(analyzers.open(str(tmp_path)).where(run=run)) for run in ("load-1", "run-1")
    )
    (one,) = of_service.counters
    assert one.requests is not None
    # The window ends with the last ns of the last answer.
    assert of_clients.counters[0].requests == one.requests
    assert of_clients.counters[0].parts["decode"] == one.parts["decode"]


def test_without_a_counter_nothing_is_told_and_why(tmp_path: Path) -> None:
    found = energy_of(analyzers.open(str(write(tmp_path, []))))
    assert (found.counters, found.not_measurable) == ((), (NO_COUNTER,))


def test_a_machine_without_a_counter_says_so_in_the_samplers_words(tmp_path: Path) -> None:
    def absent(source: str, why: str) -> Row:
        pairs = [("perfledger.device.source", source), ("error.type", why)]
        told = [{"key": key, "text": text} for key, text in pairs]
        name = "perfledger.device.source.present"
        return point(5, 0.0, name=name, kind="gauge", unit="1", attributes=told)

    points = [absent("rapl", "no RAPL zone"), absent("nvml", "not found"), absent("perf", "x")]
    found = energy_of(analyzers.open(str(write(tmp_path, points))))
    assert (found.counters, found.not_measurable) == (
        (),
        (
            "not measurable here: the device sampler found no energy counter"
            " (nvml: not found; rapl: no RAPL zone)",
        ),
    )


def test_a_sampler_that_was_started_again_goes_on_with_the_counter(tmp_path: Path) -> None:
    def later(number: int) -> str:
        told = {"host.name": "a", "perfledger.clock.boot_id": "boot"}
        return json.dumps(told | {"perfledger.clock.monotonic_ns": number})

    points = [
        p | {"resource_attributes": later(int(p["time_ns"] > BASE + 250 * MS))} for p in EVERY_10_MS
    ]  # type: ignore[operator]
    one = only(write(tmp_path, points))
    assert (one.reads, one.breaks, one.total.estimate) == (61, 0, near(97))


def test_the_points_of_the_device_sampler_are_understood(tmp_path: Path) -> None:
    """A synthetic session of two GPUs that begins at BASE: 412 W, and 80 W of the idle one."""
    sampler, points = replaying("h100_pair"), []
    request = lenient(ExportMetricsServiceRequest.DESCRIPTOR.full_name)
    while not sampler.ended():
        body = sampler.sample() or b""
        points += point_rows(request.FromString(body), AttributeReader(), BASE)
    found = energy_of(analyzers.open(str(write(tmp_path, points))).where(run="run-1"))
    assert found.not_measurable == ()
    told = {
        one.counter: (one.device, one.label, one.note, one.read_every_ns) for one in found.counters
    }
    h100 = ("gpu", "NVIDIA H100 80GB HBM3", "replayed: synthetic", 100 * MS)
    assert told == {FIRST: h100, SECOND: h100}
    first, second = (one.total for one in found.counters)
    assert (first.estimate, second.estimate) == (near(0.37 * 412), near(0.37 * 80))


def test_a_counter_and_no_steps(tmp_path: Path) -> None:
    write(tmp_path, EVERY_10_MS)
    found = energy_of(analyzers.open(str(tmp_path)).where(run="another"))
    assert (found.counters, found.not_measurable) == (
        (),
        ("not measurable here: no engine steps in this selection",),
    )


def test_counters_of_the_same_machine_are_told_apart_and_those_of_others_left_out(
    tmp_path: Path,
) -> None:
    package: list[Row] = [{"key": "hw.id", "text": "package-0"}, {"key": "hw.type", "text": "cpu"}]
    cpu = [point(ms, ms / 10, attributes=package) for ms in range(0, 601, 10)]
    elsewhere = json.dumps({"host.name": "b", "perfledger.clock.boot_id": "other"})
    other = [point(ms, ms / 10, resource_attributes=elsewhere) for ms in range(0, 601, 10)]
    found = energy_of(analyzers.open(str(write(tmp_path, EVERY_10_MS + cpu + other))))
    totals = {one.counter: (one.device, one.total.estimate) for one in found.counters}
    assert totals == {"package-0": ("cpu", near(37)), "GPU-1": ("gpu", near(97))}
    assert found.not_measurable == ("GPU-1: of another host (b) than the selected engines",)


def test_a_counter_that_was_reset_leaves_out_the_steps_around_that(tmp_path: Path) -> None:
    points = [
        point(ms, joules_at(ms) if ms < 250 else joules_at(ms) - 1050) for ms in range(0, 601, 10)
    ]
    one = only(write(tmp_path, points))
    assert (one.breaks, one.steps, one.steps_counted) == (1, 3, 2)
    assert (one.parts["prefill"].tokens, one.parts["decode"].tokens) == (30, 2)
    assert one.parts["prefill"].joules.estimate == near(30)
    assert one.parts["left_out"].time_ns == 80 * MS  # of the 100; 20 are not covered at all
    assert one.requests is None  # no request has all its steps


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ([point(ms, 5.0) for ms in range(0, 601, 10)], "the counter did not move"),
        ([point(100, 5.0)], "fewer than two reads"),
        (
            [point(ms, joules_at(600) + ms) for ms in range(1000, 1100, 10)],
            "its reads do not enclose any time of these requests",
        ),
        ([point(ms, float("nan")) for ms in range(0, 601, 10)], "fewer than two reads"),
    ],
)
def test_a_counter_that_says_nothing_says_why(tmp_path: Path, points: list[Row], why: str) -> None:
    found = energy_of(analyzers.open(str(write(tmp_path, points))))
    assert (found.counters, found.not_measurable) == ((), (f"GPU-1 (gpu): not measurable: {why}",))


def test_points_that_are_no_cumulative_joules_are_not_taken_for_them(tmp_path: Path) -> None:
    odd = [
        point(ms, 3.0, unit="mJ", temporality="delta", attributes=None) for ms in range(0, 601, 10)
    ]
    found = energy_of(analyzers.open(str(write(tmp_path, odd))))
    assert found.counters == ()
    assert found.not_measurable == (
        "unnamed: 61 points are no joules: mJ sum delta",
        "unnamed (unknown): not measurable: fewer than two reads",
    )


def test_what_the_ledger_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_energy(energy_of(analyzers.open(str(write(tmp_path, EVERY_10_MS))).where(run="run-1")))
    assert capsys.readouterr().out == PRINTED


PRINTED = """\
energy: gpu GPU-1
part       time  energy    power  a token         lies in
───────  ──────  ──────  ───────  ───────  ──────────────
prefill  0.17 s  52.5 J  300.0 W   1.59 J   1.5 to 1.68 J
decode   0.12 s  37.5 J  300.0 W   12.5 J  11.5 to 12.8 J
waiting  0.07 s     7 J  100.0 W        –               –
2 requests, every step of them counted: 45 J (43.5 to 45.5 J) a request; 18 J
  (17.4 to 18.2 J) an output token
read every 10 ms, seen to rise every 10 ms; 0.37 of 0.37 s covered

"""
