"""Hypotheses as data: what is suspected, what changing one variable must do, what would refute it.

Written before the run and hashed with the plan, so that a prediction cannot follow its result.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from perfledger.schema.manifest import canonical_json, content_hash

Direction = Literal["falls", "rises"]


@dataclass(frozen=True)
class Condition:
    """One part of a symptom: a quantity observed by `measures.observe`, at least or at most."""

    quantity: str
    at_least: float = -math.inf
    at_most: float = math.inf
    meaning: str = ""

    def holds(self, observed: Mapping[str, float | None]) -> bool | None:
        """Return whether it holds; None where the quantity was not observed."""
        value = observed.get(self.quantity)
        return None if value is None else self.at_least <= value <= self.at_most


@dataclass(frozen=True)
class Prediction:
    """What a metric does from level A to level B: direction and smallest relative change.

    A change within `margin` counts as none; it is far smaller than `at_least`.
    """

    metric: str
    direction: Direction
    at_least: float
    margin: float

    @property
    def log_ratio(self) -> float:
        """The predicted change as log(B/A), signed."""
        return math.log1p(-self.at_least if self.direction == "falls" else self.at_least)

    def __str__(self) -> str:
        return f"{self.direction} by {self.at_least:.0%} or more"


@dataclass(frozen=True)
class Control:
    """A metric that the variable must leave alone: a change beyond `margin` spoils the test."""

    metric: str
    margin: float


@dataclass(frozen=True)
class Confounder:
    """Another cause of the same picture, and the observation that would expose it."""

    cause: str
    exposed_by: str


@dataclass(frozen=True)
class Hypothesis:
    """One suspicion and the rerun that tests it. Levels are A and B, B the greater."""

    name: str
    claim: str
    symptom: tuple[Condition, ...]
    variable: str
    levels: tuple[int, int]
    predictions: tuple[Prediction, ...]  # at most 5: they share one error rate
    manipulation: Prediction
    control: Control
    refuted_if: str
    confounders: tuple[Confounder, ...]
    source: str

    def hash(self) -> str:
        """Return a hash of everything said here."""
        text = {key: repr(value) for key, value in asdict(self).items()}
        return content_hash(canonical_json(text))

    def symptom_holds(self, observed: Mapping[str, float | None]) -> bool | None:
        """Return whether every condition holds; None where one cannot be seen and none fails."""
        answers = [condition.holds(observed) for condition in self.symptom]
        if False in answers:
            return False
        return None if None in answers else True


TOO_FEW_SLOTS = Hypothesis(
    name="too_few_slots",
    claim="requests wait because the batch has too few slots, not because the device is full",
    symptom=(
        Condition("queue_share_of_ttft", at_least=0.2, meaning="a good part of TTFT is queueing"),
        Condition("waiting_mean", at_least=0.5, meaning="requests wait while steps run"),
        Condition("slots_full_share", at_least=0.5, meaning="most steps use every slot"),
        Condition("kv_used_peak", at_most=0.9, meaning="KV blocks are to spare"),
    ),
    variable="max_num_seqs",
    levels=(2, 8),
    # In a burst of N equal requests through S slots a request waits (N/S - 1)/2 rounds on average,
    # so from 2 to 8 slots queueing falls by over 75 % for N >= 24, and steps per token by 4/S.
    # Half of that or less is asked for: lengths differ, and arrivals may spread.
    predictions=(
        Prediction("queue_ns_per_request", "falls", at_least=0.3, margin=0.1),
        Prediction("queue_steps_per_request", "falls", at_least=0.3, margin=0.1),
        Prediction("steps_per_output_token", "falls", at_least=0.3, margin=0.1),
        Prediction("cpu_ns_per_output_token", "falls", at_least=0.2, margin=0.05),
    ),
    manipulation=Prediction("batch_width", "rises", at_least=0.3, margin=0.1),
    control=Control("prefill_tokens_per_request", margin=0.02),
    refuted_if="queueing stays as it was although batches are wider, or KV blocks are what is full",
    confounders=(
        Confounder("KV blocks mask the slots", "kv_used_peak near 1, waits with reason kv_full"),
        Confounder("a burst that no server could absorb", "queueing ends with the burst"),
        Confounder("more prefill per step delays decoding", "prefill tokens per step rise"),
    ),
    source="queueing: waiting grows as the share of busy slots nears 1",
)

HYPOTHESES: tuple[Hypothesis, ...] = (TOO_FEW_SLOTS,)


def hypothesis_about(variable: str) -> Hypothesis | None:
    """Return the hypothesis that varies this variable, if one is written down."""
    return next((h for h in HYPOTHESES if h.variable == variable), None)
