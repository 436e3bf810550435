"""Plan and verdict on simulated runs: planted effects, no effect, and every way to spoil a test."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.analyzers.experiments.hypothesis import (
    HYPOTHESES,
    TOO_FEW_SLOTS,
    Hypothesis,
    Prediction,
    hypothesis_about,
)
from perfledger.analyzers.experiments.measures import METRIC, measure, observe
from perfledger.analyzers.experiments.plan import Pair, RerunPlan, RunSample, Work, run_pairs
from perfledger.analyzers.experiments.statistics import Interval
from perfledger.analyzers.experiments.verdict import Gate, as_json, decide
from perfledger.schema.errors import UsageError

WORK = Work("h", requests=24, errors=0, output_tokens=576)
LEVEL_A = {
    "queue_ns_per_request": 2e9,
    "queue_steps_per_request": 130.0,
    "steps_per_output_token": 0.5,
    "cpu_ns_per_output_token": 3e6,
    "batch_width": 2.0,
    "prefill_tokens_per_request": 32.0,
    "ttft_ns_p50": 2e9,
}
AS_PREDICTED = {
    "queue_ns_per_request": 0.2,
    "queue_steps_per_request": 0.2,
    "steps_per_output_token": 0.3,
    "cpu_ns_per_output_token": 0.5,
    "batch_width": 3.0,
}
QUIET_GATE = Gate("host", "h", 10, {name: Interval(-0.02, 0.03) for name in METRIC})


def sample(level: int, metrics: Mapping[str, float], **changed: object) -> RunSample:
    run = RunSample("r", level, 0, 1, work=WORK, metrics=metrics)
    return replace(run, **changed)  # type: ignore[arg-type]


def simulated(
    ratios: Mapping[str, float], *, pairs: int = 8, noise: float = 0.02, seed: int = 0
) -> list[Pair]:
    """Return pairs whose B is A times `ratios`, every number with log-normal noise."""
    generator = np.random.default_rng(seed)

    def noisy(factor: Mapping[str, float]) -> dict[str, float]:
        return {
            name: value * factor.get(name, 1.0) * math.exp(noise * generator.standard_normal())
            for name, value in LEVEL_A.items()
        }

    return [
        Pair(index, "a", sample(2, noisy({})), sample(8, noisy(ratios))) for index in range(pairs)
    ]


# --- The plan -------------------------------------------------------------------------------


def plan(**changed: object) -> RerunPlan:
    start = RerunPlan("max_num_seqs", (2, 8), pairs=8, seed=1, warm_up="w", workload_hash="h")
    return replace(start, **changed)  # type: ignore[arg-type]


@given(st.integers(1, 60), st.integers())
def test_order_is_adjacent_pairs_half_and_half(pairs: int, seed: int) -> None:
    levels: list[int] = []

    def run_once(level: int) -> RunSample:
        levels.append(level)
        return sample(level, {})

    made = run_pairs(plan(pairs=pairs, seed=seed), run_once)
    assert [set(levels[i : i + 2]) for i in range(0, 2 * pairs, 2)] == [{2, 8}] * pairs
    a_first = sum(pair.first == "a" for pair in made)
    assert a_first in (pairs // 2, pairs - pairs // 2)
    assert [pair.a.level for pair in made] == [2] * pairs
    assert [2 if pair.first == "a" else 8 for pair in made] == levels[::2]
    assert plan(pairs=pairs, seed=seed).first_arms() == [pair.first for pair in made]


def test_order_depends_on_the_seed() -> None:
    assert len({tuple(plan(seed=seed).first_arms()) for seed in range(20)}) > 10


@pytest.mark.parametrize("wrong", [{"levels": (8, 2)}, {"levels": (2, 2)}, {"pairs": 0}])
def test_plans_that_say_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        plan(**wrong)


def test_registration_fixes_plan_and_hypothesis() -> None:
    weaker = replace(TOO_FEW_SLOTS, refuted_if="never")
    said = [
        plan().registration(TOO_FEW_SLOTS),
        plan(pairs=9).registration(TOO_FEW_SLOTS),
        plan().registration(weaker),
        plan().registration(None),
    ]
    assert len(set(said)) == 4
    assert said[0] == plan().registration(TOO_FEW_SLOTS)


def test_a_pair_that_fails_ends_it_and_is_kept() -> None:
    seen: list[tuple[int, int]] = []
    pairs = run_pairs(
        plan(),
        lambda level: sample(level, {}, failure="did not start"),
        lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 16), (2, 16)]
    assert [pair.excluded() for pair in pairs] == ["run r failed: did not start"]


# --- The verdict ----------------------------------------------------------------------------


def test_hypotheses_are_well_formed() -> None:
    for hypothesis in HYPOTHESES:
        named = [*(p.metric for p in hypothesis.predictions), hypothesis.manipulation.metric]
        assert {*named, hypothesis.control.metric} <= METRIC.keys()
        assert 1 <= len(hypothesis.predictions) <= 5
        predictions = (*hypothesis.predictions, hypothesis.manipulation)
        assert all(p.margin < abs(math.expm1(p.log_ratio / 2)) for p in predictions)
    assert hypothesis_about("max_num_seqs") is TOO_FEW_SLOTS
    assert hypothesis_about("threads") is None


def test_a_planted_effect_is_supported_with_its_evidence() -> None:
    verdict = decide(TOO_FEW_SLOTS, simulated(AS_PREDICTED))
    assert verdict.outcome == "supported"
    assert verdict.reason == "all 3 predictions that can be decided hold"
    assert verdict.basis == (
        "CPU time, counts and tokens only (A/A gate not run; not decided: queue_ns_per_request)"
    )
    assert {row.metric.name: row.result for row in verdict.evidence} == {
        "queue_ns_per_request": "not decided",
        "queue_steps_per_request": "as predicted",
        "steps_per_output_token": "as predicted",
        "cpu_ns_per_output_token": "as predicted",
        "batch_width": "as predicted",
        "prefill_tokens_per_request": "quiet",
        "ttft_ns_p50": "shown",
    }
    cpu = next(r for r in verdict.evidence if r.metric.name == "cpu_ns_per_output_token")
    assert cpu.effect.interval.low < math.log(0.5) < cpu.effect.interval.high
    assert (cpu.effect.pairs, cpu.effect.p, cpu.exact) == (8, 2 / 256, False)
    assert verdict.would_decide == (
        "queue_ns_per_request: an A/A gate of 10 pairs on this machine and workload (not in this"
        " version)",
    )


def test_with_a_quiet_gate_wall_time_decides_too() -> None:
    verdict = decide(TOO_FEW_SLOTS, simulated(AS_PREDICTED), gate=QUIET_GATE)
    assert (verdict.outcome, verdict.reason) == (
        "supported",
        "all 4 predictions that can be decided hold",
    )
    assert verdict.would_decide == ()
    still_queueing = {**AS_PREDICTED, "queue_ns_per_request": 1.0}
    verdict = decide(TOO_FEW_SLOTS, simulated(still_queueing), gate=QUIET_GATE)
    assert (verdict.outcome, verdict.reason) == (
        "refuted",
        "queue_ns_per_request went against the prediction",
    )
    loud = Gate("host", "h", 10, {"queue_ns_per_request": Interval(0.1, 0.3)})
    assert decide(TOO_FEW_SLOTS, simulated(still_queueing), gate=loud).outcome == "supported"


def test_wider_batches_but_equal_queueing_refute() -> None:
    ratios = {**AS_PREDICTED, "queue_steps_per_request": 1.0}
    verdict = decide(TOO_FEW_SLOTS, simulated(ratios))
    assert (verdict.outcome, verdict.reason) == (
        "refuted",
        "queue_steps_per_request went against the prediction",
    )


@pytest.mark.parametrize(
    ("ratios", "reason"),
    [
        ({}, "the manipulation check failed: not shown that batch_width rises by 30% or more"),
        (
            {**AS_PREDICTED, "prefill_tokens_per_request": 1.3},
            "the negative control prefill_tokens_per_request moved",
        ),
        (
            {**AS_PREDICTED, "cpu_ns_per_output_token": 0.93},
            "not decided by the data: cpu_ns_per_output_token",
        ),
    ],
)
def test_spoiled_or_open_tests_are_inconclusive(ratios: dict[str, float], reason: str) -> None:
    verdict = decide(TOO_FEW_SLOTS, simulated(ratios))
    assert (verdict.outcome, verdict.reason) == ("inconclusive", reason)
    assert verdict.would_decide


def test_too_few_pairs_say_nothing() -> None:
    verdict = decide(TOO_FEW_SLOTS, simulated(AS_PREDICTED, pairs=5))
    assert (verdict.outcome, verdict.reason) == (
        "inconclusive",
        "5 pairs count; 6 are the fewest that can say",
    )
    assert verdict.would_decide[0] == "6 pairs or more that count; 5 did, 0 did not"
    nothing = decide(TOO_FEW_SLOTS, [])
    assert (nothing.outcome, nothing.evidence) == ("inconclusive", ())


def test_noisy_counts_share_the_error_rate_and_six_pairs_are_then_too_few() -> None:
    verdict = decide(TOO_FEW_SLOTS, simulated(AS_PREDICTED, pairs=6, noise=0.06))
    assert verdict.outcome == "inconclusive"
    cpu = next(r for r in verdict.evidence if r.metric.name == "cpu_ns_per_output_token")
    assert (cpu.effect.p, cpu.p_holm) == (2 / 64, pytest.approx(6 / 64))
    assert cpu.why == "p 0.094, too few pairs"
    assert "cpu_ns_per_output_token: about 8 pairs at this spread" in verdict.would_decide
    assert (
        decide(TOO_FEW_SLOTS, simulated(AS_PREDICTED, pairs=8, noise=0.06)).outcome == "supported"
    )


def test_counts_that_repeat_are_compared_exactly() -> None:
    b = {name: value * AS_PREDICTED.get(name, 1.0) for name, value in LEVEL_A.items()}
    pairs = [Pair(i, "b", sample(2, LEVEL_A), sample(8, b)) for i in range(6)]
    verdict = decide(TOO_FEW_SLOTS, pairs)
    steps = next(r for r in verdict.evidence if r.metric.name == "steps_per_output_token")
    assert (steps.exact, steps.p_holm, steps.effect.estimate) == (True, None, math.log(0.15 / 0.5))
    cpu = next(r for r in verdict.evidence if r.metric.name == "cpu_ns_per_output_token")
    assert (cpu.exact, cpu.p_holm) == (False, 2 / 64)  # alone in its family
    assert verdict.outcome == "supported"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"failure": "did not start"}, "run r failed: did not start"),
        ({"disturbances": ("30% stolen",)}, "run r was disturbed: 30% stolen"),
        (
            {"work": replace(WORK, errors=1, output_tokens=552)},
            "unequal work: errors 0 and 1, output_tokens 576 and 552",
        ),
        ({"work": None}, "unequal work: one run does not say what it did"),
    ],
)
def test_spoiled_pairs_are_left_out_and_named(spoil: dict[str, object], why: str) -> None:
    pairs = simulated(AS_PREDICTED, pairs=7)
    pairs[3] = replace(pairs[3], b=replace(pairs[3].b, **spoil))  # type: ignore[arg-type]
    verdict = decide(TOO_FEW_SLOTS, pairs)
    assert (verdict.excluded, verdict.pairs_used) == (((3, why),), 6)
    assert {row.effect.pairs for row in verdict.evidence} == {6}


def test_without_a_hypothesis_effects_are_shown_and_nothing_is_claimed() -> None:
    verdict = decide(None, simulated(AS_PREDICTED))
    assert verdict.outcome == "inconclusive"
    assert verdict.reason == "no pre-registered prediction: effect sizes only, exploratory"
    assert {(row.role, row.result) for row in verdict.evidence} == {("exploratory", "shown")}


def test_a_metric_that_a_run_lacks_is_not_evidence() -> None:
    pairs = simulated(AS_PREDICTED)
    lacking = {k: v for k, v in pairs[0].a.metrics.items() if k != "cpu_ns_per_output_token"}
    pairs[0] = replace(pairs[0], a=replace(pairs[0].a, metrics=lacking))
    verdict = decide(TOO_FEW_SLOTS, pairs)
    assert "cpu_ns_per_output_token" not in {row.metric.name for row in verdict.evidence}
    assert verdict.reason == "not decided by the data: cpu_ns_per_output_token"


def test_verdict_as_json_has_no_infinity() -> None:
    verdict = as_json(decide(TOO_FEW_SLOTS, simulated(AS_PREDICTED, pairs=2, noise=0.0)))
    assert json.loads(json.dumps(verdict, allow_nan=False)) == verdict
    rows = {row["metric"]: row for row in verdict["evidence"]}  # type: ignore[index, union-attr]
    assert rows["cpu_ns_per_output_token"]["low"] is None
    assert rows["cpu_ns_per_output_token"]["predicted"] == "falls by 20% or more"


# --- How often it is right ------------------------------------------------------------------

ONE_COST = Hypothesis(
    name="cheaper",
    claim="B costs less",
    symptom=(),
    variable="v",
    levels=(2, 8),
    predictions=(Prediction("cpu_ns_per_output_token", "falls", at_least=0.05, margin=0.02),),
    manipulation=TOO_FEW_SLOTS.manipulation,
    control=TOO_FEW_SLOTS.control,
    refuted_if="",
    confounders=(),
    source="",
)


def outcomes(cost_ratio: float, draws: int, noise: float = 0.03) -> list[str]:
    ratios = {"batch_width": 3.0, "cpu_ns_per_output_token": cost_ratio}
    return [
        decide(ONE_COST, simulated(ratios, pairs=10, noise=noise, seed=seed)).outcome
        for seed in range(draws)
    ]


def test_no_effect_is_rarely_supported() -> None:
    found = outcomes(1.0, draws=400)
    assert found.count("supported") <= 400 * 0.05
    assert found.count("refuted") > found.count("supported")


def test_a_rise_against_the_prediction_is_never_supported_and_mostly_refuted() -> None:
    found = outcomes(1.1, draws=200)
    assert found.count("supported") == 0
    assert found.count("refuted") >= 190


def test_an_effect_of_twice_the_predicted_size_is_found() -> None:
    found = outcomes(0.9, draws=200)
    assert found.count("supported") >= 170
    assert found.count("refuted") <= 2


@settings(max_examples=25)
@given(st.floats(0.3, 3.0), st.integers(0, 10**6))
def test_turning_the_prediction_around_turns_the_verdict(ratio: float, seed: int) -> None:
    pairs = simulated({"batch_width": 3.0, "cpu_ns_per_output_token": ratio}, seed=seed)
    rises = replace(
        ONE_COST, predictions=(Prediction("cpu_ns_per_output_token", "rises", 0.05, 0.02),)
    )
    both = {decide(ONE_COST, pairs).outcome, decide(rises, pairs).outcome}
    assert both != {"supported"}
    if "supported" in both:
        assert both == {"supported", "refuted"}


# --- Metrics and symptom --------------------------------------------------------------------


def frames() -> tuple[pl.DataFrame, pl.DataFrame]:
    steps = pl.DataFrame(
        {
            "start_ns": [0, 10, 20, 30],
            "width": [2, 2, 2, 1],
            "prefill_tokens": [64, 0, 0, 0],
            "waiting": [2, 2, 1, 0],
            "kv_blocks_used": [4, 6, 6, 3],
            "kv_blocks_total": [10, 10, 10, 10],
            "cpu_ns": [100, 50, 50, 20],
        }
    )
    requests = pl.DataFrame(
        {
            "arrival_ns": [0, 0],
            "end_ns": [30, 40],
            "e2e_ns": [30, 40],
            "ttft_ns": [10, 30],
            "queue_ns": [2, 22],
            "output_tokens": [3, 5],
        }
    )
    return steps, requests


def test_metrics_of_a_run() -> None:
    assert measure(*frames()) == {
        "queue_ns_per_request": 12.0,
        "queue_steps_per_request": 2.5,
        "steps_per_output_token": 0.5,
        "cpu_ns_per_output_token": 27.5,
        "batch_width": 1.75,
        "prefill_tokens_per_request": 32.0,
        "ttft_ns_p50": 20.0,
        "e2e_ns_p50": 35.0,
        "wall_ns_per_output_token": 5.0,
    }


def test_what_is_not_told_is_left_out() -> None:
    steps, requests = frames()
    untold = requests.with_columns(queue_ns=pl.Series([None, 22]))
    found = measure(steps.with_columns(cpu_ns=pl.lit(None, pl.Int64)), untold)
    assert METRIC.keys() - found.keys() == {"queue_ns_per_request", "cpu_ns_per_output_token"}
    assert measure(steps, requests.clear()) == {}


def test_symptom() -> None:
    steps, requests = frames()
    observed = observe(steps, requests, slots=2)
    assert observed == {
        "queue_share_of_ttft": 0.6,
        "waiting_mean": 1.25,
        "slots_full_share": 0.75,
        "kv_used_peak": 0.6,
    }
    assert TOO_FEW_SLOTS.symptom_holds(observed) is True
    assert TOO_FEW_SLOTS.symptom_holds({**observed, "kv_used_peak": 0.95}) is False
    assert TOO_FEW_SLOTS.symptom_holds({**observed, "waiting_mean": None}) is None
    nothing = observe(steps.clear(), requests.clear(), slots=None)
    assert set(nothing.values()) == {None}
