"""The built-in workloads reproduce the published statistics of their traces, within tolerances.

Published: benchmarks of the traces themselves (requests, CV of gaps, index of dispersion, mean,
p50, p95, p99 of lengths). Samples are large and seeded, so the tests are deterministic.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from perfledger.instrumented_runtime.load.formats import read_workload
from perfledger.instrumented_runtime.load.generator import (
    SERVEGEN_CLIENTS,
    Quantiles,
    generate,
    servegen_clients,
)
from perfledger.instrumented_runtime.load.workload import Spread, Workload, describe
from perfledger.schema.errors import UsageError

S = 1_000_000_000
NAMES = ("azure-code", "mooncake", "servegen")


@dataclass(frozen=True)
class Published:
    """Mean, p50, p95, p99 of lengths, and requests a second."""

    rate: float
    input_tokens: tuple[float, float, float, float]
    output_tokens: tuple[float, float, float, float]


PUBLISHED = {
    "azure-code": Published(2.57, (2048, 1469, 7303, 7436), (27.9, 13, 90, 252)),
    "mooncake": Published(3.40, (12035, 6909, 39551, 85400), (343, 350, 698, 1119)),
    "servegen": Published(16.0, (1268, 208, 6714, 23423), (1527, 792, 5701, 12607)),
}


def statistics(lengths: Spread) -> tuple[float, float, float, float]:
    return (lengths.mean, lengths.p50, lengths.p95, lengths.p99)


def gaps(workload: Workload) -> np.ndarray:
    return np.diff([arrival.offset_ns for arrival in workload.arrivals])


def dispersion(workload: Workload, window_s: float) -> float:
    """Index of dispersion: variance over mean of the requests in windows of one length."""
    offsets = np.array([arrival.offset_ns for arrival in workload.arrivals])
    counts = np.bincount((offsets / S // window_s).astype(int))[:-1]
    return float(counts.var() / counts.mean())


@pytest.mark.parametrize("name", NAMES)
def test_lengths_are_as_published(name: str) -> None:
    facts = describe(generate(name, 50_000, seed=1))
    assert statistics(facts.input_tokens) == pytest.approx(PUBLISHED[name].input_tokens, rel=0.05)
    assert statistics(facts.output_tokens) == pytest.approx(PUBLISHED[name].output_tokens, rel=0.06)


@pytest.mark.parametrize(("name", "tolerance"), [("azure-code", 0.12), ("mooncake", 0.03)])
def test_the_rate_is_as_published(name: str, tolerance: float) -> None:
    # Over five seeds: silences of minutes make one sample of the Azure rate vary by a tenth.
    rates = [generate(name, 20_000, seed).rate for seed in range(5)]
    assert np.mean(rates) == pytest.approx(PUBLISHED[name].rate, rel=tolerance)


def test_azure_code_is_as_bursty_as_published() -> None:
    workload = generate("azure-code", 100_000, seed=1)
    facts = describe(workload)
    assert facts.gap_cv == pytest.approx(13.15, rel=0.1)
    assert facts.empty_seconds == pytest.approx(0.734, abs=0.03)
    assert dispersion(workload, 1) == pytest.approx(13.2, rel=0.15)
    assert dispersion(workload, 60) == pytest.approx(160.5, rel=0.2)
    silences = gaps(workload) > 10 * S
    assert silences.sum() * 8819 / 100_000 == pytest.approx(45, rel=0.15)
    assert gaps(workload).max() <= 218 * S


def test_mooncake_arrives_and_shares_prefixes_as_published() -> None:
    workload = generate("mooncake", 12_031, seed=1)
    assert workload.notes == ("arrivals are not on the 3 s grid of the trace",)
    assert describe(workload).gap_cv == pytest.approx(1.0, abs=0.1)
    assert describe(workload).leading_reuse == pytest.approx(0.366, abs=0.015)
    assert dispersion(workload, 60) == pytest.approx(2.8, rel=0.25)
    on_grid = np.diff([a.offset_ns // (3 * S) * 3 for a in workload.arrivals])
    assert on_grid.std() / on_grid.mean() == pytest.approx(3.03, rel=0.03)
    assert (on_grid == 0).mean() == pytest.approx(0.90, abs=0.01)


def test_mooncake_prompts_grow_within_their_session() -> None:
    newest: dict[str, tuple[int, ...]] = {}
    for arrival in generate("mooncake", 2_000, seed=1).arrivals:
        blocks = arrival.prefix_ids
        assert len(blocks) == len(set(blocks)) == -(-arrival.input_tokens // 512)
        carried = newest.get(arrival.session, (0, -1))[:-1]
        assert blocks[: len(carried)] == carried
        newest[arrival.session] = blocks


def test_servegen_is_a_mixture_of_unequal_clients() -> None:
    clients = servegen_clients()
    workload = generate("servegen", 100_000, seed=1)
    times: dict[str, list[int]] = {}
    for arrival in workload.arrivals:
        times.setdefault(arrival.tenant, []).append(arrival.offset_ns)
    cvs = {
        tenant: float(np.std(np.diff(at)) / np.mean(np.diff(at)))
        for tenant, at in times.items()
        if len(at) > 2
    }
    weighted = sum(len(times[tenant]) * cv for tenant, cv in cvs.items()) / sum(
        len(times[tenant]) for tenant in cvs
    )
    assert len(times) == len(clients) == SERVEGEN_CLIENTS
    assert len(times["client-00"]) / 100_000 == pytest.approx(0.286, rel=0.05)
    assert weighted == pytest.approx(2.28, rel=0.05)
    assert sum(client.weibull for client in clients) / len(clients) == pytest.approx(
        522 / 3111, abs=0.01
    )
    assert sum(client.share for client in clients) == pytest.approx(1)
    assert workload.rate == pytest.approx(16.0, rel=0.1)


def test_servegen_clients_have_lengths_of_their_own() -> None:
    inputs: dict[str, list[int]] = {}
    for arrival in generate("servegen", 50_000, seed=1).arrivals:
        inputs.setdefault(arrival.tenant, []).append(arrival.input_tokens)
    medians = sorted(float(np.median(values)) for values in inputs.values() if len(values) > 100)
    assert medians[-1] > 10 * medians[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_names_one_workload(name: str) -> None:
    first, again, other = (generate(name, 300, seed) for seed in (5, 5, 6))
    offsets = [arrival.offset_ns for arrival in first.arrivals]
    assert first == again
    assert first.sha256() == again.sha256() != other.sha256()
    assert len(offsets) == 300
    assert offsets[0] == 0
    assert all(earlier <= later for earlier, later in pairwise(offsets))


@pytest.mark.parametrize("name", NAMES)
def test_one_request_is_enough(name: str) -> None:
    assert [arrival.offset_ns for arrival in generate(name, 1).arrivals] == [0]


@pytest.mark.parametrize(
    ("name", "requests"), [("azure", 10), ("servegen", 0), ("servegen", 10**9)]
)
def test_what_cannot_be_generated_is_refused(name: str, requests: int) -> None:
    with pytest.raises(UsageError):
        generate(name, requests)


def test_quantiles_give_their_own_points_back() -> None:
    table = Quantiles(((0, 1), (0.5, 10), (1, 1000)))
    assert table.at(np.array([0, 0.25, 0.5, 0.75, 1])).tolist() == pytest.approx(
        [1, 10**0.5, 10, 100, 1000]
    )


@pytest.mark.parametrize(
    ("name", "file"),
    [("azure-code", "azure_llm_2023_code.csv"), ("mooncake", "mooncake_conversation.jsonl")],
)
def test_generated_lengths_follow_the_public_file(shared_data: Path, name: str, file: str) -> None:
    real = read_workload(shared_data / "workloads" / file)
    made = generate(name, len(real.arrivals), seed=2)
    for field in ("input_tokens", "output_tokens"):
        a, b = (np.sort([getattr(x, field) for x in w.arrivals]) for w in (real, made))
        everywhere = np.union1d(a, b)
        below = [np.searchsorted(x, everywhere, side="right") / len(x) for x in (a, b)]
        # Kolmogorov-Smirnov distance; lognormal fits of these reach 0.11 to 0.18.
        assert np.abs(below[0] - below[1]).max() < 0.06


def test_generated_clients_vary_as_the_public_ones_do(shared_data: Path) -> None:
    windows = [
        line.split(",")
        for path in (shared_data / "workloads" / "servegen_deepseek_r1").glob("*-trace.csv")
        for line in path.read_text().splitlines()
    ]
    public = [float(cells[2]) for cells in windows if cells[3]]
    ours = [client.gap_cv for client in servegen_clients()]
    assert min(public) <= min(ours)
    assert max(ours) <= max(public)
    assert {cells[3] for cells in windows if cells[3]} == {"Gamma", "Weibull"}
