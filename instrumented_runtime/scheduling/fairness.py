"""Turns between tenants: whoever was served least goes first.

The virtual token counter of Sheng et al. 2024, "Fairness in Serving Large Language Models",
algorithm 2: prompt tokens count once when a request is admitted (but for those found in the
prefix cache, which cost nothing), sampled ones twice; a tenant that comes back with an empty
queue is lifted to the least served of those that wait, so that idling saves up no credit.
"""

from dataclasses import dataclass

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
# Tenants that wait for nothing are remembered up to this many: their names come from callers.
MAX_IDLE = 1024


@dataclass(slots=True, eq=False)
class Tenant:
    """A customer of the service, within one engine."""

    name: str
    served: int = 0  # weighted tokens: the virtual counter
    live: int = 0  # requests that have not ended
    waiting: int = 0  # those of them in the queue, for the first time
    salt: bytes = b""  # of its prefix hashes; empty until the first look-up


class Tenants:
    """All tenants with a request in the engine, and the last of those without."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}  # the longest idle first
        self._last_left = 0

    def named(self, name: str) -> Tenant:
        """Return the account of a tenant, a new one for a new name."""
        if name not in self._tenants:
            self._forget_idle()
            self._tenants[name] = Tenant(name)
        return self._tenants[name]

    def queue(self, tenant: Tenant) -> None:
        """A new request of the tenant waits."""
        if not tenant.waiting:
            others = [one.served for one in self._tenants.values() if one.waiting]
            tenant.served = max(tenant.served, min(others, default=self._last_left))
        tenant.waiting += 1
        tenant.live += 1

    def unqueue(self, tenant: Tenant) -> None:
        """A request of the tenant waits no longer: admitted, or gone."""
        tenant.waiting -= 1
        if not tenant.waiting:
            self._last_left = tenant.served

    def end(self, tenant: Tenant) -> None:
        """A request of the tenant has ended."""
        tenant.live -= 1
        if not tenant.live and tenant.name in self._tenants:
            self._tenants[tenant.name] = self._tenants.pop(tenant.name)

    def _forget_idle(self) -> None:
        if len(self._tenants) < MAX_IDLE:
            return
        idle = next((one.name for one in self._tenants.values() if not one.live), None)
        if idle is not None:
            del self._tenants[idle]
