"""The router over real child processes that speak the engine's protocol: choice, death, retry,
health, drain, rolling restart, versions, ranks."""

import asyncio
import contextlib
import errno
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from played_engine import HOLD, Spawner

from perfledger.instrumented_runtime import rank_processes
from perfledger.instrumented_runtime.engine_link import (
    FAILED,
    LOADING,
    OK,
    STOPPING,
    Answer,
    RequestFailedError,
)
from perfledger.instrumented_runtime.messages import KvHolding, KvMap, SamplingParams, Submit
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import RankPlace
from perfledger.instrumented_runtime.routing import replicas as replicas_module
from perfledger.instrumented_runtime.routing.choice import Choice
from perfledger.instrumented_runtime.routing.replica import DRAINING, UNHEALTHY
from perfledger.instrumented_runtime.routing.replicas import Replicas
from perfledger.instrumented_runtime.routing.rolling import RollingError, RollingRestart
from perfledger.instrumented_runtime.runtime_version import runtime_version
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import PerfledgerError

pytestmark = pytest.mark.anyio
NUMBERS = itertools.count(1)
TWO = RuntimeOptions(replicas=2, route="round-robin", health_timeout_s=0.6)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "BACKOFF_S", 0.05)
    monkeypatch.setattr(replicas_module, "CHECK_S", 0.05)


