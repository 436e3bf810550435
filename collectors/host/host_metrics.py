"""What the host sampler says, declared once.

Names are OpenTelemetry's (semantic conventions, "System metrics") where it has one, else
`perfledger.host.*`. Counters are cumulative since boot, as the kernel keeps them.
"""

from perfledger.schema.metrics import Metric

SOURCE_PRESENT = Metric(
    "perfledger.host.source.present",
    "gauge",
    "1",
    "1 where this machine shows the source, 0 where it does not: then its metrics are absent",
    "perfledger.host.source",
)
SAMPLER_CPU = Metric(
    "perfledger.host.sampler.cpu_time", "counter", "ns", "CPU time that sampling itself took"
)
SAMPLER_LATE = Metric(
    "perfledger.host.sampler.late", "counter", "{sample}", "samples over half a period late"
)

CPU_TIME = Metric(
    "system.cpu.time",
    "counter",
    "s",
    "by mode; steal is what the hypervisor took; guest time is within user and nice",
    "cpu.mode, cpu.logical_number",
)
CPU_COUNT = Metric("system.cpu.logical.count", "gauge", "{cpu}", "CPUs online")
CPU_FREQUENCY = Metric(
    "perfledger.host.cpu.frequency", "gauge", "Hz", "over the CPUs", "perfledger.host.statistic"
)
THERMAL_THROTTLES = Metric(
    "perfledger.host.cpu.thermal_throttles",
    "counter",
    "{event}",
    "throttled by heat: cores' events added up, and packages'",
    "perfledger.host.level",
)
CONTEXT_SWITCHES = Metric("perfledger.host.context_switches", "counter", "{switch}", "all CPUs")
PROCESSES_CREATED = Metric("system.process.created", "counter", "{process}", "forks and clones")
RUNNABLE = Metric(
    "perfledger.host.threads.runnable", "gauge", "{thread}", "running or in a run queue right now"
)
BLOCKED = Metric(
    "perfledger.host.threads.blocked", "gauge", "{thread}", "waiting for disk right now"
)
RUN_QUEUE_TIME = Metric(
    "perfledger.host.run_queue.time", "counter", "ns", "threads waited for a CPU, all added up"
)
PRESSURE_TIME = Metric(
    "perfledger.host.pressure.time",
    "counter",
    "us",
    "some: at least one task stalled on the resource; full: all non-idle tasks (kernel PSI)",
    "perfledger.host.resource, perfledger.host.stalled",
)
PRESSURE_SHARE = Metric(
    "perfledger.host.pressure.share",
    "gauge",
    "1",
    "share of time stalled, the kernel's running average over a window of seconds",
    "perfledger.host.resource, perfledger.host.stalled, perfledger.host.window",
)

MEMORY_USAGE = Metric("system.memory.usage", "gauge", "By", "by state", "system.memory.state")
MEMORY_LIMIT = Metric("system.memory.limit", "gauge", "By", "memory that the kernel manages")
MEMORY_AVAILABLE = Metric(
    "system.memory.linux.available", "gauge", "By", "can be had without swapping (estimate)"
)
MEMORY_SHARED = Metric("system.memory.linux.shared", "gauge", "By", "shared memory and tmpfs")
SLAB = Metric(
    "system.memory.linux.slab.usage", "gauge", "By", "slab", "system.memory.linux.slab.state"
)
HUGEPAGES_LIMIT = Metric(
    "system.memory.linux.hugepages.limit", "gauge", "{page}", "huge pages of the default size"
)
HUGEPAGES_USAGE = Metric(
    "system.memory.linux.hugepages.usage",
    "gauge",
    "{page}",
    "by state",
    "system.memory.linux.hugepages.state",
)
HUGEPAGES_SIZE = Metric(
    "system.memory.linux.hugepages.page_size", "gauge", "By", "default size of a huge page"
)
DIRTY = Metric(
    "perfledger.host.memory.to_write",
    "gauge",
    "By",
    "dirty: to be written; writeback: being written",
    "perfledger.host.state",
)
PAGING_USAGE = Metric("system.paging.usage", "gauge", "By", "swap", "system.paging.state")
PAGING_FAULTS = Metric(
    "system.paging.faults",
    "counter",
    "{fault}",
    "major: from disk; minor: the others",
    "system.paging.fault.type",
)
PAGING_OPERATIONS = Metric(
    "system.paging.operations", "counter", "{operation}", "swap pages", "system.paging.direction"
)
OOM_KILLS = Metric("perfledger.host.oom_kills", "counter", "{kill}", "processes killed")
NUMA_MEMORY = Metric(
    "perfledger.host.numa.memory",
    "gauge",
    "By",
    "per node by state",
    "perfledger.host.numa_node, perfledger.host.state",
)
NUMA_ALLOCATIONS = Metric(
    "perfledger.host.numa.allocations",
    "counter",
    "{page}",
    "hit: where wanted; miss: here but wanted elsewhere; foreign: elsewhere but wanted here; "
    "local, other: by a CPU of this or another node",
    "perfledger.host.numa_node, perfledger.host.placement",
)

