"""The tables of the store, declared once: Arrow schemas and docs/tables.md are made from these."""

import pyarrow as pa

from perfledger.schema.columns import Column, Table
from perfledger.schema.stages import STAGES
from perfledger.schema.step_work import COLUMN_MEANINGS

NS = pa.int64()
TEXT = pa.string()
COUNT = pa.int64()
TRACE_ID = pa.binary(16)
SPAN_ID = pa.binary(8)

# One value column per type: a key that is an int here and text there keeps both as they were.
KEY_VALUE = pa.struct(
    [
        pa.field("key", TEXT, nullable=False),
        pa.field("text", TEXT),
        pa.field("int", pa.int64()),
        pa.field("double", pa.float64()),
        pa.field("bool", pa.bool_()),
        pa.field("bytes", pa.binary()),
        pa.field("json", TEXT),
    ]
)
KEY_VALUES = pa.list_(KEY_VALUE)
EVENTS = pa.list_(
    pa.struct([pa.field("time_ns", NS), pa.field("name", TEXT), pa.field("attributes", KEY_VALUES)])
)
LINKS = pa.list_(
    pa.struct(
        [
            pa.field("trace_id", pa.binary()),
            pa.field("span_id", pa.binary()),
            pa.field("phase", TEXT),
            pa.field("tokens", COUNT),
            pa.field("attributes", KEY_VALUES),
        ]
    )
)
MEMBERS = pa.list_(
    pa.struct(
        [
            pa.field("trace_id", pa.binary()),
            pa.field("span_id", pa.binary()),
            pa.field("phase", TEXT),
            pa.field("tokens", COUNT),
        ]
    )
)

_SOURCE = (
    Column("run_id", TEXT, "the run that this belongs to, where the service said so"),
    Column("service_name", TEXT, "resource attribute service.name"),
)

_RESOURCE = Column(
    "resource_attributes",
    TEXT,
    "all other resource attributes as a JSON object, and the scope's as `otel.scope.<key>`; bytes "
    "are base64. One text for all rows of a resource, so it costs next to nothing",
)

SPANS = Table(
    "spans",
    "Spans as received, content removed. Promoted attributes have a column each, the rest are "
    "typed key/value pairs.",
    (
        Column("trace_id", TRACE_ID, "16 bytes", required=True),
        Column("span_id", SPAN_ID, "8 bytes", required=True),
        Column("parent_span_id", SPAN_ID, "null at the root"),
        Column("name", TEXT, "operation, of low cardinality", required=True),
        Column("kind", TEXT, "internal, server, client, producer or consumer", required=True),
        Column("start_ns", NS, "wall clock, ns since 1970", required=True),
        Column("end_ns", NS, "wall clock; never before start_ns", required=True),
        Column("time_repaired", pa.bool_(), "end before start, or one absent: set to the other"),
        Column("status", TEXT, "unset, ok or error"),
        Column("status_message", TEXT, "as sent; null where it repeats an exception's message"),
        *_SOURCE,
        Column("service_instance_id", TEXT, "resource attribute service.instance.id"),
        Column("boot_id", TEXT, "clock domain: spans with one boot id share a clock"),
        Column("scope_name", TEXT, "instrumentation scope"),
        Column("scope_version", TEXT, "its version; ours is the schema version"),
        Column("operation", TEXT, "gen_ai.operation.name"),
        Column("model", TEXT, "gen_ai.request.model"),
        Column("input_tokens", COUNT, "gen_ai.usage.input_tokens"),
        Column("cached_tokens", COUNT, "gen_ai.usage.cache_read.input_tokens"),
        Column("output_tokens", COUNT, "gen_ai.usage.output_tokens"),
        Column("reasoning_tokens", COUNT, "gen_ai.usage.reasoning.output_tokens"),
        Column("error_type", TEXT, "error.type"),
        Column("outcome", TEXT, "perfledger.status: ok, error, refused or aborted"),
        Column("tenant", TEXT, "perfledger.tenant"),
        Column("traffic_class", TEXT, "perfledger.class"),
        Column("session", TEXT, "perfledger.session"),
        Column("deadline_ms", COUNT, "perfledger.deadline_ms"),
        Column("ttfc_ns", NS, "perfledger.ttfc_ns: arrival to the first chunk written"),
        Column("reason", TEXT, "perfledger.reason"),
        Column("tokens", COUNT, "perfledger.tokens: computed by this span"),
        Column("replica", TEXT, "perfledger.replica"),
        Column("rank", pa.int32(), "perfledger.rank"),
        Column("step_seq", COUNT, "perfledger.step.seq"),
        Column("attributes", KEY_VALUES, "all other attributes"),
        _RESOURCE,
        Column("events", EVENTS, "span events; a client span has one `chunk` a chunk received"),
        Column("links", LINKS, "links; a step links the requests in its batch"),
        Column("trace_state", TEXT, "W3C tracestate"),
        Column("flags", pa.int64(), "W3C flags as sent"),
        Column("values_cut", pa.int32(), "values of this row that were too long and were cut"),
        Column("kept_share", pa.float64(), "share of such traces that sampling keeps; null: all"),
        Column("received_ns", NS, "arrival at the collector, wall clock", required=True),
    ),
    key=("trace_id", "span_id", "name", "start_ns", "end_ns"),
    sort=("trace_id", "start_ns"),
)