async def until(ready: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(60):
        while not ready():
            await asyncio.sleep(0.01)
    assert ready(), what


@contextlib.asynccontextmanager
async def running(
    options: RuntimeOptions, spawner: Spawner
) -> AsyncIterator[tuple[Replicas, list[str]]]:
    """Replicas that are loaded, and the states that they said they had, as `0 ok`."""
    said: list[str] = []
    replicas = Replicas(options, spawner, lambda one: said.append(f"{one.number} {one.state}"))
    replicas.start()
    try:
        await until(lambda: replicas.state != LOADING, "loading")
        yield replicas, said
    finally:
        await replicas.stop()
        assert not [one for one in spawner.processes.values() if one.is_alive()]


def send(
    replicas: Replicas, max_tokens: int, retried: list[Choice] | None = None, prompt: int = 20
) -> tuple[Answer, Choice]:
    tokens = [5] * prompt
    choice = replicas.choose(tokens, "acme")
    submit = Submit(next(NUMBERS), tokens, SamplingParams(max_tokens), 1, 1, monotonic_ns())
    retried = [] if retried is None else retried
    return replicas.submit(submit, choice, retried.append), choice


async def tokens_of(answer: Answer) -> list[int]:
    """Return all tokens of an answer: each is the number of the replica that sampled it."""
    tokens, finish = [], None
    async with asyncio.timeout(60):
        while finish is None:
            sampled = await answer.next()
            tokens.append(sampled.token)
            finish = sampled.finish
    return tokens


async def test_each_request_is_answered_by_the_replica_that_was_chosen() -> None:
    async with running(TWO, Spawner()) as (replicas, said):
        sent = [send(replicas, 3) for _ in range(6)]
        assert [choice.replica for _, choice in sent] == ["0", "1"] * 3
        assert replicas.in_flight == 6
        for answer, choice in sent:
            assert await tokens_of(answer) == [int(choice.replica)] * 3
        assert (replicas.state, replicas.in_flight) == (OK, 0)
        assert sorted(said) == ["0 ok", "1 ok"]
        choice = replicas.choose([5] * 20, "acme")
        assert choice.attributes().pop("perfledger.route.estimated_queue_ns") == 0
        assert choice.attributes() == {
            "perfledger.replica": "0",
            "perfledger.reason": "in_turn",
            "perfledger.route.policy": "round-robin",
            "perfledger.route.estimated_queue_ns": 0,
            "perfledger.route.prefix_hit_tokens": 16,
            "perfledger.route.retries": 0,
        }
        replicas.refuse_new()
        assert replicas.state == STOPPING
        with pytest.raises(RequestFailedError, match="no replica takes requests"):
            send(replicas, 3)


async def test_when_a_replica_is_killed_only_requests_with_a_token_are_lost() -> None:
    spawner = Spawner()
    async with running(TWO, spawner) as (replicas, said):
        retried: list[Choice] = []
        held, choice = send(replicas, HOLD, retried)
        assert choice.replica == "0"
        assert await tokens_of(send(replicas, 2)[0]) == [1, 1]  # the turn of the other
        streaming, _ = send(replicas, HOLD - 1)
        assert (await streaming.next()).token == 0
        os.kill(spawner.processes["0", 0].pid or 0, signal.SIGKILL)
        with pytest.raises(RequestFailedError, match="replica 0: the engine process ended"):
            await tokens_of(streaming)
        assert [(c.replica, c.retries, c.retry_of, c.reason) for c in retried] == [
            ("1", 1, "0", "only_one")
        ]
        assert retried[0].attributes()["perfledger.route.retry_of"] == "0"
        assert (replicas["1"].link.in_flight, replicas.state) == (1, OK)
        held.abort("client_disconnect")  # by the new engine
        assert replicas["1"].link.in_flight == 0
        await until(lambda: replicas["0"].state == OK, "restart")
        assert (replicas["0"].starts, replicas["1"].starts) == (2, 1)
        answers = [send(replicas, 2)[0] for _ in range(2)]
        assert sorted([(await tokens_of(one))[0] for one in answers]) == [0, 1]
        assert said[2:] == ["0 failed", "0 ok"]


async def test_a_retried_request_is_answered_by_the_other_replica() -> None:
    spawner = Spawner()
    async with running(TWO, spawner) as (replicas, _):
        os.kill(spawner.processes["0", 0].pid or 0, signal.SIGSTOP)  # it will answer nothing
        answer, choice = send(replicas, 4)
        assert choice.replica == "0"
        os.kill(spawner.processes["0", 0].pid or 0, signal.SIGKILL)
        assert await tokens_of(answer) == [1] * 4


async def test_a_restart_for_which_there_is_no_room_is_tried_again() -> None:
    spawner, tried = Spawner(), []

    def no_room(place: RankPlace) -> None:
        tried.append(place.rank)
        if tried == [0, 1]:  # the second rank of the first try
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    async with running(replace(TWO, tensor_parallel=2), spawner) as (replicas, said):
        spawner.before = no_room
        os.kill(spawner.processes["1", 0].pid or 0, signal.SIGKILL)
        await until(lambda: replicas["1"].starts == 3, "second try")
        await until(lambda: replicas["1"].state == OK, "restart")
        assert (said[2:], tried, replicas.failure) == (["1 failed", "1 ok"], [0, 1, 0, 1], "")


async def test_without_room_for_all_replicas_none_stays() -> None:
    spawner = Spawner()

    def no_room(place: RankPlace) -> None:
        if (place.replica, place.rank) == ("1", 1):
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    spawner.before = no_room
    replicas = Replicas(replace(TWO, tensor_parallel=2), spawner, lambda one: None)
    with pytest.raises(PerfledgerError, match="cannot start replica 1: Resource temporarily"):
        replicas.start()
    assert spawner.processes.keys() >= {("0", 0), ("0", 1), ("1", 0)}
    spawner.processes["1", 0].join(10)  # it ends with its pipe
    assert not [one for one in spawner.processes.values() if one.is_alive()]


async def test_a_request_that_kills_engines_does_not_kill_them_all() -> None:
    spawner = Spawner()
    options = RuntimeOptions(replicas=4, route="round-robin")
    async with running(options, spawner) as (replicas, _):
        retried: list[Choice] = []
        answer, choice = send(replicas, HOLD, retried)
        for _ in range(3):
            victim = retried[-1].replica if retried else choice.replica
            before = len(retried)
            os.kill(spawner.processes[victim, 0].pid or 0, signal.SIGKILL)
            await until(lambda n=before: len(retried) > n or not answer.arrived.empty(), "retry")  # type: ignore[misc]
        assert [one.retries for one in retried] == [1, 2]
        with pytest.raises(RequestFailedError, match="the engine process ended"):
            await answer.next()


async def test_an_engine_that_does_not_answer_gets_no_new_requests_until_it_does() -> None:
    spawner = Spawner()
    async with running(TWO, spawner) as (replicas, said):
        pid = spawner.processes["0", 0].pid or 0
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1)
        assert replicas["0"].state == OK  # it owes nothing
        waiting, choice = send(replicas, 3)
        assert choice.replica == "0"
        await until(lambda: replicas["0"].state == UNHEALTHY, "unhealthy")
        assert {send(replicas, 1)[1].replica for _ in range(3)} == {"1"}
        assert replicas["0"].report()["state"] == "unhealthy"
        os.kill(pid, signal.SIGCONT)
        assert await tokens_of(waiting) == [0] * 3
        await until(lambda: replicas["0"].state == OK, "healthy again")
        assert said[2:] == ["0 unhealthy", "0 ok"]


