"""Joules for each token and each request, prefill and decode apart, idle apart; with their bounds.

From differences of cumulative counters (metric hw.energy) over exactly the time that steps own
(step_shares.py). Counters are told apart and never added up: a GPU's board, a CPU's package and
what is measured of both may be the same joules. A counter counts all of its device, also what other
processes do there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfledger.analyzers.counter_curve import Curve, Floats
from perfledger.analyzers.energy_counters import EnergyCounter, read_counters
from perfledger.analyzers.latency import Distribution, distribution
from perfledger.analyzers.ledger import Selection
from perfledger.analyzers.served_steps import Served, read_served
from perfledger.analyzers.step_shares import OwnedTime, Pieces
from perfledger.schema.intervals import Coverage

DEFINITIONS: Mapping[str, str] = {
    "joules": "estimate: the counter's difference, rising evenly between two reads; at_least and"
    " at_most hold wherever between its reads it rose, and at whatever power above 0",
    "prefill": "the time of steps that compute prompts, with the share that prompt and recomputed"
    " tokens have of a mixed step's tokens",
    "decode": "the same of new tokens. A step with new tokens owns the time since the step before",
    "waiting": "a selected request was there and no step ran: tokenizing, queueing, writing",
    "idle": "no selected request was there",
    "left_out": "steps that the counter's reads do not enclose, or that do not tell their tokens:"
    " neither their joules nor their tokens are in anything else",
    "per_token": "joules of the part / tokens computed in it",
    "requests": "requests of which every step is counted; a step's joules are split among its"
    " members by their tokens",
    "per_output_token": "joules of those requests / tokens that their roots say were sampled",
    "read_every_ns": "median time between two reads of the counter",
    "rises_every_ns": "median time between two reads that differ: what is shorter than this it"
    " cannot tell apart, and the bounds say so",
}


@dataclass(frozen=True)
class Joules:
    """An amount of energy, and the bounds that it certainly lies in. May be per something."""

    estimate: float
    at_least: float
    at_most: float

    def per(self, count: int) -> "Joules | None":
        """Return it divided; None where there is nothing to divide by."""
        if not count:
            return None
        return Joules(self.estimate / count, self.at_least / count, self.at_most / count)


@dataclass(frozen=True)
class Part:
    """What one kind of time took. `watts` is its mean power, `tokens` what was computed in it."""

    name: str
    joules: Joules
    time_ns: int
    watts: float | None
    tokens: int | None = None
    per_token: Joules | None = None


@dataclass(frozen=True)
class RequestEnergy:
    """Of the requests that are counted whole; `distribution` is of their estimates, in joules."""

    requests: int
    output_tokens: int
    per_request: Joules
    per_output_token: Joules | None
    prefill_per_request: float
    decode_per_request: float
    distribution: Distribution


@dataclass(frozen=True)
class CounterEnergy:
    """What one counter says. `parts` add up to `total`, the joules of the time that it covers."""

    counter: str  # hw.id
    device: str  # hw.type: gpu, cpu or memory
    label: str  # hw.name
    host: str
    note: str  # "", or that the reads are of a replay, and whether they are synthetic
    reads: int
    read_every_ns: int
    rises_every_ns: int
    breaks: int  # times that it fell or began anew; the time between is not covered
    refused: int  # reads that were no amount
    window_ns: int
    covered_ns: int
    steps: int
    steps_counted: int
    parts: dict[str, Part]  # prefill, decode, waiting, idle, left_out
    total: Joules
    requests: RequestEnergy | None


@dataclass(frozen=True)
class Energy:
    """One entry a counter; `not_measurable` says why there is none, or what was left out."""

    counters: tuple[CounterEnergy, ...]
    not_measurable: tuple[str, ...]


def energy_of(selection: Selection) -> Energy:
    """Return what each energy counter says of the selected requests and their steps.

    Times are wall ns. Where there is no counter nothing else is read. Raises PartialInputError on
    damaged files.
    """
    selection = selection.resolved()
    counters, reasons = read_counters(selection)
    if not counters:
        return Energy((), tuple(reasons))
    served = read_served(selection)
    if not len(served.start_ns):
        return Energy((), (*reasons, "not measurable here: no engine steps in this selection"))
    found = []
    for counter in counters:
        told = energy_by(counter, served)
        if isinstance(told, str):
            reasons.append(f"{counter.name} ({counter.device}): not measurable: {told}")
        else:
            found.append(told)
    return Energy(tuple(found), tuple(reasons))


def energy_by(counter: EnergyCounter, served: Served) -> CounterEnergy | str:
    """Return what one counter says, or why it says nothing."""
    curve = counter.curve
    covered = curve.covered()
    read_every, rises_every = curve.read_every_ns, curve.rises_every_ns
    if read_every is None or rises_every is None:
        return "the counter did not move" if curve.reads > 1 else "fewer than two reads"
    owned = served.owned()
    sharing = _Sharing(served, owned, curve, covered)
    if not sharing.covered_ns:
        return "its reads do not enclose any time of these requests"
    return CounterEnergy(
        counter=counter.name,
        device=counter.device,
        label=counter.label,
        host=counter.host,
        note=counter.note,
        reads=curve.reads,
        read_every_ns=read_every,
        rises_every_ns=rises_every,
        breaks=curve.breaks,
        refused=curve.refused,
        window_ns=served.to_ns - served.from_ns,
        covered_ns=sharing.covered_ns,
        steps=len(served.start_ns),
        steps_counted=int(sharing.counted.sum()),
        parts=_parts(sharing),
        total=sharing.joules(sharing.known),
        requests=_requests(sharing),
    )


class _Sharing:
    """The pieces of the time of a selection, and what a counter says of them."""

    def __init__(self, served: Served, owned: OwnedTime, curve: Curve, covered: Coverage) -> None:
        in_flight = Coverage.of(served.arrival_ns, served.left_ns)
        window = np.array([served.from_ns, served.to_ns])
        inside = np.clip(owned.start_ns, *window), np.clip(owned.end_ns, *window)
        clipped = OwnedTime(owned.engine, *inside)
        spans = [one for part in (covered, in_flight) for one in (part.start, part.end)]
        self.served, self.curve = served, curve
        self.pieces = Pieces.cut(clipped, [window, *(np.clip(one, *window) for one in spans)])
        start, end = self.pieces.bound_ns[:-1], self.pieces.bound_ns[1:]
        self.length_ns = end - start
        self.known = (covered.within(start, end) == self.length_ns).astype(np.float64)
        self.in_flight = in_flight.within(start, end) > 0
        self.rise = self.pieces.between(curve)
        within = (owned.start_ns >= served.from_ns) & (owned.end_ns <= served.to_ns)
        told = np.isfinite(served.prefill_share)
        self.counted: NDArray[np.bool_] = _enclosed(covered, owned) & within & told

    @property
    def covered_ns(self) -> int:
        return int(self.length_ns @ self.known)

    def of_steps(self, part: Floats) -> Floats:
        """Return the share that something has of each piece, given its part of each step."""
        share: Floats = self.pieces.share(part * self.counted) * self.known
        return share

    def joules(self, share: Floats) -> Joules:
        at_least, at_most = self.pieces.bounds_of(share, self.curve)
        return Joules(float(share @ self.rise), at_least, at_most)

    def step_joules(self) -> Floats:
        joules = self.pieces.of_steps(self.rise * self.known, len(self.counted))
        return joules * self.counted


def _enclosed(covered: Coverage, owned: OwnedTime) -> NDArray[np.bool_]:
    """Return which steps lie in one stretch of what is covered."""
    begun = np.searchsorted(covered.start, owned.start_ns, side="right")
    end_ns = np.append(covered.end, np.iinfo(np.int64).min)[begun - 1]  # of none, for the first
    enclosed: NDArray[np.bool_] = owned.end_ns <= end_ns
    return enclosed


def _parts(sharing: _Sharing) -> dict[str, Part]:
    served = sharing.served
    prefill = np.nan_to_num(served.prefill_share)
    shares = {"prefill": sharing.of_steps(prefill), "decode": sharing.of_steps(1 - prefill)}
    unowned = (sharing.pieces.running == 0) * sharing.known
    shares["waiting"] = unowned * sharing.in_flight
    shares["idle"] = unowned * ~sharing.in_flight
    shares["left_out"] = np.maximum(sharing.known - sum(shares.values()), 0.0)
    tokens: dict[str, int | None] = {
        "prefill": int(served.prefill_tokens[sharing.counted].sum()),
        "decode": int(served.decode_tokens[sharing.counted].sum()),
    }
    return {name: _part(sharing, name, share, tokens.get(name)) for name, share in shares.items()}


def _part(sharing: _Sharing, name: str, share: Floats, tokens: int | None) -> Part:
    joules = sharing.joules(share)
    time_ns = float(share @ sharing.length_ns)
    return Part(
        name,
        joules,
        round(time_ns),
        joules.estimate / (time_ns / 1e9) if time_ns else None,
        tokens,
        None if tokens is None else joules.per(tokens),
    )


def _requests(sharing: _Sharing) -> RequestEnergy | None:
    """Split the joules of the steps among their members; None where no request is counted."""
    served, members = sharing.served, sharing.served.members
    requests = len(served.arrival_ns)
    lost = np.bincount(members.request[~sharing.counted[members.step]], minlength=requests)
    held = np.bincount(members.request, minlength=requests)
    whole = (held > 0) & (lost == 0) & (served.output_tokens >= 0)
    if not whole.any():
        return None
    part = members.tokens / np.maximum(served.member_tokens[members.step], 1)
    joules = sharing.step_joules()[members.step] * part
    prefill = np.bincount(members.request, joules * members.prefill, requests)[whole]
    each = np.bincount(members.request, joules, requests)[whole]
    counted = whole[members.request]
    share = np.bincount(members.step[counted], part[counted], len(served.start_ns))
    total = sharing.joules(sharing.of_steps(share.astype(np.float64)))
    output_tokens = int(served.output_tokens[whole].sum())
    per_request = total.per(len(each))
    assert per_request is not None
    return RequestEnergy(
        requests=len(each),
        output_tokens=output_tokens,
        per_request=per_request,
        per_output_token=total.per(output_tokens),
        prefill_per_request=float(prefill.mean()),
        decode_per_request=float((each - prefill).mean()),
        distribution=distribution(each),
    )
