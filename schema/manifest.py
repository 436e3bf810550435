"""The manifest: what a run was made of. Each field is declared once, with why a difference matters.

Two runs compare only where their manifests differ in exactly the declared variable. A field that
is unknown (null) on both sides compares, is listed, and lowers the confidence; unknown on one
side refuses. Secrets never enter: see redaction.py.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from perfledger.schema.errors import NotComparableError, UsageError
from perfledger.schema.redaction import redact_command, redact_text

MANIFEST_VERSION = 1
LARGEST_MANIFEST_BYTES = 1_000_000

Value = str | int | float | bool | list[str] | dict[str, str] | None


@dataclass(frozen=True)
class Field:
    """One field. `essential`: unknown on both sides makes the confidence low.

    `volatile`: recorded, but different in every run by its nature, so never compared.
    """

    name: str
    type: type
    meaning: str
    why: str = ""
    essential: bool = False
    volatile: bool = False


def _volatile(name: str, kind: type, meaning: str) -> Field:
    return Field(name, kind, meaning, volatile=True)


_OTHER_WORK = "other weights do other work"
_OTHER_TEXT = "the same text becomes other tokens"
_OTHER_CODE = "other code takes other time"
_OTHER_BATCH = "it shapes the batches, and so queueing and time per token"
_OTHER_HOST = "another machine is another speed"
_OTHER_CLOCK = "the clock rate follows it"
_OTHER_PLACE = "memory, devices and peers are nearer or farther, on wider or narrower links"
_OTHER_SHARE = "it limits how much of the machine the run may use"
_OTHER_LOAD = "other requests are other work"

FIELDS: tuple[Field, ...] = (
    Field("model.name", str, "model as asked for", _OTHER_WORK),
    Field("model.weights_hash", str, "hash of the weights", _OTHER_WORK, essential=True),
    Field("model.parameters", int, "parameters", _OTHER_WORK),
    Field("model.quantization", str, "how weights are stored", "bytes read per token follow it"),
    Field("model.tokenizer_hash", str, "hash of the tokenizer", _OTHER_TEXT, essential=True),
    Field("model.template_hash", str, "hash of the chat template", _OTHER_TEXT),
    Field("runtime.name", str, "the server program", _OTHER_CODE, essential=True),
    Field("runtime.version", str, "its version", _OTHER_CODE, essential=True),
    Field("runtime.commit", str, "its commit; empty if not run from a repository", _OTHER_CODE),
    Field("runtime.changes", str, "hash of uncommitted changes; empty if none", _OTHER_CODE),
    Field("runtime.versions", dict, "versions of Python and libraries", _OTHER_CODE),
    Field("runtime.device", str, "device that computes", _OTHER_HOST, essential=True),
    Field("runtime.dtype", str, "dtype of weights and KV", "bytes and FLOP rate follow it"),
    Field("runtime.kernel_path", str, "attention path really used", _OTHER_CODE),
    Field("runtime.threads", int, "threads of the engine", "parallel speed follows it"),
    Field("runtime.max_num_seqs", int, "sequences in a batch at most", _OTHER_BATCH),
    Field("runtime.max_num_batched_tokens", int, "tokens in a step at most", _OTHER_BATCH),
    Field("runtime.block_size", int, "tokens in a KV block", "fragmentation and gather cost"),
    Field("runtime.kv_blocks", int, "KV blocks there are", "too few mean waiting or preemption"),
    Field("runtime.max_model_len", int, "tokens in prompt and answer at most", _OTHER_BATCH),
    Field("runtime.telemetry", bool, "whether telemetry is on", "telemetry costs time itself"),
    Field("runtime.options", dict, "other options of the server", _OTHER_CODE),
    Field("runtime.environment", dict, "allow-listed environment variables", _OTHER_CODE),
    Field("host.cpu_model", str, "CPU model", _OTHER_HOST, essential=True),
    Field("host.cpu_flags", str, "hash of the CPU's instruction sets", "kernels are chosen by it"),
    Field("host.cores", int, "cores of the machine that are online", _OTHER_HOST, essential=True),
    Field("host.affinity", str, "cores this run may use, as 0-3,8", _OTHER_SHARE, essential=True),
    Field("host.numa_nodes", int, "NUMA nodes", "memory is nearer or farther"),
    Field("host.memory_bytes", int, "memory of the machine", _OTHER_HOST),
    Field("host.governor", str, "CPU frequency governor", _OTHER_CLOCK),
    Field("host.boost", str, "whether the CPU may boost", _OTHER_CLOCK),
    Field("host.transparent_hugepage", str, "huge pages policy", "page faults follow it"),
    Field("host.kernel", str, "kernel release", "its scheduler and network stack"),
    Field("host.os", str, "system library: C library and version", "malloc and maths library"),
    Field("host.microcode", str, "CPU firmware", "mitigations change speed"),
    Field("host.firmware", str, "BIOS version", "power and memory settings"),
    Field("host.virtual", bool, "whether it is a virtual machine", "time can be stolen"),
    Field("host.cgroup_cpus", str, "CPU limit of the control group, cores or max", _OTHER_SHARE),
    Field("host.cgroup_memory_bytes", str, "its memory limit, bytes or max", _OTHER_SHARE),
    Field("device.names", list, "accelerators; empty if there are none", _OTHER_HOST),
    Field("device.driver", str, "accelerator driver; empty if there are none", _OTHER_CODE),
    Field("device.firmware", list, "accelerator firmware (VBIOS)", _OTHER_CODE),
    Field("device.power_limits", list, "power limits, mW", _OTHER_CLOCK),
    Field("device.max_clocks", list, "highest SM clocks, MHz", _OTHER_CLOCK),
    Field("topology.numa", list, "NUMA nodes: CPUs, memory, distances", _OTHER_PLACE),
    Field("topology.gpus", list, "GPUs: NUMA node and PCIe link; empty if none", _OTHER_PLACE),
    Field("topology.links", list, "paths from GPU to GPU and to network cards", _OTHER_PLACE),
    Field("topology.nics", list, "network cards that are up: speed, NUMA node", _OTHER_PLACE),
    Field("topology.placement", list, "CPUs and memory nodes of the server", _OTHER_SHARE),
    Field("topology.container", str, "kind of container, as far as seen", _OTHER_CODE),
    Field("workload.hash", str, "hash of all requests in order", _OTHER_LOAD, essential=True),
    Field("workload.requests", int, "requests sent", _OTHER_LOAD, essential=True),
    Field("workload.prompt_tokens", int, "prompt tokens asked for, all requests", _OTHER_LOAD),
    Field("workload.output_limit", int, "output tokens asked for, all requests", _OTHER_LOAD),
    Field("workload.arrival", str, "arrival process, or hash of its times", "queueing follows it"),
    Field("workload.sampling", str, "how tokens are chosen", "it decides where answers end"),
    Field("workload.seed", int, "seed of lengths and texts", _OTHER_LOAD),
    Field("method.warm_up", str, "what runs before measuring starts", "cold caches are slower"),
    Field("method.repetitions", int, "pairs planned", "more pairs, narrower intervals"),
    _volatile("run.id", str, "the run"),
    _volatile("run.started_ns", int, "wall clock, ns since 1970"),
    _volatile("run.command", list, "command line of the server, redacted"),
    _volatile("run.pid", int, "process of the server"),
    _volatile("run.url", str, "where it listened"),
    _volatile("run.environment", dict, "allow-listed variables that name places and runs"),
    _volatile("host.boot_id", str, "kernel boot"),
    _volatile("host.load", str, "load average over 1 minute, before the run"),
    _volatile("device.temperatures", list, "accelerator temperatures, degrees C"),
)
FIELD: dict[str, Field] = {field.name: field for field in FIELDS}

# What makes a machine the same one for a cached measurement of its noise. Topology is left out: it
# follows from the machine, but for placement and network cards, which change from run to run.
_HOST_FIELDS = tuple(
    field.name
    for field in FIELDS
    if field.name.startswith(("host.", "device.")) and not field.volatile
)


@dataclass(frozen=True)
class Manifest:
    """All declared fields; None is unknown. Equal content has equal `hash()`."""

    values: Mapping[str, Value]

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Self:
        """Check, redact and complete. Raises UsageError for an unknown field or a wrong type."""
        if unknown := sorted(values.keys() - FIELD.keys()):
            raise UsageError(f"a manifest has no field {', '.join(unknown)}")
        return cls({field.name: _checked(field, values.get(field.name)) for field in FIELDS})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json()` back. Raises UsageError for anything else."""
        if len(text.encode()) > LARGEST_MANIFEST_BYTES:
            raise UsageError("a manifest of more than 1 MB", fix="this is not a manifest of ours")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"a manifest that is not JSON: {error}") from error
        if not isinstance(content, dict) or content.pop("version", None) != MANIFEST_VERSION:
            raise UsageError(f"not a manifest of version {MANIFEST_VERSION}")
        return cls.of(content)

    def to_json(self) -> str:
        """Return canonical JSON: sorted keys, no spaces; equal manifests give equal bytes."""
        return canonical_json({"version": MANIFEST_VERSION, **self.values})

    def hash(self) -> str:
        """Return the sha256 of `to_json()`, hex."""
        return content_hash(self.to_json())

    def with_values(self, **groups: Mapping[str, Value]) -> Self:
        """Return a copy with fields set, by group: `with_values(run={"id": "r1"})`."""
        new = {f"{group}.{k}": v for group, values in groups.items() for k, v in values.items()}
        return type(self).of({**self.values, **new})

    def host_fingerprint(self) -> str:
        """Return a hash of the machine, the same for every run on it."""
        return content_hash(canonical_json({name: self.values[name] for name in _HOST_FIELDS}))


