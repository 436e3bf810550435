"""Attribute names on spans and resources: OpenTelemetry's where it has one, else `perfledger.*`.

Every name that we write is declared here once, with its type, unit and meaning; docs/attributes.md
is made from it. Version of this declaration: SCHEMA_VERSION, sent as the scope's version.
"""

from dataclasses import dataclass

SCHEMA_VERSION = "1"
SCOPE_NAME = "perfledger.runtime"


@dataclass(frozen=True)
class Attribute:
    """One attribute; `column` names the promoted column of `spans` that holds it, if any."""

    name: str
    type: str
    meaning: str
    column: str = ""


RESOURCE_ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute("service.name", "string", "the service", "service_name"),
    Attribute("service.instance.id", "string", "one process of it", "service_instance_id"),
    Attribute("perfledger.run.id", "string", "the run that this telemetry belongs to", "run_id"),
    Attribute("perfledger.clock.boot_id", "string", "kernel boot: the clock domain", "boot_id"),
    Attribute("perfledger.clock.monotonic_ns", "int", "the anchor, monotonic side, ns"),
    Attribute("perfledger.clock.wall_ns", "int", "the anchor, wall side, ns since 1970"),
)

SPAN_ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute("gen_ai.operation.name", "string", "chat or text_completion", "operation"),
    Attribute("gen_ai.request.model", "string", "model asked for", "model"),
    Attribute("gen_ai.response.model", "string", "model that answered"),
    Attribute("gen_ai.response.id", "string", "id of the answer, as the client saw it"),
    Attribute("gen_ai.response.finish_reasons", "string[]", "stop, length, abort"),
    Attribute("gen_ai.request.max_tokens", "int", "limit asked for, tokens"),
    Attribute("gen_ai.request.temperature", "double", "sampling temperature"),
    Attribute("gen_ai.request.top_p", "double", "nucleus sampling mass"),
    Attribute("gen_ai.request.seed", "int", "sampling seed"),
    Attribute("gen_ai.request.stream", "boolean", "whether the answer is streamed"),
    Attribute("gen_ai.request.choice.count", "int", "answers asked for (n)"),
    Attribute("gen_ai.usage.input_tokens", "int", "prompt tokens", "input_tokens"),
    Attribute("gen_ai.usage.output_tokens", "int", "tokens sampled", "output_tokens"),
    Attribute(
        "gen_ai.usage.cache_read.input_tokens",
        "int",
        "prompt tokens found in the prefix cache",
        "cached_tokens",
    ),
    Attribute(
        "gen_ai.usage.reasoning.output_tokens", "int", "reasoning tokens", "reasoning_tokens"
    ),
    Attribute("error.type", "string", "class of the error", "error_type"),
    Attribute("perfledger.tenant", "string", "customer of the service", "tenant"),
    Attribute("perfledger.class", "string", "traffic class", "traffic_class"),
    Attribute("perfledger.session", "string", "conversation", "session"),
    Attribute("perfledger.deadline_ms", "int", "deadline given by the caller, ms", "deadline_ms"),
    Attribute("perfledger.status", "string", "ok, error, refused or aborted", "outcome"),
    Attribute("perfledger.ttfc_ns", "int", "arrival to the first chunk written, ns", "ttfc_ns"),
    Attribute("perfledger.model.hash", "string", "hash of the weights' description"),
    Attribute("perfledger.tokenizer.hash", "string", "hash of tokenizer and template"),
    Attribute("perfledger.reason", "string", "why: of a wait, a preemption, an abort", "reason"),
    Attribute("perfledger.tokens", "int", "tokens computed by this span", "tokens"),
    Attribute("perfledger.replica", "string", "engine replica", "replica"),
    Attribute("perfledger.rank", "int", "rank within the replica", "rank"),
    Attribute("perfledger.step.seq", "int", "number of the step within the rank", "step_seq"),
    Attribute("perfledger.step.width", "int", "sequences in the batch"),
    Attribute("perfledger.step.prefill_tokens", "int", "prompt tokens computed"),
    Attribute("perfledger.step.decode_tokens", "int", "new tokens computed"),
    Attribute("perfledger.step.waiting", "int", "requests waiting for admission"),
    Attribute("perfledger.step.kv_blocks_used", "int", "KV blocks held"),
    Attribute("perfledger.step.kv_blocks_total", "int", "KV blocks there are"),
    Attribute(
        "perfledger.step.cpu_ns",
        "int",
        "CPU time of the engine process since the last step that told it, ns",
    ),
    Attribute("perfledger.step.decode_context_tokens", "int", "tokens that decodes attend to"),
    Attribute(
        "perfledger.step.decode_gathered_blocks", "int", "KV blocks gathered for them, and padding"
    ),
    Attribute("perfledger.step.chunks", "int", "pieces of prompts, one of a sequence"),
    Attribute("perfledger.step.continued_chunks", "int", "those with tokens in the cache before"),
    Attribute("perfledger.step.chunk_key_tokens", "int", "tokens in chunks and before them"),
    Attribute("perfledger.step.chunk_pairs", "int", "query and key pairs of chunks, also masked"),
    Attribute("perfledger.step.continued_pairs", "int", "those of the continued chunks"),
    Attribute("perfledger.step.chunk_gathered_blocks", "int", "KV blocks gathered for chunks"),
    Attribute("perfledger.step.sampled_rows", "int", "tokens sampled, in a step with chunks"),
    Attribute("perfledger.step.microbatches", "int", "parts that a pipeline cut the step into"),
    Attribute("perfledger.step.decode_microbatches", "int", "parts with a row that decodes"),
    Attribute("perfledger.step.sampled_microbatches", "int", "parts with a token sampled"),
    Attribute("perfledger.model.shape", "string", "what the rank computes with, as sizes"),
    Attribute("perfledger.device", "string", "device that computed: cpu, cuda:0"),
    Attribute("perfledger.dtype", "string", "dtype of weights and KV"),
    Attribute("perfledger.kernel_path", "string", "attention path really used"),
    Attribute("perfledger.dropped", "int", "records lost in a telemetry_dropped gap"),
    Attribute("perfledger.memory.process_bytes", "int", "resident memory of the process, bytes"),
    Attribute("perfledger.memory.device_bytes", "int", "memory allocated on its device, bytes"),
    Attribute("http.response.status_code", "int", "HTTP status that a load client saw"),
    Attribute("perfledger.client.index", "int", "number of the request in its workload, from 0"),
    Attribute("perfledger.client.warmup", "boolean", "sent before the schedule, to warm up"),
    Attribute("perfledger.client.scheduled_ns", "int", "when it was due, ns since 1970"),
    Attribute("perfledger.client.lateness_ns", "int", "real send minus scheduled time, ns"),
    Attribute("perfledger.client.input_tokens", "int", "prompt tokens that the workload asks for"),
    Attribute("perfledger.priority", "int", "priority given by the caller: lower goes first"),
    Attribute("perfledger.degraded", "string", "steps of the degrading policy that changed it"),
    Attribute("perfledger.recomputed_tokens", "int", "tokens computed again after a preemption"),
    Attribute("perfledger.kv_blocks_held", "int", "KV blocks of the request, at their most"),
    Attribute("perfledger.route.policy", "string", "how the router chooses a replica"),
    Attribute("perfledger.route.estimated_queue_ns", "int", "wait expected at the choice, ns"),
    Attribute("perfledger.route.prefix_hit_tokens", "int", "prompt tokens expected in its cache"),
    Attribute("perfledger.route.retries", "int", "replicas tried before this one"),
    Attribute("perfledger.route.retry_of", "string", "replica that failed before it, if any"),
    Attribute("perfledger.computed_tokens", "int", "tokens computed for the first time"),
    Attribute("perfledger.kv_blocks_evicted", "int", "cached prefixes that made room for it"),
    Attribute("perfledger.kv_blocks_copied", "int", "KV blocks copied on its first write to them"),
    Attribute("perfledger.kv_blocks_swapped", "int", "KV blocks moved to or from the host for it"),
    Attribute("perfledger.step.kv_stored", "int", "KV blocks made findable in the step"),
    Attribute("perfledger.step.kv_evicted", "int", "cached KV blocks given to other tokens"),
    Attribute("perfledger.step.kv_copied", "int", "KV blocks copied before a write"),
    Attribute("perfledger.step.kv_swapped_out", "int", "KV blocks moved to the host"),
    Attribute("perfledger.step.kv_swapped_in", "int", "KV blocks moved back from the host"),
    Attribute("perfledger.moe.layers", "int", "layers of experts that the rank computed"),
    Attribute("perfledger.moe.assignments", "int", "rows times experts of each, over those layers"),
    Attribute(
        "perfledger.moe.busiest_share",
        "double",
        "part of the assignments that a layer's busiest expert has, mean over layers",
    ),
    Attribute("perfledger.moe.touched_experts", "int", "experts with a row, summed over layers"),
    Attribute("perfledger.moe.expert_tokens", "string", "assignments of expert 0, 1, … like 3,0,5"),
    Attribute("perfledger.degrade.step", "string", "step of degrading that went on or off"),
    Attribute("perfledger.degrade.on", "boolean", "whether it went on"),
    Attribute("perfledger.degrade.pressure", "double", "wanted as a share of what there is"),
    Attribute("perfledger.layout", "string", "ranks in each parallel dimension, like tp=2,pp=2"),
    Attribute("perfledger.train.loss", "double", "mean loss of the rank's tokens, nats"),
    Attribute("perfledger.train.parameter_bytes", "int", "its shard of the parameters"),
    Attribute("perfledger.train.gradient_bytes", "int", "gradients that the rank holds"),
    Attribute("perfledger.train.optimizer_bytes", "int", "optimizer state that the rank holds"),
    Attribute("perfledger.train.full_peak_bytes", "int", "full copies of shards, the most held"),
    Attribute("perfledger.train.full_left_bytes", "int", "full copies that were not freed"),
    Attribute("perfledger.train.memory_bytes", "int", "CUDA: peak, else resident"),
    Attribute("perfledger.train.observed", "boolean", "its collectives were observed"),
    Attribute("perfledger.microbatch", "int", "number of the microbatch in its step"),
    Attribute("perfledger.checkpoint.step", "int", "steps that the checkpoint has behind it"),
    Attribute("perfledger.checkpoint.shard", "string", "file of the rank's shard"),
    Attribute("perfledger.checkpoint.bytes", "int", "bytes of the shard"),
    Attribute("perfledger.collective.op", "string", "all_reduce, all_gather, send, …"),
    Attribute("perfledger.collective.group", "string", "process group, named after its use"),
    Attribute("perfledger.collective.dimension", "string", "tp, pp, dp, fsdp, cp, ep or world"),
    Attribute("perfledger.collective.ranks", "int", "ranks in the group"),
    Attribute("perfledger.collective.members", "string", "those ranks, like 0-3 or 1-7:2"),
    Attribute("perfledger.collective.bytes", "int", "bytes of the message, as nccl-tests counts"),
    Attribute("perfledger.collective.wire_bytes", "int", "bytes that this rank sends for it"),
    Attribute("perfledger.collective.sequence", "int", "number of the call in its group, from 0"),
    Attribute("perfledger.collective.peer", "int", "rank at the other end, or root of the group"),
    Attribute("perfledger.collective.queued_ns", "int", "from the call to its start, ns"),
    Attribute(
        "perfledger.collective.start_observed",
        "boolean",
        "whether the start could be observed: never on gloo",
    ),
    Attribute(
        "perfledger.collective.end_observed",
        "boolean",
        "whether the end could be: not if nobody waited for it; the span is then of no length",
    ),
    Attribute(
        "perfledger.copy.boundary",
        "string",
        "host_to_device, device_to_host, dtype, stage, offload_out or offload_in",
    ),
    Attribute("perfledger.copy.source", "string", "device or stage that it came from"),
    Attribute("perfledger.copy.target", "string", "device or stage that it went to"),
    Attribute("perfledger.copy.bytes", "int", "bytes written to the target"),
)

