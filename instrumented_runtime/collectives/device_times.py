"""When a device began and ended a call, by events on its stream: read later, never waited for.

On CUDA a collective returns once it is enqueued. An event before it says when its inputs were
ready and the stream got to it, one after it when the stream went on; both are placed on the
monotonic clock by one event whose time was read on both sides.
"""

from collections import deque
from collections.abc import Callable

import torch

from perfledger.schema.clocks import monotonic_ns

_MOST_PENDING = 4096
Ended = Callable[[int, int], None]  # start and end, monotonic ns


class DeviceTimes:
    """Calls on their way through the streams of one process's device, oldest first."""

    def __init__(self) -> None:
        self.lost = 0  # calls that were too many to wait for
        self._pending: deque[tuple[torch.Event, torch.Event, Ended]] = deque()
        self._anchor: tuple[torch.Event, int] | None = None

    def mark(self) -> torch.Event:
        """Return an event at this place of the current stream."""
        if self._anchor is None:
            anchor = torch.Event("cuda", enable_timing=True)
            torch.cuda.synchronize()
            anchor.record()
            anchor.synchronize()
            self._anchor = (anchor, monotonic_ns())
        event = torch.Event("cuda", enable_timing=True)
        event.record()
        return event

    def ends(self, start: torch.Event, ended: Ended) -> None:
        """Note that a call has been enqueued; `ended` hears its times in a later `flush`."""
        if len(self._pending) >= _MOST_PENDING:
            self.lost += 1
            return
        self._pending.append((start, self.mark(), ended))
        self.flush()

    def flush(self, wait: bool = False) -> None:
        """Tell the times of all calls that have ended; with `wait`, wait until all have."""
        while self._pending and (wait or self._pending[0][1].query()):
            start, end, ended = self._pending.popleft()
            if wait:
                end.synchronize()
            ended(self._to_ns(start), self._to_ns(end))

    def _to_ns(self, event: torch.Event) -> int:
        assert self._anchor is not None
        anchor, anchor_ns = self._anchor
        elapsed_ms: float = anchor.elapsed_time(event)
        return anchor_ns + round(elapsed_ms * 1e6)


DEVICE_TIMES = DeviceTimes()  # of this process
