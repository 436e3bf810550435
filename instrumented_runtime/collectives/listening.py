"""Who hears of this process's collectives and copies: one sink, or nobody."""

from perfledger.instrumented_runtime.collectives.observed import CollectiveSink


class _Listener:
    """The sink of this process. Read at every call: one attribute of one object."""

    __slots__ = ("sink",)

    def __init__(self) -> None:
        self.sink: CollectiveSink | None = None


LISTENER = _Listener()


def observe(sink: CollectiveSink | None) -> None:
    """Tell `sink` of every collective and copy of this process from now on; None: nobody."""
    LISTENER.sink = sink
