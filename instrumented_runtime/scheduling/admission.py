"""Whether a deadline can be met, by the engine's own rates so far. Pure.

The deadline is that of the first token: how long an answer will be nobody knows.
"""

from dataclasses import dataclass

NS_PER_S = 1_000_000_000
# Weight that older steps keep at each new one: about the last fifty count.
KEPT = 0.98


@dataclass(slots=True)
class Rates:
    """What the last steps computed and how long they took, older ones counting less."""

    prefill_tokens: float = 0.0  # in steps that computed any
    prefill_ns: float = 0.0
    steps: float = 0.0
    steps_ns: float = 0.0
    ended: float = 0.0  # seats freed while somebody waited
    ended_ns: float = 0.0

    def observe(self, step_ns: int, prefill_tokens: int, ended: int, waiting: bool) -> None:
        """Count one step."""
        self.steps = self.steps * KEPT + 1
        self.steps_ns = self.steps_ns * KEPT + step_ns
        if prefill_tokens:
            self.prefill_tokens = self.prefill_tokens * KEPT + prefill_tokens
            self.prefill_ns = self.prefill_ns * KEPT + step_ns
        if waiting:
            self.ended = self.ended * KEPT + ended
            self.ended_ns = self.ended_ns * KEPT + step_ns

    @property
    def tokens_per_s(self) -> int:
        """Prompt tokens computed in a second of steps that compute any; 0 before the first."""
        return round(self.prefill_tokens * NS_PER_S / self.prefill_ns) if self.prefill_ns else 0

    @property
    def step_ns(self) -> int:
        """Length of a step; 0 before the first."""
        return round(self.steps_ns / self.steps) if self.steps else 0

    @property
    def seat_ns(self) -> int:
        """Time until a seat becomes free while somebody waits; 0 if none ever did."""
        return round(self.ended_ns / self.ended) if self.ended > 0.5 else 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """What stands before a request: prompt tokens to compute, and seats that must become free."""

    tokens: int
    seats: int


def first_token_ns(ahead: Ahead, prompt_tokens: int, rates: Rates) -> int | None:
    """Return how long the first token will take, or None while nothing was measured.

    The longer of two waits, for the tokens before it and for a seat, then its own prompt.
    """
    per_s = rates.tokens_per_s
    if not per_s:
        return None
    wait_ns = max(ahead.tokens * NS_PER_S // per_s, ahead.seats * rates.seat_ns)
    return wait_ns + max(prompt_tokens * NS_PER_S // per_s, rates.step_ns)


def why_too_late(
    deadline_ns: int, now_ns: int, ahead: Ahead, prompt_tokens: int, rates: Rates
) -> tuple[str, int] | None:
    """Return why a deadline cannot be met and how late it would be (ns), or None if it can."""
    left_ns = deadline_ns - now_ns
    if left_ns <= 0:
        return f"the deadline was {_ms(-left_ns)} ago", 0
    expected_ns = first_token_ns(ahead, prompt_tokens, rates)
    if expected_ns is None or expected_ns <= left_ns:
        return None
    why = (
        f"the first token would come in about {_ms(expected_ns)}, the deadline is in"
        f" {_ms(left_ns)}: {ahead.tokens} tokens and {ahead.seats} seats are wanted before its"
        f" {prompt_tokens} tokens, {rates.tokens_per_s} prompt tokens a second are computed"
    )
    return why, expected_ns - left_ns


def _ms(length_ns: int) -> str:
    return f"{length_ns / 1e6:.0f} ms"
