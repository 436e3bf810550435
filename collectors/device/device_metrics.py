"""What the device sampler says, declared once.

Names are OpenTelemetry's (semantic conventions, "Hardware metrics") where it has one, else
`perfledger.*`. `hw.id` is a GPU's UUID or a RAPL zone. A counter that fell or was not seen for
too long starts anew, with a new start time: only points of one start time may be subtracted.
"""

from perfledger.schema.metrics import Metric

SOURCE_PRESENT = Metric(
    "perfledger.device.source.present",
    "gauge",
    "1",
    "1 where the source can be read, 0 where not, and then why (NVML's or the kernel's error)",
    "hw.id, perfledger.device.source, error.type",
)
SAMPLER_PERIOD = Metric(
    "perfledger.device.sampler.period", "gauge", "s", "between two samples, as declared"
)
SAMPLER_CPU = Metric(
    "perfledger.device.sampler.cpu_time", "counter", "ns", "CPU time that sampling itself took"
)
SAMPLER_LATE = Metric(
    "perfledger.device.sampler.late", "counter", "{sample}", "samples over half a period late"
)

ENERGY = Metric(
    "hw.energy",
    "counter",
    "J",
    "gpu: since the driver was loaded; cpu (a package) and memory (its DRAM): RAPL",
    "hw.id, hw.type, hw.name",
)
POWER = Metric(
    "hw.power", "gauge", "W", "right now, or NVML's average of a second", "hw.id, hw.type"
)
POWER_LIMIT = Metric("perfledger.gpu.power.limit", "gauge", "W", "that is enforced", "hw.id")
TEMPERATURE = Metric(
    "hw.temperature",
    "gauge",
    "Cel",
    "of the die, of its memory",
    "hw.id, hw.type, hw.sensor_location",
)
STATUS = Metric(
    "hw.status", "gauge", "1", "1 where the device is in that state", "hw.id, hw.type, hw.state"
)
ERRORS = Metric(
    "hw.errors",
    "counter",
    "{error}",
    "ecc_corrected and ecc_uncorrected since the driver was loaded; pcie_replay",
    "hw.id, hw.type, error.type",
)

GPU_UTILIZATION = Metric(
    "hw.gpu.utilization",
    "gauge",
    "1",
    "share of NVML's own last period (1/6 to 1 s) in which any kernel ran",
    "hw.id, hw.gpu.task",
)
MEMORY_BUSY = Metric(
    "perfledger.gpu.memory.busy",
    "gauge",
    "1",
    "share of that period in which memory was read or written: not its bandwidth",
    "hw.id",
)
MEMORY_USAGE = Metric("hw.gpu.memory.usage", "gauge", "By", "allocated", "hw.id")
MEMORY_LIMIT = Metric("hw.gpu.memory.limit", "gauge", "By", "there is", "hw.id")
GPU_IO = Metric(
    "hw.gpu.io",
    "counter",
    "By",
    "over PCIe (host_device) or all NVLinks (scale_up). counter: as the device counts; gpm: its "
    "mean rate between two samples times the time between them, added up",
    "hw.id, network.io.direction, perfledger.edge, perfledger.device.source",
)
PCIE_RATE = Metric(
    "perfledger.gpu.pcie.rate",
    "gauge",
    "By/s",
    "over a window of 20 ms, where no counter is: what is between the windows is not seen",
    "hw.id, network.io.direction",
)
IO_RATE = Metric(
    "perfledger.gpu.io.rate",
    "gauge",
    "By/s",
    "over PCIe (host_device) or all NVLinks (scale_up), mean of DCGM's own interval (DCGM only)",
    "hw.id, network.io.direction, perfledger.edge",
)
IO_TOTAL_RATE = Metric(
    "perfledger.gpu.io.total_rate",
    "gauge",
    "By/s",
    "as perfledger.gpu.io.rate, both directions added up (DCGM only)",
    "hw.id, perfledger.edge",
)
PCIE_GENERATION = Metric("perfledger.gpu.pcie.generation", "gauge", "1", "of the link", "hw.id")
PCIE_WIDTH = Metric("perfledger.gpu.pcie.width", "gauge", "{lane}", "of the link", "hw.id")

BANDWIDTH_SHARE = Metric(
    "perfledger.gpu.memory.bandwidth.share",
    "gauge",
    "1",
    "of the device memory's peak, mean between two samples (GPM)",
    "hw.id",
)
BANDWIDTH_LIMIT = Metric(
    "perfledger.gpu.memory.bandwidth.limit",
    "gauge",
    "By/s",
    "that peak: highest memory clock x bus width x 2 transfers a clock; computed, not measured",
    "hw.id",
)
ACTIVITY = Metric(
    "perfledger.gpu.activity",
    "gauge",
    "1",
    "share of time, mean between two samples and over the SMs (GPM), by unit: sm (busy), tensor, "
    "integer, fp16, fp32, fp64; occupancy: warps of those that fit",
    "hw.id, perfledger.gpu.unit",
)

CLOCK = Metric(
    "perfledger.gpu.clock", "gauge", "Hz", "right now", "hw.id, perfledger.gpu.clock.domain"
)
CLOCK_LIMIT = Metric(
    "perfledger.gpu.clock.limit", "gauge", "Hz", "highest", "hw.id, perfledger.gpu.clock.domain"
)
THROTTLED = Metric(
    "perfledger.gpu.throttled",
    "gauge",
    "1",
    "1 while the reason holds clocks down",
    "hw.id, perfledger.gpu.reason",
)
THROTTLE_TIME = Metric(
    "perfledger.gpu.throttle.time",
    "counter",
    "ns",
    "clocks were held down for the reason",
    "hw.id, perfledger.gpu.reason",
)
REMAPPED_ROWS = Metric(
    "perfledger.gpu.memory.remapped_rows",
    "gauge",
    "{row}",
    "rows of memory replaced after such errors",
    "hw.id, error.type",
)

PROCESS_MEMORY = Metric(
    "perfledger.gpu.process.memory",
    "gauge",
    "By",
    "held by a process that computes on the device, by its id on the host",
    "hw.id, process.pid",
)
PROCESS_UTILIZATION = Metric(
    "perfledger.gpu.process.utilization",
    "gauge",
    "1",
    "share of time in which a kernel of the process ran, as NVML samples it",
    "hw.id, process.pid",
)
PROCESSES = Metric(
    "perfledger.gpu.processes", "gauge", "{process}", "that compute on the device", "hw.id"
)

PERF_EVENTS = Metric(
    "perfledger.perf.events",
    "counter",
    "{event}",
    "software events of perf on all CPUs since the sampler started",
    "perfledger.perf.event",
)

DEVICE_METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