async def test_a_slow_request_is_no_sign_of_bad_health() -> None:
    """The engine has sampled nothing for long, but says so when asked."""
    async with running(TWO, Spawner()) as (replicas, said):
        send(replicas, HOLD)
        await asyncio.sleep(2)
        assert replicas["0"].state == OK
        assert len(said) == 2


async def test_a_replica_of_another_version_is_refused_by_name() -> None:
    spawner = Spawner()
    spawner.versions["1"] = "0.0.9+abc"
    refusal = (
        f"replica 1: refused: it has runtime version 0.0.9+abc, the router has {runtime_version()}"
    )
    async with running(TWO, spawner) as (replicas, said):
        assert (replicas.state, replicas.failure) == (FAILED, refusal)  # at the start: the end
        assert "1 failed" in said

    spawner = Spawner()
    async with running(TWO, spawner) as (replicas, said):
        rolling = RollingRestart(replicas)
        spawner.versions["1"] = "0.0.9+abc"  # as after an upgrade under a running router
        rolling.begin()
        await until(lambda: not rolling.running, "rolling")
        assert rolling.report == f"stopped: {refusal}"
        assert (replicas["0"].state, replicas["1"].state, replicas.state) == (OK, FAILED, OK)
        await asyncio.sleep(0.5)
        assert replicas["1"].starts == 2  # starting it again would not help
        assert {send(replicas, 1)[1].replica for _ in range(3)} == {"0"}


async def test_a_replica_with_other_weights_is_refused() -> None:
    """As when a checkpoint is replaced on disk and one replica dies and comes back."""
    spawner = Spawner()
    async with running(TWO, spawner) as (replicas, _):
        spawner.weights["0"] = "newer"
        os.kill(spawner.processes["0", 0].pid or 0, signal.SIGKILL)
        await until(lambda: replicas["0"].refused, "refusal")
        said = "replica 0: refused: it loaded weights newer, others have weights"
        assert (replicas.state, replicas["0"].link.failure) == (OK, said)


async def test_a_draining_replica_ends_what_it_has_and_gets_no_more() -> None:
    async with running(TWO, Spawner()) as (replicas, _):
        running_one, choice = send(replicas, 30)
        assert choice.replica == "0"
        replicas["0"].draining = True
        assert replicas["0"].state == DRAINING
        assert {send(replicas, 1)[1].replica for _ in range(3)} == {"1"}
        assert await tokens_of(running_one) == [0] * 30
        replicas["1"].draining = True
        assert replicas.state == DRAINING
        replicas["0"].draining = False
        assert send(replicas, 1)[1].replica == "0"


async def test_a_rolling_restart_loses_no_request() -> None:
    spawner = Spawner()
    async with running(TWO, spawner) as (replicas, _):
        rolling = RollingRestart(replicas)
        before = {place: process.pid for place, process in spawner.processes.items()}
        answers = [send(replicas, 40)[0] for _ in range(8)]
        rolling.begin()
        with pytest.raises(RollingError, match="under way"):
            rolling.begin()
        while rolling.running:
            answers.append(send(replicas, 5)[0])
            await asyncio.sleep(0.02)
        assert rolling.report == "done"
        counts = [len(await tokens_of(answer)) for answer in answers]
        assert counts == [40] * 8 + [5] * (len(answers) - 8)
        assert len(answers) > 10
        after = {place: process.pid for place, process in spawner.processes.items()}
        assert set(before.values()).isdisjoint(after.values())


