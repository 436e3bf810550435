"""Which process of this host ended first: a broken connection alone names an address, not a rank.

A death runs through the ranks: each that loses a peer ends too. So the first one is remembered,
by a thread that sleeps in the kernel until then.
"""

import os
import select
import threading
from collections.abc import Mapping

GRACE_S = 2.0  # a peer's connections may break while it is still ending


class PeerWatch:
    """Watches processes by number, from now on. Where the system cannot, it knows of none."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """`pids` are processes by rank."""
        self._ended = threading.Event()
        self._first: int | None = None
        self._ranks: dict[int, int] = {}  # by descriptor
        self._wake_read, self._wake_write = os.pipe()
        for rank, pid in pids.items() if hasattr(os, "pidfd_open") else ():
            try:
                self._ranks[os.pidfd_open(pid)] = rank
            except ProcessLookupError:
                self._note(rank)
            except OSError:
                pass  # not on this kernel
        self._thread = threading.Thread(target=self._wait, name="peer-watch", daemon=True)
        self._thread.start()

    def first_ended(self, timeout_s: float = GRACE_S) -> int | None:
        """Return the rank that ended first, waiting until one has; None if none did in time."""
        self._ended.wait(timeout_s)
        return self._first

    def stop(self) -> None:
        """End the thread and close what it watched."""
        os.write(self._wake_write, b".")
        self._thread.join()
        for descriptor in (*self._ranks, self._wake_read, self._wake_write):
            os.close(descriptor)

    def _wait(self) -> None:
        poll = select.poll()
        for descriptor in (*self._ranks, self._wake_read):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll():
            if descriptor in self._ranks:
                self._note(self._ranks[descriptor])

    def _note(self, rank: int) -> None:
        if self._first is None:
            self._first = rank
            self._ended.set()
