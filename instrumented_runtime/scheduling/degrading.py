"""Degrading under load: which steps there are, and when they go on and off. Pure.

Pressure is what the requests in the engine want as a share of what it has: seats in the batch or
KV blocks, whichever is scarcer; above 1 somebody waits. A step goes on at its `enter` and off at
its lower `leave`, so that a load near one of them does not switch it at every step of the engine.
The options name the steps in order: each goes on only after those before it, and off before them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from perfledger.schema.errors import UsageError


@dataclass(frozen=True, slots=True)
class DegradeStep:
    """One step of the policy. Thresholds are pressure in thousandths."""

    name: str
    enter: int
    leave: int
    meaning: str


# Limit of the answers while cap-max-tokens is on.
CAPPED_TOKENS = 64
# A step computes this share of its token budget while shrink-chunk is on.
SHRINK_DIVISOR = 4

STEPS: tuple[DegradeStep, ...] = (
    DegradeStep("shrink-chunk", 1250, 1000, "prompts in smaller chunks: streams stutter less"),
    DegradeStep("refuse-n", 1500, 1100, "requests of several choices are refused"),
    DegradeStep("cap-max-tokens", 2000, 1250, f"answers of at most {CAPPED_TOKENS} tokens"),
    DegradeStep("shed-low-priority", 3000, 1500, "priority above 0 is refused, also if it waits"),
)
BY_NAME = {step.name: step for step in STEPS}
CODES = {step.name: code for code, step in enumerate(STEPS)}


def bit(name: str) -> int:
    """Return the bit of a step in `Request.degraded`."""
    return 1 << CODES[name]


def step_names(bits: int) -> list[str]:
    """Return the names of the steps whose bits are set."""
    return [step.name for code, step in enumerate(STEPS) if bits >> code & 1]


class Change(NamedTuple):
    """A step of the policy went on or off, at this pressure in thousandths."""

    step: str
    on: bool
    pressure: int


def check_order(order: tuple[str, ...]) -> None:
    """Raise UsageError for names that are no step, or one named twice."""
    for name in order:
        if name not in BY_NAME:
            known = ", ".join(BY_NAME)
            raise UsageError(f"{name!r} is no step of degrading", fix=f"one of {known}")
    if len(set(order)) < len(order):
        raise UsageError("a step of degrading is named twice: " + ", ".join(order))


class Degrading:
    """Which steps are on."""

    def __init__(self, order: tuple[str, ...]) -> None:
        check_order(order)
        self._order = order
        self._level = 0  # the first so many are on
        self.on: frozenset[str] = frozenset()

    def update(self, pressure: int) -> list[Change]:
        """Take the pressure of now; return what went on or off, in order."""
        order, changes = self._order, []
        while self._level and pressure <= BY_NAME[order[self._level - 1]].leave:
            self._level -= 1
            changes.append(Change(order[self._level], False, pressure))
        if not changes:
            while self._level < len(order) and pressure >= BY_NAME[order[self._level]].enter:
                changes.append(Change(order[self._level], True, pressure))
                self._level += 1
        if changes:
            self.on = frozenset(order[: self._level])
        return changes
