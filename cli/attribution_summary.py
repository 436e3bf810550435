"""How an attribution looks on one screen: the answer first, then the numbers behind it."""

from typing import TYPE_CHECKING

from perfledger.output import percent, print_table, rate, say

if TYPE_CHECKING:
    import polars as pl

    from perfledger.analyzers.attribution import Attribution, Band
    from perfledger.analyzers.completeness import Completeness
    from perfledger.analyzers.latency import Distribution

SLOWEST = 20  # requests listed without --jsonl
_SHARES = {
    "prefill": ("recompute",),
    "host_gap": ("schedule", "other_step", "rest"),
}
_SERVER = (("TTFT", "ttft_ns"), ("TTFC", "ttfc_ns"), ("ITL", "itl_ns"), ("E2E", "e2e_ns"))
_CLIENT = (
    *(("client TTFT", "ttft_ns"), ("  more than server", "ttft_difference_ns")),
    *(("    sending", "before_ns"), ("    first chunk", "first_chunk_ns")),
    *(("client E2E", "e2e_ns"), ("  more than server", "e2e_difference_ns")),
    ("    after the end", "after_ns"),
)


def print_attribution(found: "Attribution", band: str = "p95") -> None:
    """Print an attribution within 80 columns, explaining one band; undefined numbers are dashes."""
    _print_answer(found, found.bands[band])
    print()
    _print_stages(found, band)
    print()
    _print_latencies(found)
    print()
    _print_missing(found.completeness)
    say(
        f"share, tail: of {band}. tail: part of the difference to p50 (association, not cause). "
        "longest: requests that have it as longest. TTFT: arrival to end of first sample; TTFC: to "
        "first chunk written; ITL: gaps between a request's tokens, pooled; of ok requests. "
        "All definitions: --json."
    )


def print_slowest(requests: "pl.DataFrame") -> None:
    """Print the slowest requests, one a line."""
    slowest = requests.sort("e2e_ns", descending=True).head(SLOWEST)
    rows = [
        (
            row["trace_id"].hex(),
            _number(row["e2e_ns"]),
            _number(row["ttft_ns"]),
            row["longest"],
            percent(row[f"{row['longest']}_ns"] / row["e2e_ns"] if row["e2e_ns"] else None),
        )
        for row in slowest.iter_rows(named=True)
    ]
    title = f"the slowest {len(rows)} of {len(requests):,} requests (all: --jsonl)"
    print_table(title, ("trace", "E2E ms", "TTFT ms", "longest", "share"), rows)


def _print_answer(found: "Attribution", band: "Band") -> None:
    if band.longest is None or band.stages_ns is None or not band.e2e_ns:
        say("No request ended ok, so there is no band to explain.")
    else:
        share = percent(band.stages_ns[band.longest] / band.e2e_ns)
        few = ", too few to be a percentile" if band.too_few else ""
        count = f"{band.requests:,} request{'' if band.requests == 1 else 's'}"
        say(
            f"{band.name}: the longest stage is {band.longest}, {share} of "
            f"{_number(band.e2e_ns)} ms ({count}{few})"
        )
    if band.contributions:
        largest = sorted(band.contributions.items(), key=lambda part: -part[1])[:2]
        parts = ", ".join(f"{name} {percent(part)}" for name, part in largest if part > 0)
        say(f"  what is more than at p50: {parts}")
    outcomes = (
        f"{status} {count:,} (longest {_counts(found.longest_by_status[status])})"
        for status, count in found.statuses.items()
    )
    say(f"{found.selection}, {len(found.requests):,} requests: {'; '.join(outcomes)}")


def _counts(longest: dict[str, int]) -> str:
    ranked = sorted(longest.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count:,}" for name, count in ranked[:3])


def _print_stages(found: "Attribution", explained: str) -> None:
    """Print the mean of every stage, shares of a stage below it."""
    bands = list(found.bands.values())
    band = found.bands[explained]
    split = found.latency.ttft_stages_ns or {}
    rows: list[tuple[object, ...]] = []
    for stage in found.bands["p50"].stages_ns or {}:
        assert band.stages_ns is not None
        share = band.stages_ns[stage] / band.e2e_ns if band.e2e_ns else None
        tail = None if band.contributions is None else round(band.contributions[stage], 3) or 0.0
        times = [_number((b.stages_ns or {}).get(stage)) for b in bands]
        count = found.longest_of_requests.get(stage, 0)
        rows.append(
            (stage, *times, percent(share), percent(tail), _number(split.get(stage)), count)
        )
        for name in _SHARES.get(stage, ()):
            of = [_number((b.sub_stages_ns or {}).get(f"{stage}_{name}")) for b in bands]
            rows.append((f"  {name}", *of, "", "", "", ""))
    names = [f"{b.name}{'*' if b.too_few else ''}" for b in bands]
    columns = ("mean ms in", *names, "share", "tail", "TTFT", "longest")
    print_table("", columns, rows)
    if any(b.too_few for b in bands):
        sizes = ", ".join(f"{b.name} {b.requests}" for b in bands)
        print(f"* too few requests for a percentile ({sizes})")


def _print_latencies(found: "Attribution") -> None:
    rows = [_row(label, getattr(found.latency, name)) for label, name in _SERVER]
    if found.client is not None:
        rows += [_row(label, getattr(found.client, name)) for label, name in _CLIENT]
    print_table("", ("ms", "mean", "p50", "p95", "p99", "n"), rows)
    if found.client is None:
        print("client: no client spans")
    elif found.client.unmatched:
        print(f"client: {found.client.unmatched:,} client spans have no request in this store")
    print(f"output: {rate(found.latency.output_tokens_per_s, 'tokens/s')} of wall time")
    print(f"prompt: {rate(found.latency.prompt_tokens_per_s, 'tokens/s')} of time that prefill ran")


def _row(label: str, values: "Distribution") -> tuple[object, ...]:
    points = (values.mean, values.p50, values.p95, values.p99)
    return (label, *(_number(point) for point in points), values.n)


def _print_missing(completeness: "Completeness") -> None:
    """Print what is missing, or that nothing is known to be."""
    notes = completeness.losses()
    if completeness.without_steps:
        notes.append(f"{completeness.without_steps:,} ok requests have no engine step")
    if completeness.missing_spans:
        missing = (f"{name} {count:,}" for name, count in completeness.missing_spans.items())
        notes.append(f"ok requests without a span: {', '.join(missing)}")
    if completeness.untimed_tokens:
        notes.append(f"{completeness.untimed_tokens:,} output tokens without a time")
    if completeness.times_repaired:
        notes.append(f"{completeness.times_repaired:,} spans ended before they started")
    if completeness.unsettled:
        notes.append(f"{completeness.unsettled:,} requests are being derived again")
    if completeness.not_derived:
        notes.append(f"{completeness.not_derived:,} requests not in the table `requests` (yet)")
    say(f"missing: {'; '.join(notes) or 'nothing known'}")


def _number(ns: float | None) -> str:
    """Return ns as ms without the unit, with fewer decimals where it is long."""
    if ns is None:
        return "–"
    return f"{ns / 1e6:,.0f}" if ns >= 1e10 else f"{ns / 1e6:,.1f}"
