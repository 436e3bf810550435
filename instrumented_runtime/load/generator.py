"""Built-in workloads: seeded samples that follow the published statistics of three traces.

azure-code  Azure LLM inference trace 2023, code: bursts of short gaps, then silence
mooncake    Mooncake conversation trace: sessions whose prompts grow and share prefixes
servegen    ServeGen deepseek-r1: many clients of unequal rate, burstiness and lengths

A distribution is a table of its quantiles, because no two-parameter family fits these: a gamma
fit of the Azure gaps reaches a CV of 2, the trace has 13. The numbers are statistics of the
public traces (Azure/AzurePublicDataset, CC-BY-4.0; kvcache-ai/Mooncake and alibaba/ServeGen,
Apache-2.0); no row of them is kept here.
"""

import bisect
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perfledger.instrumented_runtime.load.workload import NS_PER_S, Arrival, Workload
from perfledger.schema.errors import UsageError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

MAX_REQUESTS = 2_000_000


@dataclass(frozen=True)
class Quantiles:
    """A distribution by its quantiles (share, value), geometric in between."""

    points: tuple[tuple[float, float], ...]

    def at(self, shares: Floats) -> Floats:
        """Return the values below which these shares of the distribution lie."""
        known, values = zip(*self.points, strict=True)
        return np.exp(np.interp(shares, known, np.log(values)))

    def tokens(self, shares: Floats) -> Integers:
        """Return `at(shares)` as whole numbers of at least 1."""
        return np.maximum(1, np.rint(self.at(shares))).astype(np.int64)


def generate(name: str, requests: int, seed: int = 0) -> Workload:
    """Return `requests` arrivals of a built-in workload; the same seed gives the same ones.

    Raises UsageError for an unknown name or a number of requests that cannot be.
    """
    if name not in GENERATORS:
        raise UsageError(f"no built-in workload {name!r}", fix=f"one of {', '.join(GENERATORS)}")
    if not 1 <= requests <= MAX_REQUESTS:
        raise UsageError(f"cannot generate {requests} requests", fix=f"1 to {MAX_REQUESTS}")
    return GENERATORS[name](requests, np.random.default_rng([seed, 7]))


def _offsets_ns(gaps_s: Floats) -> list[int]:
    """Return arrival offsets, the first 0, from the gaps after it."""
    return [0, *np.rint(np.cumsum(gaps_s) * NS_PER_S).astype(np.int64).tolist()]


# --- Azure code ---------------------------------------------------------------------------

AZURE_INPUT = Quantiles(
    ((0, 3), (0.05, 75), (0.1, 147), (0.2, 386), (0.3, 770), (0.4, 1075), (0.5, 1469))
    + ((0.6, 1909), (0.7, 2433), (0.8, 3192), (0.9, 5188), (0.95, 7303), (0.97, 7435), (1, 7437))
)
AZURE_OUTPUT = Quantiles(
    ((0, 6), (0.05, 6), (0.25, 9), (0.5, 13), (0.75, 24), (0.9, 55), (0.95, 90))
    + ((0.98, 171), (0.99, 252), (0.995, 359), (0.999, 825), (1, 1899))
)
# A burst ends where no request comes for a second. Its gaps share a tempo, which gives the
# index of dispersion of 13 at 1 s (10 without).
AZURE_BURST_REQUESTS = Quantiles(
    ((0, 1), (0.1, 4), (0.25, 12), (0.5, 27), (0.75, 78), (0.9, 150), (0.95, 253), (1, 575))
)
AZURE_GAP_S = Quantiles(
    ((0, 6e-6), (0.1, 2e-4), (0.25, 2e-3), (0.5, 0.06), (0.75, 0.105), (0.9, 0.225))
    + ((0.95, 0.34), (0.99, 0.65), (1, 1.0))
)
AZURE_TEMPO_SIGMA = 0.5
AZURE_SILENCE_S = Quantiles(
    ((0, 1.0), (0.1, 1.13), (0.25, 1.7), (0.5, 3.13), (0.75, 18.0), (0.9, 49.2), (0.95, 87.6))
    + ((0.99, 172), (1, 217.2))
)


def _azure_code(requests: int, rng: np.random.Generator) -> Workload:
    gaps: list[Floats] = []
    made = 0
    while made < requests:
        burst = int(AZURE_BURST_REQUESTS.tokens(rng.random(1))[0])
        tempo = rng.lognormal(-(AZURE_TEMPO_SIGMA**2) / 2, AZURE_TEMPO_SIGMA)
        gaps.append(np.minimum(AZURE_GAP_S.at(rng.random(burst - 1)) * tempo, 1.0))
        gaps.append(AZURE_SILENCE_S.at(rng.random(1)))
        made += burst
    columns = zip(
        _offsets_ns(np.concatenate(gaps)[: requests - 1]),
        AZURE_INPUT.tokens(rng.random(requests)).tolist(),
        AZURE_OUTPUT.tokens(rng.random(requests)).tolist(),
        strict=True,
    )
    return Workload("generated", "azure-code", tuple(Arrival(*row) for row in columns))


