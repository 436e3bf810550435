"""The open loop: every request goes out at its time, whatever became of the ones before.

The schedule is absolute, from one monotonic start. A request that could not be sent in time
keeps its scheduled time, so the wait that the client caused shows (no coordinated omission).
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import aiohttp

from perfledger.instrumented_runtime.load.client import (
    UNREACHABLE,
    Sending,
    first_model,
    is_reachable,
    open_session,
    request_body,
    send,
)
from perfledger.instrumented_runtime.load.plan import (
    Calibration,
    Ending,
    LoadPlan,
    LoadResult,
    Sample,
)
from perfledger.instrumented_runtime.load.prompts import (
    PROBE_WORDS,
    calibrate,
    chat_text,
    probe_text,
    token_ids,
)
from perfledger.instrumented_runtime.load.workload import NS_PER_S, Arrival
from perfledger.schema.clocks import monotonic_ns, take_anchor
from perfledger.schema.errors import PerfledgerError

START_DELAY_NS = 50_000_000
# Bodies are made ahead while the next request is not due: at most so many, and only with so
# much time to spare.
AHEAD = 64
SPARE_NS = 5_000_000
LAG_EVERY_S = 0.02
# The server counts as gone after so many refused connections in a row, over so long a time.
GONE_AFTER = 3
GONE_AFTER_NS = 3 * NS_PER_S


def _ignore(sample: Sample) -> None:
    del sample


async def run_load(
    plan: LoadPlan,
    *,
    on_sample: Callable[[Sample], object] = _ignore,
    stop: asyncio.Event | None = None,
) -> LoadResult:
    """Run the plan and return every sample; prints and writes nothing.

    on_sample: called with each measured sample as it ends.
    stop: set it to end early; requests under way are cut and kept as `interrupted`. It is also
    set here when the server is gone, which ends the run as well.
    Raises PerfledgerError where the server cannot be reached at the start or names no model.
    """
    anchor = take_anchor()
    async with open_session() as session:
        model = plan.model or await first_model(session, plan)
        loop = _OpenLoop(session, plan, model, stop or asyncio.Event(), on_sample)
        if plan.endpoint == "chat":
            await loop.calibrate()
        warm_up = await loop.warm_up()
        measured = await loop.run()
        ended = await loop.ending()
    return LoadResult(
        plan=plan,
        model=model,
        anchor=anchor,
        started_ns=loop.started_ns,
        samples=(*warm_up, *sorted(measured, key=lambda sample: sample.index)),
        loop_lag_ns=loop.lag_ns,
        ended=ended,
        unsent=len(plan.workload.arrivals) - len(measured),
        calibration=loop.calibration,
    )


class _OpenLoop:
    """One run under way."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        plan: LoadPlan,
        model: str,
        stop: asyncio.Event,
        on_sample: Callable[[Sample], object],
    ) -> None:
        self._session = session
        self._plan = plan
        self._model = model
        self._stop = stop
        self._on_sample = on_sample
        self._samples: list[Sample] = []
        self._ready: deque[bytes] = deque()
        self._prepared = 0
        self._refusals = 0  # in a row
        self._refused_since_ns = 0
        self._gone = False
        self.calibration: Calibration | None = None
        self.started_ns = 0
        self.lag_ns: array[int] = array("q")

    async def calibrate(self) -> None:
        """Ask for two answers of one token to learn what the server makes of a word."""
        counts = []
        for words in PROBE_WORDS:
            body = request_body(self._plan, self._model, probe_text(words), output_tokens=1)
            sending = Sending(0, True, Arrival(0, words, 1), body, monotonic_ns())
            counts.append((await self._send_now(sending)).input_tokens)
        self.calibration = calibrate((counts[0], counts[1]))

    async def warm_up(self) -> list[Sample]:
        """Send the first requests of the workload one by one, with prompts of their own."""
        samples: list[Sample] = []
        arrivals = self._plan.workload.arrivals
        while len(samples) < self._plan.warm_up and not self._stop.is_set():
            index = len(samples) % len(arrivals)
            body = self._body(index, warm_up=True)
            sending = Sending(index, True, arrivals[index], body, monotonic_ns())
            samples.append(await self._send_now(sending))
        return samples

    async def run(self) -> list[Sample]:
        """Send every request at its time and return the samples, in order of their ends."""
        lag = asyncio.create_task(self._watch_lag())
        try:
            while self._prepared < min(AHEAD, len(self._plan.workload.arrivals)):
                self._prepare()
            self.started_ns = monotonic_ns() + START_DELAY_NS
            async with asyncio.TaskGroup() as group:
                tasks = await self._send_all(group)
                stopped = group.create_task(self._cut_when_stopped(tasks))
                await asyncio.gather(*tasks)
                stopped.cancel()
        finally:
            lag.cancel()
        return self._samples

    async def ending(self) -> Ending:
        """Return how the run ended, asking the server where its last answers failed to come."""
        if self._gone:
            return "server_gone"
        cut = any(sample.error == "interrupted" for sample in self._samples)
        if cut or len(self._samples) < len(self._plan.workload.arrivals):
            return "interrupted"
        newest = max(self._samples, key=lambda sample: sample.end_ns, default=None)
        lost = newest is not None and newest.error in UNREACHABLE | {"disconnected"}
        if lost and not await is_reachable(self._session, self._plan):
            return "server_gone"
        return "finished"

    async def _send_all(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        tasks: list[asyncio.Task[None]] = []
        for index, arrival in enumerate(self._plan.workload.arrivals):
            due_ns = self.started_ns + arrival.offset_ns
            await self._wait_until(due_ns)
            if self._stop.is_set():
                break
            if not self._ready:
                self._prepare()
            sending = Sending(index, False, arrival, self._ready.popleft(), due_ns)
            tasks.append(group.create_task(self._measure(sending)))
            await asyncio.sleep(0)  # lets it go out now, and answers come in
        return tasks

    async def _wait_until(self, due_ns: int) -> None:
        """Wait for a time or for the stop; make bodies ahead while there is time to spare."""
        while self._has_spare(due_ns):
            self._prepare()
            await asyncio.sleep(0)
        wait_s = (due_ns - monotonic_ns()) / NS_PER_S
        if wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stop.wait()

    def _has_spare(self, due_ns: int) -> bool:
        more = self._prepared < len(self._plan.workload.arrivals) and len(self._ready) < AHEAD
        return more and not self._stop.is_set() and due_ns - monotonic_ns() > SPARE_NS

    def _prepare(self) -> None:
        self._ready.append(self._body(self._prepared, warm_up=False))
        self._prepared += 1

    def _body(self, index: int, *, warm_up: bool) -> bytes:
        plan = self._plan
        if self.calibration is not None:
            prompt: object = chat_text(plan, index, self.calibration, warm_up=warm_up)
        else:
            prompt = token_ids(plan, index, warm_up=warm_up)
        arrival = plan.workload.arrivals[index]
        return request_body(plan, self._model, prompt, arrival.output_tokens)

    async def _measure(self, sending: Sending) -> None:
        sample = await send(self._session, self._plan, sending)
        self._samples.append(sample)
        self._on_sample(sample)
        if sample.error not in UNREACHABLE:
            self._refusals = 0
            return
        self._refusals += 1
        if self._refusals == 1:
            self._refused_since_ns = sample.end_ns
        if self._refusals >= GONE_AFTER and sample.end_ns - self._refused_since_ns >= GONE_AFTER_NS:
            self._gone = True
            self._stop.set()

    async def _send_now(self, sending: Sending) -> Sample:
        """Send before the schedule starts; raises PerfledgerError where nothing listens."""
        task = asyncio.create_task(send(self._session, self._plan, sending))
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            task.cancel()  # does nothing to a finished one
        sample = await task
        if sample.error in UNREACHABLE:
            raise PerfledgerError(
                f"no server answers: {sample.error}",
                where=self._plan.url,
                fix="start one: perfledger serve",
            )
        return sample

    async def _cut_when_stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        await self._stop.wait()
        for task in tasks:
            task.cancel()

    async def _watch_lag(self) -> None:
        """Sample how late the event loop wakes up: what it adds to every time it stamps."""
        while True:
            due_ns = monotonic_ns() + int(LAG_EVERY_S * NS_PER_S)
            await asyncio.sleep(LAG_EVERY_S)
            self.lag_ns.append(max(0, monotonic_ns() - due_ns))
