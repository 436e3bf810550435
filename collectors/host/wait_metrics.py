"""What the wait-state sampler says of a process, declared once.

Counters are cumulative since the sampler first saw the process. Threads are grouped by name, and
numbers in names become `#`. Run and queue times are the kernel's own, exact; the time in each
blocked state is exact in sum, and shared out among the states by samples. A thread that spins is
running: so is one in a CUDA synchronisation, unless the program asked for a blocking one.
"""

from perfledger.schema.metrics import Metric

WAIT_SAMPLES = Metric(
    "perfledger.wait.samples",
    "counter",
    "{sample}",
    "times that a thread was seen in a state",
    "thread.name, perfledger.wait.state",
)
WAIT_TIME = Metric(
    "perfledger.wait.time_ns",
    "counter",
    "ns",
    "time blocked; with run and queue time it adds up to the threads' wall time",
    "thread.name, perfledger.wait.state",
)
RUN_TIME = Metric(
    "perfledger.thread.run_time_ns", "counter", "ns", "on a CPU, exact", "thread.name"
)
QUEUE_TIME = Metric(
    "perfledger.thread.runqueue_wait_ns",
    "counter",
    "ns",
    "runnable, but waiting for a CPU, exact",
    "thread.name",
)
SWITCHES = Metric(
    "process.context_switches",
    "counter",
    "{context_switch}",
    "voluntary: it waited for something; involuntary: its CPU was taken away",
    "thread.name, process.context_switch.type",
)
BUSIEST_SHARE = Metric(
    "perfledger.wait.busiest.share",
    "gauge",
    "1",
    "share of wall time by state of the thread that ran and queued most since the last report: "
    "near 1 in running or runnable it is the limit, however idle the machine looks",
    "thread.name, perfledger.wait.state",
)
THREADS = Metric("process.thread.count", "gauge", "{thread}", "threads")
THREADS_ENDED = Metric(
    "perfledger.wait.threads_ended",
    "counter",
    "{thread}",
    "threads that ended; what each did after its last sample is not in the times above",
)
PROCESS_CPU = Metric("process.cpu.time", "counter", "s", "all threads, ended ones too", "cpu.mode")
PROCESS_FAULTS = Metric(
    "process.paging.faults", "counter", "{fault}", "page faults", "system.paging.fault.type"
)
SEEN = Metric(
    "perfledger.wait.source.present",
    "gauge",
    "1",
    "1 where it can be seen, else 0. schedstat: run and queue times; calls: what a thread is "
    "blocked in; gil: the process has a Python runtime that was found; names: Python's thread "
    "names",
    "perfledger.wait.source",
)
SAMPLES_LATE = Metric(
    "perfledger.wait.sampler.late", "counter", "{sample}", "samples over half a period late"
)
SAMPLER_CPU = Metric(
    "perfledger.wait.sampler.cpu_time", "counter", "ns", "CPU time that sampling itself took"
)

WAIT_METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
