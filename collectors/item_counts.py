"""How many items came and what became of them, so that it adds up at every moment.

Received = accepted + rejected, and accepted = written + waiting + deduplicated + sampled away:
each change keeps both, and each reading is of one moment, in whatever thread.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from perfledger.collectors.attribute_values import Tally

_FOUND = {
    "values_cut": "cut",
    "values_denied": "denied",
    "values_repaired": "repaired",
    "duplicate_keys": "duplicate_keys",
    "exemplars_dropped": "exemplars_dropped",
}


class ItemCounts:
    """Counts of one collector: by table and fate, and of what was found in the items."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._rejected: Counter[tuple[str, str]] = Counter()

    def took(self, requests: Iterable[tuple[str, Tally]]) -> None:
        """Count requests, each with its table: what is not rejected waits to be written."""
        with self._lock:
            for table, tally in requests:
                rejected = tally.rejected.total()
                self._counts[f"{table}_received"] += tally.items
                self._counts[f"{table}_rejected"] += rejected
                self._counts[f"{table}_accepted"] += tally.items - rejected
                self._counts[f"{table}_waiting"] += tally.items - rejected
                self._rejected.update({(table, why): n for why, n in tally.rejected.items()})
                for name, found in _FOUND.items():
                    self._counts[name] += getattr(tally, found)

    def became(self, table: str, fate: str, items: int) -> None:
        """Count items that waited and are now written, deduplicated or sampled away."""
        with self._lock:
            self._counts[f"{table}_waiting"] -= items
            self._counts[f"{table}_{fate}"] += items

    def add(self, others: Mapping[str, int]) -> None:
        """Count what concerns no item."""
        with self._lock:
            self._counts.update(others)

    def read(self) -> Counter[str]:
        """Return all counts of this moment."""
        with self._lock:
            return self._counts.copy()

    def rejected(self) -> Counter[tuple[str, str]]:
        """Return how many items were rejected, by table and reason."""
        with self._lock:
            return self._rejected.copy()

    def waiting(self) -> int:
        """Return how many items are acknowledged and not yet in files."""
        with self._lock:
            return sum(n for name, n in self._counts.items() if name.endswith("_waiting"))
