"""A rolling restart: one replica after another is drained, ended and started again.

No request is lost: while one is away the others take what comes, and none is ended before its
last request has. It stops at the first replica that does not come back, and says why.
"""

import asyncio
from typing import TYPE_CHECKING

from perfledger.instrumented_runtime.engine_link import FAILED, LOADING, OK
from perfledger.instrumented_runtime.routing.replica import Replica

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.routing.replicas import Replicas

DRAIN_S = 600.0
TURN_S = 0.05


class RollingError(Exception):
    """The restart cannot begin, or not go on."""


class RollingRestart:
    """The last one asked for; `report` is for /admin."""

    def __init__(self, replicas: "Replicas") -> None:
        self._replicas = replicas
        self.running = False
        self._said = "never asked for"

    @property
    def report(self) -> str:
        """What it does now, or how it ended."""
        return self._said

    def begin(self) -> None:
        """Start it beside everything else. Raises RollingError where it would lose requests."""
        if self.running:
            raise RollingError("a restart is under way")
        others = [replica for replica in self._replicas if replica.state == OK]
        if len(others) < 2:
            raise RollingError("requests would be lost: no two replicas take requests now")
        self.running = True
        self._replicas.keep(self._run())

    async def _run(self) -> None:
        try:
            for replica in self._replicas:
                if replica.state == FAILED and not replica.refused:
                    continue  # it is being started again already
                await self._one(replica)
            self._said = "done"
        except RollingError as error:
            self._said = f"stopped: {error}"
        finally:
            self.running = False

    async def _one(self, replica: Replica) -> None:
        others = [one for one in self._replicas if one is not replica and one.state == OK]
        if not others:
            raise RollingError(f"no replica but {replica.number} takes requests")
        was_draining, replica.draining = replica.draining, True
        try:
            self._said = f"replica {replica.number}: draining"
            await self._drain(replica)
            if replica.state == FAILED and not replica.refused:
                raise RollingError(replica.link.failure)  # and it is being started again already
            self._said = f"replica {replica.number}: restarting"
            await replica.stop()
            try:
                replica.start()
            except OSError as error:
                self._replicas.try_again(replica)
                raise RollingError(f"replica {replica.number} cannot start: {error}") from error
            while replica.link.state == LOADING:
                await asyncio.sleep(TURN_S)
            if replica.link.state != OK:
                raise RollingError(replica.link.failure or f"replica {replica.number} ended")
        finally:
            replica.draining = was_draining

    async def _drain(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                while replica.link.in_flight:
                    await asyncio.sleep(TURN_S)
        except TimeoutError:
            left = replica.link.in_flight
            raise RollingError(
                f"replica {replica.number} still has {left} requests after {DRAIN_S:.0f} s"
            ) from None
