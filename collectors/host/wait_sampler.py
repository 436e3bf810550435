"""The wait-state sampler: what the threads of chosen processes do, 20 times a second.

    asyncio.create_task(run(sink, WaitSettings(port=8000), stop))

What may not be seen is said, once in the log and in perfledger.wait.source.present, and never
guessed: such threads are in state unknown.
"""

import asyncio
import logging
import os
import threading
import time
from collections import Counter, deque
from dataclasses import replace

from perfledger.collectors.host.host_sampler import host_resource
from perfledger.collectors.host.process_files import KeptFiles
from perfledger.collectors.host.process_search import (
    find_by_command,
    find_by_port,
    parents,
    with_descendants,
)
from perfledger.collectors.host.process_waits import ProcessWaits
from perfledger.collectors.host.python_runtime import find_py_spy, python_thread_names
from perfledger.collectors.host.readings import PointStream, Reading
from perfledger.collectors.host.sampling_loop import run_sampler
from perfledger.collectors.host.wait_metrics import SAMPLER_CPU, SAMPLES_LATE
from perfledger.collectors.host.wait_settings import WaitSettings
from perfledger.collectors.host.wait_summary import summarise
from perfledger.collectors.transport.otlp_receiver import Sink

SCOPE_NAME = "perfledger.waits"

logger = logging.getLogger("perfledger.waits")