# --- Mooncake conversation ----------------------------------------------------------------

MOONCAKE_RATE = 3.40  # requests a second
MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_INPUT = Quantiles(
    ((0, 891), (0.05, 901), (0.1, 964), (0.25, 2306), (0.5, 6909), (0.75, 15367), (0.9, 27367))
    + ((0.95, 39551), (0.98, 65500), (0.99, 85400), (1, 126195))
)
MOONCAKE_OUTPUT = Quantiles(
    ((0, 1), (0.05, 10), (0.1, 24), (0.15, 46), (0.25, 156), (0.35, 256), (0.5, 350))
    + ((0.75, 472), (0.9, 597), (0.95, 698), (0.98, 892), (0.99, 1119), (0.999, 2000), (1, 2000))
)
# The rate of a minute varies by this much: the index of dispersion of 2.8 at 60 s.
MOONCAKE_MINUTE_CV = 0.094
# How often a request carries on a session, and how much it prefers the longest that fits (0:
# always that one). Fitted to the reuse of leading blocks, 36.6 %; in the trace 39 % of requests
# carry on and repeat 21 blocks, here 40 % and 21.
MOONCAKE_CARRY_ON = 0.5
MOONCAKE_LONGEST = 0.1

Prompt = tuple[int, tuple[int, ...]]  # session, ids of its blocks


