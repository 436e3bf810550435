"""A bounded set of trace keys that forgets the oldest, for many look-ups at once."""

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Mask = NDArray[np.bool_]

# More parts forget in smaller steps, fewer are searched faster.
_PARTS = 4


class RecentTraces:
    """Holds up to `limit` keys in sorted parts, newest last; 8 bytes a key.

    A key that is added again becomes a new one. One caller at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._part_size = max(1, limit // _PARTS)
        self._parts: list[Keys] = [np.empty(0, np.uint64)]
        self.forgotten = 0

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def holds(self, keys: Keys) -> Mask:
        """Return which of the keys are remembered."""
        found = np.zeros(len(keys), np.bool_)
        for part in self._parts:
            if len(part):
                place = np.searchsorted(part, keys)
                place[place == len(part)] = 0
                found |= part[place] == keys
        return found

    def add(self, keys: Keys) -> None:
        """Remember keys, sorted and each given once; the oldest are forgotten and counted."""
        for start in range(0, len(keys), self._part_size):
            self._parts[-1] = _merged(self._parts[-1], keys[start : start + self._part_size])
            if len(self._parts[-1]) >= self._part_size:
                self._parts.append(np.empty(0, np.uint64))
            while len(self) > self._limit:
                oldest = self._parts.pop(0)
                self.forgotten += int((~self.holds(oldest)).sum())


def _merged(keys: Keys, others: Keys) -> Keys:
    """Return both sorted sets as one; copying is far cheaper than sorting again."""
    if not len(keys):
        return others
    place = np.searchsorted(keys, others)
    new = keys[np.minimum(place, len(keys) - 1)] != others
    return np.insert(keys, place[new], others[new])
