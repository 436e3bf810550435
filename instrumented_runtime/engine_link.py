"""The API's end of the pipe to the engine: one reader for all requests, one wake-up a step.

Everything here runs on the event loop's thread. Nothing blocks it: messages to the engine wait in
a queue while the pipe has no room, and a slow client delays only its own `Answer`.
"""

import asyncio
import select
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection

from perfledger.instrumented_runtime.messages import (
    USAGE,
    WHOLE_ENGINE,
    Abort,
    Admitted,
    Arrived,
    Failed,
    Inspect,
    KvMap,
    Ready,
    StepOutput,
    Submit,
    ToEngine,
)

LOADING, OK, FAILED, STOPPING = "loading", "ok", "failed", "stopping"
PROCESS_ENDED = "the engine process ended"


class RequestFailedError(Exception):
    """A request ended without its answer; `reason` is a LEAVE_REASONS name."""

    def __init__(self, reason: str, detail: str, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token as the engine sent it (`sent_ns`: monotonic); `finish` comes with the last."""

    token: int
    finish: str | None
    sent_ns: int
    choice: int = 0  # which of the request's n answers


class Answer:
    """The tokens of one request, of all its choices, as they come."""

    def __init__(self, submit: Submit) -> None:
        self.link: EngineLink | None = None  # the engine that has it
        self.submit = submit
        self.request = submit.request
        self.started = False  # a token has come
        self.open = set(range(submit.sampling.n))  # choices of which tokens are still to come
        self.admitted: Admitted | None = None  # known at the latest with the first token
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
        if self.link is not None:
            self.link.abort(self.request, reason, detail)

    def end_choice(self, choice: int, reason: str) -> None:
        """End one choice in the engine: no token of it comes any more. The last ends them all."""
        if self.open == {choice}:
            self.abort(reason)
        elif choice in self.open:
            self.open.remove(choice)
            if self.link is not None:
                self.link.end_choice(self.request, choice, reason)


class Hears:
    """What follows from what the engine says; by itself nothing."""

    def changed(self) -> None:
        """The engine is ready, or has failed."""

    def arrived(self) -> None:
        """Rank 0 is where the ranks meet."""

    def stepped(self, step: StepOutput) -> None:
        """A step has ended; its tokens are on their way."""

    def answered(self) -> None:
        """The engine refused a request."""

    def kv_found(self, found: KvMap) -> None:
        """The answer to `EngineLink.inspect`."""

    def explain(self, detail: str) -> str:
        """Return why the engine failed, perhaps better than `detail`."""
        return detail

    def rescue(self, answer: Answer) -> bool:
        """Give a request that got no token to another engine, or return False."""
        return False


class EngineLink:
    """State of the engine as the API sees it, and the requests that are in it."""

    def __init__(self, connection: Connection, hears: "Hears") -> None:
        self._hears = hears
        self._connection = connection
        self._writable = select.poll()
        self._writable.register(connection.fileno(), select.POLLOUT)
        self._unsent: deque[ToEngine] = deque()
        self._answers: dict[int, Answer] = {}
        self.state = LOADING
        self.failure = ""
        self.misused = False  # it failed because it could never start as asked
        self.ready: Ready | None = None

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
        answer = Answer(submit)
        self.take(answer)
        return answer

    def take(self, answer: Answer) -> None:
        """Hand a request to the engine whose answer is waited for already."""
        answer.link = self
        self._answers[answer.request] = answer
        self._send(answer.submit)

    def inspect(self) -> None:
        """Ask for the KV map: `Hears.kv_found` gets it after the step that runs."""
        self._send(Inspect())

    def abort(self, request: int, reason: str, detail: str) -> None:
        """See Answer.abort."""
        answer = self._answers.pop(request, None)
        if answer is not None:
            answer.arrived.put_nowait(RequestFailedError(reason, detail))
            self._send(Abort(request, reason))

    def end_choice(self, request: int, choice: int, reason: str) -> None:
        """See Answer.end_choice."""
        if request in self._answers:
            self._send(Abort(request, reason, choice))

    @property
    def answers(self) -> list[Answer]:
        """The requests that are in the engine now."""
        return list(self._answers.values())

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
        detail = self._hears.explain(detail)
        self.failure, self.state = detail, FAILED
        self._unsent.clear()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if answer.started or not self._hears.rescue(answer):
                answer.arrived.put_nowait(RequestFailedError("error", detail))
        self._hears.changed()

    def _receive(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self.fail(PROCESS_ENDED)
            return
        if isinstance(message, StepOutput):
            self._distribute(message)
            self._hears.stepped(message)
        elif isinstance(message, Ready):
            self.ready = message
            if self.state == LOADING:
                self.state = OK
            self._hears.changed()
        elif isinstance(message, Failed):
            self._refused_by_engine(message)
            self._hears.answered()
        elif isinstance(message, KvMap):
            self._hears.kv_found(message)
        elif isinstance(message, Arrived):
            self._hears.arrived()

    def _distribute(self, step: StepOutput) -> None:
        for admitted in step.admitted:
            if answer := self._answers.get(admitted.request):
                answer.admitted = admitted
        for request, token, finish, choice in step.tokens:
            answer = self._answers.get(request)
            if answer is None or choice not in answer.open:
                continue  # aborted while the engine computed the step
            answer.started = True
            answer.arrived.put_nowait(Sampled(token, finish, step.sent_ns, choice))
            if finish is not None:
                answer.open.remove(choice)
                if not answer.open:
                    del self._answers[request]

    def _refused_by_engine(self, failed: Failed) -> None:
        if failed.request == WHOLE_ENGINE:
            self.misused = failed.reason == USAGE
            self.fail(failed.detail)
        elif (answer := self._answers.pop(failed.request, None)) is not None:
            error = RequestFailedError(failed.reason, failed.detail, failed.retry_after_s)
            answer.arrived.put_nowait(error)

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
                self.fail(PROCESS_ENDED)
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._connection.fileno())

    def _forget_pipe(self) -> None:
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
