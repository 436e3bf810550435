"""From pairs of runs to supported, refuted or inconclusive, by the test fixed beforehand.

Per prediction (direction, smallest change d, margin m): *as predicted* if the 95 % interval lies
wholly beyond d/2 and Holm's p is below 0.05; *against* if the 90 % interval lies inside +-m or the
95 % one wholly on the other side; else undecided. A count that is the same in all runs of an arm,
for both arms, needs no statistics and is compared as it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from perfledger.analyzers.experiments.hypothesis import Control, Hypothesis, Prediction
from perfledger.analyzers.experiments.measures import METRICS, Metric
from perfledger.analyzers.experiments.plan import Pair
from perfledger.analyzers.experiments.statistics import (
    Interval,
    PairedEffect,
    holm,
    paired_effect,
    pairs_needed,
)

Outcome = Literal["supported", "refuted", "inconclusive"]
Role = Literal["primary", "manipulation", "control", "exploratory"]
Result = Literal["as predicted", "against", "quiet", "moved", "undecided", "not decided", "shown"]

MINIMUM_PAIRS = 6  # below that there is no 95 % interval
GATE_PAIRS = 10
ALPHA = 0.05
NO_GATE = "A/A gate not run"


@dataclass(frozen=True)
class Gate:
    """A measured A/A comparison of this machine and workload: where wall time may be trusted."""

    host: str
    workload_hash: str
    pairs: int
    intervals: Mapping[str, Interval]

    def quiet(self, metric: str) -> bool:
        """Return whether A against A showed no effect in this metric, from enough pairs."""
        interval = self.intervals.get(metric)
        quiet = interval is not None and interval.low <= 0 <= interval.high
        return quiet and self.pairs >= GATE_PAIRS


@dataclass(frozen=True)
class Evidence:
    """One metric over all pairs that count. `exact` is a count compared as it is."""

    metric: Metric
    role: Role
    predicted: Prediction | None
    a: float  # median of the runs at level A
    b: float
    effect: PairedEffect
    exact: bool
    p_holm: float | None = None
    result: Result = "shown"
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """The answer with what it stands on and, always, what would decide what it leaves open."""

    outcome: Outcome
    reason: str
    basis: str
    evidence: tuple[Evidence, ...]
    pairs_used: int
    excluded: tuple[tuple[int, str], ...]  # pair and why
    would_decide: tuple[str, ...]


def decide(
    hypothesis: Hypothesis | None, pairs: Sequence[Pair], *, gate: Gate | None = None
) -> Verdict:
    """Apply the test. Without a hypothesis effects are shown, and the answer is inconclusive."""
    reasons = [(pair.index, pair.excluded()) for pair in pairs]
    excluded = tuple((index, why) for index, why in reasons if why is not None)
    usable = [pair for pair in pairs if pair.excluded() is None]
    evidence = _with_holm(
        [row for row in (_evidence(m, hypothesis, usable, gate) for m in METRICS) if row]
    )
    outcome, reason = _outcome(hypothesis, evidence, len(usable))
    return Verdict(
        outcome=outcome,
        reason=reason,
        basis=_basis(evidence, gate),
        evidence=tuple(evidence),
        pairs_used=len(usable),
        excluded=excluded,
        would_decide=tuple(_would_decide(hypothesis, evidence, len(usable), len(excluded), gate)),
    )


def _evidence(
    metric: Metric, hypothesis: Hypothesis | None, usable: Sequence[Pair], gate: Gate | None
) -> Evidence | None:
    """Return what the pairs say of a metric; None where a pair lacks it or a ratio has no sense."""
    a = [pair.a.metrics.get(metric.name, 0.0) for pair in usable]
    b = [pair.b.metrics.get(metric.name, 0.0) for pair in usable]
    if not usable or min(a) <= 0 or min(b) <= 0:
        return None
    role, predicted, control = _role(metric, hypothesis)
    exact = metric.kind == "count" and _repeats(a) and _repeats(b)
    effect = paired_effect(a, b)
    if exact:
        ratio = math.log(median(b) / median(a))
        point = Interval(ratio, ratio)
        effect = replace(effect, estimate=ratio, interval=point, interval90=point)
    row = Evidence(metric, role, predicted, median(a), median(b), effect, exact)
    if metric.kind == "wall" and not (gate and gate.quiet(metric.name)):
        why = "the A/A gate is not quiet" if gate else NO_GATE
        return replace(row, result="not decided" if predicted else "shown", why=why)
    if control:
        return _judge_control(row, control)
    return _judge(row, predicted) if predicted else row


def _repeats(values: Sequence[float]) -> bool:
    """Return whether a count was the same in every run of an arm: then it needs no statistics."""
    return len(values) > 1 and min(values) == max(values)


def _role(
    metric: Metric, hypothesis: Hypothesis | None
) -> tuple[Role, Prediction | None, Control | None]:
    if hypothesis is None:
        return "exploratory", None, None
    for prediction in hypothesis.predictions:
        if prediction.metric == metric.name:
            return "primary", prediction, None
    if hypothesis.manipulation.metric == metric.name:
        return "manipulation", hypothesis.manipulation, None
    if hypothesis.control.metric == metric.name:
        return "control", None, hypothesis.control
    return "exploratory", None, None


def _judge(row: Evidence, prediction: Prediction) -> Evidence:
    """Hold the interval against the prediction; whether p is small enough comes with Holm."""
    target, effect = prediction.log_ratio, row.effect
    if effect.interval.beyond(target / 2):
        return replace(row, result="as predicted", why="beyond half of the predicted change")
    if effect.interval90.inside(math.log1p(prediction.margin)):
        return replace(row, result="against", why=f"no change, within {prediction.margin:.0%}")
    if effect.interval.high < 0 if target > 0 else effect.interval.low > 0:
        return replace(row, result="against", why="the other direction")
    if row.exact:
        return replace(row, result="undecided", why="a change, but smaller than predicted")
    return replace(row, result="undecided", why="the interval spans both answers")


def _judge_control(row: Evidence, control: Control) -> Evidence:
    interval = row.effect.interval
    told_from_none = interval.low > 0 or interval.high < 0
    if told_from_none and abs(row.effect.estimate) > math.log1p(control.margin):
        return replace(row, result="moved", why=f"beyond {control.margin:.0%}")
    return replace(row, result="quiet", why=f"no change told, or within {control.margin:.0%}")


def _with_holm(evidence: list[Evidence]) -> list[Evidence]:
    """Adjust p over the primary metrics that statistics decide; above 0.05 none is as predicted."""
    family = [
        row
        for row in evidence
        if row.role == "primary" and not row.exact and row.result != "not decided"
    ]
    adjusted = dict(
        zip(
            (row.metric.name for row in family), holm([row.effect.p for row in family]), strict=True
        )
    )
    return [_held_to_p(row, adjusted.get(row.metric.name)) for row in evidence]


def _held_to_p(row: Evidence, p_holm: float | None) -> Evidence:
    p = p_holm if row.role == "primary" else row.effect.p
    if row.exact or p is None or p < ALPHA or row.result != "as predicted":
        return replace(row, p_holm=p_holm)
    return replace(row, p_holm=p_holm, result="undecided", why=f"p {p:.3f}, too few pairs")


def _outcome(
    hypothesis: Hypothesis | None, evidence: Sequence[Evidence], pairs: int
) -> tuple[Outcome, str]:
    if hypothesis is None:
        return "inconclusive", "no pre-registered prediction: effect sizes only, exploratory"
    if pairs < MINIMUM_PAIRS:
        return "inconclusive", f"{pairs} pairs count; {MINIMUM_PAIRS} are the fewest that can say"
    if spoiled := _spoiled(hypothesis, {row.metric.name: row.result for row in evidence}):
        return "inconclusive", spoiled
    primary = {row.metric.name: row.result for row in evidence if row.role == "primary"}
    results = {p.metric: primary.get(p.metric, "undecided") for p in hypothesis.predictions}
    decided = {name: result for name, result in results.items() if result != "not decided"}
    if against := [name for name, result in decided.items() if result == "against"]:
        return "refuted", f"{', '.join(against)} went against the prediction"
    open_ = [name for name, result in decided.items() if result == "undecided"]
    if open_ or not decided:
        return "inconclusive", f"not decided by the data: {', '.join(open_) or 'any prediction'}"
    return "supported", f"all {len(decided)} predictions that can be decided hold"


def _spoiled(hypothesis: Hypothesis, results: Mapping[str, Result]) -> str:
    """Say why the experiment tests nothing: no manipulation, or a control that moved."""
    manipulation, control = hypothesis.manipulation, hypothesis.control.metric
    if results.get(manipulation.metric) != "as predicted":
        said = f"{manipulation.metric} {manipulation}"
        return f"the manipulation check failed: not shown that {said}"
    if results.get(control) != "quiet":
        return f"the negative control {control} {'moved' if control in results else 'is missing'}"
    return ""


def _basis(evidence: Sequence[Evidence], gate: Gate | None) -> str:
    if gate is not None:
        return "wall time where the A/A gate is quiet, CPU time, counts and tokens"
    skipped = [r.metric.name for r in evidence if r.result == "not decided"]
    said = f"; not decided: {', '.join(skipped)}" if skipped else ""
    return f"CPU time, counts and tokens only ({NO_GATE}{said})"


def _would_decide(
    hypothesis: Hypothesis | None,
    evidence: Sequence[Evidence],
    pairs: int,
    excluded: int,
    gate: Gate | None,
) -> list[str]:
    if hypothesis is None:
        return ["a hypothesis about this variable, written before the next rerun"]
    if any(row.role == "manipulation" and row.result == "against" for row in evidence):
        return [f"levels or a workload with which {hypothesis.manipulation.metric} changes"]
    found = []
    if pairs < MINIMUM_PAIRS:
        found.append(f"{MINIMUM_PAIRS} pairs or more that count; {pairs} did, {excluded} did not")
    for row in evidence:
        if row.result == "undecided" and row.predicted:
            found.append(f"{row.metric.name}: {_pairs_for(row, len(hypothesis.predictions))}")
        elif row.result == "not decided":
            need = f"an A/A gate of {GATE_PAIRS} pairs on this machine and workload (not in this"
            need += " version)"
            found.append(f"{row.metric.name}: {need if gate is None else 'a quieter machine'}")
        elif row.result == "moved":
            found.append(f"{row.metric.name}: what else changed with the variable")
    return found


def _pairs_for(row: Evidence, family: int) -> str:
    """Name the number of pairs that would put a true effect of the predicted size beyond d/2."""
    assert row.predicted is not None
    if row.exact:
        return "nothing more: the change is real, and smaller than predicted"
    smallest = math.ceil(math.log2(2 * family / ALPHA))
    needed = pairs_needed(row.predicted.log_ratio / 2, row.effect.spread, at_least=smallest)
    if needed is None:
        return "no number of pairs on a machine this noisy; a quieter one"
    return f"about {max(needed, row.effect.pairs + 1)} pairs at this spread"


def as_json(verdict: Verdict) -> dict[str, object]:
    """Return the verdict as JSON objects; changes are log ratios B/A, null where unbounded."""
    return {
        "outcome": verdict.outcome,
        "reason": verdict.reason,
        "basis": verdict.basis,
        "pairs_used": verdict.pairs_used,
        "excluded": [{"pair": index, "why": why} for index, why in verdict.excluded],
        "would_decide": list(verdict.would_decide),
        "evidence": [_row_as_json(row) for row in verdict.evidence],
    }


def _row_as_json(row: Evidence) -> dict[str, object]:
    effect, prediction = row.effect, row.predicted
    numbers = {
        "log_ratio": effect.estimate,
        "low": effect.interval.low,
        "high": effect.interval.high,
        "low90": effect.interval90.low,
        "high90": effect.interval90.high,
        "p": effect.p,
        "spread": effect.spread,
        "minimum_detectable": effect.minimum_detectable,
    }
    return {
        "metric": row.metric.name,
        "unit": row.metric.unit,
        "kind": row.metric.kind,
        "role": row.role,
        "a": row.a,
        "b": row.b,
        "pairs": effect.pairs,
        "method": "count, compared exactly" if row.exact else "Hodges-Lehmann, sign flip",
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "p_holm": row.p_holm,
        "predicted": str(prediction) if prediction else None,
        "predicted_log_ratio": prediction.log_ratio if prediction else None,
        "result": row.result,
        "why": row.why,
    }
