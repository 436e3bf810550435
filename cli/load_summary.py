"""How `perfledger load` shows a run: lengths, outcomes, latencies, rates, and what to doubt."""

import textwrap
from dataclasses import fields
from typing import TYPE_CHECKING

from perfledger.output import WIDTH, ms, percent, print_table, rate

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.load.plan import LoadResult
    from perfledger.instrumented_runtime.load.summary import LoadSummary, Metric
    from perfledger.instrumented_runtime.load.workload import Scaling, Spread

LATENCIES = {
    "ttft_ns": "TTFT",
    "ttft_from_schedule_ns": "TTFT, from schedule",
    "ttfo_ns": "TTFO",
    "itl_ns": "ITL (chunk gaps)",
    "e2e_ns": "E2E",
    "e2e_from_schedule_ns": "E2E, from schedule",
    "lateness_ns": "client: sent late by",
    "loop_lag_ns": "client: woke up late by",
}
FOOTNOTES = """\
TTFT, TTFO, E2E run from the real send to the first chunk with text, the first
with answer text (no reasoning), the last with text. Ok requests only, without
warm-up. ITL: gaps between chunks, pooled; a chunk may hold several tokens."""


def print_summary(summary: "LoadSummary", store: str) -> None:
    """Print a run within 80 columns; undefined numbers are dashes."""
    _say(f"run {summary.run_id}: {summary.model} at {summary.url} ({summary.endpoint})")
    _print_workload(summary)
    counts = [("ok", summary.ok), *((f"failed: {kind}", n) for kind, n in summary.failed.items())]
    if summary.aborted:
        counts.append(("cut by the end of the run", summary.aborted))
    if summary.unsent:
        counts.append(("not sent", summary.unsent))
    counts.append(("warm-up (not below)", summary.warm_up))
    print_table("", ("requests", "count"), counts)
    print()
    shown = {
        k: label for k, label in LATENCIES.items() if k != "ttfo_ns" or _has_reasoning(summary)
    }
    rows = [_metric_row(label, summary.metrics[name]) for name, label in shown.items()]
    print_table("", ("latency", "mean", "p50", "p95", "p99", "n"), rows)
    print(FOOTNOTES)
    print()
    achieved, asked = rate(summary.rate_achieved, "req/s"), rate(summary.rate_asked, "req/s")
    _say(f"rate {achieved}, asked for {asked}; {_throughput(summary)}")
    _print_warnings(summary)
    _say(f"samples kept in {store}")


def _print_workload(summary: "LoadSummary") -> None:
    asked = summary.asked
    burstiness = "" if asked.gap_cv is None else f", CV of gaps {asked.gap_cv:.1f}"
    empty = "" if not asked.empty_seconds else f", {percent(asked.empty_seconds)} of seconds empty"
    _say(
        f"workload {summary.workload} {summary.workload_source}, {asked.requests} requests in "
        f"{asked.span_s:,.1f} s{burstiness}{empty}"
    )
    factors = _factors(summary.scaling)
    _say(f"  scaled by {factors}; seed {summary.seed}" if factors else f"  seed {summary.seed}")
    for note in summary.workload_notes:
        _say(f"  note: {note}")
    print()
    rows = [
        _length_row("prompt, asked", asked.input_tokens),
        _length_row("prompt, as served", summary.realised_input_tokens),
        _length_row("answer, asked", asked.output_tokens),
        _length_row("answer, as served", summary.realised_output_tokens),
    ]
    print_table("", ("tokens", "mean", "p50", "p95", "max"), rows)
    if summary.calibration is not None:
        how = "from two probes" if summary.calibration.probed else "assumed: no usage was sent"
        print(
            f"  {summary.calibration.tokens_per_word:.2f} tokens a word, "
            f"{summary.calibration.overhead_tokens:.0f} of template ({how})"
        )
    print()


def _say(text: str) -> None:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    lines = textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    print("\n".join(lines))


def _factors(scaling: "Scaling") -> str:
    values = {
        field.name: (getattr(scaling, field.name), field.default) for field in fields(scaling)
    }
    return ", ".join(
        name.replace("_", "-") + ("" if value is True else f" {value:g}")
        for name, (value, default) in values.items()
        if value != default
    )


def _length_row(label: str, lengths: "Spread | None") -> tuple[object, ...]:
    if lengths is None:
        return (label, None, None, None, None)
    values = (lengths.mean, lengths.p50, lengths.p95, lengths.maximum)
    return (label, *(f"{value:,.0f}" for value in values))


def _metric_row(label: str, metric: "Metric") -> tuple[object, ...]:
    return (label, ms(metric.mean), ms(metric.p50), ms(metric.p95), ms(metric.p99), metric.n)


def _has_reasoning(summary: "LoadSummary") -> bool:
    return summary.metrics["ttfo_ns"] != summary.metrics["ttft_ns"]


def _throughput(summary: "LoadSummary") -> str:
    if summary.usage_missing:
        return f"output tokens/s unknown: no usage in {summary.usage_missing} answers"
    if summary.window_s is None:
        return "output tokens/s undefined: no request succeeded"
    speed = rate(summary.output_tokens_per_s, "output tokens/s")
    return f"{speed} over {summary.window_s:,.1f} s"


def _print_warnings(summary: "LoadSummary") -> None:
    if summary.ended == "server_gone":
        print(f"the server has gone: {summary.unsent} requests were not sent")
    if summary.ended == "interrupted":
        print("interrupted: what was measured until then is kept")
    if summary.client_is_bottleneck:
        print("warning: this client was late by over 10 ms (p99): it shapes these numbers")
    if 0 < summary.ok < 100:
        print(f"note: p99 of {summary.ok} requests is near their maximum")


def print_failures(result: "LoadResult") -> None:
    """Print one example of each kind of failure; its text goes nowhere else."""
    examples = {sample.error: sample.detail for sample in result.measured if sample.detail}
    for kind, detail in examples.items():
        print(f"{kind}, for example: {' '.join(detail.split())}"[:240])
