"""The plan of a rerun: randomised order inside adjacent pairs, one fresh process a run.

All runs of A before all runs of B cannot be written down here: drift of the machine would look
like an effect (with that order a paired test rejects 15-40 % of A/A experiments, not 5 %).
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from perfledger.analyzers.experiments.hypothesis import Hypothesis
from perfledger.schema.errors import UsageError
from perfledger.schema.manifest import canonical_json, content_hash

Arm = Literal["a", "b"]
MOST_PAIRS = 1_000


@dataclass(frozen=True)
class Work:
    """What a run did; the two runs of a pair must have done the same."""

    requests_hash: str
    requests: int
    errors: int
    output_tokens: int


@dataclass(frozen=True)
class RunSample:
    """One run with everything measured of it; `failure` says why it does not count."""

    run_id: str
    level: int
    started_ns: int  # wall clock: the first measured request was due
    ended_ns: int
    work: Work | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    disturbances: tuple[str, ...] = ()
    manifest_hash: str = ""
    failure: str | None = None


@dataclass(frozen=True)
class Pair:
    """Two adjacent runs, and which one came first."""

    index: int
    first: Arm
    a: RunSample
    b: RunSample

    def excluded(self) -> str | None:
        """Return why this pair does not count, or None."""
        for run in (self.a, self.b):
            if run.failure:
                return f"run {run.run_id} failed: {run.failure}"
            if run.disturbances:
                return f"run {run.run_id} was disturbed: {'; '.join(run.disturbances)}"
        if self.a.work != self.b.work:
            return f"unequal work: {_unequal(self.a.work, self.b.work)}"
        return None

    def completed(self, complete: Callable[[RunSample], RunSample]) -> "Pair":
        """Return the pair with both samples passed through a function."""
        return replace(self, a=complete(self.a), b=complete(self.b))


@dataclass(frozen=True)
class RerunPlan:
    """What will be run. Raises UsageError for a plan that can never say anything."""

    variable: str
    levels: tuple[int, int]
    pairs: int
    seed: int
    warm_up: str
    workload_hash: str

    def __post_init__(self) -> None:
        if self.levels[0] >= self.levels[1]:
            raise UsageError(f"levels {self.levels} are not two different ones, the smaller first")
        if not 1 <= self.pairs <= MOST_PAIRS:
            raise UsageError(f"{self.pairs} pairs", fix=f"give 1 to {MOST_PAIRS}; 8 or more decide")

    def first_arms(self) -> list[Arm]:
        """Return which arm runs first in each pair: half and half, shuffled by the seed.

        Of an odd number the last is drawn. Balance makes a steady drift cancel.
        """
        generator = random.Random(self.seed)
        arms: list[Arm] = ["a", "b"] * (self.pairs // 2)
        if self.pairs % 2:
            arms.append(generator.choice(("a", "b")))
        generator.shuffle(arms)
        return arms

    def registration(self, hypothesis: Hypothesis | None) -> str:
        """Return the hash of what is fixed before the first run."""
        said = {"plan": asdict(self), "hypothesis": hypothesis.hash() if hypothesis else None}
        return content_hash(canonical_json(said))


def run_pairs(
    plan: RerunPlan,
    run_once: Callable[[int], RunSample],
    after_run: Callable[[int, int], None] = lambda done, total: None,
) -> list[Pair]:
    """Run the plan; `run_once(level)` makes one fresh run, and says of a failed one why.

    Stops after a pair whose runs both failed: the rest would too. Pairs not begun are not returned.
    """
    pairs: list[Pair] = []
    for index, first in enumerate(plan.first_arms()):
        samples: dict[Arm, RunSample] = {}
        for arm in (first, _other(first)):
            samples[arm] = run_once(plan.levels[0 if arm == "a" else 1])
            after_run(index * 2 + len(samples), plan.pairs * 2)
        pairs.append(Pair(index, first, samples["a"], samples["b"]))
        if samples["a"].failure and samples["b"].failure:
            break
    return pairs


def _other(arm: Arm) -> Arm:
    return "b" if arm == "a" else "a"


def _unequal(a: Work | None, b: Work | None) -> str:
    if a is None or b is None:
        return "one run does not say what it did"
    first, second = asdict(a), asdict(b)
    return ", ".join(f"{k} {first[k]} and {second[k]}" for k in first if first[k] != second[k])