EVENT_ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "perfledger.client.channel",
        "string",
        "of a `chunk` event: reasoning or tool; absent where it holds output",
    ),
    Attribute(
        "perfledger.client.choice",
        "int",
        "of a `chunk` event: which of the n answers it belongs to; absent for the first",
    ),
)

LINK_ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute("perfledger.phase", "string", "what the request computed in the step", "phase"),
    Attribute("perfledger.tokens", "int", "tokens of the request in the step", "tokens"),
)

# Span names, all of low cardinality.
COLLECTIVE_NAME = "collective"
REQUEST_ROOTS = frozenset({"chat", "text_completion"})
STEP_NAMES = frozenset({"prefill_step", "decode_step", "mixed_step"})

# Denied before anything is written, from every source; compared in lower case. A key stands for
# itself and for its children (`gen_ai.prompt.0.content`).
CONTENT_KEYS = frozenset(
    {
        # OpenTelemetry, its older names and what follows it (OpenLLMetry, OpenLIT)
        "gen_ai.prompt",
        "gen_ai.completion",
        "gen_ai.input.messages",
        "gen_ai.output.messages",
        "gen_ai.system_instructions",
        "gen_ai.tool.definitions",
        "gen_ai.tool.call.arguments",
        "gen_ai.tool.call.result",
        "gen_ai.request.stop_sequences",
        "gen_ai.content.prompt",
        "gen_ai.content.completion",
        "gen_ai.event.content",
        "gen_ai.retrieval.query.text",
        "gen_ai.retrieval.documents",
        "gen_ai.evaluation.explanation",
        "traceloop.entity.input",
        "traceloop.entity.output",
        # OpenInference
        "llm.prompts",
        "llm.completions",
        "llm.choices",
        "llm.input_messages",
        "llm.output_messages",
        "llm.function_call",
        "llm.tools",
        "llm.prompt_template.template",
        "llm.prompt_template.variables",
        "input.value",
        "output.value",
        "message.content",
        "message.contents",
        "document.content",
        "retrieval.documents",
        "reranker.query",
        "reranker.input_documents",
        "reranker.output_documents",
        "embedding.text",
        "embedding.vector",
        "embedding.embeddings",
        "tool.parameters",
        "tool_call.function.arguments",
        # Vercel AI SDK, MLflow, Langfuse, Pydantic AI and Logfire
        "ai.prompt",
        "ai.texts",
        "ai.value",
        "ai.values",
        "ai.embedding",
        "ai.embeddings",
        "ai.response.text",
        "ai.response.object",
        "ai.response.reasoning",
        "ai.response.toolcalls",
        "ai.result.text",
        "ai.result.object",
        "ai.toolcall.args",
        "ai.toolcall.result",
        "mlflow.spaninputs",
        "mlflow.spanoutputs",
        "mlflow.chat.messages",
        "langfuse.trace.input",
        "langfuse.trace.output",
        "langfuse.observation.input",
        "langfuse.observation.output",
        "pydantic_ai.all_messages",
        "all_messages_events",
        "final_result",
        "tool_arguments",
        "tool_response",
        "request_data",
        "response_data",
        # What carries a request's or a statement's text, and messages that quote it
        "http.request.body",
        "http.response.body",
        "db.statement",
        "db.query.text",
        "db.query.parameter",
        "exception.message",
        "exception.stacktrace",
        # Bare names
        "prompt",
        "completion",
        "messages",
        "content",
        "input",
        "output",
        "token_ids",
        "prompt_token_ids",
        "output_token_ids",
    }
)
# Children of those that hold a size and nothing else (OpenTelemetry's HTTP conventions).
HARMLESS_KEYS = frozenset({"http.request.body.size", "http.response.body.size"})
LONGEST_CONTENT_KEY = max(len(key) for key in CONTENT_KEYS)


