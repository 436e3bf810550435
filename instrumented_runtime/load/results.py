"""A load run into the store: a client span a request, and one row that says what was run."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import pyarrow as pa

from perfledger.instrumented_runtime.load.plan import CHANNELS, OUTPUT, LoadResult, Sample
from perfledger.instrumented_runtime.load.summary import summarise
from perfledger.schema.attributes import SCHEMA_VERSION
from perfledger.schema.manifest import Manifest, canonical_json
from perfledger.schema.redaction import redact_text
from perfledger.schema.store import Store
from perfledger.schema.tables import RUNS, SPANS

SERVICE_NAME = "perfledger-load"
SCOPE = "perfledger.load"
OPERATIONS = {"chat": "chat", "completions": "text_completion"}
# Chunks that become one file: bounds the memory of the conversion.
CHUNKS_A_FILE = 200_000

KeyValue = dict[str, object]

# Most chunks hold output, so only the others say what they hold.
_CHANNEL_ATTRIBUTES: dict[str, list[KeyValue]] = {
    letter: [{"key": "perfledger.client.channel", "text": name}] if letter != OUTPUT else []
    for letter, name in CHANNELS.items()
}


def write_result(store: Store, result: LoadResult) -> None:
    """Write all samples, warm-up and failed ones too, and the row of the run; durable on return.

    Neither prompts nor answers nor errors' texts are written.
    """
    for batch in _batches(result.samples):
        store.write("spans", spans_table(result, batch))
    store.write("runs", _run_table(result))


def spans_table(result: LoadResult, samples: Sequence[Sample]) -> pa.Table:
    """Return the client spans of samples: times on the wall clock through the run's one anchor."""
    received_ns = time.time_ns()
    return SPANS.from_rows(_span(result, sample, received_ns) for sample in samples)


def _batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    chunks = 0
    for sample in samples:
        batch.append(sample)
        chunks += len(sample.chunk_ns) + 1
        if chunks >= CHUNKS_A_FILE:
            yield batch
            batch, chunks = [], 0
    if batch:
        yield batch


def _span(result: LoadResult, sample: Sample, received_ns: int) -> dict[str, object]:
    wall, arrival = result.anchor.to_wall_ns, sample.arrival
    operation = OPERATIONS[result.plan.endpoint]
    return {
        "trace_id": sample.trace_id,
        "span_id": sample.span_id,
        "name": operation,
        "kind": "client",
        "start_ns": wall(sample.sent_ns),
        "end_ns": wall(sample.end_ns),
        "status": "error" if sample.error else "ok",
        "run_id": result.plan.run_id or None,
        "service_name": SERVICE_NAME,
        "boot_id": result.anchor.boot_id,
        "scope_name": SCOPE,
        "scope_version": SCHEMA_VERSION,
        "operation": operation,
        "model": result.model,
        "input_tokens": sample.input_tokens,
        "cached_tokens": sample.cached_tokens,
        "output_tokens": sample.output_tokens,
        "reasoning_tokens": sample.reasoning_tokens,
        "error_type": sample.error or None,
        "outcome": sample.outcome,
        "tenant": arrival.tenant or None,
        "traffic_class": arrival.traffic_class or None,
        "session": arrival.session or None,
        "deadline_ms": arrival.deadline_ms,
        "attributes": _attributes(result, sample),
        "events": [
            {"time_ns": wall(at_ns), "name": "chunk", "attributes": _of_chunk(channel, choice)}
            for at_ns, channel, choice in zip(
                sample.chunk_ns, sample.channels, sample.choices, strict=True
            )
        ],
        "received_ns": received_ns,
    }


def _of_chunk(channel: str, choice: int) -> list[KeyValue] | None:
    of_choice = [_int("perfledger.client.choice", choice)] if choice else []
    return [*_CHANNEL_ATTRIBUTES[channel], *of_choice] or None


def _attributes(result: LoadResult, sample: Sample) -> list[KeyValue]:
    found = [
        _int("perfledger.client.index", sample.index),
        {"key": "perfledger.client.warmup", "bool": sample.warm_up},
        _int("perfledger.client.scheduled_ns", result.anchor.to_wall_ns(sample.scheduled_ns)),
        _int("perfledger.client.lateness_ns", sample.lateness_ns),
        _int("perfledger.client.input_tokens", sample.arrival.input_tokens),
        _int("gen_ai.request.max_tokens", sample.arrival.output_tokens),
        {"key": "gen_ai.request.stream", "bool": True},
    ]
    if result.plan.n > 1:
        found.append(_int("gen_ai.request.choice.count", result.plan.n))
    if sample.arrival.priority is not None:
        found.append(_int("perfledger.priority", sample.arrival.priority))
    if sample.http_status is not None:
        found.append(_int("http.response.status_code", sample.http_status))
    if sample.response_id:
        found.append(_text("gen_ai.response.id", sample.response_id))
    if sample.finish_reason:
        reasons = canonical_json([sample.finish_reason])
        found.append({"key": "gen_ai.response.finish_reasons", "json": reasons})
    return found


def _int(key: str, value: int) -> KeyValue:
    return {"key": key, "int": value}


def _text(key: str, value: str) -> KeyValue:
    return {"key": key, "text": value}


def _run_table(result: LoadResult) -> pa.Table:
    manifest = load_manifest(result)
    summary = asdict(summarise(result)) | {"url": redact_text(result.plan.url)}
    row = {
        "run_id": result.plan.run_id,
        "kind": "load",
        "created_ns": result.anchor.to_wall_ns(result.started_ns),
        "manifest": manifest.to_json(),
        "manifest_hash": manifest.hash(),
        "samples": canonical_json(summary),
        "received_ns": time.time_ns(),
    }
    return RUNS.from_rows([row])


def load_manifest(result: LoadResult) -> Manifest:
    """Return what the client knows of the run; what it cannot know of the server stays unknown."""
    plan, workload = result.plan, result.plan.workload
    stops = "ignore_eos" if plan.ignore_eos else "respect eos"
    answers = f", n {plan.n}" if plan.n > 1 else ""
    return Manifest.of(
        {
            "model.name": result.model,
            "workload.hash": workload.sha256(),
            "workload.requests": len(workload.arrivals),
            "workload.prompt_tokens": sum(a.input_tokens for a in workload.arrivals),
            "workload.output_limit": sum(a.output_tokens for a in workload.arrivals),
            "workload.arrival": f"{workload.name} {workload.source}",
            "workload.sampling": f"temperature {plan.temperature:g}, {stops}{answers}",
            "workload.seed": plan.seed,
            "method.warm_up": f"{plan.warm_up} requests, one by one",
            "run.id": plan.run_id,
            "run.started_ns": result.anchor.to_wall_ns(result.started_ns),
            "run.url": plan.url,
        }
    )
