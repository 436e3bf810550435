"""A small child process that speaks the engine's side of the pipe, for tests of the router.

It "samples" its replica's number. A request of HOLD tokens at most gets none, ever; the others get
one every STEP_S. What a real engine computes is not here.
"""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from perfledger.instrumented_runtime.messages import (
    WHOLE_ENGINE,
    Abort,
    Arrived,
    Failed,
    Inspect,
    KvHolding,
    KvMap,
    Ready,
    StepOutput,
    Submit,
    Token,
)
from perfledger.instrumented_runtime.parallel.layout import RankPlace
from perfledger.instrumented_runtime.runtime_version import runtime_version
from perfledger.schema.clocks import monotonic_ns

HOLD = 1000
STEP_S = 0.01


def play(connection: Connection, place: RankPlace, version: str, weights: str, fails: str) -> None:
    """Run one rank until the pipe ends. `fails`: joining, loading, or nothing."""
    try:
        if not place.alone and fails != "joining":
            connection.send(Arrived())
        if fails == "loading":
            connection.send(Failed(WHOLE_ENGINE, "usage", "there is no such model"))
            return
        if place.rank == 0 and fails != "joining":
            facts = ("cpu", "float32", "played", 1, 64, 4096, 7, weights)
            connection.send(Ready(*facts, runtime_version=version, layout=str(place.layout)))
            _serve(connection, int(place.replica))
        connection.recv()
    except (EOFError, OSError):
        pass


def _serve(connection: Connection, token: int) -> None:
    live: dict[int, tuple[Submit, int]] = {}
    while True:
        while connection.poll(STEP_S if live else None):
            message = connection.recv()
            if isinstance(message, Submit):
                live[message.request] = (message, 0)
            elif isinstance(message, Abort):
                live.pop(message.request, None)
            elif isinstance(message, Inspect):
                held = [KvHolding(number, 1, 16) for number in live]
                connection.send(KvMap(16, 64, len(live), 2, 62 - len(live), tuple(held)))
        tokens = []
        for number, (submit, sampled) in list(live.items()):
            if submit.sampling.max_tokens < HOLD:
                live[number] = (submit, sampled + 1)
                last = sampled + 1 == submit.sampling.max_tokens
                tokens.append(Token(number, token, "length" if last else None))
                if last:
                    del live[number]
        if tokens:
            held_tokens = sum(len(one.prompt) for one, sampled in live.values() if not sampled)
            connection.send(
                StepOutput(1, monotonic_ns(), tokens, running=len(live), waiting_tokens=held_tokens)
            )
        time.sleep(STEP_S / 10)


class Spawner:
    """Starts played engines; what it starts next can be set."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}  # by replica; else our own
        self.weights: dict[str, str] = {}
        self.fails: dict[tuple[str, int], str] = {}  # by replica and rank
        self.before: Callable[[RankPlace], None] = lambda _: None
        self.processes: dict[tuple[str, int], BaseProcess] = {}

    def __call__(self, place: RankPlace) -> tuple[BaseProcess, Connection]:
        """See rank_processes.Spawn."""
        self.before(place)
        spawn = multiprocessing.get_context("spawn")
        near, far = spawn.Pipe()
        version = self.versions.get(place.replica, runtime_version())
        fails = self.fails.get((place.replica, place.rank), "")
        weights = self.weights.get(place.replica, "weights")
        process = spawn.Process(target=play, args=(far, place, version, weights, fails))
        process.start()
        far.close()
        self.processes[place.replica, place.rank] = process
        return process, near