def boottime_ns() -> int:
    """Return CLOCK_BOOTTIME: the clock of the start times in /proc."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class WaitSampler:
    """Samples the processes that its settings choose."""

    name = "wait sampler"
    # A service that wakes 20 times a second must not be seen at the same point each time.
    jitter = 0.5

    def __init__(self, settings: WaitSettings) -> None:
        self.period_s = 1 / settings.rate_hz
        self.counts: Counter[str] = Counter()
        self.processes: dict[int, ProcessWaits] = {}
        self._settings = settings
        self._streams: dict[int, PointStream] = {}
        self._resource = host_resource(settings.proc.parent)
        self._searched_ns: int | None = None
        self._reported_ns = boottime_ns()
        self._names = ThreadNames() if settings.python_names else None
        self._over = False
        self._kept = KeptFiles.quarter()
        self._cpu_ns = 0

    def sample(self) -> bytes | None:
        """Sample each process; return the OTLP metrics request when a report is due."""
        started_ns, now_ns = time.thread_time_ns(), boottime_ns()
        self._search(now_ns)
        for process in list(self.processes.values()):
            try:
                process.sample(now_ns)
            except OSError:
                self._drop(process)
        body = None
        if now_ns - self._reported_ns >= self._settings.report_interval_s * 1e9:
            body = self.report(now_ns)
        self._cpu_ns += time.thread_time_ns() - started_ns
        return body

    def report(self, now_ns: int) -> bytes | None:
        """Return an OTLP metrics request of all processes, None where there is none."""
        self._reported_ns = now_ns
        time_ns, parts = time.time_ns(), []
        for process in list(self.processes.values()):
            try:
                process.learn_runtime()
                if self._names is not None:
                    self._names.learn(process, now_ns)
                readings = [*process.report(now_ns), *self._own_readings()]
            except (OSError, ValueError):
                self._drop(process)
                continue
            parts.append(self._streams[process.pid].encode(readings, time_ns))
        self.counts["processes"] = len(self.processes)
        self.counts["threads_skipped"] = sum(p.threads_skipped for p in self.processes.values())
        return b"".join(parts) or None

    def summary(self) -> str:
        """Return what the busiest thread of each process did between the last two reports."""
        lines = []
        for process in self.processes.values():
            unseen = sorted(process.unseen.items())
            lines.append(summarise(process.pid, process.window))
            lines += [f"  cannot be seen: {what} ({why})" for what, why in unseen]
        return "\n".join(lines) or f"{self._settings}: no such process"

    def close(self) -> bytes | None:
        """Return a last report, and let go of the processes."""
        last = self.report(boottime_ns())
        for process in list(self.processes.values()):
            self._drop(process)
        return last

    def ended(self) -> bool:
        """Return whether the process that was chosen by its id has ended."""
        return self._over

    def _own_readings(self) -> list[Reading]:
        return [
            Reading(SAMPLES_LATE, self.counts["late"]),
            Reading(SAMPLER_CPU, self._cpu_ns),
        ]

    def _search(self, now_ns: int) -> None:
        interval_ns = self._settings.search_interval_s * 1e9
        if self._searched_ns is not None and now_ns - self._searched_ns < interval_ns:
            return
        first, self._searched_ns = self._searched_ns is None, now_ns
        chosen = self._chosen()
        if self._settings.children:
            chosen = with_descendants(chosen, parents(self._settings.proc))
        self.counts["processes_skipped"] = max(0, len(chosen) - self._settings.most_processes)
        for pid in chosen[: self._settings.most_processes]:
            if pid not in self.processes:
                self._watch(pid, now_ns)
        if first and not self.processes:
            logger.warning("wait sampler: %s: no such process", self._settings)
        self._over = self._settings.pid is not None and not self.processes

    def _chosen(self) -> list[int]:
        settings, proc = self._settings, self._settings.proc
        if settings.pid is not None:
            return [settings.pid]
        if settings.port is not None:
            return find_by_port(proc, settings.port)
        assert settings.command is not None
        return find_by_command(proc, settings.command, os.getpid())

    def _watch(self, pid: int, now_ns: int) -> None:
        try:
            process = ProcessWaits(self._settings.proc, pid, now_ns, self._kept)
        except (OSError, ValueError):
            return  # it has ended since
        process.unseen["names"] = "not asked for" if self._names is None else "not yet asked"
        process.learn_runtime()
        if self._names is not None:
            self._names.learn(process, now_ns)
        self.processes[pid] = process
        attributes: dict[str, str | int] = {
            "service.name": SCOPE_NAME,
            "service.instance.id": f"{pid}-{process.files.start_ticks}",
            **self._resource,
            "process.pid": pid,
            "process.executable.name": process.executable_name(),
        }
        self._streams[pid] = PointStream(SCOPE_NAME, attributes, time.time_ns())

    def _drop(self, process: ProcessWaits) -> None:
        process.close()
        del self.processes[process.pid], self._streams[process.pid]
        self.counts["processes_ended"] += 1
        if process.pid == self._settings.pid:
            self._searched_ns = None  # find out at once whether there is anything left


class ThreadNames:
    """Asks py-spy for Python's thread names: in a thread, as it takes tens of ms, and seldom."""

    def __init__(self) -> None:
        self._py_spy = find_py_spy()
        self._asking: threading.Thread | None = None
        self._waiting: deque[ProcessWaits] = deque()

    def learn(self, process: ProcessWaits, now_ns: int) -> None:
        """Ask about a process where a thread of it is new."""
        if self._py_spy is None:
            process.unseen["names"] = "no py-spy here; names are the kernel's"
            return
        if "gil" not in process.unseen and process.names_are_due(now_ns):
            process.note_asked(now_ns)
            self._waiting.append(process)
        if self._waiting and (self._asking is None or not self._asking.is_alive()):
            self._asking = threading.Thread(target=self._ask_all, name="py-spy", daemon=True)
            self._asking.start()

    def _ask_all(self) -> None:
        while self._waiting:
            self._ask(self._waiting.popleft())

    def _ask(self, process: ProcessWaits) -> None:
        assert self._py_spy is not None
        try:
            names = python_thread_names(self._py_spy, process.pid)
        except OSError as error:
            process.unseen["names"] = str(error)
            return
        process.names = process.names | names
        process.unseen.pop("names", None)


async def run(sink: Sink, settings: WaitSettings, stop: asyncio.Event) -> None:
    """Sample the chosen processes into `sink` until `stop` is set, or the chosen pid ends."""
    await run_sampler(WaitSampler(settings), sink, stop)


def watch_for(settings: WaitSettings, seconds: float) -> str:
    """Watch for some seconds and return what the busiest threads did, a line a process."""
    sampler = WaitSampler(replace(settings, report_interval_s=2 * seconds))
    end_ns = boottime_ns() + round(seconds * 1e9)
    while boottime_ns() < end_ns and not sampler.ended():
        sampler.sample()
        time.sleep(sampler.period_s)
    sampler.report(boottime_ns())
    summary = sampler.summary()
    sampler.close()
    return summary
