"""A hardware counter that should only rise: unfolded where it wraps, started anew where it fell."""

from dataclasses import dataclass


@dataclass(slots=True)
class RisingCounter:
    """Turns what a register says into a total that never falls while it is one count.

    `modulus` is where the register wraps to 0 (None: it does not), and `most_per_s` what it can
    gain in a second at most: a step that would take more is no wrap but a reset, and an interval
    in which the register could have gone round whole is not guessed at.
    """

    modulus: int | None = None
    most_per_s: float = 0.0
    restarts: int = 0
    _offset: int = 0
    _last: int | None = None
    _last_ns: int = 0

    def total(self, raw: int, at_ns: int) -> int | None:
        """Return the total at a monotonic time; None where what was gained cannot be known.

        The count then starts anew, from what the register says.
        """
        last, possible = self._last, self.most_per_s * (at_ns - self._last_ns) / 1e9
        self._last, self._last_ns = raw, at_ns
        if last is None:
            return raw
        if self.modulus is None:
            is_known = raw >= last
        else:
            gained = (raw - last) % self.modulus
            is_known = gained <= possible < self.modulus
            if is_known and raw < last:
                self._offset += self.modulus
        if is_known:
            return self._offset + raw
        self._offset = 0
        self.restarts += 1
        return None
