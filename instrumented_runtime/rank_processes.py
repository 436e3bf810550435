"""The processes of one replica, one a rank: they start together, and one's end is the end of all.

Rank 0 has the pipe to the API process. The others have a lifeline: a pipe on which they say that
they have arrived or why they cannot go on, and whose end tells them to end.
"""

import asyncio
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from perfledger.instrumented_runtime.child_processes import end, make_rendezvous, remove_rendezvous
from perfledger.instrumented_runtime.engine_link import PROCESS_ENDED
from perfledger.instrumented_runtime.messages import USAGE, Arrived, Failed
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace, name_of

JOIN_S = 60.0  # for all ranks to arrive where they meet
LEADER_STOP_S = 5.0
SEEN_S = 0.1
WORD_S = 1.0
FOLLOWER_STOP_S = 2.0  # once rank 0 has ended

Spawn = Callable[[RankPlace], tuple[BaseProcess, Connection]]
# What is called with the reason when a rank has ended or cannot go on; True: it was asked for what
# can never be.
OnEnd = Callable[[str, bool], None]


class RankProcesses:
    """All ranks of one replica, from their start to their end."""

    def __init__(self, layout: Layout, replica: str, spawn: Spawn) -> None:
        """Start them all. Raises OSError where the system has no room for them; those that were
        started then end, for nobody holds their pipes."""
        meet = make_rendezvous() if layout.world > 1 else ""
        self._places = [RankPlace(layout, rank, meet, replica) for rank in range(layout.world)]
        try:
            started = [spawn(place) for place in self._places]
        except OSError:
            remove_rendezvous(self._places[0])
            raise
        self._processes = [process for process, _ in started]
        self.connection, *self._lifelines = (connection for _, connection in started)
        self._arrived: set[int] = set()
        self._joining: asyncio.TimerHandle | None = None
        self._on_end: OnEnd = lambda *_: None
        self._ended = False

    @property
    def exit_code(self) -> int | None:
        """Exit code of rank 0, None while it runs."""
        return self._processes[0].exitcode

    def watch(self, on_end: OnEnd) -> None:
        """Call `on_end` when one of them ends or cannot go on; rank 0 says that by its pipe."""
        self._on_end = on_end
        loop = asyncio.get_running_loop()
        for rank, lifeline in enumerate(self._lifelines, 1):
            loop.add_reader(lifeline.fileno(), self._listen, rank, lifeline)
            loop.add_reader(self._processes[rank].sentinel, self._one_ended, rank)
        if self._lifelines:
            self._joining = loop.call_later(JOIN_S, self._all_joined)

    def leader_arrived(self) -> None:
        """Rank 0 is where the ranks meet."""
        self._arrived.add(0)

    def explain(self, detail: str) -> str:
        """Return what ended the replica: a rank that was killed, else `detail`, which for the end
        of a process with no word before it is the rank's name and exit code.

        A rank that was killed takes the others with it, and they end with an error of their own.
        """
        if len(self._places) == 1:
            return detail
        codes = self._exit_codes()
        killed = [rank for rank, code in codes.items() if code < 0]
        for rank in killed or (codes if detail == PROCESS_ENDED else ()):
            return f"{self._name(rank)} ended with exit code {codes[rank]}"
        return detail

    def kill(self) -> None:
        """End them at once."""
        for process in self._processes:
            process.kill()

    def forget(self) -> None:
        """Watch no longer: they are about to end. Calls after the first do nothing."""
        if self._ended:
            return
        self._ended = True
        self._on_end = lambda *_: None
        loop = asyncio.get_running_loop()
        if self._joining is not None:
            self._joining.cancel()
        for rank, lifeline in enumerate(self._lifelines, 1):
            loop.remove_reader(lifeline.fileno())
            loop.remove_reader(self._processes[rank].sentinel)

    def end(self) -> None:
        """Wait until all have ended, rank 0 first, whose pipe is closed; blocks for some seconds,
        then kills. Call `forget` before."""
        end(self._processes[0], LEADER_STOP_S)
        for lifeline in self._lifelines:
            lifeline.close()
        for process in self._processes[1:]:
            end(process, FOLLOWER_STOP_S)
        remove_rendezvous(self._places[0])

    def _listen(self, rank: int, lifeline: Connection) -> None:
        try:
            message = lifeline.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(lifeline.fileno())  # its end is seen as well
            return
        if isinstance(message, Arrived):
            self._arrived.add(rank)
        elif isinstance(message, Failed):
            # All ranks find the same fault in the options: whose word comes first says nothing.
            misused = message.reason == USAGE
            name = "" if misused else f"{self._name(rank)}: "
            self._on_end(name + message.detail, misused)

    def _one_ended(self, rank: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._processes[rank].sentinel)
        killed = self._exit_codes()[rank] < 0
        # One that ended by itself has said why, or rank 0 is about to.
        loop.call_later(0 if killed else WORD_S, lambda: self._on_end(PROCESS_ENDED, False))

    def _exit_codes(self) -> dict[int, int]:
        """Return the exit codes of those that have ended, by rank."""
        seen = wait([one.sentinel for one in self._processes], SEEN_S)
        codes = {}
        for rank, process in enumerate(self._processes):
            if process.sentinel in seen:
                process.join(SEEN_S)  # the exit code is there a moment later
                codes[rank] = process.exitcode or 0
        return codes

    def _all_joined(self) -> None:
        missing = [rank for rank in range(len(self._places)) if rank not in self._arrived]
        if missing:
            names = ", ".join(self._name(rank) for rank in missing)
            self._on_end(f"not joined within {JOIN_S:.0f} s: {names}", False)

    def _name(self, rank: int) -> str:
        return name_of(self._places[rank])
