"""Text of /proc and /sys about CPUs -> readings: time per mode, run queue, pressure, heat."""

from collections.abc import Iterator, Mapping
from statistics import fmean

from perfledger.collectors.host.host_metrics import (
    BLOCKED,
    CONTEXT_SWITCHES,
    CPU_COUNT,
    CPU_FREQUENCY,
    CPU_TIME,
    PROCESSES_CREATED,
    RUN_QUEUE_TIME,
    RUNNABLE,
    THERMAL_THROTTLES,
)
from perfledger.collectors.host.readings import Reading
from perfledger.schema.metrics import Metric

# Linux always tells user space ticks of 1/100 s (USER_HZ), whatever its own clock.
TICKS_PER_S = 100
# In the order of /proc/stat. guest and guest_nice follow; they are counted in user and nice too.
MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "softirq", "steal")
_COUNTS = {
    "ctxt": CONTEXT_SWITCHES,
    "processes": PROCESSES_CREATED,
    "procs_running": RUNNABLE,
    "procs_blocked": BLOCKED,
}


def boot_time_ns(stat: str) -> int | None:
    """Return when the kernel started (wall clock, ns; whole seconds), from /proc/stat."""
    for line in stat.splitlines():
        if line.startswith("btime "):
            return int(line.split()[1]) * 10**9
    return None


def cpu_readings(stat: str, *, per_core: bool = False) -> Iterator[Reading]:
    """Yield CPU time by mode and the scheduler's counts, from /proc/stat."""
    cores = 0
    for line in stat.splitlines():
        name, _, rest = line.partition(" ")
        if name.startswith("cpu"):
            core = name[3:]
            cores += core != ""
            if core == "" or per_core:
                yield from _mode_times(core, rest.split())
        elif name in _COUNTS:
            yield Reading(_COUNTS[name], int(rest))
    if cores:
        yield Reading(CPU_COUNT, cores)


def _mode_times(core: str, ticks: list[str]) -> Iterator[Reading]:
    where = (("cpu.logical_number", int(core)),) if core else ()
    for mode, count in zip(MODES, ticks, strict=False):
        yield Reading(CPU_TIME, int(count) / TICKS_PER_S, (("cpu.mode", mode), *where))


def run_queue_readings(schedstat: str) -> Iterator[Reading]:
    """Yield how long threads waited for a CPU, from /proc/schedstat (version 15 to 17).

    Field 8 of a cpu line: "sum of all time spent waiting to run by tasks on this processor (in
    ns)" in the kernel's documentation, scheduler/sched-stats.
    """
    waits = [
        int(line.split()[8])
        for line in schedstat.splitlines()
        if line.startswith("cpu") and len(line.split()) > 8
    ]
    if waits:
        yield Reading(RUN_QUEUE_TIME, sum(waits))


def pressure_readings(
    text: str, resource: str, time_metric: Metric, share_metric: Metric, *, whole_host: bool
) -> Iterator[Reading]:
    """Yield the stalls of one resource, from /proc/pressure/* or a control group's *.pressure.

    `full` of the CPU means nothing for the whole host, and the kernel writes 0 there (kernel
    documentation, accounting/psi): it is left out.
    """
    for line in text.splitlines():
        stalled, *fields = line.split()
        if whole_host and resource == "cpu" and stalled == "full":
            continue
        what = (("perfledger.host.resource", resource), ("perfledger.host.stalled", stalled))
        for field in fields:
            name, _, value = field.partition("=")
            if name == "total":
                yield Reading(time_metric, int(value), what)
            elif name.startswith("avg"):
                window = ("perfledger.host.window", int(name[3:]))
                yield Reading(share_metric, float(value) / 100, (*what, window))


def frequency_readings(kilohertz: Mapping[str, str]) -> Iterator[Reading]:
    """Yield least, mean and most frequency, from each CPU's cpufreq/scaling_cur_freq."""
    hertz = [int(text) * 1000 for text in kilohertz.values() if text.strip().isdigit()]
    if hertz:
        for name, value in (("min", min(hertz)), ("mean", fmean(hertz)), ("max", max(hertz))):
            yield Reading(CPU_FREQUENCY, value, (("perfledger.host.statistic", name),))


def throttle_readings(
    cores: Mapping[str, str], packages: Mapping[str, str], package_of: Mapping[str, str]
) -> Iterator[Reading]:
    """Yield events of throttling by heat, from each CPU's thermal_throttle/*_throttle_count.

    All CPUs of a package show the package's counter, so one of them (the largest) counts.
    """
    if cores:
        total = sum(int(text) for text in cores.values())
        yield Reading(THERMAL_THROTTLES, total, (("perfledger.host.level", "core"),))
    if packages:
        most: dict[str, int] = {}
        for cpu, text in packages.items():
            package = package_of.get(cpu, "0").strip()
            most[package] = max(most.get(package, 0), int(text))
        total = sum(most.values())
        yield Reading(THERMAL_THROTTLES, total, (("perfledger.host.level", "package"),))