LOGS = Table(
    "logs",
    "Log records. Bodies are content and are dropped.",
    (
        Column("time_ns", NS, "wall clock", required=True),
        Column("trace_id", pa.binary(), "16 bytes, or null"),
        Column("span_id", pa.binary(), "8 bytes, or null"),
        Column("severity", pa.int32(), "OTLP severity number"),
        Column("body", TEXT, "null: bodies are content"),
        *_SOURCE,
        Column("attributes", KEY_VALUES, "attributes"),
        _RESOURCE,
        Column("received_ns", NS, "arrival at the collector", required=True),
    ),
    key=("time_ns", "trace_id", "span_id", "severity", "attributes", "resource_attributes"),
    sort=("time_ns",),
)

POINTS = Table(
    "points",
    "Metric points: OTLP metrics, scraped metrics, device and host samples.",
    (
        Column("time_ns", NS, "wall clock", required=True),
        Column("start_ns", NS, "start of the counted interval, for sums and histograms"),
        Column("name", TEXT, "metric name", required=True),
        Column("unit", TEXT, "UCUM unit as sent"),
        Column("kind", TEXT, "gauge, sum, histogram, exponential_histogram or summary"),
        Column("temporality", TEXT, "cumulative or delta, for sums and histograms"),
        Column("monotonic", pa.bool_(), "for sums"),
        Column("value", pa.float64(), "value of a gauge or sum; sum of a histogram"),
        Column("count", COUNT, "observations of a histogram"),
        Column("min", pa.float64(), "smallest observation, where sent"),
        Column("max", pa.float64(), "largest observation, where sent"),
        Column("bounds", pa.list_(pa.float64()), "upper bounds of the buckets"),
        Column("bucket_counts", pa.list_(pa.int64()), "observations per bucket"),
        *_SOURCE,
        Column("service_instance_id", TEXT, "resource attribute service.instance.id"),
        Column("attributes", KEY_VALUES, "attributes of the point"),
        _RESOURCE,
        Column("received_ns", NS, "arrival at the collector", required=True),
    ),
    # One name, time and process has a point for each set of attributes.
    key=(
        "name",
        "time_ns",
        "service_name",
        "service_instance_id",
        "attributes",
        "resource_attributes",
    ),
    sort=("name", "time_ns"),
)

