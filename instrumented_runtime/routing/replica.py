"""One replica: its processes, the pipe to it, its load, and whether it can take requests."""

import asyncio
from typing import Protocol

from perfledger.instrumented_runtime.engine_link import (
    FAILED,
    OK,
    Answer,
    EngineLink,
    Hears,
)
from perfledger.instrumented_runtime.messages import KvMap, Ready, StepOutput
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.rank_processes import RankProcesses, Spawn
from perfledger.instrumented_runtime.routing.load import Load
from perfledger.instrumented_runtime.routing.policy import Candidate
from perfledger.instrumented_runtime.routing.prefixes import RecentPrefixes
from perfledger.schema.clocks import monotonic_ns

UNHEALTHY, DRAINING = "unhealthy", "draining"
KV_MAP_S = 10.0


class Watcher(Protocol):
    """Who is told of a replica's changes, and can help its requests."""

    def changed(self, replica: "Replica") -> None:
        """The replica's state is another one."""

    def refusal(self, replica: "Replica", ready: Ready) -> str:
        """Return why a replica that is loaded must not serve; empty if it may."""

    def rescue(self, answer: Answer) -> bool:
        """See Hears.rescue."""


class Replica(Hears):
    """An engine of one or more ranks, which may be started again."""

    def __init__(
        self, number: str, options: RuntimeOptions, spawn: Spawn, watcher: Watcher
    ) -> None:
        self.number = number
        self.draining = False
        self.unhealthy = False
        self.refused = False  # its code does not fit ours: starting it again would not help
        self.starts = 0
        self.ready_ns = 0
        self._options, self._spawn, self._watcher = options, spawn, watcher
        self._ending = asyncio.Lock()
        self._maps: list[asyncio.Future[KvMap]] = []

    def start(self) -> None:
        """Start its processes, on the running event loop."""
        self.starts += 1
        self.refused = self.unhealthy = False
        self.load = Load()
        self.prefixes = RecentPrefixes(0)
        self._heard_ns = monotonic_ns()
        self._probed = False
        self._processes = RankProcesses(self._options.layout, self.number, self._spawn)
        self.link = EngineLink(self._processes.connection, self)
        self.link.start()
        self._processes.watch(self._rank_ended)

    @property
    def state(self) -> str:
        """One of EngineLink's states, UNHEALTHY or DRAINING; it takes requests while OK."""
        if self.link.state != OK:
            return self.link.state
        return DRAINING if self.draining else UNHEALTHY if self.unhealthy else OK

    @property
    def ready(self) -> Ready | None:
        """What the engine said of itself when it was loaded."""
        return self.link.ready

    @property
    def _broken(self) -> bool:
        """Whether one of several ranks is gone."""
        return self.link.state == FAILED and self._options.layout.world > 1

    @property
    def exit_code(self) -> int | None:
        """Exit code of its rank 0."""
        return self._processes.exit_code

    def candidate(self, hashes: list[bytes]) -> Candidate:
        """Return what the policy needs to know of it, for a prompt of blocks of these names."""
        if not self.link.in_flight:
            self.load.emptied()  # of those too whose clients left
        return Candidate(
            self.number,
            self.link.in_flight,
            self._options.max_num_seqs,
            self.load.queue_tokens,
            self.load.queue_ns,
            self.prefixes.hits(hashes) * self._options.block_size,
        )

    def report(self) -> dict[str, object]:
        """Return what /health says of it."""
        ready, load = self.ready, self.load
        report: dict[str, object] = {
            "replica": self.number,
            "state": self.state,
            "starts": self.starts,
            "in_flight": self.link.in_flight,
            "running": load.running,
            "queue_tokens": load.queue_tokens,
            "estimated_queue_ns": load.queue_ns,
            "kv_blocks_used": load.kv_blocks_used,
            "kv_blocks": ready.kv_blocks if ready else None,
            "weights_hash": ready.weights_hash if ready else None,
            "runtime_version": ready.runtime_version if ready else None,
            "layout": str(self._options.layout),
        }
        return report | ({"detail": self.link.failure} if self.link.failure else {})

    def take(self, answer: Answer, hashes: list[bytes]) -> None:
        """Send it a request."""
        now_ns = monotonic_ns()
        if not self.link.in_flight:
            self._heard_ns = now_ns
        self.load.sent(len(answer.submit.prompt), now_ns)
        self.prefixes.sent(hashes)
        self.link.take(answer)

    def check_health(self, now_ns: int) -> None:
        """See whether it still answers while it has work: half-way to the limit it is asked."""
        limit_ns = int(self._options.health_timeout_s * 1e9)
        if self.link.state != OK:
            return
        owes = self.link.in_flight or self._probed
        silent_ns = now_ns - self._heard_ns if owes else 0
        if silent_ns > limit_ns // 2 and not self._probed:
            self._probed = True
            self.link.inspect()
        if (silent_ns > limit_ns) != self.unhealthy:
            self.unhealthy = silent_ns > limit_ns
            self._watcher.changed(self)

    async def kv_map(self) -> KvMap:
        """Ask the engine what is in its KV cache. Raises TimeoutError where it does not say."""
        asked: asyncio.Future[KvMap] = asyncio.get_running_loop().create_future()
        self._maps.append(asked)
        self.link.inspect()
        async with asyncio.timeout(KV_MAP_S):
            return await asked

    def abandon(self) -> None:
        """Kill its processes before any of them has served; wait for their end."""
        self.link.shut_down()
        self._processes.forget()
        self._processes.kill()
        self._processes.end()

    async def stop(self) -> None:
        """End its processes, in a bounded time."""
        async with self._ending:
            if self.link.ready is None or self._broken:
                self._processes.kill()  # it would not listen: it loads, or waits for a dead peer
            self.link.shut_down()
            self._processes.forget()
            await asyncio.to_thread(self._processes.end)

    # --- what the engine says ---

    def changed(self) -> None:
        """See Hears."""
        ready = self.link.ready
        if ready is not None and self.link.state != FAILED:
            self.ready_ns = monotonic_ns()
            self.prefixes = RecentPrefixes(ready.kv_blocks)
            if why := self._watcher.refusal(self, ready):
                self.refused = True
                self.link.fail(f"refused: {why}")
                return
        self._watcher.changed(self)

    def arrived(self) -> None:
        """See Hears."""
        self._processes.leader_arrived()

    def stepped(self, step: StepOutput) -> None:
        """See Hears."""
        self.load.stepped(step, self.link.in_flight)
        self._heard()

    def answered(self) -> None:
        """See Hears."""
        if not self.link.in_flight:
            self.load.emptied()
        self._heard()

    def kv_found(self, found: KvMap) -> None:
        """See Hears."""
        asked, self._maps = self._maps, []
        for one in asked:
            if not one.done():
                one.set_result(found)
        self._heard()

    def explain(self, detail: str) -> str:
        """See Hears."""
        detail = self._processes.explain(detail)
        if self._options.replicas == 1 or self.link.misused:
            return detail
        return f"replica {self.number}: {detail}"

    def rescue(self, answer: Answer) -> bool:
        """See Hears."""
        return self._watcher.rescue(answer)

    def _heard(self) -> None:
        self._heard_ns, self._probed = monotonic_ns(), False
        if self.unhealthy:
            self.unhealthy = False
            self._watcher.changed(self)

    def _rank_ended(self, reason: str, misused: bool) -> None:
        self.link.misused |= misused
        self.link.fail(reason)
