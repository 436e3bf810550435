"""Whatever happens to replicas, each request is in one of them, or has ended, and nothing else."""

import asyncio
import contextlib
import functools
import itertools
import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.instrumented_runtime.engine_link import Answer, RequestFailedError
from perfledger.instrumented_runtime.messages import (
    Abort,
    Ready,
    SamplingParams,
    StepOutput,
    Submit,
    Token,
)
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import RankPlace
from perfledger.instrumented_runtime.routing import replicas as replicas_module
from perfledger.instrumented_runtime.routing.choice import Choice
from perfledger.instrumented_runtime.routing.policy import POLICIES
from perfledger.instrumented_runtime.routing.replicas import MAX_RETRIES, Replicas
from perfledger.instrumented_runtime.runtime_version import runtime_version
from perfledger.schema.clocks import monotonic_ns

REPLICAS = 3
TOKENS = 3  # of each answer
READY = Ready(
    "cpu", "float32", "none", 1, 64, 4096, 7, "weights", runtime_version=runtime_version()
)


def nothing() -> None:
    """What the process that has ended did."""


@functools.cache
def ended_process() -> BaseProcess:
    """Return a process that is over: the test plays the engines itself, at the pipes' ends."""
    process = multiprocessing.get_context("spawn").Process(target=nothing)
    process.start()
    process.join()
    return process


class Engines:
    """The engines' side of the pipes, by replica, with the requests that each has."""

    def __init__(self) -> None:
        self._ends: dict[str, Connection] = {}
        self._live: dict[str, dict[int, int]] = {}

    def __call__(self, place: RankPlace) -> tuple[BaseProcess, Connection]:
        near, far = multiprocessing.Pipe()
        self._ends[place.replica], self._live[place.replica] = far, {}
        far.send(READY)
        return ended_process(), near

    def step(self, replica: str) -> None:
        """Take what has come, then sample a token for each request: the replica's number."""
        end, live = self._ends[replica], self._live[replica]
        while end.poll():
            message = end.recv()
            if isinstance(message, Submit):
                live[message.request] = 0
            elif isinstance(message, Abort):
                live.pop(message.request, None)
        tokens = []
        for request in list(live):
            live[request] += 1
            last = live[request] == TOKENS
            tokens.append(Token(request, int(replica), "length" if last else None))
            if last:
                del live[request]
        end.send(StepOutput(1, monotonic_ns(), tokens))

    def die(self, replica: str) -> None:
        self._ends[replica].close()


class Sent:
    """One request and what came of it so far."""

    def __init__(self, replicas: Replicas, number: int) -> None:
        self.choices = [replicas.choose([number % 5] * 40, "")]
        submit = Submit(number, [number % 5] * 40, SamplingParams(TOKENS), 1, 1, monotonic_ns())
        self.answer: Answer = replicas.submit(submit, self.choices[0], self.choices.append)
        self.tokens: list[int] = []
        self.ended = self.failed = self.aborted = False

    def look(self) -> None:
        while not self.answer.arrived.empty():
            got = self.answer.arrived.get_nowait()
            assert not self.ended, "something came after the end"
            if isinstance(got, RequestFailedError):
                self.ended = self.failed = True
            else:
                self.tokens.append(got.token)
                self.ended = got.finish is not None


REPLICA = st.integers(0, REPLICAS - 1).map(str)
EVENT = st.one_of(
    st.tuples(st.just("send"), st.just("")),
    st.tuples(st.sampled_from(["step", "step", "die", "drain", "resume"]), REPLICA),
    st.tuples(st.just("abort"), st.integers(0, 30).map(str)),
)


@pytest.fixture(autouse=True, scope="module")
def _at_once() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas_module, "BACKOFF_S", 0.0)
        yield


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(POLICIES), st.lists(EVENT, max_size=30))
def test_every_request_is_in_one_replica_or_has_ended(
    policy: str, events: list[tuple[str, str]]
) -> None:
    asyncio.run(play(RuntimeOptions(replicas=REPLICAS, route=policy), events))


async def play(options: RuntimeOptions, events: list[tuple[str, str]]) -> None:
    engines = Engines()
    replicas = Replicas(options, engines, lambda _: None)
    replicas.start()
    sent: list[Sent] = []
    numbers = itertools.count(1)
    try:
        await settle(replicas)
        for name, of in [("send", ""), *events, *([("step", r) for r in "012"] * TOKENS)]:
            if name == "send":
                with contextlib.suppress(RequestFailedError):  # all are draining
                    sent.append(Sent(replicas, next(numbers)))
            elif name == "step":
                engines.step(of)
            elif name == "die":
                engines.die(of)
            elif name == "abort" and int(of) < len(sent):
                sent[int(of)].aborted = True
                sent[int(of)].answer.abort("client_disconnect")
            elif name in ("drain", "resume"):
                replicas[of].draining = name == "drain"
            await settle(replicas)
            check(replicas, sent, died="die" in [event for event, _ in events])
        assert all(one.ended for one in sent)
        assert replicas.in_flight == 0
    finally:
        await replicas.stop()


async def settle(replicas: Replicas) -> None:
    """Let what is in the pipes arrive, and what died come back."""
    for _ in range(3):
        await asyncio.sleep(0.001)
    async with asyncio.timeout(30):
        while any(replica.state not in ("ok", "draining") for replica in replicas):
            await asyncio.sleep(0.001)


def check(replicas: Replicas, sent: list[Sent], died: bool) -> None:
    for one in sent:
        one.look()
        places = [r.number for r in replicas if one.answer in r.link.answers]
        assert len(places) == (0 if one.ended else 1)
        assert len(set(one.tokens)) <= 1, "a request moved after its first token"
        last = one.choices[-1]
        assert places in ([], [last.replica])
        assert set(one.tokens) <= {int(last.replica)}
        assert [choice.retries for choice in one.choices] == list(range(len(one.choices)))
        assert len(one.choices) <= 1 + MAX_RETRIES
        assert one.aborted or died or not one.failed
        assert one.failed or not one.ended or len(one.tokens) == TOKENS
    open_ones = [one for one in sent if not one.ended]
    assert replicas.in_flight == len(open_ones)
    for replica in replicas:
        queue_tokens = replica.candidate([]).queue_tokens
        assert queue_tokens >= 0
        assert replica.link.in_flight or queue_tokens == 0


def test_a_choice_keeps_its_attributes_small() -> None:
    """No content in telemetry: names of blocks stay in the router."""
    choice = Choice("0", "round-robin", "in_turn", None, 0, 1, 2, hashes=[b"secret"])
    assert b"secret" not in str(choice.attributes()).encode()
    assert "secret" not in repr(choice)