STEPS = Table(
    "steps",
    "One row per engine step and rank, made from the step's span and its children.",
    (
        *_SOURCE,
        Column("replica", TEXT, "engine replica", required=True),
        Column("rank", pa.int32(), "rank within the replica", required=True),
        Column("step_seq", COUNT, "number of the step within the rank", required=True),
        Column("trace_id", TRACE_ID, "trace of the engine", required=True),
        Column("span_id", SPAN_ID, "span of the step", required=True),
        Column("kind", TEXT, "prefill_step, decode_step or mixed_step", required=True),
        Column("start_ns", NS, "start of its schedule child", required=True),
        Column("schedule_end_ns", NS, "end of its schedule child", required=True),
        Column("sample_start_ns", NS, "start of its sample child; null where it has none"),
        Column("sample_end_ns", NS, "end of its sample child; null where it has none"),
        Column("end_ns", NS, "end of the step", required=True),
        Column("width", pa.int32(), "sequences in the batch"),
        Column("prefill_tokens", COUNT, "prompt and recomputed tokens computed"),
        Column("decode_tokens", COUNT, "new tokens computed"),
        Column("waiting", COUNT, "requests waiting for admission"),
        Column("kv_blocks_used", COUNT, "KV blocks held"),
        Column("kv_blocks_total", COUNT, "KV blocks there are"),
        Column("cpu_ns", NS, "CPU time of the engine process since the last step that told it"),
        Column("members", MEMBERS, "the requests in the batch: trace, root span, phase, tokens"),
        Column("decode_context_tokens", COUNT, "tokens that decoding rows attend to, own included"),
        Column("decode_gathered_blocks", COUNT, "KV blocks gathered for them, padding included"),
        *(Column(name, COUNT, meaning) for name, meaning in COLUMN_MEANINGS.items()),
        Column("received_ns", NS, "arrival at the collector", required=True),
    ),
    key=("trace_id", "span_id"),
    sort=("replica", "rank", "step_seq"),
)

REQUESTS = Table(
    "requests",
    "One row per request, derived from its spans and its engine's steps about 5 s after its root "
    "ended. A late span makes a newer version; the reader shows the newest. The stage columns "
    "are integers of ns that add up to e2e_ns exactly.",
    (
        Column("trace_id", TRACE_ID, "trace of the request", required=True),
        Column("span_id", SPAN_ID, "server root of the request", required=True),
        *_SOURCE,
        Column("replica", TEXT, "engine replica that computed it"),
        Column("operation", TEXT, "chat, text_completion or generate_content"),
        Column("model", TEXT, "model asked for"),
        Column("tenant", TEXT, "customer of the service"),
        Column("traffic_class", TEXT, "traffic class"),
        Column("session", TEXT, "conversation"),
        Column("deadline_ms", COUNT, "deadline given by the caller"),
        Column("status", TEXT, "ok, error, refused or aborted", required=True),
        Column("error_type", TEXT, "class of the error"),
        Column("input_tokens", COUNT, "prompt tokens"),
        Column("cached_tokens", COUNT, "prompt tokens from the prefix cache"),
        Column("output_tokens", COUNT, "tokens sampled"),
        Column("reasoning_tokens", COUNT, "reasoning tokens among them"),
        Column("arrival_ns", NS, "start of the root, wall clock", required=True),
        Column("end_ns", NS, "end of the root", required=True),
        Column("e2e_ns", NS, "end minus arrival", required=True),
        Column("ttft_ns", NS, "arrival to the end of the first sample; null if never sampled"),
        Column("ttfc_ns", NS, "arrival to the first chunk written; null where not told"),
        Column("longest", TEXT, "the longest stage", required=True),
        *(
            Column(f"{stage.name}_ns", NS, f"stage: {stage.meaning}", required=True)
            for stage in STAGES
        ),
        *(
            Column(f"{stage.name}_{sub}_ns", NS, f"share of {stage.name}: {sub}", required=True)
            for stage in STAGES
            for sub in stage.sub_stages
        ),
        Column("steps", pa.int32(), "engine steps that held a token of it"),
        Column("preemptions", pa.int32(), "waits in the queue after the first"),
        Column("token_times_ns", pa.list_(NS), "wall clock at which each token was sampled"),
        Column("version", pa.int32(), "1, and one more for each rewrite", required=True),
        Column("received_ns", NS, "when this row was derived", required=True),
    ),
    key=("trace_id", "span_id"),
    sort=("trace_id", "arrival_ns"),
)

