"""The end of the engine: it comes whatever the engine does, and its last records with it."""

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import pytest

from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.child_processes import end, spawn_engine
from perfledger.instrumented_runtime.engine_link import OK, STOPPING, EngineLink, Hears
from perfledger.instrumented_runtime.messages import SamplingParams, Submit
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.records import LEAVE_REASONS, Admit, Leave
from perfledger.instrumented_runtime.ring import Reader, Ring
from perfledger.schema.clocks import monotonic_ns

OPTIONS = RuntimeOptions(model="reference-small", threads=1, max_num_seqs=4)
SECOND_NS = 1_000_000_000


def submit(link: EngineLink, request: int, prompt_tokens: int, **delays_ns: int) -> None:
    sampling = SamplingParams(max_tokens=3000)
    link.submit(
        Submit(request, [5] * prompt_tokens, sampling, 1 << 100, request, monotonic_ns(), delays_ns)
    )


def idle(link: EngineLink) -> None:
    """The engine sleeps in the pipe."""


def busy_while_the_pipe_is_full(link: EngineLink) -> None:
    """One step takes seconds, and more requests are sent than the pipe holds."""
    submit(link, 1, 20, prefill=2 * SECOND_NS)
    time.sleep(0.3)
    for request in range(2, 300):
        submit(link, request, 1000)
    assert link._unsent, "there is still room in the pipe"


def waiting_for_a_reader(link: EngineLink) -> None:
    """The API reads nothing until the engine's own send blocks, and then not either."""
    for request in range(1, 4):
        submit(link, request, 20)
    time.sleep(4)


async def run_and_shut_down(
    ring: Ring, make: Callable[[EngineLink], None]
) -> tuple[BaseProcess, EngineLink]:
    process, connection = spawn_engine(OPTIONS, resolve(OPTIONS.model), ring.name)
    changed = asyncio.Event()

    class Hearing(Hears):
        def changed(self) -> None:
            changed.set()

    link = EngineLink(connection, Hearing())
    try:
        link.start()
        await asyncio.wait_for(changed.wait(), 60)
        assert link.state == OK
        make(link)
    finally:
        link.shut_down()
        await asyncio.to_thread(end, process, 30)
    link.abort_all("shutdown", "after the end: goes nowhere")
    link.shut_down()
    return process, link


@pytest.mark.parametrize("make", [idle, busy_while_the_pipe_is_full, waiting_for_a_reader])
def test_the_engine_ends_by_itself_and_records_every_leave(
    make: Callable[[EngineLink], None],
) -> None:
    ring = Ring.create(1 << 15)
    try:
        process, link = asyncio.run(run_and_shut_down(ring, make))
        records = Reader.attach(ring.name).read(1 << 15)
    finally:
        ring.close()
    assert (process.exitcode, link.state, link.in_flight) == (0, STOPPING, 0)
    admitted = {one.request for one in records if isinstance(one, Admit)}
    left = {one.request: LEAVE_REASONS[one.reason] for one in records if isinstance(one, Leave)}
    assert left == dict.fromkeys(admitted, "shutdown")
    assert bool(left) == (make is not idle)


def test_what_was_sent_before_the_end_arrives_whole() -> None:
    near, far = multiprocessing.Pipe()

    async def fill_and_shut_down() -> None:
        link = EngineLink(near, Hears())
        link.start()
        for request in range(200):
            submit(link, request, 1000)
        link.shut_down()

    asyncio.run(fill_and_shut_down())
    received = []
    with pytest.raises(EOFError):
        while True:
            received.append(far.recv().request)
    assert received == list(range(len(received))) and 0 < len(received) < 200
