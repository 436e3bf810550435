"""What a thread waits for in a system call: the calls that block, by number and architecture.

Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux.
A call that is in no list is OTHER: it is not guessed at.
"""

import platform
from collections.abc import Mapping
from enum import Enum


class Waits(Enum):
    """How to find out what a call waits for."""

    FUTEX = "futex"  # argument 0 is the address of the lock
    LOCK = "lock"  # a file lock or a System V semaphore
    SLEEP = "sleep"
    DESCRIPTOR = "descriptor"  # argument 0 is what is waited for
    EPOLL = "epoll"  # argument 0 is an epoll descriptor
    POLL = "poll"  # arguments 0 and 1: an array of struct pollfd and its length
    SELECT = "select"  # arguments 0 to 3: a bound and three bit sets
    DISK = "disk"  # the file system
    OTHER = "other"


X86_64 = {
    Waits.FUTEX: (202, 449, 455),  # futex, futex_waitv, futex_wait
    Waits.LOCK: (73, 65, 220),  # flock, semop, semtimedop
    Waits.SLEEP: (35, 230, 34, 128),  # nanosleep, clock_nanosleep, pause, rt_sigtimedwait
    # read write ioctl pread pwrite readv writev sendfile connect accept sendto recvfrom sendmsg
    # recvmsg fcntl splice tee vmsplice accept4 preadv pwritev recvmmsg sendmmsg preadv2 pwritev2
    Waits.DESCRIPTOR: (0, 1, 16, 17, 18, 19, 20, 40, 42, 43, 44, 45, 46, 47, 72)
    + (275, 276, 278, 288, 295, 296, 299, 307, 327, 328),
    Waits.EPOLL: (232, 281, 441),  # epoll_wait, epoll_pwait, epoll_pwait2
    Waits.POLL: (7, 271),  # poll, ppoll
    Waits.SELECT: (23, 270),  # select, pselect6
    # open stat lstat close fsync fdatasync truncate ftruncate getdents rename mkdir rmdir creat
    # link unlink sync getdents64 io_getevents openat unlinkat renameat msync sync_file_range
    # fallocate syncfs renameat2 copy_file_range statx
    Waits.DISK: (2, 4, 6, 3, 74, 75, 76, 77, 78, 82, 83, 84, 85, 86, 87, 162, 217, 208, 257, 263)
    + (264, 26, 277, 285, 306, 316, 326, 332),
}
AARCH64 = {
    Waits.FUTEX: (98, 449, 455),
    Waits.LOCK: (32, 193, 192),
    Waits.SLEEP: (101, 115, 137),  # there is no pause
    # ioctl read write readv writev pread pwrite preadv pwritev sendfile vmsplice splice tee
    # accept connect sendto recvfrom sendmsg recvmsg fcntl accept4 recvmmsg sendmmsg …2
    Waits.DESCRIPTOR: (29, 63, 64, 65, 66, 67, 68, 69, 70, 71, 75, 76, 77, 202, 203, 206, 207)
    + (211, 212, 25, 242, 243, 269, 286, 287),
    Waits.EPOLL: (22, 441),
    Waits.POLL: (73,),
    Waits.SELECT: (72,),
    # io_getevents mkdirat unlinkat linkat renameat truncate ftruncate fallocate openat close
    # getdents64 sync fsync fdatasync sync_file_range msync syncfs renameat2 copy_file_range statx
    Waits.DISK: (4, 34, 35, 37, 38, 45, 46, 47, 56, 57, 61, 81, 82, 83, 84, 227, 267, 276, 285)
    + (291,),
}


def _by_number(lists: Mapping[Waits, tuple[int, ...]]) -> dict[int, Waits]:
    return {number: waits for waits, numbers in lists.items() for number in numbers}


CALLS: dict[str, dict[int, Waits]] = {
    "x86_64": _by_number(X86_64),
    "aarch64": _by_number(AARCH64),
}


def calls_of_this_machine() -> dict[int, Waits]:
    """Return the calls by number; of an architecture that is not listed, none."""
    return CALLS.get(platform.machine(), {})
