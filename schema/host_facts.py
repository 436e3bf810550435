"""What the machine is, for the manifest, and what disturbed it during a run.

Everything is read below injected roots, so that captured files stand in for machines. A file that
is not there makes its field unknown (None), never a guess.
"""

import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfledger.schema.manifest import Value, content_hash

ROOT = Path("/")
LARGEST_FACT_BYTES = 4_000_000
NVIDIA_QUERY = [
    "name",
    "driver_version",
    "vbios_version",
    "power.limit",
    "clocks.max.sm",
    "temperature.gpu",
]
Ask = Callable[[Sequence[str]], str | None]


def host_facts(root: Path = ROOT, *, affinity: Sequence[int] | None = None) -> dict[str, Value]:
    """Return the manifest's `host.*` fields of the machine whose /proc and /sys are below `root`.

    `affinity` are the cores that the run may use; by default this process's.
    """
    cpu = _cpuinfo(root)
    cores = sorted(os.sched_getaffinity(0)) if affinity is None else sorted(affinity)
    system = root / "sys/devices/system"
    return {
        "host.cpu_model": cpu.get("model name") or cpu.get("Model") or None,
        "host.cpu_flags": _hash_of(cpu.get("flags") or cpu.get("Features")),
        "host.cores": _count(_read(system / "cpu/online")),
        "host.affinity": ranges(cores) if cores else None,
        "host.numa_nodes": _count(_read(system / "node/online")),
        "host.memory_bytes": _memory_bytes(root),
        "host.governor": _read(system / "cpu/cpu0/cpufreq/scaling_governor"),
        "host.boost": _boost(system / "cpu"),
        "host.transparent_hugepage": _chosen(_read(root / THP_FILE)),
        "host.kernel": _read(root / "proc/sys/kernel/osrelease"),
        "host.os": " ".join(platform.libc_ver()).strip() or None,
        "host.microcode": cpu.get("microcode"),
        "host.firmware": _read(root / "sys/class/dmi/id/bios_version"),
        "host.virtual": "hypervisor" in cpu["flags"].split() if "flags" in cpu else None,
        "host.cgroup_cpus": _cgroup_cpus(root),
        "host.cgroup_memory_bytes": _cgroup_memory(root),
        "host.boot_id": _read(root / "proc/sys/kernel/random/boot_id"),
        "host.load": (_read(root / "proc/loadavg") or "").split(" ")[0] or None,
    }


