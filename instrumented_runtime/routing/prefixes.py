"""Which replica computed which prefixes, as far as the router remembers."""

from collections import OrderedDict
from collections.abc import Sequence


class RecentPrefixes:
    """Names of the KV blocks (kv/prefix_hashes.py) that prompts sent to one replica consist of.

    Bounded: the replica holds no more blocks than it has, and drops the ones longest unused too.
    It may have dropped one earlier, so a hit is an estimate.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def hits(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the first blocks of a prompt are known."""
        for count, name in enumerate(hashes):
            if name not in self._names:
                return count
        return len(hashes)

    def sent(self, hashes: Sequence[bytes]) -> None:
        """A prompt goes to the replica. Its last blocks are forgotten first: they are of no use
        without the first ones."""
        for name in reversed(hashes):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def forget(self) -> None:
        """The replica starts anew."""
        self._names.clear()
