"""The reference runtime as a target of experiments: one fresh `perfledger serve` for each run.

What can be varied is declared as data: `VARIABLES`.
"""

import hashlib
import json
import os
import platform
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from perfledger.instrumented_runtime.targets.process import Child, perfledger_command, running
from perfledger.schema.errors import PerfledgerError, UsageError
from perfledger.schema.manifest import Value
from perfledger.schema.redaction import allowed_environment, recorded_environment

READY_S = 180.0  # to load a model on a busy machine
HEALTH_S = 10.0
LARGEST_HEALTH_BYTES = 1_000_000
READY_LINE = r"^API +(http\S+)/v1$"

PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "fastapi",
    "uvicorn",
    "opentelemetry-sdk",
)
# What of a checkout can run.
CODE = (
    "analyzers",
    "cli",
    "collectors",
    "dashboards",
    "instrumented_runtime",
    "schema",
    "pyproject.toml",
)
# Manifest field of each option in /health; the others go into runtime.options.
OPTION_FIELDS = {
    "max_num_seqs": "runtime.max_num_seqs",
    "max_num_batched_tokens": "runtime.max_num_batched_tokens",
    "block_size": "runtime.block_size",
    "telemetry": "runtime.telemetry",
}
PER_RUN_OPTIONS = frozenset({"model", "host", "port", "run_id", "service_name"})
READY_FIELDS = {
    "weights_hash": "model.weights_hash",
    "parameters": "model.parameters",
    "tokenizer_hash": "model.tokenizer_hash",
    "template_hash": "model.template_hash",
    "device": "runtime.device",
    "dtype": "runtime.dtype",
    "kernel_path": "runtime.kernel_path",
    "threads": "runtime.threads",
    "kv_blocks": "runtime.kv_blocks",
    "max_model_len": "runtime.max_model_len",
}


@dataclass(frozen=True)
class Variable:
    """One thing that a rerun may vary: `field` names it in the manifest, `touches` what follows."""

    name: str
    unit: str
    low: int
    high: int
    flag: str
    field: str
    meaning: str
    touches: tuple[str, ...] = ()

    def checked(self, level: int) -> int:
        """Return the level. Raises UsageError outside the range."""
        if not self.low <= level <= self.high:
            raise UsageError(
                f"{self.name} {level} is not between {self.low} and {self.high} {self.unit}"
            )
        return level


VARIABLES: dict[str, Variable] = {
    variable.name: variable
    for variable in (
        Variable(
            "max_num_seqs",
            "sequences",
            1,
            1024,
            "--max-num-seqs",
            "runtime.max_num_seqs",
            "sequences in a batch at most",
            touches=("runtime.kv_blocks",),  # it keeps no more than all sequences can fill
        ),
        Variable(
            "max_num_batched_tokens",
            "tokens",
            1,
            65_536,
            "--max-num-batched-tokens",
            "runtime.max_num_batched_tokens",
            "tokens in a step at most: longer prompts go in chunks",
        ),
        Variable(
            "block_size",
            "tokens",
            1,
            1024,
            "--block-size",
            "runtime.block_size",
            "tokens in a KV block",
            touches=("runtime.kv_blocks",),
        ),
        Variable(
            "threads",
            "threads",
            1,
            1024,
            "--threads",
            "runtime.threads",
            "torch threads of the engine",
        ),
    )
}


@dataclass(frozen=True)
class ReferenceTarget:
    """How every run of an experiment is started, except for the variable."""

    model: str
    otlp_endpoint: str
    fixed: Mapping[str, int] = field(default_factory=dict)  # other variables, by name
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready, and what it is: fields of the manifest."""

    url: str
    facts: Mapping[str, Value]
    child: Child


@contextmanager
def serving(
    target: ReferenceTarget, variable: Variable, level: int, *, run_id: str, log: Path
) -> Iterator[RunningServer]:
    """Run the reference runtime at a level of the variable, for the time of the block.

    Raises UsageError where it refuses its options, PerfledgerError where it does not start.
    """
    levels = {**target.fixed, variable.name: variable.checked(level)}
    flags = [word for name in levels for word in (VARIABLES[name].flag, str(levels[name]))]
    command = perfledger_command("serve", "--model", target.model, "--port", "0", *flags)
    command += ["--run-id", run_id]
    environment = {**target.environment, "OTEL_EXPORTER_OTLP_ENDPOINT": target.otlp_endpoint}
    with running("serve", command, environment, log) as child:
        url = child.wait_for(READY_LINE, READY_S)[1]
        yield RunningServer(url, _facts(url, command, environment, child), child)


def _facts(
    url: str, command: list[str], environment: Mapping[str, str], child: Child
) -> dict[str, Value]:
    health = _health(url)
    said = health.get("facts")
    if not isinstance(said, dict) or not isinstance(said.get("options"), dict):
        raise PerfledgerError("/health tells no facts", where=url)
    options: dict[str, object] = said["options"]
    rest = sorted(options.keys() - OPTION_FIELDS.keys() - PER_RUN_OPTIONS)
    facts: dict[str, Value] = {
        "model.name": str(health.get("model")),
        "model.quantization": str(options.get("quantization", "none")),
        "runtime.name": "perfledger",
        "runtime.version": version("perfledger"),
        "runtime.versions": _versions(),
        "runtime.options": {name: str(options[name]) for name in rest},
        "runtime.environment": allowed_environment(environment),
        "run.environment": recorded_environment(environment),
        "run.command": command,
        "run.pid": child.process.pid,
        "run.url": url,
    }
    facts |= {field: said.get(name) for name, field in READY_FIELDS.items()}
    facts |= {field: options.get(name) for name, field in OPTION_FIELDS.items()}  # type: ignore[misc]
    return facts | source_facts(Path(__file__).parents[2])


def source_facts(root: Path) -> dict[str, Value]:
    """Return commit and uncommitted changes to the code of the checkout at `root`.

    Both are empty where it is none (an installed package), unknown where git does not say. Edits
    to tests, documents and results change nothing that runs, and do not count.
    """
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return {"runtime.commit": "", "runtime.changes": ""}
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--", *CODE)
    difference = _git(root, "diff", "HEAD", "--", *CODE)
    if commit is None or status is None or difference is None:
        return {"runtime.commit": None, "runtime.changes": None}
    changes = hashlib.sha256((status + difference).encode()).hexdigest()
    clean = not status.strip()
    return {"runtime.commit": commit.strip(), "runtime.changes": "" if clean else changes}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode(errors="replace")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _health(url: str) -> dict[str, object]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=HEALTH_S) as response:
            report = json.loads(response.read(LARGEST_HEALTH_BYTES))
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise PerfledgerError(f"the server does not answer: {error}", where=url) from error
    if not isinstance(report, dict):
        raise PerfledgerError("/health is not an object", where=url)
    return report