def device_facts(root: Path = ROOT, ask: Ask | None = None) -> dict[str, Value]:
    """Return the manifest's `device.*` fields; without an NVIDIA driver there are no devices.

    With one, `ask` runs nvidia-smi (by default the machine's) and a silent one leaves all unknown.
    """
    if not (root / "proc/driver/nvidia/version").exists():
        return {
            "device.names": [],
            "device.driver": "",
            "device.firmware": [],
            "device.power_limits": [],
            "device.max_clocks": [],
            "device.temperatures": [],
        }
    query = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA_QUERY)}"]
    answer = (ask or _ask)([*query, "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in row.split(",")] for row in (answer or "").splitlines()]
    if not rows or any(len(row) != len(NVIDIA_QUERY) for row in rows):
        return {}
    names, drivers, firmware, power_watts, clocks, temperatures = map(list, zip(*rows, strict=True))
    return {
        "device.names": names,
        "device.driver": drivers[0],
        "device.firmware": firmware,
        "device.power_limits": [_milliwatts(watts) for watts in power_watts],
        "device.max_clocks": clocks,
        "device.temperatures": temperatures,
    }


@dataclass(frozen=True)
class HostCounters:
    """Counters of disturbance at one instant. None: this machine does not say."""

    busy_ticks: int | None  # all cores, in 1/100 s
    stolen_ticks: int | None  # by the hypervisor
    throttled_ns: int | None  # by the control group's CPU quota
    heat_events: int | None  # thermal throttling, all cores

    @classmethod
    def read(cls, root: Path = ROOT) -> "HostCounters":
        """Read the counters now."""
        ticks = (_read(root / "proc/stat") or "").split("\n")[0].split()[1:]
        known = len(ticks) >= 8
        return cls(
            busy_ticks=sum(int(ticks[i]) for i in (0, 1, 2, 5, 6, 7)) if known else None,
            stolen_ticks=int(ticks[7]) if known else None,
            throttled_ns=_throttled_ns(root),
            heat_events=_heat_events(root),
        )

    def disturbances(self, later: "HostCounters", *, limit: float) -> tuple[str, ...]:
        """Name what took more than `limit` (a share of the busy CPU time) from a run until then.

        Thermal throttling counts from its first event.
        """
        found = []
        busy = _difference(self.busy_ticks, later.busy_ticks)
        stolen = _difference(self.stolen_ticks, later.stolen_ticks)
        if busy and stolen / busy > limit:
            found.append(f"{stolen / busy:.0%} of the busy CPU time was stolen by other machines")
        throttled = _difference(self.throttled_ns, later.throttled_ns) / 1e7
        if busy and throttled / busy > limit:
            found.append(f"the CPU quota held the run back for {throttled / 100:.1f} s")
        if heat := _difference(self.heat_events, later.heat_events):
            found.append(f"the CPU was throttled by heat {heat} times")
        return tuple(found)


THP_FILE = "sys/kernel/mm/transparent_hugepage/enabled"


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted integers in the kernel's list format: 0-3,8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _read(path: Path) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(LARGEST_FACT_BYTES).strip() or None
    except OSError:
        return None


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return /proc/cpuinfo's first processor."""
    first = (_read(root / "proc/cpuinfo") or "").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _count(ids: str | None) -> int | None:
    """Return how many numbers the kernel's list format names: 0-3,8 has 5."""
    if not ids:
        return None
    bounds = [part.split("-") for part in ids.split(",")]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in bounds)


def _memory_bytes(root: Path) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _boost(cpu: Path) -> str | None:
    if (boost := _read(cpu / "cpufreq/boost")) is not None:
        return "on" if boost == "1" else "off"
    if (no_turbo := _read(cpu / "intel_pstate/no_turbo")) is not None:
        return "off" if no_turbo == "1" else "on"
    return None


def _chosen(choices: str | None) -> str | None:
    """Return the bracketed word of `always [madvise] never`."""
    return choices.split("[")[1].split("]")[0] if choices and "[" in choices else choices


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Return this process's control group and all above it, unified or version 1."""
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        base = mount if number == "0" else mount / controllers
        if number != "0" and controller not in controllers.split(","):
            continue
        here = base / path.lstrip("/")
        folders = [folder for folder in (here, *here.parents) if folder.is_relative_to(base)]
        if any((folder / name).exists() for folder in folders for name in _LIMITS[controller]):
            return folders
    return []


_LIMITS = {
    "cpu": ("cpu.max", "cpu.cfs_quota_us"),
    "memory": ("memory.max", "memory.limit_in_bytes"),
}


def _cgroup_cpus(root: Path) -> str | None:
    """Return the smallest CPU quota of the group and its parents in cores, or max."""
    folders = _cgroup_folders(root, "cpu")
    quotas = []
    for folder in folders:
        unified = _read(folder / "cpu.max")
        quota, period = (
            unified.split()
            if unified
            else (_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))
        )
        if quota and period and quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    if quotas:
        return f"{min(quotas):g}"
    return "max" if folders else None


def _cgroup_memory(root: Path) -> str | None:
    """Return the smallest memory limit of the group and its parents in bytes, or max."""
    folders = _cgroup_folders(root, "memory")
    found = [_read(folder / name) for folder in folders for name in _LIMITS["memory"]]
    limits = [int(text) for text in found if text and text != "max"]
    limits = [limit for limit in limits if limit < 1 << 60]  # version 1 says no limit so
    if limits:
        return str(min(limits))
    return "max" if folders else None


def _throttled_ns(root: Path) -> int | None:
    for folder in _cgroup_folders(root, "cpu"):
        for line in (_read(folder / "cpu.stat") or "").splitlines():
            name, _, value = line.partition(" ")
            if name == "throttled_usec":
                return int(value) * 1000
            if name == "throttled_time":
                return int(value)
    return None


def _heat_events(root: Path) -> int | None:
    pattern = "sys/devices/system/cpu/cpu*/thermal_throttle/core_throttle_count"
    counts = [_read(path) for path in root.glob(pattern)]
    known = [int(count) for count in counts if count]
    return sum(known) if known else None


def _difference(before: int | None, after: int | None) -> int:
    return max(after - before, 0) if before is not None and after is not None else 0


def _hash_of(text: str | None) -> str | None:
    return content_hash(" ".join(sorted(text.split())))[:16] if text else None


def _milliwatts(watts: str) -> str:
    try:
        return str(round(float(watts) * 1000))
    except ValueError:
        return watts


def _ask(command: Sequence[str]) -> str | None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout
