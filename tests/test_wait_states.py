"""What a thread is doing, from recorded and hostile text of the kernel."""

import os
import re
import struct
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.collectors.host.process_files import KeptFiles, ProcessFiles, kind_of
from perfledger.collectors.host.process_search import (
    find_by_command,
    find_by_port,
    listening_inodes,
    parents,
    with_descendants,
)
from perfledger.collectors.host.process_waits import MOST_GROUPS, ProcessWaits
from perfledger.collectors.host.python_runtime import (
    NO_ELF_FILE,
    find_symbol,
    parse_thread_names,
    python_images,
)
from perfledger.collectors.host.system_calls import AARCH64, CALLS, X86_64, Waits
from perfledger.collectors.host.thread_state import (
    STATES,
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
from perfledger.collectors.host.thread_waits import ThreadWaits
from perfledger.collectors.host.wait_metrics import WAIT_METRICS
from perfledger.collectors.host.wait_settings import WaitSettings
from perfledger.collectors.host.wait_summary import ThreadWindow, summarise, thread_window
from perfledger.schema.errors import UsageError

GIL = range(0x7F486834E540, 0x7F486834E540 + 0x24000)
# (stat's letter, syscall, wchan) -> state. Recorded on Linux 6.18, but for the two of a GPU.
RECORDED = [
    ("S", "202 0x556537ab3e50 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", "futex_do_wait", "lock"),
    ("S", "202 0x7f486834e6f4 0x89 0x0 0x7f48 0x0 0xffffffff 0x7f 0x7f", "futex_do_wait", "gil"),
    ("S", "230 0x0 0x0 0x7ffe 0x7ffe 0x0 0x0 0x7f 0x7f", "hrtimer_nanosleep", "sleep"),
    ("S", "45 0x3 0x7ffe 0x1 0x0 0x0 0x0 0x7f 0x7f", "unix_stream_read_generic", "socket"),
    ("S", "0 0x4 0x7ffe 0x1 0x0 0x0 0x0 0x7f 0x7f", "anon_pipe_read", "pipe"),
    ("S", "232 0x5 0x7ffe 0x10 0xffffffff 0x0 0x0 0x7f 0x7f", "ep_poll", "socket"),
    ("S", "7 0x7ffe0000 0x2 0xffffffff 0x0 0x0 0x0 0x7f 0x7f", "do_sys_poll", "gpu"),
    ("S", "7 0x0 0x0 0x64 0x0 0x0 0x0 0x7f 0x7f", "do_sys_poll", "sleep"),
    ("D", "74 0x6 0x7ffe 0x0 0x0 0x0 0x0 0x7f 0x7f", "jbd2_log_wait_commit", "disk"),
    ("D", "0 0x6 0x7ffe 0x1000 0x0 0x0 0x0 0x7f 0x7f", "folio_wait_bit_common", "disk"),
    ("S", "16 0x7 0xc020462a 0x7ffe 0x0 0x0 0x0 0x7f 0x7f", "nvidia_ioctl", "gpu"),
    ("S", "61 0xffffffff 0x7ffe 0x0 0x0 0x0 0x0 0x7f 0x7f", "do_wait", "other"),
    ("D", "-1 0x7ffe 0x7f", "folio_wait_bit_common", "disk"),
    ("D", "9 0x0 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f", "rwsem_down_read_slowpath", "lock"),
    ("T", "35 0x0 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f", "do_signal_stop", "stopped"),
]


class RecordedDescriptors:
    """Descriptors 3 to 7: a socket, a pipe, an epoll of both, a file, a GPU."""

    kinds = {3: "socket", 4: "pipe", 5: "other", 6: "disk", 7: "gpu"}

    def kind(self, descriptor: int) -> str:
        return self.kinds[descriptor]

    def in_epoll(self, descriptor: int) -> set[str]:
        assert descriptor == 5
        return {"socket", "pipe"}

    def in_poll(self, address: int, count: int) -> set[str]:
        return {"pipe", "gpu"} if count else set()

    def in_select(self, bound: int, addresses: tuple[int, ...]) -> set[str]:
        return {"timer"}


@pytest.mark.parametrize(("letter", "syscall", "function", "state"), RECORDED)
def test_a_blocked_thread_is_told_what_it_waits_for(
    letter: str, syscall: str, function: str, state: str
) -> None:
    call = parse_syscall(syscall.encode())
    found = blocked_state(letter, call, function, RecordedDescriptors(), GIL, CALLS["x86_64"])
    assert found == state


@pytest.mark.parametrize(
    ("letter", "function", "state"),
    [
        ("S", "0", "unknown"),
        ("S", "", "unknown"),
        ("D", "0", "disk"),
        ("S", "futex_do_wait", "lock"),
        ("S", "hrtimer_nanosleep", "sleep"),
        ("S", "sk_wait_data", "socket"),
        ("S", "a_function_of_tomorrow", "other"),
    ],
)
def test_what_may_not_be_seen_is_unknown_and_not_guessed(
    letter: str, function: str, state: str
) -> None:
    descriptors = RecordedDescriptors()
    assert blocked_state(letter, None, function, descriptors, None, CALLS["x86_64"]) == state


def test_without_a_runtime_the_gil_is_not_told_from_other_locks() -> None:
    call = parse_syscall(b"202 0x7f486834e6f4 0x89 0x0 0x0 0x0 0xffffffff 0x0 0x0")
    state = blocked_state("S", call, "", RecordedDescriptors(), None, CALLS["x86_64"])
    assert state == "lock"


def test_calls_of_both_architectures_have_one_meaning_each() -> None:
    for each in (X86_64, AARCH64):
        numbers = [number for group in each.values() for number in group]
        assert len(numbers) == len(set(numbers))
        assert set(each) == set(Waits) - {Waits.OTHER}


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("socket:[200802]", "socket"),
        ("pipe:[200802]", "pipe"),
        ("anon_inode:[eventfd]", "pipe"),
        ("anon_inode:[eventpoll]", "other"),
        ("anon_inode:[timerfd]", "timer"),
        ("/dev/nvidia0", "gpu"),
        ("/dev/nvidia-uvm", "gpu"),
        ("(unreachable)/dev/nvidiactl", "gpu"),
        ("/dev/dri/renderD128", "gpu"),
        ("/dev/infiniband/uverbs0", "socket"),
        ("/dev/null", "other"),
        ("/dev/pts/3", "pipe"),
        ("/dev/shm/arena", "disk"),
        ("/home/dev/nvidia/model.bin", "disk"),
        ("/data/wal (deleted)", "disk"),
    ],
)
def test_descriptors_by_their_links(target: str, kind: str) -> None:
    assert kind_of(target) == kind


def stat_line(name: bytes, state: str = "S", start_ticks: int = 999, pid: int = 7) -> bytes:
    rest = f" {state} 1 7 7 0 -1 64 107 0 3 0 21 22 0 0 20 0 1 0 {start_ticks} 3133440 395 0"
    return b"%d (" % pid + name + b")" + rest.encode() + b"\n"


@given(st.binary(max_size=64))
def test_a_name_of_any_bytes_does_not_shift_the_fields(name: bytes) -> None:
    stat = parse_stat(stat_line(name))
    assert stat[1:] == ("S", 1, 107, 3, 21, 22, 999)
    assert stat.name and stat.name.isprintable()


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b"a) R 1 (b", "a) R 1 (b"),
        (b"two\nlines", "two?lines"),
        (b"\xff\xfe", "��"),
        (b"", "?"),
        ("naïve".encode(), "naïve"),
    ],
)
def test_hostile_names_become_printable(raw: bytes, name: str) -> None:
    assert parse_stat(stat_line(raw)).name == name
    assert clean_name(raw) == name


@given(st.binary(max_size=200))
def test_bytes_that_are_no_stat_are_refused(raw: bytes) -> None:
    for parse in (parse_stat, parse_schedstat, parse_syscall, parse_switches):
        try:
            parse(raw)
        except ValueError:
            continue


def test_numbers_do_not_make_groups() -> None:
    assert group_name("ThreadPoolExecutor-3_17") == "ThreadPoolExecutor-#_#"
    assert parse_switches(
        b"a:\t1\nvoluntary_ctxt_switches:\t4\nnonvoluntary_ctxt_switches:\t5\n"
    ) == (4, 5)


STAT = ThreadStat("worker", "S", 1, 0, 0, 0, 0, 0)
STEP = st.tuples(
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.sampled_from([None, "lock", "socket"]),
)


@given(st.lists(STEP, min_size=1), st.booleans())
def test_states_add_up_to_the_wall_time_that_is_known(
    steps: list[tuple[int, int, int, str | None]], whole: bool
) -> None:
    """Whatever a thread does between samples, nothing is counted twice."""
    run_ns = wait_ns = slices = now_ns = 0
    thread = ThreadWaits(1, STAT, SchedStat(0, 0, 0), 0, whole=whole)
    totals: Counter[tuple[str, str]] = Counter()
    for ran, waited, blocked, state in steps:
        run_ns, wait_ns, slices = run_ns + ran, wait_ns + waited, slices + (ran > 0)
        now_ns += ran + waited + blocked
        if thread.quiet and not ran and not waited:
            thread.note_quiet(now_ns)
        else:
            thread.note(SchedStat(run_ns, wait_ns, slices), now_ns, state)
        totals.update(thread.take())
    assert (totals["ns", "running"], totals["ns", "runnable"]) == (run_ns, wait_ns)
    known_ns = sum(count for (what, _), count in totals.items() if what == "ns")
    assert known_ns <= now_ns
    if thread.state in ("lock", "socket"):
        assert known_ns == now_ns
    assert sum(count for (what, _), count in totals.items() if what == "samples") == len(steps)


def test_samples_of_running_and_runnable_have_the_ratio_of_the_exact_times() -> None:
    thread = ThreadWaits(1, STAT, SchedStat(0, 0, 0), 0, whole=False)
    for i in range(1, 101):
        thread.note(SchedStat(i * 30, i * 10, i), i * 40, None)
    totals = thread.take()
    assert totals["samples", "running"] == 75
    assert totals["samples", "runnable"] == 25


def test_a_thread_that_was_there_before_counts_from_when_it_was_first_seen() -> None:
    thread = ThreadWaits(1, STAT, SchedStat(10**12, 10**12, 5), 100, whole=False)
    thread.note(SchedStat(10**12 + 7, 10**12 + 3, 6), 200, "lock")
    assert thread.take() == Counter(
        {("ns", "running"): 7, ("ns", "runnable"): 3, ("ns", "lock"): 90, ("samples", "lock"): 1}
    )


def test_a_kernel_without_run_times_has_samples_only() -> None:
    thread = ThreadWaits(1, STAT, None, 0, whole=True)
    for state in (None, "lock", None):
        thread.note(None, 100, state)
    assert thread.take() == Counter({("samples", "running"): 2, ("samples", "lock"): 1})


class Tree:
    """A /proc of one process, written by hand."""

    def __init__(self, folder: Path, pid: int = 7) -> None:
        self.proc, self.pid = folder, pid
        self.write("stat", stat_line(b"engine"))
        self.write("syscall", b"running\n")
        self.write("maps", b"")
        (folder / str(pid) / "exe").symlink_to("/usr/bin/engine")
        (folder / str(pid) / "task").mkdir()

    def write(self, path: str, text: bytes) -> None:
        file = self.proc / str(self.pid) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)

    def thread(
        self,
        tid: int,
        *,
        name: bytes = b"engine",
        run: int = 0,
        wait: int = 0,
        slices: int = 1,
        syscall: bytes = b"202 0x10 0x0 0x0 0x0 0x0 0x0 0x0 0x0\n",
        state: str = "S",
        start: int = 999,
    ) -> None:
        self.write(f"task/{tid}/stat", stat_line(name, state, start, tid))
        self.write(f"task/{tid}/schedstat", f"{run} {wait} {slices}\n".encode())
        self.write(f"task/{tid}/syscall", syscall)
        self.write(f"task/{tid}/wchan", b"0")
        self.write(
            f"task/{tid}/status",
            b"voluntary_ctxt_switches:\t%d\nnonvoluntary_ctxt_switches:\t2\n" % slices,
        )

    def end(self, tid: int) -> None:
        folder = self.proc / str(self.pid) / "task" / str(tid)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def watch(tree: Tree, now_ns: int = 0) -> ProcessWaits:
    process = ProcessWaits(tree.proc, tree.pid, now_ns, KeptFiles(0))
    process.calls = CALLS["x86_64"]  # the tree is of that architecture, whatever this machine is
    return process


def told(process: ProcessWaits, now_ns: int) -> dict[tuple[str, ...], float]:
    return {
        (reading.metric.name, *(str(value) for _, value in reading.attributes)): reading.value
        for reading in process.report(now_ns)
    }


def test_a_process_is_told_whole(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.thread(7)
    tree.thread(8, name=b"worker-1", run=100)
    process = watch(tree)
    process.sample(0)
    tree.thread(7, run=300, wait=200, slices=3)
    tree.thread(8, name=b"worker-1", run=100)
    process.sample(1000)
    lock = "perfledger.wait.samples", "engine", "lock"
    assert told(process, 1000) == {
        ("perfledger.thread.run_time_ns", "engine"): 300,
        ("perfledger.thread.runqueue_wait_ns", "engine"): 200,
        lock: 2,
        ("perfledger.wait.time_ns", "engine", "lock"): 500,
        ("process.context_switches", "engine", "voluntary"): 0,
        ("process.context_switches", "engine", "involuntary"): 0,
        ("perfledger.thread.run_time_ns", "worker-#"): 0,
        ("perfledger.thread.runqueue_wait_ns", "worker-#"): 0,
        ("perfledger.wait.samples", "worker-#", "lock"): 2,
        ("perfledger.wait.time_ns", "worker-#", "lock"): 1000,
        ("process.context_switches", "worker-#", "voluntary"): 0,
        ("process.context_switches", "worker-#", "involuntary"): 0,
        ("process.thread.count",): 2,
        ("perfledger.wait.threads_ended",): 0,
        ("process.cpu.time", "user"): 0.21,
        ("process.cpu.time", "system"): 0.22,
        ("process.paging.faults", "minor"): 107,
        ("process.paging.faults", "major"): 3,
        ("perfledger.wait.source.present", "schedstat"): 1,
        ("perfledger.wait.source.present", "calls"): 1,
        ("perfledger.wait.source.present", "gil"): 1,
        ("perfledger.wait.source.present", "names"): 1,
        ("perfledger.wait.busiest.share", "engine", "running"): 0.3,
        ("perfledger.wait.busiest.share", "engine", "runnable"): 0.2,
        ("perfledger.wait.busiest.share", "engine", "lock"): 0.5,
    }
    assert summarise(7, process.window) == (
        "process 7: its busiest thread engine (7) in 0.0 s: 50% lock, 30% running, 20% runnable"
    )
    declared = {metric.name for metric in WAIT_METRICS}
    assert {name for name, *_ in told(process, 2000)} <= declared


def test_threads_come_and_go_and_counters_never_fall(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.thread(7)
    process = watch(tree)
    last: dict[tuple[str, ...], float] = {}
    for i in range(1, 20):
        tree.thread(7, run=i, slices=i)
        tree.thread(100 + i, name=b"short-%d" % i, run=50, start=i)
        process.sample(i * 10**7)
        now = told(process, i * 10**7)
        for series, value in last.items():
            if series[0] in ("perfledger.wait.samples", "perfledger.thread.run_time_ns"):
                assert now[series] >= value, series
        last = now
        tree.end(100 + i)
    assert last["perfledger.wait.threads_ended",] == 18
    assert last["perfledger.thread.run_time_ns", "short-#"] == 18 * 50  # the first was there
    assert last["perfledger.thread.run_time_ns", "engine"] == 18


def test_a_thread_id_that_is_given_again_is_another_thread(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.thread(7)
    tree.thread(8, name=b"old", run=10**6, start=1000)
    process = watch(tree)
    process.sample(10**10)
    tree.thread(8, name=b"new", run=5, start=2000)
    process.sample(3 * 10**10)
    now = told(process, 3 * 10**10)
    assert now["perfledger.thread.run_time_ns", "new"] == 5
    assert now["perfledger.wait.time_ns", "new", "lock"] == 10**10 - 5  # it began at 20 s
    assert now["perfledger.wait.threads_ended",] == 1


def test_a_thread_that_was_there_but_not_seen_counts_from_now(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.thread(7)
    process = watch(tree, now_ns=10**10)
    process.sample(10**10)
    tree.thread(8, name=b"overlooked", run=10**9, start=1)
    process.sample(2 * 10**10)
    now = told(process, 2 * 10**10)
    assert now["perfledger.thread.run_time_ns", "overlooked"] == 0
    assert ("perfledger.wait.time_ns", "overlooked", "lock") not in now


def test_a_process_of_dead_threads_has_ended(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.thread(7)
    process = watch(tree)
    process.sample(0)
    tree.thread(7, state="Z", slices=9)
    with pytest.raises(ProcessLookupError):
        process.sample(10)


def test_names_without_end_share_one_group(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    alphabet = "abcdefghij"
    for i in range(MOST_GROUPS + 9):
        tree.thread(100 + i, name=f"w{alphabet[i // 10]}{alphabet[i % 10]}".encode())
    process = watch(tree)
    process.sample(0)
    process.sample(10)
    now = told(process, 10)
    groups = {series[1] for series in now if series[0] == "perfledger.wait.samples"}
    assert len(groups) == MOST_GROUPS + 1
    assert now["perfledger.wait.samples", "other threads", "lock"] == 2 * 9


def test_what_an_epoll_a_poll_and_a_select_wait_on_is_read_from_the_process(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    fd = tmp_path / "7/fd"
    fd.mkdir()
    for number, target in ((3, "socket:[1]"), (4, "anon_inode:[timerfd]"), (5, "/dev/nvidia0")):
        (fd / str(number)).symlink_to(target)
    tree.write("fdinfo/9", b"pos:\t0\ntfd:        4 events: 19\ntfd:        3 events: 19\n")
    tree.write(
        "mem", bytes(64) + struct.pack("=ihh", 5, 1, 0) + struct.pack("=ihh", -1, 1, 0) + b"\x18"
    )
    files = ProcessFiles(tmp_path, 7, KeptFiles(0))
    assert files.in_epoll(9) == {"timer", "socket"}
    assert files.in_epoll(8) == {"other"}
    assert files.in_poll(64, 2) == {"gpu"}
    assert files.in_poll(64, 10_000) == {"other"}  # memory that is not there
    assert files.in_poll(2**64 - 1, 2) == {"other"}
    assert files.in_poll(0, 0) == set()
    assert files.in_select(8, (80, 0, 0)) == {"socket", "timer"}
    assert files.in_select(8, (0, 0, 0)) == set()
    assert files.kind(77) == "other"


def test_processes_are_found_by_command_port_and_parent(tmp_path: Path) -> None:
    for pid, command, parent in ((10, b"vllm\0serve\0", 1), (11, b"worker\0", 10), (12, b"", 11)):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "cmdline").write_bytes(command)
        line = stat_line(b"k (thread)").replace(b" S 1 ", b" S %d " % parent)
        (tmp_path / str(pid) / "stat").write_bytes(line)
    (tmp_path / "11/fd/5").symlink_to("socket:[4242]")
    (tmp_path / "net").mkdir()
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  "
        "timeout inode\n"
        "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        "
        "0 4242 1 ffff 100 0 0 10 0\n"
        "   1: 0100007F:1F40 0100007F:C000 01 00000000:00000000 00:00000000 00000000     0        "
        "0 4343 1 ffff 100 0 0 10 0\n"
    )
    (tmp_path / "net/tcp").write_text(table)
    assert listening_inodes(table, 8000) == {"4242"}
    assert find_by_port(tmp_path, 8000) == [11]
    assert find_by_port(tmp_path, 8001) == []
    assert find_by_command(tmp_path, re.compile("vllm serve"), but=0) == [10]
    assert find_by_command(tmp_path, re.compile("vllm serve"), but=10) == []
    assert find_by_command(tmp_path, re.compile("thread"), but=0) == [12]
    assert with_descendants([10], parents(tmp_path)) == [10, 11, 12]
    assert with_descendants([11, 10], {11: 10, 10: 11}) == [11, 10]


def test_files_that_are_no_python_are_passed_over(tmp_path: Path) -> None:
    maps = (
        "5608-5609 r--p 00000000 fe:00 1   /usr/bin/python3.11\n"
        "560a-560b rw-p 00003000 fe:00 1   /usr/bin/python3.11\n"
        "7f48-7f49 r--p 00000000 fe:00 2   /usr/lib/libpython3.11.so.1.0\n"
        "7f50-7f51 r--p 00000000 fe:00 3   /usr/lib/libc.so.6\n"
        "7f60-7f61 r--p 00000000 fe:00 4   /opt/my engine\n"
        "7f70-7f71 rw-p 00000000 00:00 0 \n"
    )
    assert list(python_images(maps, "/opt/my engine")) == [
        (0x5608, "/usr/bin/python3.11"),
        (0x7F48, "/usr/lib/libpython3.11.so.1.0"),
        (0x7F60, "/opt/my engine"),
    ]
    for content in (
        b"#!/bin/sh\n",
        b"\x7fELF\x02\x01" + bytes(200),
        b"\x7fELF\x02\x01" + b"\xff" * 90,
    ):
        (tmp_path / "image").write_bytes(content)
        with open(tmp_path / "image", "rb") as image:
            try:
                assert find_symbol(image.fileno(), b"_PyRuntime") is None
            except NO_ELF_FILE:
                continue


def test_names_are_all_that_is_kept_of_py_spys_answer() -> None:
    answer = b"""[{"thread_name": "MainThread", "os_thread_id": 7, "frames": [{"name": "secret"}]},
                  {"thread_name": null, "os_thread_id": 8},
                  {"thread_name": "a\\nb", "os_thread_id": 9}]"""
    assert parse_thread_names(answer) == {7: "MainThread", 9: "a?b"}
    with pytest.raises(OSError, match="no JSON"):
        parse_thread_names(b"Error: no python")


def test_a_summary_names_the_busiest_thread() -> None:
    assert summarise(1, []) == "process 1: no thread was seen"
    idle = ThreadWindow(1, "main", 10**10, {"socket": 10**10})
    busy = ThreadWindow(
        2, "engine", 10**10, {"running": 6 * 10**9, "runnable": 3 * 10**9, "gil": 10**9}
    )
    assert summarise(1, [idle, busy]) == (
        "process 1: its busiest thread engine (2) in 10.0 s: 60% running, 30% runnable, 10% gil"
    )
    assert list(busy.shares()) == [state for state in STATES if state in busy.state_ns]


def test_without_exact_times_samples_share_the_wall_time_out() -> None:
    seen = Counter({("samples", "running"): 3, ("samples", "lock"): 1, ("ns", "running"): 0})
    assert thread_window(1, "main", 400, seen).state_ns == {"running": 300, "lock": 100}
    assert thread_window(1, "main", 400, Counter()).shares() == {}


def test_settings_are_read_from_the_file() -> None:
    settings = WaitSettings.from_toml({"port": 8000, "rate_hz": 50, "children": False})
    assert (settings.port, settings.rate_hz, settings.children) == (8000, 50.0, False)
    assert str(settings) == "what listens on port 8000"
    assert str(WaitSettings.from_toml({"command": "vllm"})) == "command /vllm/"
    assert str(WaitSettings.from_toml({"pid": os.getpid()})) == f"process {os.getpid()}"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "pid, command or port must be set, and only one of the three"),
        ({"pid": 1, "port": 2}, "only one of the three"),
        ({"pid": 0}, "bad value of pid"),
        ({"port": 70000}, "bad value of port"),
        ({"command": "("}, "bad value of command"),
        ({"command": ""}, "a pattern that is not empty"),
        ({"pid": 1, "rate_hz": 1000}, "bad value of rate_hz"),
        ({"pid": 1, "frequency": 3}, "unknown setting: frequency"),
    ],
)
def test_settings_that_cannot_be_are_refused(table: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        WaitSettings.from_toml(table)
