"""Where each part of a sample comes from: one function a source, from files to readings.

A source that is not there raises OSError, or yields nothing; its name is then said to be absent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from perfledger.collectors.host.cgroup import (
    group_folders,
    group_memory_readings,
    quota_readings,
    usage_readings,
)
from perfledger.collectors.host.disk import disk_readings
from perfledger.collectors.host.ethtool import DriverCounters
from perfledger.collectors.host.fabric import driver_readings, rdma_readings
from perfledger.collectors.host.host_files import HostFiles
from perfledger.collectors.host.host_metrics import (
    CGROUP_PRESSURE_SHARE,
    CGROUP_PRESSURE_TIME,
    PRESSURE_SHARE,
    PRESSURE_TIME,
)
from perfledger.collectors.host.host_settings import HostSettings
from perfledger.collectors.host.memory import fault_readings, memory_readings, node_readings
from perfledger.collectors.host.network import (
    backlog_readings,
    interface_readings,
    protocol_readings,
)
from perfledger.collectors.host.processor import (
    cpu_readings,
    frequency_readings,
    pressure_readings,
    run_queue_readings,
    throttle_readings,
)
from perfledger.collectors.host.readings import Reading

RESOURCES = ("cpu", "memory", "io")
_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_RDMA = "sys/class/infiniband"
_INTERFACES = "sys/class/net"


@dataclass(frozen=True)
class Machine:
    """What sources read from: files, settings, and drivers (None for a recorded tree)."""

    files: HostFiles
    settings: HostSettings
    drivers: DriverCounters | None

    def network_file(self, name: str) -> str:
        """Return the text of a file of /proc/net. Raises OSError.

        Below another root, /proc/net would be of this process's own network namespace: the
        first process's is the host's.
        """
        if self.drivers is None:
            of_host = self.files.text_or_none(f"proc/1/net/{name}")
            if of_host is not None:
                return of_host
        return self.files.text(f"proc/net/{name}")


@dataclass(frozen=True)
class Source:
    """One source; a slow one is read less often, as asking costs the device or the driver."""

    name: str
    read: Callable[[Machine], Iterator[Reading]]
    slow: bool = False


def _cpu(machine: Machine) -> Iterator[Reading]:
    return cpu_readings(machine.files.text("proc/stat"), per_core=machine.settings.per_core)


def _run_queue(machine: Machine) -> Iterator[Reading]:
    return run_queue_readings(machine.files.text("proc/schedstat"))


def _pressure(machine: Machine) -> Iterator[Reading]:
    for resource in RESOURCES:
        text = machine.files.text(f"proc/pressure/{resource}")
        yield from pressure_readings(text, resource, PRESSURE_TIME, PRESSURE_SHARE, whole_host=True)


def _memory(machine: Machine) -> Iterator[Reading]:
    return memory_readings(machine.files.text("proc/meminfo"))


def _faults(machine: Machine) -> Iterator[Reading]:
    return fault_readings(machine.files.text("proc/vmstat"))


def _numa(machine: Machine) -> Iterator[Reading]:
    files = machine.files
    return node_readings(
        files.texts(_NODES, "node", "meminfo"), files.texts(_NODES, "node", "numastat")
    )


def _disk(machine: Machine) -> Iterator[Reading]:
    text = machine.files.text("proc/diskstats")
    try:
        whole = frozenset(machine.files.names("sys/block"))
    except OSError:
        whole = None
    return disk_readings(text, whole, machine.settings.excluded_devices)


def _interfaces(machine: Machine) -> Iterator[Reading]:
    text = machine.network_file("dev")
    return interface_readings(text, machine.settings.excluded_interfaces)


def _tcp(machine: Machine) -> Iterator[Reading]:
    yield from protocol_readings(machine.network_file("snmp"))
    yield from protocol_readings(machine.network_file("netstat"))


def _backlog(machine: Machine) -> Iterator[Reading]:
    return backlog_readings(machine.network_file("softnet_stat"))


def _frequency(machine: Machine) -> Iterator[Reading]:
    return frequency_readings(machine.files.texts(_CPUS, "cpu", "cpufreq/scaling_cur_freq"))


def _heat(machine: Machine) -> Iterator[Reading]:
    files = machine.files
    return throttle_readings(
        files.texts(_CPUS, "cpu", "thermal_throttle/core_throttle_count"),
        files.texts(_CPUS, "cpu", "thermal_throttle/package_throttle_count"),
        files.texts(_CPUS, "cpu", "topology/physical_package_id"),
    )


def _quota(machine: Machine) -> Iterator[Reading]:
    yield from quota_readings(_of_group(machine, "cpu", "cpu.stat"))
    if "cpuacct" in group_folders(machine.files.text("proc/self/cgroup")):  # version 1
        yield from usage_readings(_of_group(machine, "cpuacct", "cpuacct.usage"))


def _group_memory(machine: Machine) -> Iterator[Reading]:
    read = machine.files.text_or_none
    for folder in _group(machine, "memory"):
        for current, limit, events in (
            ("memory.current", "memory.max", "memory.events"),
            ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control"),
        ):
            if (usage := read(f"{folder}/{current}")) is not None:
                yield from group_memory_readings(
                    usage, read(f"{folder}/{limit}"), read(f"{folder}/{events}")
                )
                return


def _group_pressure(machine: Machine) -> Iterator[Reading]:
    folder = _own_unified_group(machine)
    for resource in RESOURCES:
        text = machine.files.text(f"{folder}/{resource}.pressure")
        yield from pressure_readings(
            text, resource, CGROUP_PRESSURE_TIME, CGROUP_PRESSURE_SHARE, whole_host=False
        )


def _group(machine: Machine, controller: str) -> list[str]:
    folders = group_folders(machine.files.text("proc/self/cgroup"))
    # Where version 1 has the controller, version 2 shows nothing of it.
    return [*folders.get(controller, ()), *folders.get("", ())]


def _own_unified_group(machine: Machine) -> str:
    """Return this process's version 2 group. Raises OSError where that is the root group.

    The root group, alone without cgroup.events, is the whole host: said already.
    """
    for folder in group_folders(machine.files.text("proc/self/cgroup")).get("", ()):
        if machine.files.text_or_none(f"{folder}/cgroup.events") is not None:
            return folder
    raise OSError("in the root group, or in none of version 2")


def _of_group(machine: Machine, controller: str, name: str) -> str:
    """Return the first such file of this process's group. Raises FileNotFoundError."""
    for folder in _group(machine, controller):
        if (text := machine.files.text_or_none(f"{folder}/{name}")) is not None:
            return text
    raise FileNotFoundError(2, "no such control group file", name)


