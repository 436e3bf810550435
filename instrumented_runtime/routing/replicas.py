"""The router: all replicas of one service, which of them gets a request, and what becomes of one
whose replica dies.

It runs on the event loop of the API process. A choice costs microseconds and waits for nobody.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator

from perfledger.instrumented_runtime.engine_link import (
    FAILED,
    LOADING,
    OK,
    STOPPING,
    Answer,
    RequestFailedError,
)
from perfledger.instrumented_runtime.kv.prefix_hashes import block_hashes, prefix_salt
from perfledger.instrumented_runtime.messages import Ready, Submit
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.rank_processes import Spawn
from perfledger.instrumented_runtime.routing.choice import Choice
from perfledger.instrumented_runtime.routing.policy import pick
from perfledger.instrumented_runtime.routing.replica import DRAINING, UNHEALTHY, Replica
from perfledger.instrumented_runtime.runtime_version import runtime_version
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import PerfledgerError

MAX_RETRIES = 2  # of one request: it may be what the engines die of
CHECK_S = 0.5
BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 30.0
STABLE_NS = 60_000_000_000  # after so long a replica's earlier failures are forgotten


class RoutedAnswer(Answer):
    """An answer that another replica may take over until its first token."""

    def __init__(self, submit: Submit, choice: Choice, on_retry: Callable[[Choice], None]) -> None:
        super().__init__(submit)
        self.choice, self.on_retry = choice, on_retry


class Replicas:
    """All engines behind one API, numbered from 0."""

    def __init__(
        self, options: RuntimeOptions, spawn: Spawn, on_change: Callable[[Replica], None]
    ) -> None:
        """`on_change` is called whenever the state of a replica has changed."""
        numbers = map(str, range(options.replicas))
        self._all = {number: Replica(number, options, spawn, self) for number in numbers}
        self._options, self._on_change = options, on_change
        self._failures = dict.fromkeys(self._all, 0)
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.loaded = False  # all have been ready once: from here on a failure is not the end

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, number: object) -> bool:
        return number in self._all

    def __getitem__(self, number: str) -> Replica:
        return self._all[number]

    def start(self) -> None:
        """Start all of them, on the running event loop, or none. Raises PerfledgerError."""
        started: list[Replica] = []
        try:
            for replica in self:
                replica.start()
                started.append(replica)
        except OSError as error:
            for replica in started:
                replica.abandon()
            what = f"cannot start replica {len(started)}: {error.strerror}"
            raise PerfledgerError(what) from None
        self.keep(self._watch_health())

    def keep(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Run something besides, until it is done or the router stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """End all processes, in a bounded time."""
        self.refuse_new()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.stop() for replica in self))

    # --- what the API asks ---

    @property
    def state(self) -> str:
        """State of the service: OK where a replica takes requests, and all have been loaded."""
        if self._stopping:
            return STOPPING
        states = {replica.state for replica in self}
        if not self.loaded:
            return FAILED if FAILED in states else LOADING
        order = (OK, UNHEALTHY, DRAINING, LOADING, STOPPING, FAILED)
        best = next(state for state in order if state in states)
        return LOADING if best == STOPPING else best  # one alone is being restarted

    @property
    def failure(self) -> str:
        """Why the last of them failed that is not back; empty where all run."""
        return next((r.link.failure for r in self if r.state == FAILED), "")

    @property
    def misused(self) -> bool:
        """Whether one failed because it could never start as asked."""
        return any(replica.link.misused for replica in self)

    @property
    def ready(self) -> Ready | None:
        """What an engine said of itself; all are of the same checkpoint and options."""
        return next((replica.ready for replica in self if replica.ready), None)

    @property
    def in_flight(self) -> int:
        """Requests that the engines have or will get."""
        return sum(replica.link.in_flight for replica in self)

    def choose(self, prompt: list[int], tenant: str) -> Choice:
        """Choose a replica for a prompt. Raises RequestFailedError where none takes requests."""
        start_ns = monotonic_ns()
        hashes = []
        if self._options.prefix_cache and len(self) > 1:
            hashes = block_hashes(prompt, self._options.block_size, prefix_salt(tenant))
        return self._choose(hashes, start_ns)

    def submit(self, submit: Submit, choice: Choice, on_retry: Callable[[Choice], None]) -> Answer:
        """Send a request to the replica of its choice; `on_retry` gets each later choice, made
        because that one failed before a token came."""
        if self._all[choice.replica].state != OK:  # it may have changed since
            choice = self._choose(choice.hashes, monotonic_ns())
            on_retry(choice)
        answer = RoutedAnswer(submit, choice, on_retry)
        self._all[choice.replica].take(answer, choice.hashes)
        return answer

    def refuse_new(self) -> None:
        """From now on the API takes no request."""
        self._stopping = True
        for replica in self:
            replica.link.refuse_new()

    def abort_all(self, reason: str, detail: str) -> None:
        """Abort all that runs or waits."""
        for replica in self:
            replica.link.abort_all(reason, detail)

    # --- what the replicas say ---

    def changed(self, replica: Replica) -> None:
        """See Watcher."""
        self.loaded = self.loaded or all(one.ready and one.state != FAILED for one in self)
        if self.loaded and replica.state == FAILED and not self._stopping:
            self.try_again(replica)
        self._on_change(replica)

    def refusal(self, replica: Replica, ready: Ready) -> str:
        """See Watcher: it must speak our protocol and hold the weights that the others have."""
        theirs, ours = ready.runtime_version or "unknown", runtime_version()
        if theirs != ours:
            return f"it has runtime version {theirs}, the router has {ours}"
        others = [one.ready for one in self if one is not replica and one.ready]
        loaded = {other.weights_hash for other in others}
        if loaded and ready.weights_hash not in loaded:
            return f"it loaded weights {ready.weights_hash}, others have {', '.join(loaded)}"
        return ""

    def rescue(self, answer: Answer) -> bool:
        """See Watcher."""
        if not isinstance(answer, RoutedAnswer) or answer.choice.retries >= MAX_RETRIES:
            return False
        before = answer.choice
        try:
            after = self._choose(before.hashes, monotonic_ns(), before)
        except RequestFailedError:
            return False
        answer.choice = after
        answer.on_retry(after)
        self._all[after.replica].take(answer, after.hashes)
        return True

    def _choose(self, hashes: list[bytes], start_ns: int, failed: Choice | None = None) -> Choice:
        takers = [replica.candidate(hashes) for replica in self if replica.state == OK]
        if not takers or self._stopping:
            raise RequestFailedError("error", "no replica takes requests")
        chosen, reason = pick(self._options.route, takers, self._turn)
        self._turn += 1
        return Choice(
            chosen.replica,
            self._options.route if len(self) > 1 else "",
            reason,
            chosen.queue_ns,
            chosen.hit_tokens,
            start_ns,
            monotonic_ns(),
            failed.retries + 1 if failed else 0,
            failed.replica if failed else "",
            hashes,
        )

    def try_again(self, replica: Replica) -> None:
        """Start a replica again that has no processes, after a while."""
        self.keep(self._after_failure(replica))

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for replica in self:
                replica.check_health(monotonic_ns())

    async def _after_failure(self, replica: Replica) -> None:
        """Clear away a replica that died and start it again, later and later if it goes on dying.

        A single engine is not started again: that is its supervisor's to decide.
        """
        await replica.stop()
        if len(self) == 1 or replica.refused:
            return
        if monotonic_ns() - replica.ready_ns > STABLE_NS:
            self._failures[replica.number] = 0
        wait_s = min(BACKOFF_S * 2 ** self._failures[replica.number], LONGEST_BACKOFF_S)
        self._failures[replica.number] += 1
        await asyncio.sleep(wait_s)
        try:
            replica.start()
        except OSError:  # no more processes or memory just now
            self.try_again(replica)
