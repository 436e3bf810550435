"""Bytes against FLOPs, by step kind and operator class, and which roof the numbers support.

The roofline model (Williams, Waterman and Patterson, CACM 2009): the work of a step takes at least
its bytes over the memory's bandwidth, and at least its FLOPs over the rate of the arithmetic. A
bound is named only where one of the two, from roofs that were measured on this host, explains most
of the time that the steps really took; else it stays undecided, and says why. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

ALL = "all"  # operators together, or step kinds together
MEMORY, COMPUTE, LAUNCH, UNDECIDED = "memory", "compute", "launch", "undecided"
COLLECTIVES = "collectives"
# A bound explains at least so much of the time, and so much more than the next one does.
EXPLAINS, LEADS = 0.5, 1.5
# A datasheet's roof is higher than any that can be reached: it must explain more.
EXPLAINS_OF_DATASHEET = 0.7
# Beyond this a roof is not of these steps: a cache answered, or other shapes and threads.
TOO_MUCH = 1.1


@dataclass(frozen=True)
class Roof:
    """A limit: of `memory` in bytes/s, of `compute` in flop/s; measured here or of a datasheet."""

    name: str
    kind: str  # memory or compute
    value: float
    provenance: str  # measured or datasheet


@dataclass(frozen=True)
class Point:
    """The work of one operator class (or ALL) in the steps of one kind (or ALL).

    Only whole steps have a time: `time_ns` and `flops_per_s` are null for an operator class, whose
    time is not observed. Then `attainable_flops_per_s` is where it could be at best.
    """

    step_kind: str  # prefill, decode, mixed or all
    operator: str
    steps: int
    tokens: int | None
    read_bytes: int
    written_bytes: int
    flops: int
    intensity: float | None  # FLOP a byte; null where no byte moved
    time_ns: int | None
    flops_per_s: float | None
    bytes_per_s: float | None
    attainable_flops_per_s: float | None  # min(compute roof, intensity x memory roof)
    memory_roof: str | None  # names of the roofs that it is held against
    compute_roof: str | None
    memory_share: float | None  # of its time that its bytes explain, at the memory roof
    compute_share: float | None  # of its time that its FLOPs explain, at the compute roof
    launch_share: float | None  # of its time that launches and the host explain, as measured
    bound: str  # memory, compute, launch, collectives or undecided
    why: str
    collective_share: float | None = None  # of its time that it was in collectives, with waiting


@dataclass(frozen=True)
class Roofline:
    """All points and roofs; `why` says why there are no points."""

    points: tuple[Point, ...]
    roofs: tuple[Roof, ...]
    why: str


@dataclass(frozen=True)
class Work:
    """What steps of one kind did on all devices together: exact sums.

    `time_ns` is the time that a device was active in them (a union), added up over the devices.
    `operators` has read bytes, written bytes and FLOPs of each class. `collective_share` is
    what part of the time ranks were in collectives, waiting too; null where none tells of it.
    """

    step_kind: str
    steps: int
    tokens: int
    time_ns: int
    read_bytes: int
    written_bytes: int
    flops: int
    launches: int
    operators: Mapping[str, tuple[int, int, int]]
    collective_share: float | None = None


@dataclass(frozen=True)
class Roofs:
    """The roofs of the steps of one kind; null where there is none. `launch_ns` is the cost of a
    launch and `step_ns` of what the host does for a step beside, if they were measured."""

    memory: Roof | None
    compute: Roof | None
    launch_ns: float | None = None
    step_ns: float = 0.0


def roofline(works: Iterable[tuple[Work, Roofs]], more: Sequence[Roof] = ()) -> Roofline:
    """Return the points of each kind of step, whole and by operator class, and all roofs.

    `more` are roofs to draw that no point is held against.
    """
    points: list[Point] = []
    roofs: dict[str, Roof] = {}
    for work, limits in works:
        points.append(step_point(work, limits))
        points += [operator_point(work, name, limits) for name in work.operators]
        roofs |= {roof.name: roof for roof in (limits.memory, limits.compute) if roof}
    for roof in more:
        roofs.setdefault(roof.name, roof)
    why = "" if points else "no step tells its bytes and FLOPs"
    return Roofline(tuple(points), tuple(roofs.values()), why)


def step_point(work: Work, limits: Roofs) -> Point:
    """Return the point of whole steps, which have a time."""
    size = work.read_bytes + work.written_bytes
    memory = _share(size, limits.memory, work.time_ns)
    compute = _share(work.flops, limits.compute, work.time_ns)
    launch = None
    if limits.launch_ns and work.launches and work.time_ns:
        host_ns = work.launches * limits.launch_ns + work.steps * limits.step_ns
        launch = host_ns / work.time_ns
    others = {LAUNCH: launch, COLLECTIVES: work.collective_share}
    bound, why = _bound(memory, compute, others, limits)
    point = _point(work, ALL, (work.read_bytes, work.written_bytes, work.flops), limits)
    return replace(
        point,
        time_ns=work.time_ns,
        flops_per_s=_per_s(work.flops, work.time_ns),
        bytes_per_s=_per_s(size, work.time_ns),
        memory_share=memory,
        compute_share=compute,
        launch_share=launch,
        bound=bound,
        why=why,
        collective_share=work.collective_share,
    )


def operator_point(work: Work, operator: str, limits: Roofs) -> Point:
    """Return the point of one operator class, whose time nobody observes."""
    point = _point(work, operator, work.operators[operator], limits)
    return replace(point, why=_side(point, limits))


def _point(work: Work, operator: str, done: tuple[int, int, int], limits: Roofs) -> Point:
    read, written, flops = done
    intensity = flops / (read + written) if read + written else None
    return Point(
        step_kind=work.step_kind,
        operator=operator,
        steps=work.steps,
        tokens=work.tokens,
        read_bytes=read,
        written_bytes=written,
        flops=flops,
        intensity=intensity,
        time_ns=None,
        flops_per_s=None,
        bytes_per_s=None,
        attainable_flops_per_s=_attainable(intensity, limits),
        memory_roof=limits.memory.name if limits.memory else None,
        compute_roof=limits.compute.name if limits.compute else None,
        memory_share=None,
        compute_share=None,
        launch_share=None,
        bound=UNDECIDED,
        why="",
    )


def _attainable(intensity: float | None, limits: Roofs) -> float | None:
    if intensity is None or limits.memory is None or limits.compute is None:
        return None
    return min(limits.compute.value, intensity * limits.memory.value)


def _share(amount: int, roof: Roof | None, time_ns: int) -> float | None:
    """Return the share of a time that an amount takes at a roof."""
    if roof is None or not time_ns:
        return None
    return amount / roof.value * 1e9 / time_ns


def _bound(
    memory: float | None,
    compute: float | None,
    others: Mapping[str, float | None],
    limits: Roofs,
) -> tuple[str, str]:
    """Return the bound that the numbers support, and why."""
    if memory is None or compute is None:
        what = "memory" if memory is None else "arithmetic"
        return UNDECIDED, f"no ceiling of the {what}, or the steps took no time"
    shares = {MEMORY: memory, COMPUTE: compute}
    shares |= {name: share for name, share in others.items() if share is not None}
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    if max(shares.values()) > TOO_MUCH:
        return UNDECIDED, f"at its ceiling it would have taken longer than it did: {told}"
    (first, most), (_, next_most) = sorted(shares.items(), key=lambda item: -item[1])[:2]
    needed, roof = EXPLAINS, {MEMORY: limits.memory, COMPUTE: limits.compute}.get(first)
    if roof is not None and roof.provenance != "measured":
        needed = EXPLAINS_OF_DATASHEET
    if most < needed:
        return UNDECIDED, f"no ceiling explains {needed:.0%} of the time: {told}"
    if most < LEADS * next_most:
        return UNDECIDED, f"two explain it about equally: {told}"
    return first, f"explains {most:.0%} of the time ({told})"


def _side(point: Point, limits: Roofs) -> str:
    """Say on which side of the ridge an operator class lies."""
    if point.intensity is None or limits.memory is None or limits.compute is None:
        return "its time is not observed"
    ridge = limits.compute.value / limits.memory.value
    roof = MEMORY if point.intensity < ridge else COMPUTE
    return f"its time is not observed; at best {roof} limits it (ridge {ridge:.3g} FLOP/byte)"


def _per_s(amount: int, time_ns: int) -> float | None:
    return amount * 1e9 / time_ns if time_ns else None