RUNS = Table(
    "runs",
    "One row per recorded run: its manifest, raw samples and verdict, as JSON.",
    (
        Column("run_id", TEXT, "id of the run", required=True),
        Column("kind", TEXT, "record, load, rerun, import or ceilings", required=True),
        Column("created_ns", NS, "wall clock", required=True),
        Column("manifest", TEXT, "manifest, canonical JSON"),
        Column("manifest_hash", TEXT, "sha256 of the manifest"),
        Column("samples", TEXT, "raw samples, JSON"),
        Column("verdict", TEXT, "verdict with its evidence, JSON"),
        Column("received_ns", NS, "when this row was written", required=True),
    ),
    key=("run_id",),
    sort=("created_ns",),
)

COLLECTIVES = Table(
    "collectives",
    "One row per collective or point-to-point call and rank, made from its span. Waiting and "
    "transfer follow from the rows of all ranks, which come apart: they are computed when read.",
    (
        *_SOURCE,
        Column("replica", TEXT, "engine replica or job", required=True),
        Column("rank", pa.int32(), "rank", required=True),
        Column("dimension", TEXT, "parallel dimension: tp, pp, dp, fsdp, cp, ep or world"),
        Column("group", TEXT, "process group, named after its use", required=True),
        Column("members", TEXT, "ranks in the group, like 0-3 or 1-7:2"),
        Column("ranks", pa.int32(), "how many those are"),
        Column("sequence", COUNT, "number of the call in its group, from 0", required=True),
        Column("op", TEXT, "all_reduce, all_gather, reduce_scatter, send, …", required=True),
        Column("peer", pa.int32(), "rank at the other end of a send or recv, or a root"),
        Column("dtype", TEXT, "of the elements; null of a barrier"),
        Column("bytes", COUNT, "bytes of the message: nccl-tests' S, the whole of what is shared"),
        Column("wire_bytes", COUNT, "bytes that this rank sent, by the backend's algorithm"),
        Column("step_seq", COUNT, "engine or training step that it ran in; null outside of any"),
        Column("trace_id", TRACE_ID, "trace of the engine", required=True),
        Column("span_id", SPAN_ID, "span of the call", required=True),
        Column("parent_span_id", SPAN_ID, "span of the step"),
        Column("enqueue_ns", NS, "call", required=True),
        Column("start_ns", NS, "start on the device; null where not observable, as on gloo"),
        Column("end_ns", NS, "completion; null where nobody waited for it"),
        Column("received_ns", NS, "arrival at the collector", required=True),
    ),
    key=("trace_id", "span_id"),
    sort=("group", "sequence", "rank"),
)

KERNELS = Table(
    "kernels",
    "Imported device activity (not yet filled).",
    (
        Column("run_id", TEXT, "run", required=True),
        Column("rank", pa.int32(), "rank", required=True),
        Column("device", TEXT, "device", required=True),
        Column("stream", COUNT, "stream"),
        Column("category", TEXT, "kernel, memcpy, memset or sync", required=True),
        Column("name", TEXT, "kernel name", required=True),
        Column("start_ns", NS, "start", required=True),
        Column("end_ns", NS, "end", required=True),
        Column("bytes", COUNT, "bytes copied"),
        Column("received_ns", NS, "when imported", required=True),
    ),
    key=("run_id", "rank", "device", "stream", "start_ns", "name"),
    sort=("rank", "start_ns"),
)

TABLES: dict[str, Table] = {
    table.name: table
    for table in (SPANS, LOGS, POINTS, STEPS, REQUESTS, RUNS, COLLECTIVES, KERNELS)
}


def reference() -> str:
    """Return docs/tables.md."""
    head = "# Tables\n\nMade from schema/tables.py. Times are integers of ns since 1970.\n\n"
    return head + "\n".join(table.markdown() for table in TABLES.values())
