"""Requests that wait to be forwarded: bounded in bytes, filled from any thread, never blocking."""

import threading
from collections import deque
from dataclasses import dataclass, field, replace

from perfledger.collectors.otlp_rows import Signal

# What a request costs beside its bytes: many tiny ones must not go far over the limit.
REQUEST_COST_BYTES = 512


@dataclass(frozen=True)
class Request:
    """One request; `alone` once its batch was refused, as another in it may have been why."""

    signal: Signal
    body: bytes
    hops: tuple[str, ...]
    offered_ns: int  # monotonic
    alone: bool = False

    @property
    def size_bytes(self) -> int:
        """Return the memory that it holds."""
        return len(self.body) + REQUEST_COST_BYTES


@dataclass(frozen=True, eq=False)
class Batch:
    """Requests of one signal that came the same way, oldest first."""

    requests: tuple[Request, ...]

    @property
    def body(self) -> bytes:
        """Return one request with the content of all: protobuf messages merge when joined."""
        return b"".join(request.body for request in self.requests)

    @property
    def size_bytes(self) -> int:
        """Return the memory that they hold."""
        return sum(request.size_bytes for request in self.requests)


@dataclass
class ForwardQueue:
    """What waits and what is under way count until `done`. All methods are thread-safe."""

    limit_bytes: int
    batch_bytes: int
    size_bytes: int = 0
    _waiting: dict[str, deque[Request]] = field(default_factory=dict)
    _under_way: set[Batch] = field(default_factory=set)
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, request: Request) -> str:
        """Add a request; return "", or why it cannot be added: "full" or "stopped"."""
        with self._lock:
            if self._closed:
                return "stopped"
            if self.size_bytes + request.size_bytes > self.limit_bytes:
                return "full"
            self.size_bytes += request.size_bytes
            self._waiting.setdefault(request.signal.name, deque()).append(request)
            return ""

    def take(self) -> Batch | None:
        """Return the oldest request, with those of its signal that may go along; None: empty."""
        with self._lock:
            heads = [line for line in self._waiting.values() if line]
            if not heads:
                return None
            line = min(heads, key=lambda waiting: waiting[0].offered_ns)
            batch = Batch(tuple(self._together(line)))
            self._under_way.add(batch)
            return batch

    def done(self, batch: Batch) -> None:
        """Forget a batch that was taken: it was sent, or is given up."""
        with self._lock:
            self._under_way.discard(batch)
            self.size_bytes -= batch.size_bytes

    def without_older(self, batch: Batch, oldest_ns: int) -> Batch:
        """Forget what was offered before `oldest_ns`, and return the batch of the others."""
        kept = Batch(tuple(r for r in batch.requests if r.offered_ns >= oldest_ns))
        if len(kept.requests) == len(batch.requests):
            return batch
        with self._lock:
            self._under_way.discard(batch)
            if kept.requests:
                self._under_way.add(kept)
            self.size_bytes -= batch.size_bytes - kept.size_bytes
        return kept

    def split(self, batch: Batch) -> None:
        """Put the requests of a batch back, each to be sent alone and before all others."""
        with self._lock:
            self._under_way.discard(batch)
            line = self._waiting[batch.requests[0].signal.name]
            line.extendleft(replace(old, alone=True) for old in reversed(batch.requests))

    def close(self) -> int:
        """Take no more and forget everything; return how many requests were left."""
        with self._lock:
            left = self._count()
            self._waiting.clear()
            self._under_way.clear()
            self.size_bytes, self._closed = 0, True
            return left

    def oldest_ns(self) -> int | None:
        """Return when the oldest that waits or is under way was offered; None where none is."""
        with self._lock:
            times = [batch.requests[0].offered_ns for batch in self._under_way]
            times += [line[0].offered_ns for line in self._waiting.values() if line]
            return min(times, default=None)

    def waiting(self) -> int:
        """Return how many requests wait or are under way."""
        with self._lock:
            return self._count()

    def _count(self) -> int:
        under_way = sum(len(batch.requests) for batch in self._under_way)
        return under_way + sum(map(len, self._waiting.values()))

    def _together(self, line: deque[Request]) -> list[Request]:
        first = line.popleft()
        together, size_bytes = [first], first.size_bytes
        while line and not first.alone and not line[0].alone and line[0].hops == first.hops:
            size_bytes += line[0].size_bytes
            if size_bytes > self.batch_bytes:
                break
            together.append(line.popleft())
        return together