def _rdma(machine: Machine) -> Iterator[Reading]:
    files = machine.files
    for device in files.names(_RDMA):
        for port in files.names(f"{_RDMA}/{device}/ports"):
            counters: dict[str, str] = {}
            for kind in ("counters", "hw_counters"):
                folder = f"{_RDMA}/{device}/ports/{port}/{kind}"
                try:
                    names = files.names(folder)
                except OSError:
                    continue
                counters |= files.present((name, f"{folder}/{name}") for name in names)
            yield from rdma_readings(device, int(port), counters)


def _drivers(machine: Machine) -> Iterator[Reading]:
    if machine.drivers is None:
        raise OSError("drivers are asked on this machine only")
    for interface in machine.files.names(_INTERFACES):
        if machine.settings.excluded_interfaces.fullmatch(interface):
            continue
        try:
            counters = machine.drivers.read(interface)
        except OSError:
            continue  # it keeps none, as loopback
        yield from driver_readings(interface, counters)


SOURCES = (
    Source("cpu", _cpu),
    Source("run_queue", _run_queue),
    Source("pressure", _pressure),
    Source("memory", _memory),
    Source("faults", _faults),
    Source("numa", _numa, slow=True),
    Source("disk", _disk),
    Source("interfaces", _interfaces),
    Source("tcp", _tcp),
    Source("backlog", _backlog),
    Source("frequency", _frequency, slow=True),
    Source("heat", _heat, slow=True),
    Source("cgroup_cpu", _quota),
    Source("cgroup_memory", _group_memory),
    Source("cgroup_pressure", _group_pressure),
    Source("rdma", _rdma, slow=True),
    Source("driver", _drivers, slow=True),
)