def _mooncake(requests: int, rng: np.random.Generator) -> Workload:
    offsets = _offsets_ns(_minutely_gaps(requests - 1, rng))
    inputs = MOONCAKE_INPUT.tokens(rng.random(requests)).tolist()
    outputs = MOONCAKE_OUTPUT.tokens(rng.random(requests)).tolist()
    prompts = _growing_prompts([-(-n // MOONCAKE_BLOCK_TOKENS) for n in inputs], rng)
    arrivals = (
        Arrival(at, asked, answered, blocks, session=f"session-{session}")
        for at, asked, answered, (session, blocks) in zip(
            offsets, inputs, outputs, prompts, strict=True
        )
    )
    return Workload(
        "generated",
        "mooncake",
        tuple(arrivals),
        MOONCAKE_BLOCK_TOKENS,
        notes=("arrivals are not on the 3 s grid of the trace",),
    )


def _minutely_gaps(gaps: int, rng: np.random.Generator) -> Floats:
    """Return gaps, s, of Poisson arrivals whose rate is drawn anew each minute."""
    minutes = int(gaps / (60 * MOONCAKE_RATE) * 1.5) + 10
    shape = 1 / MOONCAKE_MINUTE_CV**2
    rates = MOONCAKE_RATE * rng.gamma(shape, 1 / shape, minutes)
    expected = np.concatenate([[0.0], np.cumsum(rates * 60)])
    unit_arrivals = np.cumsum(rng.exponential(1.0, gaps))
    return np.diff(np.interp(unit_arrivals, expected, np.arange(minutes + 1) * 60.0), prepend=0.0)


def _growing_prompts(blocks: list[int], rng: np.random.Generator) -> list[Prompt]:
    """Give each prompt, of so many blocks, its session and the ids of its blocks.

    All prompts begin with block 0, the system prompt. One that carries on a session repeats all
    but the last, partly filled block of the session's newest prompt.
    """
    sessions: list[tuple[int, int, tuple[int, ...]]] = []  # newest prompts, sorted by blocks
    prompts: list[Prompt] = []
    next_block, next_session = 1, 0
    for needed, carry, pick in zip(blocks, *rng.random((2, len(blocks))).tolist(), strict=True):
        fitting = bisect.bisect_right(sessions, (needed, -1, ()))
        if fitting and carry < MOONCAKE_CARRY_ON:
            _, session, known = sessions.pop(int(fitting * pick**MOONCAKE_LONGEST))
            shared = known[:-1]
        else:
            session, shared, next_session = next_session, (0,), next_session + 1
        fresh = needed - len(shared)
        ids = (*shared, *range(next_block, next_block + fresh))
        next_block += fresh
        if needed > 2:  # shorter ones have nothing of their own to repeat
            bisect.insort(sessions, (needed, session, ids))
        prompts.append((session, ids))
    return prompts


# --- ServeGen deepseek-r1 -----------------------------------------------------------------

SERVEGEN_RATE = 16.0  # requests a second, mean of the day
SERVEGEN_CLIENTS = 73
SERVEGEN_RATE_EXPONENT = 1.196  # the largest client sends 28.6 %
SERVEGEN_MEAN_CV = 2.28  # of a client's gaps, weighted by its rate
SERVEGEN_WEIBULL_EVERY = 6  # 522 of 3,111 windows fit Weibull best, the others gamma
SERVEGEN_CV = Quantiles(((0, 0.56), (0.25, 1.0), (0.5, 1.3), (0.75, 3.4), (1, 8.0)))
SERVEGEN_INPUT = Quantiles(
    ((0, 4), (0.05, 20), (0.25, 60), (0.5, 208), (0.75, 450), (0.9, 1600), (0.95, 6714))
    + ((0.99, 23423), (1, 40000))
)
SERVEGEN_OUTPUT = Quantiles(
    ((0, 9), (0.05, 90), (0.25, 360), (0.5, 792), (0.75, 1420), (0.9, 3000), (0.95, 5701))
    + ((0.99, 12607), (1, 32768))
)
# Half of a client's lengths come from a band of its own. The bands tile the distribution by the
# clients' shares of the traffic, so that the mixture of all clients is the distribution itself.
SERVEGEN_OWN_BAND = 0.5


@dataclass(frozen=True)
class Client:
    """One client of the mixture: its share of the rate and the CV of its gaps."""

    share: float
    gap_cv: float
    weibull: bool


def servegen_clients() -> tuple[Client, ...]:
    """Return the clients of the servegen workload, the largest first."""
    ranks = np.arange(1.0, SERVEGEN_CLIENTS + 1)
    shares = ranks**-SERVEGEN_RATE_EXPONENT
    shares /= shares.sum()
    golden_ratio = (math.sqrt(5) - 1) / 2  # its multiples fill (0, 1) evenly, in no order
    cvs = SERVEGEN_CV.at(ranks * golden_ratio % 1)
    cvs *= SERVEGEN_MEAN_CV / float(shares @ cvs)
    return tuple(
        Client(share, cv, rank % SERVEGEN_WEIBULL_EVERY == 0)
        for rank, share, cv in zip(ranks.tolist(), shares.tolist(), cvs.tolist(), strict=True)
    )


def _servegen(requests: int, rng: np.random.Generator) -> Workload:
    clients = servegen_clients()
    until_s = 60 + 2 * requests / SERVEGEN_RATE
    times = [_client_times(client, until_s, rng) for client in clients]
    owners = np.repeat(np.arange(len(clients)), [len(each) for each in times])
    merged = np.concatenate(times)
    order = np.argsort(merged, kind="stable")[:requests]
    owners = owners[order]
    columns = zip(
        _offsets_ns(np.diff(merged[order])),
        SERVEGEN_INPUT.tokens(_banded_shares(clients, owners, 29, rng)).tolist(),
        SERVEGEN_OUTPUT.tokens(_banded_shares(clients, owners, 45, rng)).tolist(),
        owners.tolist(),
        strict=True,
    )
    return Workload(
        "generated",
        "servegen",
        tuple(
            Arrival(at, asked, answered, tenant=f"client-{owner:02d}")
            for at, asked, answered, owner in columns
        ),
        notes=("the rate is the mean of the trace's day, without its course over the day",),
    )


def _client_times(client: Client, until_s: float, rng: np.random.Generator) -> Floats:
    """Return a client's arrivals within [0, until_s), after a start that has been forgotten."""
    gap_s = 1 / (client.share * SERVEGEN_RATE)
    forgotten_s = 50 * gap_s
    times = np.zeros(0)
    start_s = 0.0
    while start_s < forgotten_s + until_s:
        draws = int((forgotten_s + until_s) / gap_s * 1.1) + 20
        times = np.concatenate([times, start_s + np.cumsum(_gaps(client, gap_s, draws, rng))])
        start_s = float(times[-1])
    return times[(times >= forgotten_s) & (times < forgotten_s + until_s)] - forgotten_s


def _gaps(client: Client, mean_s: float, draws: int, rng: np.random.Generator) -> Floats:
    if client.weibull:
        shape = _weibull_shape(client.gap_cv)
        return rng.weibull(shape, draws) * (mean_s / math.gamma(1 + 1 / shape))
    variance = client.gap_cv**2
    return rng.gamma(1 / variance, mean_s * variance, draws)


def _weibull_shape(cv: float) -> float:
    """Return the shape of the Weibull distribution with this CV, by bisection."""
    low, high = 0.1, 10.0
    for _ in range(60):
        shape = (low + high) / 2
        squared = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1
        low, high = (shape, high) if squared > cv**2 else (low, shape)
    return low


def _banded_shares(
    clients: tuple[Client, ...], owners: Integers, stride: int, rng: np.random.Generator
) -> Floats:
    """Return where in the distribution each request lies; the stride orders the clients' bands."""
    order = np.arange(len(clients)) * stride % len(clients)
    widths = np.array([clients[i].share for i in order])
    starts = np.empty(len(clients))
    starts[order] = np.cumsum(widths) - widths
    shares = np.array([client.share for client in clients])
    anywhere = rng.random(len(owners))
    within = starts[owners] + shares[owners] * rng.random(len(owners))
    return np.where(rng.random(len(owners)) < SERVEGEN_OWN_BAND, within, anywhere)


GENERATORS = {"azure-code": _azure_code, "mooncake": _mooncake, "servegen": _servegen}