async def test_a_replica_that_dies_while_it_drains_is_started_once() -> None:
    spawner, started = Spawner(), []
    spawner.before = lambda place: started.append(place.replica)
    async with running(TWO, spawner) as (replicas, _):
        rolling = RollingRestart(replicas)
        held, choice = send(replicas, HOLD)
        assert choice.replica == "0"
        rolling.begin()
        await until(lambda: rolling.report == "replica 0: draining", "draining")
        os.kill(spawner.processes["0", 0].pid or 0, signal.SIGKILL)
        await until(lambda: not rolling.running, "rolling")
        assert rolling.report == "stopped: replica 0: the engine process ended"
        await until(lambda: replicas["0"].state == OK, "restart")
        assert (started, replicas["0"].starts) == (["0", "1", "0"], 2)
        held.abort("client_disconnect")


async def test_a_rolling_restart_for_which_there_is_no_room_is_tried_again() -> None:
    spawner, refused = Spawner(), []
    async with running(TWO, spawner) as (replicas, _):

        def full(place: RankPlace) -> None:
            if not refused:
                refused.append(place.replica)
                raise OSError(errno.EAGAIN, "no more processes")

        spawner.before = full
        rolling = RollingRestart(replicas)
        rolling.begin()
        await until(lambda: not rolling.running, "rolling")
        said = "stopped: replica 0 cannot start: [Errno 11] no more processes"
        assert (rolling.report, refused) == (said, ["0"])
        await until(lambda: replicas["0"].state == OK, "restart")


async def test_a_rolling_restart_of_the_only_one_that_serves_is_refused() -> None:
    async with running(RuntimeOptions(), Spawner()) as (replicas, _):
        with pytest.raises(RollingError, match="no two replicas take requests"):
            RollingRestart(replicas).begin()


async def test_a_single_engine_that_dies_is_not_started_again() -> None:
    spawner = Spawner()
    async with running(RuntimeOptions(), spawner) as (replicas, said):
        answer, choice = send(replicas, HOLD)
        assert (choice.replica, choice.policy) == ("0", "")
        os.kill(spawner.processes["0", 0].pid or 0, signal.SIGKILL)
        with pytest.raises(RequestFailedError, match="^the engine process ended$"):
            await answer.next()
        await asyncio.sleep(0.5)
        assert (said, replicas.state) == (["0 ok", "0 failed"], FAILED)
        assert replicas["0"].exit_code == -9


async def test_the_kv_map_of_a_replica() -> None:
    async with running(TWO, Spawner()) as (replicas, _):
        answer, _ = send(replicas, HOLD)
        maps = await asyncio.gather(replicas["0"].kv_map(), replicas["0"].kv_map())
        assert maps == [KvMap(16, 64, 1, 2, 61, (KvHolding(answer.request, 1, 16),))] * 2


# --- ranks ---

TP2 = RuntimeOptions(tensor_parallel=2)


async def test_a_rank_that_dies_fails_its_replica_by_name(tmp_path: Path) -> None:
    spawner, meets = Spawner(), []
    spawner.before = lambda place: meets.append(place.rendezvous)
    async with running(TP2, spawner) as (replicas, _):
        folder = Path(meets[0].removeprefix("file://")).parent
        assert (len(set(meets)), folder.is_dir(), folder.stat().st_mode & 0o777) == (1, True, 0o700)
        answer, _ = send(replicas, HOLD)
        os.kill(spawner.processes["0", 1].pid or 0, signal.SIGKILL)
        with pytest.raises(RequestFailedError, match=r"rank 1 \(tp=1\) ended with exit code -9"):
            await answer.next()
        await until(lambda: not spawner.processes["0", 0].is_alive(), "the other rank's end")
    assert not folder.exists()


async def test_a_rank_that_never_joins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "JOIN_S", 15.0)
    spawner = Spawner()
    spawner.fails["0", 0] = spawner.fails["0", 3] = "joining"
    options = RuntimeOptions(tensor_parallel=2, pipeline_parallel=2)
    async with running(options, spawner) as (replicas, _):
        assert replicas.failure == (
            "not joined within 15 s: rank 0 (pp=0, tp=0), rank 3 (pp=1, tp=1)"
        )


async def test_what_can_never_be_is_said_once_by_all_ranks() -> None:
    spawner = Spawner()
    spawner.fails = {("0", 0): "loading", ("0", 1): "loading"}
    async with running(TP2, spawner) as (replicas, _):
        assert (replicas.failure, replicas.misused) == ("there is no such model", True)
