"""The metrics of our runtime, declared once: the exporter's instruments and docs/metrics.md.

Counters are cumulative since the exporter started. A gauge is the value at the last engine step,
and is not sent when no step ran since the last time: an idle engine says nothing, not an old value.
Counters are sums over all replicas and ranks; a gauge is of one replica, and names it in
perfledger.replica where there are several.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from perfledger.schema.attributes import Attribute


@dataclass(frozen=True)
class Metric:
    """One metric. `kind` is gauge or counter, `unit` a UCUM unit, `attribute` splits its values."""

    name: str
    kind: str
    unit: str
    meaning: str
    attribute: str = ""


QUEUE_LENGTH = Metric("perfledger.queue.length", "gauge", "{request}", "waiting for admission")
BATCH_WIDTH = Metric("perfledger.batch.width", "gauge", "{sequence}", "sequences in the batch")
KV_BLOCKS_USED = Metric("perfledger.kv.blocks.used", "gauge", "{block}", "KV blocks held")
KV_BLOCKS_TOTAL = Metric("perfledger.kv.blocks.total", "gauge", "{block}", "KV blocks there are")
# The capacity ledger of each rank, told with the gauges of its steps.
CAPACITY_MEMORY = Metric("perfledger.capacity.memory", "gauge", "By", "memory of the device")
CAPACITY_WEIGHTS = Metric("perfledger.capacity.weights", "gauge", "By", "held by weights")
CAPACITY_KV = Metric("perfledger.capacity.kv", "gauge", "By", "held by the KV cache")
CAPACITY_ACTIVATIONS = Metric(
    "perfledger.capacity.activations", "gauge", "By", "held by the largest step, as computed"
)
CAPACITY_SWAP = Metric("perfledger.capacity.swap", "gauge", "By", "host memory for swapped KV")
CAPACITY = (CAPACITY_MEMORY, CAPACITY_WEIGHTS, CAPACITY_KV, CAPACITY_ACTIVATIONS, CAPACITY_SWAP)
STEPS = Metric("perfledger.steps", "counter", "{step}", "engine steps")
ENGINE_CPU = Metric("perfledger.engine.cpu", "counter", "ns", "CPU time of the engine process")
TOKENS = Metric(
    "perfledger.tokens",
    "counter",
    "{token}",
    "prompt tokens admitted (input), found in the prefix cache (cached), sampled (output)",
    "gen_ai.token.type",
)
RECOMPUTED_TOKENS = Metric(
    "perfledger.tokens.recomputed", "counter", "{token}", "computed again after a preemption"
)
PREEMPTIONS = Metric("perfledger.preemptions", "counter", "{preemption}", "requests put back")
KV_EVENTS = Metric(
    "perfledger.kv.events",
    "counter",
    "{block}",
    "KV blocks stored in the prefix cache, evicted from it, copied on a write, swapped",
    "perfledger.kv.event",
)
OUT_OF_MEMORY = Metric(
    "perfledger.out_of_memory", "counter", "{request}", "requests ended because memory ran out"
)
REQUESTS = Metric(
    "perfledger.requests", "counter", "{request}", "finished, by how", "perfledger.status"
)
ERRORS = Metric("perfledger.errors", "counter", "{request}", "ended by an error", "error.type")
ABORTS = Metric("perfledger.aborts", "counter", "{request}", "aborted, by why", "perfledger.reason")
TELEMETRY_EXPORTED = Metric(
    "perfledger.telemetry.exported", "counter", "{span}", "spans a collector accepted"
)
TELEMETRY_LOST = Metric(
    "perfledger.telemetry.lost",
    "counter",
    "{item}",
    "lost: engine records to a full ring, request records to a full socket, spans to a "
    "collector that is slow or away, engine records of a request that is not known (unmatched)",
    "perfledger.telemetry.where",
)
LOST_WHERE = ("ring", "socket", "export", "unmatched")

METRICS: tuple[Metric, ...] = (
    QUEUE_LENGTH,
    BATCH_WIDTH,
    KV_BLOCKS_USED,
    KV_BLOCKS_TOTAL,
    *CAPACITY,
    STEPS,
    ENGINE_CPU,
    TOKENS,
    RECOMPUTED_TOKENS,
    PREEMPTIONS,
    KV_EVENTS,
    OUT_OF_MEMORY,
    REQUESTS,
    ERRORS,
    ABORTS,
    TELEMETRY_EXPORTED,
    TELEMETRY_LOST,
)

# Attributes that only metrics carry; the others are declared with the spans'.
METRIC_ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute("gen_ai.token.type", "string", "input, cached or output"),
    Attribute(
        "perfledger.kv.event", "string", "stored, evicted, copied, swapped_out or swapped_in"
    ),
    Attribute("perfledger.telemetry.where", "string", ", ".join(LOST_WHERE)),
)


SEVERAL = (
    "Counters are sums over all replicas and ranks. A gauge is of one replica; where there are"
    " several it carries `perfledger.replica`."
)


def reference() -> str:
    """Return docs/metrics.md."""
    lines = ["# Metrics", "", "Made from schema/metrics.py.", "", SEVERAL, ""]
    lines += metric_rows(METRICS)
    lines += ["", "## Attributes that only metrics carry", "", "| name | type | meaning |"]
    lines += ["|---|---|---|"]
    lines += [f"| `{a.name}` | {a.type} | {a.meaning} |" for a in METRIC_ATTRIBUTES]
    return "\n".join(lines) + "\n"


def metric_rows(metrics: Iterable[Metric]) -> list[str]:
    """Return the lines of a table of metrics, as the reference pages have it."""
    lines = ["| name | kind | unit | meaning | attribute |", "|---|---|---|---|---|"]
    for m in metrics:
        attributes = ", ".join(f"`{name}`" for name in m.attribute.split(", ") if name)
        lines.append(f"| `{m.name}` | {m.kind} | {m.unit} | {m.meaning} | {attributes} |")
    return lines
