"""The threads of one process, sampled: from its files to totals by group of threads."""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from perfledger.collectors.host.process_files import KeptFiles, ProcessFiles
from perfledger.collectors.host.processor import TICKS_PER_S
from perfledger.collectors.host.python_runtime import runtime_addresses
from perfledger.collectors.host.readings import Reading
from perfledger.collectors.host.system_calls import calls_of_this_machine
from perfledger.collectors.host.thread_state import (
    RUNNABLE,
    RUNNING,
    SchedStat,
    ThreadStat,
    blocked_state,
    clean_name,
    group_name,
    parse_schedstat,
    parse_stat,
    parse_switches,
    parse_syscall,
)
from perfledger.collectors.host.thread_waits import ThreadWaits, Totals
from perfledger.collectors.host.wait_metrics import (
    BUSIEST_SHARE,
    PROCESS_CPU,
    PROCESS_FAULTS,
    QUEUE_TIME,
    RUN_TIME,
    SEEN,
    SWITCHES,
    THREADS,
    THREADS_ENDED,
    WAIT_SAMPLES,
    WAIT_TIME,
)
from perfledger.collectors.host.wait_summary import ThreadWindow, busiest, thread_window

MOST_THREADS = 4096
MOST_GROUPS = 64
# Reports after which a program that has not loaded Python is taken for one that does not.
_MOST_LOOKS = 10
_SECOND_NS = 10**9
_TICK_NS = _SECOND_NS // TICKS_PER_S

logger = logging.getLogger("perfledger.waits")


def keeps_schedule(proc: Path) -> bool:
    """Return whether the kernel keeps run and queue times: for this process, which has run.

    A kernel that was built or started without writes three zeros. A recorded tree has no `self`.
    """
    own = proc / "self/schedstat"
    if not own.exists():
        return not (proc / "self").exists()
    return parse_schedstat(own.read_bytes()).slices > 0


class ProcessWaits:
    """Samples one process. Methods raise OSError once it has ended.

    `unseen` says of what cannot be seen why not. `window` is what each thread did between the
    last two reports.
    """

    def __init__(self, proc: Path, pid: int, now_ns: int, kept: KeptFiles) -> None:
        """Start watching at `now_ns` (CLOCK_BOOTTIME), with files open as `kept` allows.

        Raises OSError where there is no such process.
        """
        self.pid, self.since_ns = pid, now_ns
        self.files = ProcessFiles(proc, pid, kept)
        self.names: dict[int, str] = {}
        self.unseen: dict[str, str] = {}
        self.window: list[ThreadWindow] = []
        self.threads_ended = 0
        self.threads_skipped = 0
        self.groups: dict[str, Totals] = {}
        self._threads: dict[int, ThreadWaits] = {}
        self._schedules: dict[int, bytes] = {}
        self._reported_ns = now_ns
        self._first = True
        self._asked_ns: int | None = None
        self._asked: set[int] = set()
        self.calls = calls_of_this_machine()
        self._gil: range | None = None
        self._executable = ""
        self._looked = 0
        if not keeps_schedule(proc):
            self._say_unseen("schedstat", "this kernel keeps none")
        if not self.files.has("syscall"):
            self._say_unseen("calls", "this kernel does not tell system calls")

    def sample(self, now_ns: int) -> None:
        """Look at every thread once. Raises OSError where the process has ended."""
        tids = sorted(self.files.threads())
        if not tids:
            raise ProcessLookupError(3, "no thread left")
        self.threads_skipped = max(0, len(tids) - MOST_THREADS)
        tids = tids[:MOST_THREADS]
        for tid in self._threads.keys() - set(tids):
            self._end(tid)
        for tid in tids:
            try:
                self._sample_thread(tid, now_ns)
            except (OSError, ValueError):  # it ended between being listed and being read
                self._end(tid)
        if not self._threads:
            raise ProcessLookupError(3, "all its threads have ended")
        self._first = False

    def _sample_thread(self, tid: int, now_ns: int) -> None:
        thread = self._threads.get(tid)
        raw = b"" if "schedstat" in self.unseen else self.files.schedule(tid)
        if thread is not None and thread.quiet and raw == self._schedules[tid]:
            thread.note_quiet(now_ns)
            return
        stat = parse_stat(self.files.read(f"task/{tid}/stat"))
        if stat.state in "ZX":
            raise ProcessLookupError(3, "the thread has ended")
        schedule = parse_schedstat(raw) if raw else None
        if thread is None or thread.start_ticks != stat.start_ticks:
            self._end(tid)
            thread = self._begin(tid, stat, schedule, now_ns)
        thread.name = stat.name
        thread.note(schedule, now_ns, self._blocked_in(tid, stat.state))
        self._schedules[tid] = raw

    def _begin(
        self, tid: int, stat: ThreadStat, schedule: SchedStat | None, now_ns: int
    ) -> ThreadWaits:
        started_ns = min(now_ns, stat.start_ticks * _TICK_NS)
        whole = not self._first and started_ns + _TICK_NS >= self.since_ns
        since_ns = max(started_ns, self.since_ns) if whole else now_ns
        self._threads[tid] = ThreadWaits(tid, stat, schedule, since_ns, whole=whole)
        return self._threads[tid]

    def _blocked_in(self, tid: int, letter: str) -> str | None:
        if letter == "R":
            return None
        call = None
        if "calls" not in self.unseen:
            try:
                call = parse_syscall(self.files.read(f"task/{tid}/syscall"))
            except PermissionError:
                self._say_unseen("calls", "not permitted; needs the same user or CAP_SYS_PTRACE")
            else:
                if call is None and letter in "SD":
                    return None  # it has been woken since stat was read
        function = ""
        if call is None or letter == "D":
            function = self.files.read(f"task/{tid}/wchan").decode("ascii", "replace")
        return blocked_state(letter, call, function, self.files, self._gil, self.calls)

    def _say_unseen(self, what: str, why: str) -> None:
        if what not in self.unseen:
            logger.warning("process %d: %s cannot be seen: %s", self.pid, what, why)
        self.unseen[what] = why

    def _end(self, tid: int) -> None:
        self.files.forget(tid)
        self._schedules.pop(tid, None)
        if (thread := self._threads.pop(tid, None)) is not None:
            self._flush(thread)
            self.threads_ended += 1
        self.names.pop(tid, None)

    def _flush(self, thread: ThreadWaits) -> Totals:
        """Add to its group what a thread did since it was last flushed; return that."""
        thread.name = self.names.get(thread.tid, thread.name)
        new = thread.take()
        group = group_name(thread.name)
        if group not in self.groups and len(self.groups) >= MOST_GROUPS:
            group = "other threads"
        self.groups.setdefault(group, Counter()).update(new)
        return new

    def learn_runtime(self) -> None:
        """Look for a Python runtime where the program is a new one, or may still load it."""
        try:
            executable = self.files.link("exe")
            if executable != self._executable:
                self._executable, self._gil, self._looked = executable, None, 0
            if self._gil is None and self._looked < _MOST_LOOKS:
                self._looked += 1
                self._gil = runtime_addresses(self.files)
                self.unseen.pop("gil", None)
                if self._gil is None:
                    self.unseen["gil"] = "no Python runtime found"
        except (FileNotFoundError, ProcessLookupError):
            self.unseen["gil"] = "no program: a thread of the kernel, or it has ended"
        except PermissionError:
            self._say_unseen("gil", "not permitted; needs the same user or CAP_SYS_PTRACE")

    def report(self, now_ns: int) -> Iterator[Reading]:
        """Yield what there is to say, and start a new window. Raises OSError."""
        stat = parse_stat(self.files.read("stat"))
        self.window = [self._thread_window(thread, now_ns) for thread in self._threads.values()]
        self._reported_ns = now_ns
        yield from self._group_readings()
        yield from self._process_readings(stat)
        if (thread := busiest(self.window)) is not None:
            name = ("thread.name", group_name(thread.name))
            for state, share in thread.shares().items():
                yield Reading(BUSIEST_SHARE, share, (name, ("perfledger.wait.state", state)))

    def _thread_window(self, thread: ThreadWaits, now_ns: int) -> ThreadWindow:
        if thread.switches_are_old():
            self._note_switches(thread)
        wall_ns = now_ns - max(self._reported_ns, thread.since_ns)
        new = self._flush(thread)  # which names it
        return thread_window(thread.tid, thread.name, wall_ns, new)

    def _note_switches(self, thread: ThreadWaits) -> None:
        try:
            voluntary, involuntary = parse_switches(self.files.read(f"task/{thread.tid}/status"))
        except (OSError, ValueError):
            return  # it has ended; the next sample finds out
        thread.note_switches(voluntary, involuntary)

    def _group_readings(self) -> Iterator[Reading]:
        for group, totals in self.groups.items():
            name = ("thread.name", group)
            if "schedstat" not in self.unseen:
                yield Reading(RUN_TIME, totals["ns", RUNNING], (name,))
                yield Reading(QUEUE_TIME, totals["ns", RUNNABLE], (name,))
            for (what, state), count in totals.items():
                if what == "samples":
                    yield Reading(WAIT_SAMPLES, count, (name, ("perfledger.wait.state", state)))
                elif what == "switches":
                    kind = ("process.context_switch.type", state)
                    yield Reading(SWITCHES, count, (name, kind))
                elif state not in (RUNNING, RUNNABLE):
                    yield Reading(WAIT_TIME, count, (name, ("perfledger.wait.state", state)))

    def _process_readings(self, stat: ThreadStat) -> Iterator[Reading]:
        yield Reading(THREADS, len(self._threads))
        yield Reading(THREADS_ENDED, self.threads_ended)
        for mode, ticks in (("user", stat.user_ticks), ("system", stat.system_ticks)):
            yield Reading(PROCESS_CPU, ticks / TICKS_PER_S, (("cpu.mode", mode),))
        for kind, count in (("minor", stat.minor_faults), ("major", stat.major_faults)):
            yield Reading(PROCESS_FAULTS, count, (("system.paging.fault.type", kind),))
        for source in ("schedstat", "calls", "gil", "names"):
            present = 0 if source in self.unseen else 1
            yield Reading(SEEN, present, (("perfledger.wait.source", source),))

    def executable_name(self) -> str:
        """Return the name of its program, "" where it may not be seen."""
        try:
            return clean_name(os.path.basename(self.files.link("exe")).encode("utf-8", "replace"))
        except OSError:
            return ""

    def names_are_due(self, now_ns: int) -> bool:
        """Return whether it has threads that had not begun when names were last asked for.

        After 1 s at the earliest, and after 10 s once it has been watched for that long.
        """
        if self._asked_ns is None:
            return True
        pause_ns = min(10 * _SECOND_NS, _SECOND_NS + self._asked_ns - self.since_ns)
        return now_ns - self._asked_ns >= pause_ns and not self._threads.keys() <= self._asked

    def note_asked(self, now_ns: int) -> None:
        """Note that names are asked for now. What is no thread of Python's never gets one."""
        self._asked_ns, self._asked = now_ns, {self.pid, *self._threads}

    def close(self) -> None:
        """Let go of the process."""
        self.files.close()
