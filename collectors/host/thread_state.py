"""What a thread is doing, from what the kernel shows of it. Pure functions over text.

States. Running and runnable are told apart by the kernel's exact times, not by a sample; a thread
that spins (a CUDA synchronisation does by default) is running. lock: a futex or file lock, which
is a mutex, a semaphore or a condition, so an idle worker of a pool is in it too. gil: a futex
within CPython's runtime state, which holds no other lock. socket: network or another process.
pipe: a pipe, an eventfd, a terminal. unknown: this process may not look.
"""

import re
from typing import NamedTuple, Protocol

from perfledger.collectors.host.system_calls import Waits

RUNNING, RUNNABLE, UNKNOWN = "running", "runnable", "unknown"
BLOCKED_STATES = ("gil", "lock", "gpu", "socket", "disk", "pipe", "sleep", "stopped", "other")
STATES = (RUNNING, RUNNABLE, *BLOCKED_STATES, UNKNOWN)

LONGEST_NAME = 64


class ThreadStat(NamedTuple):
    """/proc/PID/task/TID/stat, or a process's own."""

    name: str
    state: str
    parent: int
    minor_faults: int
    major_faults: int
    user_ticks: int
    system_ticks: int
    start_ticks: int


def parse_stat(raw: bytes) -> ThreadStat:
    """Return a stat file's fields (proc(5)).

    The name is between the first and the last parenthesis, and a hostile one holds parentheses,
    newlines and bytes that are no text. Raises ValueError where the rest is cut off.
    """
    start, end = raw.index(b"("), raw.rindex(b")")
    fields = raw[end + 2 :].split()
    if len(fields) < 20:
        raise ValueError("stat is cut off")
    return ThreadStat(
        name=clean_name(raw[start + 1 : end]),
        state=fields[0].decode("ascii", "replace"),
        parent=int(fields[1]),
        minor_faults=int(fields[7]),
        major_faults=int(fields[9]),
        user_ticks=int(fields[11]),
        system_ticks=int(fields[12]),
        start_ticks=int(fields[19]),
    )


def clean_name(raw: bytes) -> str:
    """Return a name as printable text: what is none becomes `?`."""
    text = raw.decode("utf-8", "replace")[:LONGEST_NAME]
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "?"


def group_name(name: str) -> str:
    """Return the group of a thread: numbers in its name become `#`, as workers are numbered."""
    return re.sub(r"\d+", "#", name)


class SchedStat(NamedTuple):
    """/proc/PID/task/TID/schedstat: exact and cumulative, where the kernel keeps it."""

    run_ns: int
    wait_ns: int
    slices: int


def parse_schedstat(raw: bytes) -> SchedStat:
    """Return time on a CPU, time in a run queue, and how often it got a CPU."""
    run_ns, wait_ns, slices = raw.split()[:3]
    return SchedStat(int(run_ns), int(wait_ns), int(slices))


class SystemCall(NamedTuple):
    """/proc/PID/task/TID/syscall of a blocked thread; number -1 is blocked in no call."""

    number: int
    arguments: tuple[int, ...]


def parse_syscall(raw: bytes) -> SystemCall | None:
    """Return the call that a thread is blocked in, or None: it is on a CPU or in a run queue."""
    words = raw.split()
    if not words or words[0] == b"running":
        return None
    number = int(words[0])
    return SystemCall(number, tuple(int(word, 16) for word in words[1:7]) if number >= 0 else ())


def parse_switches(status: bytes) -> tuple[int, int]:
    """Return voluntary and involuntary context switches from a status file."""
    found = re.findall(rb"^(?:non)?voluntary_ctxt_switches:\s*(\d+)$", status, re.MULTILINE)
    if len(found) != 2:
        raise ValueError("status has no context switches")
    return int(found[0]), int(found[1])


class Descriptors(Protocol):
    """What the file descriptors of a process are: socket, gpu, disk, pipe, timer or other."""

    def kind(self, descriptor: int) -> str:
        """Return what a descriptor is."""

    def in_epoll(self, descriptor: int) -> set[str]:
        """Return what an epoll descriptor watches."""

    def in_poll(self, address: int, count: int) -> set[str]:
        """Return what an array of struct pollfd in the process's memory names."""

    def in_select(self, bound: int, addresses: tuple[int, ...]) -> set[str]:
        """Return what three bit sets in the process's memory name."""


# What a thread that watches several kinds waits for: the first of these that is among them.
_PRECEDENCE = ("gpu", "socket", "disk", "pipe", "timer", "other")
_BY_KIND = {"timer": "sleep"}


def blocked_state(
    letter: str,
    call: SystemCall | None,
    function: str,
    descriptors: Descriptors,
    gil: range | None,
    calls: dict[int, Waits],
) -> str:
    """Return what a thread that is not running waits for.

    `letter` is the state of stat, `call` what it is blocked in (None: not to be had), `function`
    the kernel function that it sleeps in ("" or "0": not to be had), `gil` the addresses of
    CPython's runtime state.
    """
    if letter in "TtZX":
        return "stopped"
    if call is None:
        return by_function(letter, function)
    waits = calls.get(call.number, Waits.OTHER)
    state = _in_call(waits, call.arguments, descriptors, gil)
    if state == "other" and letter == "D":
        return by_function(letter, function)
    return state


def _in_call(
    waits: Waits, arguments: tuple[int, ...], descriptors: Descriptors, gil: range | None
) -> str:
    match waits:
        case Waits.FUTEX:
            return "gil" if gil is not None and arguments[0] in gil else "lock"
        case Waits.DESCRIPTOR:
            kinds = {descriptors.kind(arguments[0])}
        case Waits.EPOLL:
            kinds = descriptors.in_epoll(arguments[0])
        case Waits.POLL:
            kinds = descriptors.in_poll(arguments[0], arguments[1])
        case Waits.SELECT:
            kinds = descriptors.in_select(arguments[0], arguments[1:4])
        case _:
            return str(waits.value)
    if not kinds:
        return "sleep"  # poll of nothing is a sleep
    kind = next((kind for kind in _PRECEDENCE if kind in kinds), "other")
    return _BY_KIND.get(kind, kind)


_FUNCTIONS = (
    ("lock", re.compile(r"futex|rwsem_|mutex_lock|__down|locks_lock|flock")),
    ("gpu", re.compile(r"nvidia|uvm_|nv_|_nv\d|amdgpu|kfd_|dma_fence|drm_")),
    (
        "disk",
        re.compile(
            r"io_schedule|folio_wait|wait_on_page|jbd2|blk_|rq_qos|submit_bio|"
            r"ext4_|xfs_|btrfs_|nfs_|wait_on_buffer|bit_wait_io|writeback"
        ),
    ),
    ("socket", re.compile(r"sk_wait|sk_stream|inet_|tcp_|udp_|unix_|skb_|sock_|ep_poll")),
    ("pipe", re.compile(r"pipe_|eventfd|n_tty|tty_")),
    ("sleep", re.compile(r"nanosleep|sigtimedwait|sigsuspend|pause")),
    ("other", re.compile(r"do_wait|kernel_clone|vfork|poll|select|kthread|worker_thread")),
)


def by_function(letter: str, function: str) -> str:
    """Return what a thread waits for from the kernel function that it sleeps in.

    Coarser than the call: of an epoll it cannot say on what, so sockets are assumed. State D is
    an uninterruptible sleep, nearly always for a disk.
    """
    for state, pattern in _FUNCTIONS:
        if pattern.search(function):
            return state
    if letter == "D":
        return "disk"
    return UNKNOWN if function in ("", "0") else "other"