@dataclass(frozen=True)
class Difference:
    """A field that differs, with both values and why that matters."""

    field: str
    a: Value
    b: Value
    why: str

    def __str__(self) -> str:
        if isinstance(self.a, dict) and isinstance(self.b, dict):
            keys = sorted(k for k in {**self.a, **self.b} if self.a.get(k) != self.b.get(k))
            changes = ", ".join(f"{k} {self.a.get(k)} -> {self.b.get(k)}" for k in keys)
            return f"{self.field}: {changes} ({self.why})"
        return f"{self.field}: {_shown(self.a)} -> {_shown(self.b)} ({self.why})"


@dataclass(frozen=True)
class Comparison:
    """What two manifests share. They are comparable where `refusals` is empty."""

    variable: str | None
    levels: tuple[Value, Value] | None
    touched: tuple[Difference, ...]  # known consequences of the variable
    refusals: tuple[Difference, ...]
    unknown: tuple[str, ...]  # on both sides

    @property
    def confidence(self) -> str:
        """high; medium with a field unknown on both sides; low if it is an essential one."""
        if any(FIELD[name].essential for name in self.unknown):
            return "low"
        return "medium" if self.unknown else "high"

    def require(self) -> Self:
        """Return self, or raise NotComparableError naming every field that refuses."""
        if not self.refusals:
            return self
        lines = "".join(f"\n  {difference}" for difference in self.refusals)
        beyond = f"beyond {self.variable}" if self.variable else "though nothing was varied"
        raise NotComparableError(
            f"the runs differ {beyond}:{lines}",
            fix="make these fields equal, and name them where they are unknown; then run again",
        )