def is_content(key: str) -> bool:
    """Return whether an attribute key names prompt, answer or other content.

    An indexed child of a content key counts too: `gen_ai.prompt.0.content`. A size does not.
    """
    # No more of a key is read than could match: keys come from outside and may be megabytes.
    key = key[: LONGEST_CONTENT_KEY + 1].lower()
    if key in CONTENT_KEYS:
        return True
    if key in HARMLESS_KEYS:
        return False
    end = key.rfind(".")
    while end > 0:
        if key[:end] in CONTENT_KEYS:
            return True
        end = key.rfind(".", 0, end)
    return False


def reference() -> str:
    """Return docs/attributes.md."""
    lines = ["# Attributes", "", f"Made from schema/attributes.py, version {SCHEMA_VERSION}.", ""]
    for title, group in (
        ("Resource", RESOURCE_ATTRIBUTES),
        ("Span", SPAN_ATTRIBUTES),
        ("Link from a step to a request in its batch", LINK_ATTRIBUTES),
        ("Event", EVENT_ATTRIBUTES),
    ):
        lines += [f"## {title}", "", "| name | type | meaning | column |", "|---|---|---|---|"]
        lines += [
            f"| `{a.name}` | {a.type} | {a.meaning} | {f'`{a.column}`' if a.column else ''} |"
            for a in group
        ]
        lines.append("")
    lines += ["## Denied by default", "", "Content is dropped before anything is written, counted,"]
    lines += ["and never shown. A child of one of these keys is dropped too, unless it is a size:"]
    lines += [f"{' and '.join(f'`{key}`' for key in sorted(HARMLESS_KEYS))} stay.", ""]
    lines += [f"- `{key}`" for key in sorted(CONTENT_KEYS)]
    return "\n".join(lines) + "\n"
