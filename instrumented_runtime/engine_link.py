"""The API's end of the pipe to the engine: one reader for all requests, one wake-up a step.

Everything here runs on the event loop's thread. Nothing blocks it: messages to the engine wait in
a queue while the pipe has no room, and a slow client delays only its own `Answer`.
"""

import asyncio
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from perfledger.instrumented_runtime.messages import (
    USAGE,
    WHOLE_ENGINE,
    Abort,
    Failed,
    Ready,
    StepOutput,
    Submit,
    ToEngine,
)

LOADING, OK, FAILED, STOPPING = "loading", "ok", "failed", "stopping"


class RequestFailedError(Exception):
    """A request ended without its answer; `reason` is a LEAVE_REASONS name."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token as the engine sent it (`sent_ns`: monotonic); `finish` comes with the last."""

    token: int
    finish: str | None
    sent_ns: int


class Answer:
    """The tokens of one request, as they come."""

    def __init__(self, link: "EngineLink", request: int) -> None:
        self._link = link
        self.request = request
        self.arrived: asyncio.Queue[Sampled | RequestFailedError] = asyncio.Queue()

    async def next(self) -> Sampled:
        """Wait for the next token. Raises RequestFailedError where none will come."""
        got = await self.arrived.get()
        if isinstance(got, RequestFailedError):
            raise got
        return got

    def abort(self, reason: str, detail: str = "") -> None:
        """End the request in the engine, and here after the tokens that have arrived.

        Does nothing once the request has ended.
        """
        self._link.abort(self.request, reason, detail)


class EngineLink:
    """State of the engine as the API sees it, and the requests that are in it."""

    def __init__(self, connection: Connection, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the engine is ready, and when it has failed."""
        self._connection = connection
        self._writable = select.poll()
        self._writable.register(connection.fileno(), select.POLLOUT)
        self._unsent: deque[ToEngine] = deque()
        self._answers: dict[int, Answer] = {}
        self.state = LOADING
        self.failure = ""
        self.misused = False  # it failed because it could never start as asked
        self.ready: Ready | None = None
        self._on_change = on_change

    @property
    def in_flight(self) -> int:
        """Requests that the engine has or will get."""
        return len(self._answers)

    def start(self) -> None:
        """Read the pipe from now on, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection.fileno(), self._receive)

    def submit(self, submit: Submit) -> Answer:
        """Hand a request to the engine."""
        answer = self._answers[submit.request] = Answer(self, submit.request)
        self._send(submit)
        return answer

    def abort(self, request: int, reason: str, detail: str) -> None:
        """See Answer.abort."""
        answer = self._answers.pop(request, None)
        if answer is not None:
            answer.arrived.put_nowait(RequestFailedError(reason, detail))
            self._send(Abort(request, reason))

    def refuse_new(self) -> None:
        """From now on the API takes no request for this engine."""
        if self.state != FAILED:
            self.state = STOPPING

    def abort_all(self, reason: str, detail: str) -> None:
        """Abort all that runs or waits."""
        for request in list(self._answers):
            self.abort(request, reason, detail)

    def shut_down(self) -> None:
        """Close the pipe, and the engine ends: its end says so whatever it does just now.

        A message could not: a busy engine leaves no room for one, and while it waits for room
        itself, it reads none. What is sent after this goes nowhere.
        """
        self.refuse_new()
        self._unsent.clear()
        if not self._connection.closed:
            self._forget_pipe()
            self._connection.close()

    def fail(self, detail: str) -> None:
        """The engine is gone: every request in it ends with an error."""
        if self.state == FAILED:
            return
        self._forget_pipe()
        self.failure, self.state = detail, FAILED
        self._unsent.clear()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.arrived.put_nowait(RequestFailedError("error", detail))
        self._on_change()

    def _receive(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self.fail("the engine process ended")
            return
        if isinstance(message, StepOutput):
            self._distribute(message)
        elif isinstance(message, Ready):
            self.ready = message
            if self.state == LOADING:
                self.state = OK
            self._on_change()
        elif isinstance(message, Failed):
            self._refused_by_engine(message)

    def _distribute(self, step: StepOutput) -> None:
        for token in step.tokens:
            answer = self._answers.get(token.request)
            if answer is None:
                continue  # aborted while the engine computed the step
            answer.arrived.put_nowait(Sampled(token.token, token.finish, step.sent_ns))
            if token.finish is not None:
                del self._answers[token.request]

    def _refused_by_engine(self, failed: Failed) -> None:
        if failed.request == WHOLE_ENGINE:
            self.misused = failed.reason == USAGE
            self.fail(failed.detail)
        elif (answer := self._answers.pop(failed.request, None)) is not None:
            answer.arrived.put_nowait(RequestFailedError(failed.reason, failed.detail))

    def _send(self, message: ToEngine) -> None:
        if self._connection.closed:
            return
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        """Send while the pipe has room (poll says writable when most of its buffer is free)."""
        while self._unsent:
            if not self._writable.poll(0):
                self._loop.add_writer(self._connection.fileno(), self._flush)
                return
            try:
                self._connection.send(self._unsent[0])
            except OSError:
                self.fail("the engine process ended")
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._connection.fileno())

    def _forget_pipe(self) -> None:
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
