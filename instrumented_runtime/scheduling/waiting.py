"""The queue: who is next. Lower priority number, then the tenant served least, then the deadline.

What was preempted goes first within its priority. Each time a request overtakes earlier ones,
those learn why: it is the reason of their wait.
"""

import heapq
from collections.abc import Iterator

from perfledger.instrumented_runtime.scheduling.fairness import Tenant, Tenants
from perfledger.instrumented_runtime.scheduling.sequences import Request

NO_DEADLINE = 1 << 62
Entry = tuple[int, int, int, Request]  # priority, deadline, arrival


class WaitingLine:
    """Requests that wait for admission. A request leaves by `take` or `remove`."""

    def __init__(self, tenants: Tenants) -> None:
        self.tokens = 0  # of those that wait: to compute before they can sample
        self.seats = 0
        self._tenants = tenants
        self._arrivals = 0
        self._waiting: dict[int, Request] = {}  # in the order of arrival
        self._counted: dict[int, tuple[int, int]] = {}  # tokens and seats, as they entered
        # Heaps hold requests that have left, too: those are dropped when they come to the top.
        self._lines: dict[Tenant, list[Entry]] = {}
        self._returned: list[Entry] = []
        self._deadlines: list[tuple[int, int, Request]] = []
        self._held: list[tuple[int, int, Request]] = []
        self._removed = 0  # since the heaps were last cleared of those that have left

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def __contains__(self, request: Request) -> bool:
        return self._waiting.get(request.number) is request

    def add(self, request: Request) -> None:
        """Put a new request into the line."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self._tenants.queue(request.tenant)
        self._insert(request)
        if request.deadline_ns is not None:
            heapq.heappush(self._deadlines, (request.deadline_ns, request.arrival, request))

    def put_back(self, request: Request) -> None:
        """Put a preempted request into the line: the first of its priority."""
        self._enter(request)
        entry = (request.priority, 0, request.arrival, request)
        heapq.heappush(self._returned, entry)

    def first(self, now_ns: int) -> Request | None:
        """Return who is next, or None if nobody waits but those held back beyond `now_ns`."""
        while self._held and self._held[0][0] <= now_ns:
            _, _, request = heapq.heappop(self._held)
            if request in self:
                self._queue_up(request)
        best = self._top(self._returned)
        key = (best[0], -1, 0, 0) if best else None
        for tenant, line in list(self._lines.items()):
            entry = self._top(line)
            if entry is None:
                del self._lines[tenant]
                continue
            rank = (entry[0], tenant.served, entry[1], entry[2])
            if key is None or rank < key:
                best, key = entry, rank
        return best[3] if best else None

    def hold(self, request: Request, until_ns: int) -> None:
        """Keep a request that `first` has just returned out of the line until then."""
        heapq.heappop(self._lines[request.tenant])
        request.held_until_ns = until_ns
        heapq.heappush(self._held, (until_ns, request.arrival, request))

    def take(self, request: Request) -> None:
        """Admit a request that `first` has just returned; tell those it overtakes why."""
        for other in self._waiting.values():
            if other is request:
                break
            if other.arrival < request.arrival and not other.admitted and not other.held_until_ns:
                other.wait_reason = _why_overtaken(other, request)
        heapq.heappop(self._returned if request.admitted else self._lines[request.tenant])
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take a request out of the line. Raises KeyError if it is not there."""
        del self._waiting[request.number]
        tokens, seats = self._counted.pop(request.number)
        self.tokens -= tokens
        self.seats -= seats
        if not request.admitted:
            self._tenants.unqueue(request.tenant)
        self._removed += 1
        if self._removed > 64 + len(self._waiting):
            self._clear_heaps()

    def recount(self, request: Request) -> None:
        """Note that one answer of a waiting request has ended."""
        tokens, seats = self._counted[request.number]
        self._counted[request.number] = request.remaining, request.seats
        self.tokens += request.remaining - tokens
        self.seats += request.seats - seats

    def expired(self, now_ns: int) -> list[Request]:
        """Take out and return the requests whose deadline has come before their admission."""
        gone = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, _, request = heapq.heappop(self._deadlines)
            if request in self and not request.admitted:
                self.remove(request)
                gone.append(request)
        return gone

    def next_event_ns(self) -> int | None:
        """Return when the first one held back may go on, or the first deadline comes (ns)."""
        return min([heap[0][0] for heap in (self._held, self._deadlines) if heap], default=None)

    def ahead_of(self, request: Request) -> tuple[int, int]:
        """Return (tokens, seats) of those that go before a new request of its priority."""
        if all(other.priority <= request.priority for other in self._waiting.values()):
            return self.tokens, self.seats
        before = [other for other in self if other.priority <= request.priority]
        return sum(other.remaining for other in before), sum(other.seats for other in before)

    def _insert(self, request: Request) -> None:
        self._enter(request)
        self._queue_up(request)

    def _enter(self, request: Request) -> None:
        self._waiting[request.number] = request
        tokens, seats = request.remaining, request.seats
        self._counted[request.number] = tokens, seats
        self.tokens += tokens
        self.seats += seats

    def _queue_up(self, request: Request) -> None:
        deadline_ns = NO_DEADLINE if request.deadline_ns is None else request.deadline_ns
        entry = (request.priority, deadline_ns, request.arrival, request)
        heapq.heappush(self._lines.setdefault(request.tenant, []), entry)

    def _clear_heaps(self) -> None:
        """Drop who has left from inside the heaps, where a far deadline could keep it for days."""
        self._removed = 0
        for heap in (self._returned, *self._lines.values()):
            heap[:] = [entry for entry in heap if entry[3] in self]
            heapq.heapify(heap)
        for timed in (self._deadlines, self._held):
            timed[:] = [entry for entry in timed if entry[2] in self]
            heapq.heapify(timed)

    def _top(self, line: list[Entry]) -> Entry | None:
        while line and line[0][3] not in self:
            heapq.heappop(line)
        return line[0] if line else None


def _why_overtaken(other: Request, by: Request) -> str:
    if by.priority < other.priority:
        return "priority"
    return "deadline" if by.tenant is other.tenant else "fairness"