def compare(
    a: Manifest, b: Manifest, variable: str | None, *, touches: Collection[str] = ()
) -> Comparison:
    """Compare two manifests field by field; with `variable` None they must be alike.

    `touches` are fields that the variable is declared to change as well. The variable itself
    must be known on both sides and differ.
    """
    if variable is not None and variable not in FIELD:
        raise UsageError(f"a manifest has no field {variable}")
    refusals: list[Difference] = []
    touched: list[Difference] = []
    unknown: list[str] = []
    for field in FIELDS:
        first, second = a.values[field.name], b.values[field.name]
        if field.volatile:
            continue
        if field.name == variable:
            if first is None or second is None or first == second:
                why = "the variable has to be known and to differ"
                refusals.append(Difference(field.name, first, second, why))
        elif first is None and second is None:
            unknown.append(field.name)
        elif first != second:
            difference = Difference(field.name, first, second, field.why)
            (touched if field.name in touches else refusals).append(difference)
    levels = (a.values[variable], b.values[variable]) if variable else None
    return Comparison(variable, levels, tuple(touched), tuple(refusals), tuple(unknown))


def canonical_json(content: object) -> str:
    """Return JSON with one spelling only: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(text: str) -> str:
    """Return the sha256 of a text, hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def reference() -> str:
    """Return docs/manifest.md."""
    lines = ["# The manifest", "", f"Made from schema/manifest.py, version {MANIFEST_VERSION}.", ""]
    lines += ["| field | type | meaning | a difference matters because |", "|---|---|---|---|"]
    for field in FIELDS:
        why = "never compared" if field.volatile else field.why
        lines.append(f"| `{field.name}` | {field.type.__name__} | {field.meaning} | {why} |")
    return "\n".join(lines) + "\n"


def _checked(field: Field, value: Value) -> Value:
    if value is None:
        return None
    if type(value) is not field.type:
        kind = field.type.__name__
        raise UsageError(f"manifest field {field.name} is {kind}, not {type(value).__name__}")
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, list):
        return redact_command([str(item) for item in value])
    if isinstance(value, dict):
        pairs = [(str(key), str(item)) for key, item in value.items()]
        return {key: redact_text(item, named=key) for key, item in pairs}
    return value


def _shown(value: Value) -> str:
    return "unknown" if value is None else str(value)
