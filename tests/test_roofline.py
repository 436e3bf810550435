"""Which roof the numbers support, and when none is named."""

from dataclasses import replace

import pytest

from perfledger.analyzers.roofline import Roof, Roofline, Roofs, Work, roofline, step_point

GB, MS = 10**9, 10**6
MEMORY = Roof("read 100MiB", "memory", 10 * GB, "measured")
COMPUTE = Roof("matmul float32 m=4", "compute", 100 * GB, "measured")
ROOFS = Roofs(MEMORY, COMPUTE, launch_ns=1000)
# 80 MB at 10 GB/s is 8 ms, 100 MFLOP at 100 GFLOP/s 1 ms, 500 launches 0.5 ms: of 10 ms.
DECODE = Work(
    step_kind="decode",
    steps=2,
    tokens=8,
    time_ns=10 * MS,
    read_bytes=79_000_000,
    written_bytes=1_000_000,
    flops=100_000_000,
    launches=500,
    operators={"linear": (79_000_000, 0, 100_000_000), "norm": (0, 1_000_000, 0)},
)


def test_a_step_that_the_memory_bounds_and_its_operators() -> None:
    found = roofline([(DECODE, ROOFS)], [Roof("datasheet memory", "memory", 2e10, "datasheet")])
    whole, linear, norm = found.points
    assert (whole.bound, whole.why) == (
        "memory",
        "explains 80% of the time (memory 80%, compute 10%, launch 5%)",
    )
    assert (whole.memory_share, whole.compute_share, whole.launch_share) == (0.8, 0.1, 0.05)
    assert whole.intensity == 1.25
    assert whole.flops_per_s == 10 * GB
    assert whole.bytes_per_s == 8 * GB
    assert whole.attainable_flops_per_s == 12.5 * GB
    assert (linear.operator, linear.time_ns, linear.flops_per_s) == ("linear", None, None)
    assert linear.attainable_flops_per_s == pytest.approx(100 / 79 * 10 * GB)
    assert linear.why == "its time is not observed; at best memory limits it (ridge 10 FLOP/byte)"
    assert (norm.intensity, norm.attainable_flops_per_s, norm.bound) == (0.0, 0.0, "undecided")
    assert [roof.name for roof in found.roofs] == [
        "read 100MiB",
        "matmul float32 m=4",
        "datasheet memory",
    ]


def test_a_prefill_that_arithmetic_bounds_and_steps_that_launches_bound() -> None:
    prefill = replace(DECODE, flops=900_000_000, read_bytes=9_000_000)
    assert step_point(prefill, ROOFS).bound == "compute"
    tiny = replace(DECODE, flops=1, read_bytes=1, launches=9_000)
    assert step_point(tiny, ROOFS).bound == "launch"
    slow_host = replace(DECODE, flops=1, read_bytes=1, launches=1000)
    assert step_point(slow_host, replace(ROOFS, step_ns=4 * MS)).launch_share == pytest.approx(0.9)


def test_steps_that_are_mostly_in_collectives() -> None:
    waiting = replace(DECODE, time_ns=40 * MS, collective_share=0.75)
    point = step_point(waiting, ROOFS)
    assert (point.bound, point.collective_share) == ("collectives", 0.75)
    assert point.why == (
        "explains 75% of the time (memory 20%, compute 2%, launch 1%, collectives 75%)"
    )


@pytest.mark.parametrize(
    ("work", "roofs", "why"),
    [
        (
            replace(DECODE, time_ns=100 * MS),
            ROOFS,
            "no ceiling explains 50% of the time: memory 8%, compute 1%, launch 0%",
        ),
        (
            replace(DECODE, flops=700_000_000),
            ROOFS,
            "two explain it about equally: memory 80%, compute 70%, launch 5%",
        ),
        (
            replace(DECODE, time_ns=5 * MS),
            ROOFS,
            "at its ceiling it would have taken longer than it did: memory 160%, compute 20%,"
            " launch 10%",
        ),
        (DECODE, Roofs(None, COMPUTE), "no ceiling of the memory, or the steps took no time"),
        (DECODE, Roofs(MEMORY, None), "no ceiling of the arithmetic, or the steps took no time"),
        (
            replace(DECODE, time_ns=0),
            ROOFS,
            "no ceiling of the memory, or the steps took no time",
        ),
        (
            replace(DECODE, time_ns=13 * MS),
            Roofs(replace(MEMORY, provenance="datasheet"), COMPUTE),
            "no ceiling explains 70% of the time: memory 62%, compute 8%",
        ),
    ],
)
def test_no_bound_is_named_where_the_numbers_do_not_carry_it(
    work: Work, roofs: Roofs, why: str
) -> None:
    point = step_point(work, roofs)
    assert (point.bound, point.why) == ("undecided", why)


def test_undefined_is_null_and_never_zero() -> None:
    nothing = Work("mixed", 0, 0, 0, 0, 0, 0, 0, {})
    point = step_point(nothing, Roofs(None, None))
    assert (point.intensity, point.flops_per_s, point.bytes_per_s) == (None, None, None)
    assert roofline([]) == Roofline((), (), "no step tells its bytes and FLOPs")
