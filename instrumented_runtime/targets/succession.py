"""One server after another: each is ended while the next one loads, never while one is measured."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self

from perfledger.instrumented_runtime.targets.reference import RunningServer


class Succession:
    """Holds the server of the current run; leaving the block ends whatever still runs."""

    def __init__(self) -> None:
        self._current = ExitStack()
        self._ender = ThreadPoolExecutor(1, "end-server")
        self._ending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._current.close()
        self._ender.shutdown(wait=True)

    def next(self, server: AbstractContextManager[RunningServer]) -> RunningServer:
        """End the current server and start this one; on return it is ready and runs alone.

        Raises what starting it raises.
        """
        previous, self._current = self._current, ExitStack()
        self._ending = self._ender.submit(previous.close)
        try:
            return self._current.enter_context(server)
        finally:
            self._ending.result()
