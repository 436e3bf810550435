"""What the router decided for one request, and what its `route` span says of it."""

from dataclasses import dataclass, field

from perfledger.instrumented_runtime.telemetry import AttributeValue


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes and why, with what the router knew. Times are monotonic ns."""

    replica: str
    policy: str  # empty where there is one replica only: nothing to choose
    reason: str
    queue_ns: int | None  # for what waits there before it; None: its speed is not known yet
    hit_tokens: int  # of its prompt, probably still in the replica's prefix cache
    start_ns: int
    end_ns: int
    retries: int = 0
    retry_of: str = ""  # the replica that failed
    hashes: list[bytes] = field(default_factory=list, repr=False)

    def attributes(self) -> dict[str, AttributeValue]:
        """Return the attributes of the `route` span."""
        known: dict[str, AttributeValue] = {}
        if self.queue_ns is not None:
            known["perfledger.route.estimated_queue_ns"] = self.queue_ns
        if self.retry_of:
            known["perfledger.route.retry_of"] = self.retry_of
        return known | {
            "perfledger.replica": self.replica,
            "perfledger.route.policy": self.policy,
            "perfledger.reason": self.reason,
            "perfledger.route.prefix_hit_tokens": self.hit_tokens,
            "perfledger.route.retries": self.retries,
        }
