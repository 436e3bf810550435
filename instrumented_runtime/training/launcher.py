"""Starts the ranks of a training run, hears them, and ends them all when one fails.

A rank that dies takes its peers with it: their collectives fail a moment later. So the first sign
of a failure is not yet its cause, and all ranks are heard for a while before one is named.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from perfledger.instrumented_runtime.child_processes import (
    end,
    make_rendezvous,
    remove_rendezvous,
    spawn_train_rank,
)
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.records import ShardMoved
from perfledger.instrumented_runtime.training.messages import (
    Finished,
    Joined,
    Message,
    RankFailed,
    StepDone,
)
from perfledger.instrumented_runtime.training.options import TrainOptions, check
from perfledger.instrumented_runtime.training.run_telemetry import RunTelemetry, TelemetryReport
from perfledger.instrumented_runtime.training.saving import join_stages
from perfledger.instrumented_runtime.training.traffic import Traffic
from perfledger.schema.errors import PerfledgerError, UsageError

START_S = 60.0  # for the processes to load torch, before they begin to wait for each other
GRACE_S = 5.0  # after a first failure, for the others to say what they saw
END_S = 5.0  # for a rank to end that was told to


@dataclass
class TrainRun:
    """What the ranks said so far."""

    options: TrainOptions
    joined: dict[int, Joined] = field(default_factory=dict)
    steps: list[dict[int, StepDone]] = field(default_factory=list)  # each by rank
    finished: dict[int, Finished] = field(default_factory=dict)
    failed: dict[int, RankFailed] = field(default_factory=dict)
    telemetry: TelemetryReport | None = None
    shards: list[ShardMoved] = field(default_factory=list)
    passed_over: tuple[str, ...] = ()  # newer checkpoints, and why they were not loaded

    def complete_steps(self) -> list[dict[int, StepDone]]:
        """Return the steps that every rank has ended."""
        return [step for step in self.steps if len(step) == self.options.layout.world]

    def saved(self) -> list[Traffic]:
        """Return what the ranks sent to gather the whole model."""
        return [row for one in self.finished.values() for row in one.saved]

    def take(self, message: Message) -> None:
        """Take what a rank says."""
        if isinstance(message, Joined):
            self.joined[message.rank] = message
        elif isinstance(message, StepDone):
            while len(self.steps) <= message.number:
                self.steps.append({})
            self.steps[message.number][message.rank] = message
        elif isinstance(message, ShardMoved):
            self.shards.append(message)
        elif isinstance(message, Finished):
            self.finished[message.rank] = message
        else:
            self.failed[message.rank] = message


def launch(run: TrainRun, on_joined: Callable[[], None], on_step: Callable[[], None]) -> None:
    """Train with one process a rank and fill `run` with what they say; call back when all have
    joined, and when all have ended a step.

    Raises UsageError for what can never work and PerfledgerError with the name of the rank that
    died, did not join or does not answer. All processes have ended when this returns or raises.
    """
    options = run.options
    check(options)
    rendezvous = make_rendezvous()
    telemetry: RunTelemetry | None = None
    ranks: dict[int, tuple[BaseProcess, Connection]] = {}
    try:
        telemetry = RunTelemetry(options) if options.telemetry else None
        for rank in range(options.layout.world):
            place = RankPlace(options.layout, rank, rendezvous)
            ring = telemetry.ring_name(rank) if telemetry else None
            ranks[rank] = spawn_train_rank(options, place, ring)
        for message in _messages(run, ranks):
            run.take(message)
            if isinstance(message, Joined):
                if telemetry:
                    telemetry.joined(message)
                if len(run.joined) == len(ranks):
                    on_joined()
            elif isinstance(message, StepDone) and len(run.steps[message.number]) == len(ranks):
                on_step()
    finally:
        for _, connection in ranks.values():
            connection.close()  # with that the ranks end
        for process, _ in ranks.values():
            end(process, END_S)
        run.telemetry = telemetry.stop() if telemetry else None
        remove_rendezvous(RankPlace(options.layout, 0, rendezvous))
    if options.save:
        join_stages(options.save, options.layout.pp)


def _messages(run: TrainRun, ranks: dict[int, tuple[BaseProcess, Connection]]) -> Iterator[Message]:
    """Yield what the ranks say until all have finished. Raises PerfledgerError when one failed."""
    speaking = [connection for _, connection in ranks.values()]
    deadline_s = time.monotonic() + START_S + run.options.join_timeout_s
    while len(run.finished) < len(ranks):
        ready = wait(speaking, max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise _silent(run)
        for connection in ready:
            assert isinstance(connection, Connection)
            try:
                message: Message = connection.recv()
            except (EOFError, OSError):
                speaking.remove(connection)
                raise _failure(run, ranks, speaking) from None
            if isinstance(message, RankFailed):
                run.take(message)
                raise _failure(run, ranks, speaking)
            yield message
            if len(run.joined) == len(ranks):
                deadline_s = time.monotonic() + run.options.step_timeout_s


def _failure(
    run: TrainRun,
    ranks: dict[int, tuple[BaseProcess, Connection]],
    speaking: list[Connection],
) -> PerfledgerError:
    """Hear the ranks for a while after the first failure, then name its cause."""
    give_up_s = time.monotonic() + GRACE_S
    while speaking and (ready := wait(speaking, max(0.0, give_up_s - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            try:
                run.take(connection.recv())
            except (EOFError, OSError):
                speaking.remove(connection)
    layout = run.options.layout
    for rank, (process, _) in ranks.items():
        process.join(0.2)
        if rank not in run.failed and rank not in run.finished and process.exitcode is not None:
            return PerfledgerError(
                f"{rank_name(layout, rank)} ended with exit code {process.exitcode}",
                fix="the lines above may say more",
            )
    quiet = [rank for rank in ranks if rank not in run.failed and rank not in run.finished]
    said_nothing = ", ".join(rank_name(layout, rank) for rank in quiet)
    # Foreseen errors of a peer that is gone come last: they are effects.
    first = min(run.failed.values(), key=_distance)
    if first.misused:
        return UsageError(first.what)
    if first.unexpected:
        where = f"{said_nothing} said nothing" if quiet else ""
        return PerfledgerError(f"{rank_name(layout, first.rank)}: {first.what}", where=where)
    return PerfledgerError(first.what)


def _distance(failed: RankFailed) -> tuple[bool, bool, bool]:
    """Order failures by how near they are to the cause."""
    return not failed.misused, not failed.unexpected, failed.effect


def rank_name(layout: Layout, rank: int) -> str:
    """Return how a rank is called in messages, like "rank 1 (tp=1)"."""
    places = layout.coordinates(rank)
    at = ", ".join(f"{name}={places[name]}" for name in layout.used())
    return f"rank {rank} ({at})" if at else f"rank {rank}"


def _silent(run: TrainRun) -> PerfledgerError:
    """Name the ranks that said nothing in time."""
    layout = run.options.layout
    everyone = set(range(layout.world))
    if missing := everyone - set(run.joined):
        limit_s, what = run.options.join_timeout_s + START_S, "has not joined"
    else:
        last = run.steps[-1] if run.steps else {}
        number = max(len(run.steps), run.options.first_step)
        missing = (everyone - set(last)) or everyone
        limit_s, what = run.options.step_timeout_s, f"has not ended step {number}"
    names = ", ".join(rank_name(layout, rank) for rank in sorted(missing))
    return PerfledgerError(f"{names} {what} in {limit_s:.0f} s", fix="a longer --step-timeout")