DISK_IO = Metric(
    "system.disk.io", "counter", "By", "transferred", "system.device, disk.io.direction"
)
DISK_OPERATIONS = Metric(
    "system.disk.operations", "counter", "{operation}", "ended", "system.device, disk.io.direction"
)
DISK_OPERATION_TIME = Metric(
    "system.disk.operation_time",
    "counter",
    "s",
    "operations took, added up",
    "system.device, disk.io.direction",
)
DISK_IO_TIME = Metric("system.disk.io_time", "counter", "s", "busy with any", "system.device")
DISK_MERGED = Metric(
    "system.disk.merged", "counter", "{operation}", "merged", "system.device, disk.io.direction"
)
DISK_IN_FLIGHT = Metric(
    "perfledger.host.disk.in_flight", "gauge", "{operation}", "right now", "system.device"
)
DISK_FLUSHES = Metric(
    "perfledger.host.disk.flushes", "counter", "{operation}", "ended", "system.device"
)
DISK_FLUSH_TIME = Metric(
    "perfledger.host.disk.flush_time", "counter", "s", "flushes took, added up", "system.device"
)

_LINK = "network.interface.name, network.io.direction"
NETWORK_IO = Metric("system.network.io", "counter", "By", "bytes", _LINK)
NETWORK_PACKETS = Metric("system.network.packet.count", "counter", "{packet}", "packets", _LINK)
NETWORK_ERRORS = Metric("system.network.errors", "counter", "{error}", "errors", _LINK)
NETWORK_DROPPED = Metric(
    "system.network.packet.dropped", "counter", "{packet}", "dropped though without error", _LINK
)
NETWORK_OVERRUNS = Metric(
    "perfledger.host.network.fifo_errors", "counter", "{error}", "device queue overruns", _LINK
)
SOFTNET = Metric(
    "perfledger.host.network.backlog",
    "counter",
    "{event}",
    "dropped: the CPU's packet backlog was full; squeezed: receiving was cut short",
    "perfledger.host.event",
)
TCP = Metric(
    "perfledger.host.tcp.events",
    "counter",
    "{event}",
    "the kernel's TCP counters by name: retransmits, out of order, listen drops, …",
    "perfledger.host.event",
)
TCP_SEGMENTS = Metric(
    "perfledger.host.tcp.segments", "counter", "{segment}", "segments", "network.io.direction"
)
ECN = Metric(
    "perfledger.host.ip.ecn_packets",
    "counter",
    "{packet}",
    "received by ECN mark: ce (congestion met), ect0, ect1, not_ect",
    "perfledger.host.mark",
)
DEVICE_COUNTER = Metric(
    "perfledger.host.network.device_counter",
    "counter",
    "{event}",
    "the driver's own counters (ethtool -S) of pauses, PFC, ECN, discards and full buffers",
    "network.interface.name, perfledger.host.counter",
)
PFC = Metric(
    "perfledger.host.network.pause_frames",
    "counter",
    "{frame}",
    "PFC pause frames by priority, from the driver's counters",
    "network.interface.name, network.io.direction, perfledger.host.priority",
)
_PORT = "perfledger.host.rdma_device, perfledger.host.rdma_port"
RDMA_IO = Metric(
    "perfledger.host.rdma.io", "counter", "By", "bytes", f"{_PORT}, network.io.direction"
)
RDMA_COUNTER = Metric(
    "perfledger.host.rdma.counter",
    "counter",
    "{event}",
    "the driver's port counters by name: CNPs, ECN marks, out of sequence, discards, …",
    f"{_PORT}, perfledger.host.counter",
)

CGROUP_CPU = Metric("perfledger.host.cgroup.cpu_time", "counter", "ns", "of this control group")
CGROUP_PERIODS = Metric(
    "perfledger.host.cgroup.cpu_periods",
    "counter",
    "{period}",
    "quota periods: all that ran, and those in which the quota was used up",
    "perfledger.host.state",
)
CGROUP_THROTTLED = Metric(
    "perfledger.host.cgroup.throttled_time", "counter", "ns", "held back by the CPU quota"
)
CGROUP_MEMORY = Metric("perfledger.host.cgroup.memory", "gauge", "By", "of this control group")
CGROUP_MEMORY_LIMIT = Metric(
    "perfledger.host.cgroup.memory_limit", "gauge", "By", "absent where there is none"
)
CGROUP_EVENTS = Metric(
    "perfledger.host.cgroup.memory_events",
    "counter",
    "{event}",
    "high, max, oom, oom_kill: how often a limit was met, and what came of it",
    "perfledger.host.event",
)
CGROUP_PRESSURE_TIME = Metric(
    "perfledger.host.cgroup.pressure.time",
    "counter",
    "us",
    "as perfledger.host.pressure.time, of this control group's tasks",
    "perfledger.host.resource, perfledger.host.stalled",
)
CGROUP_PRESSURE_SHARE = Metric(
    "perfledger.host.cgroup.pressure.share",
    "gauge",
    "1",
    "as perfledger.host.pressure.share, of this control group's tasks",
    "perfledger.host.resource, perfledger.host.stalled, perfledger.host.window",
)

HOST_METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
