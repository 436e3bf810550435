"""What may be said about a process: its environment by allow-list, its words without secrets.

A name decides first (`--api-key X`, `HF_TOKEN=…`), then the shape of the value (URL credentials,
bearer tokens, keys with a known prefix). An allow-list lets nothing in that nobody thought of.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

REDACTED = "<redacted>"
LONGEST_VALUE = 4_096  # characters; of a longer one only its length is kept

# These change speed or behaviour, so they are compared between runs.
COMPARED_ENVIRONMENT = (
    "OMP_*",
    "GOMP_*",
    "KMP_*",
    "MKL_*",
    "OPENBLAS_NUM_THREADS",
    "MALLOC_*",
    "LD_PRELOAD",
    "PYTHONHASHSEED",
    "PYTHONMALLOC",
    "PYTHONOPTIMIZE",
    "PYTORCH_*",
    "TORCH_*",
    "TORCHINDUCTOR_*",
    "CUDA_*",
    "NVIDIA_VISIBLE_DEVICES",
    "NCCL_*",
    "GLOO_*",
    "OTEL_SDK_DISABLED",
    "OTEL_TRACES_SAMPLER*",
    "OTEL_BSP_*",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_COMPRESSION",
    "TOKENIZERS_PARALLELISM",
)
# These name places and runs: worth knowing, never compared.
RECORDED_ENVIRONMENT = ("OTEL_EXPORTER_*", "OTEL_SERVICE_NAME", "PERFLEDGER_*")

_SECRET_NAME = re.compile(
    r"key|token(?!s|izer)|secret|passw|credential|header|auth|cookie|signature|bearer"
    r"|certificate|\bpat\b|\bsig\b",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_URL_QUERY = re.compile(r"(\w+://[^\s?#]*)[?#]\S*")
_KNOWN_SHAPES = re.compile(
    r"\bBearer\s+\S+|\bBasic\s+[A-Za-z0-9+/=]{8,}|\b(?:sk|pk|rk)[-_][\w-]{8,}|\bhf_\w{8,}"
    r"|\bgh[opsur]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{8,}|\bxox[abeprs]-[\w-]{8,}"
    r"|\bA(?:KIA|SIA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|\beyJ[\w-]+\.[\w.-]+"
    r"|-----BEGIN [^-]*PRIVATE KEY-----[\s\S]*",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(r"([\w.-]+)(\s*[=:]\s*)([^\s,;&]+)")


def names_secret(name: str) -> bool:
    """Return whether a flag's or variable's name says that its value is secret."""
    return _SECRET_NAME.search(name) is not None


def redact_text(text: str, *, named: str = "") -> str:
    """Return a text without secrets: all of it if its name is a secret's, else by shape."""
    if named and names_secret(named):
        return REDACTED
    if len(text) > LONGEST_VALUE:
        return f"<{len(text)} characters>"
    text = _URL_USER.sub(f"{REDACTED}@", text)
    text = _URL_QUERY.sub(rf"\1?{REDACTED}", text)
    text = _KNOWN_SHAPES.sub(REDACTED, text)
    return _ASSIGNMENT.sub(_without_secret, text)


def redact_command(words: Sequence[str]) -> list[str]:
    """Return a command line without secrets: `--api-key X`, `--api-key=X`, `KEY=X`, URLs."""
    redacted: list[str] = []
    secret_follows = False
    for word in words:
        is_flag = word.startswith("-")
        if secret_follows and not is_flag:
            redacted.append(REDACTED)
        else:
            redacted.append(redact_text(word))
        announces = (is_flag and "=" not in word) or word.endswith(":")
        secret_follows = (announces and names_secret(word)) or word in ("Bearer", "Basic")
    return redacted


def allowed_environment(
    environment: Mapping[str, str], patterns: Sequence[str] = COMPARED_ENVIRONMENT
) -> dict[str, str]:
    """Return the variables that match the allow-list and name no secret, values redacted."""
    return {
        name: redact_text(value)
        for name, value in sorted(environment.items())
        if not names_secret(name) and any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are recorded but not compared."""
    found = allowed_environment(environment, RECORDED_ENVIRONMENT)
    return {k: v for k, v in found.items() if k not in allowed_environment(environment)}


def _without_secret(match: re.Match[str]) -> str:
    name, sign, value = match.groups()
    return f"{name}{sign}{REDACTED if names_secret(name) else value}"
