"""The [[scrape]] tables of perfledger.toml: what to scrape, how often, and within which limits."""

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from perfledger.collectors.settings_table import SettingsTable
from perfledger.schema.errors import UsageError

EXAMPLE = """\
[[scrape]]
job = "vllm"
targets = ["127.0.0.1:8000", "https://inference.example/engine/metrics"]
files = ["targets/*.json"]
interval_s = 15
labels = { "perfledger.run.id" = "nightly" }
"""

_SHORTEST_S = 0.1
_LONGEST_S = 86_400.0
_LARGEST_LIMIT = 2**31
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


@dataclass(frozen=True)
class ScrapeLimits:
    """What one scrape may bring. Beyond bytes or series the scrape fails, as in Prometheus.

    A series with too many or too long labels is rejected alone.
    """

    max_bytes: int = 16 * 2**20  # after decompression
    max_series: int = 50_000  # lines with a value
    max_labels: int = 64
    max_label_name_bytes: int = 256
    max_label_value_bytes: int = 2048
    max_targets: int = 1000


@dataclass(frozen=True)
class ScrapeConfig:
    """One job. `labels` become resource attributes of everything its targets tell."""

    job: str
    targets: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    kubernetes_files: tuple[str, ...] = ()
    interval_s: float = 15.0
    timeout_s: float = 10.0
    scheme: str = "http"
    path: str = "/metrics"
    labels: Mapping[str, str] = field(default_factory=dict)
    bearer_token_file: Path | None = None
    ca_file: Path | None = None
    limits: ScrapeLimits = field(default_factory=ScrapeLimits)


def read_scrapes(tables: object, folder: Path) -> tuple[ScrapeConfig, ...]:
    """Read what a TOML file in `folder` says under `scrape`; none, or an empty table, is no job.

    Relative paths start at `folder`. Raises UsageError, which names the job and the setting.
    """
    if isinstance(tables, Mapping):
        tables = [tables] if tables else []
    if not isinstance(tables or [], list):
        raise UsageError("scrape is no list of tables", where="scrape", fix=f"\n{EXAMPLE}")
    configs: list[ScrapeConfig] = []
    for table in tables or []:  # type: ignore[attr-defined]
        config = _read_one(table, folder)
        if config.job in [earlier.job for earlier in configs]:
            raise UsageError(f"two jobs are called {config.job!r}", where="[[scrape]]")
        configs.append(config)
    return tuple(configs)


def url_of(target: str, scheme: str, path: str) -> str:
    """Return the URL of a target given as a URL or as HOST:PORT.

    Raises ValueError where it is neither, or holds a password: that would end up in the store.
    """
    if "://" not in target:
        if not _HOST_PORT.fullmatch(target):
            raise ValueError(f"neither HOST:PORT nor a URL: {target!r}")
        target = f"{scheme}://{target}{path}"
    parts = urlsplit(target)
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL with a user or a password; use bearer_token_file")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http or https URL: {target!r}")
    if parts.port == 0 or any(ord(letter) <= 32 or ord(letter) == 127 for letter in target):
        raise ValueError(f"not a URL: {target!r}")
    return target if parts.path else parts._replace(path=path).geturl()


def _read_one(table: object, folder: Path) -> ScrapeConfig:
    job = table.get("job") if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping) or not isinstance(job, str) or not job:
        raise UsageError("a job without a name", where="[[scrape]]", fix='job = "vllm"')
    settings = SettingsTable(f"scrape {job}", table)
    interval_s = settings.number("interval_s", 15.0, _SHORTEST_S, _LONGEST_S)
    config = ScrapeConfig(
        job=settings.text("job"),
        targets=settings.texts("targets"),
        files=_paths(folder, settings.texts("files")),
        kubernetes_files=_paths(folder, settings.texts("kubernetes_files")),
        interval_s=interval_s,
        timeout_s=settings.number("timeout_s", min(10.0, interval_s), _SHORTEST_S, interval_s),
        scheme=settings.choice("scheme", ("http", "https")),
        path=settings.text("path", "/metrics"),
        labels=settings.texts_by_name("labels"),
        bearer_token_file=_path(folder, settings.text("bearer_token_file")),
        ca_file=_path(folder, settings.text("ca_file")),
        limits=_limits(settings),
    )
    settings.end()
    _check(config, settings)
    return config


def _limits(settings: SettingsTable) -> ScrapeLimits:
    limits = {
        name: settings.integer(name, default, 1, _LARGEST_LIMIT)
        for name, default in asdict(ScrapeLimits()).items()
    }
    return ScrapeLimits(**limits)


def _check(config: ScrapeConfig, settings: SettingsTable) -> None:
    if not (config.targets or config.files or config.kubernetes_files):
        raise settings.error("targets", '["HOST:PORT"], or give files or kubernetes_files')
    if not config.path.startswith("/"):
        raise settings.error("path", 'a path, such as "/metrics"')
    for target in config.targets:
        try:
            url_of(target, config.scheme, config.path)
        except ValueError as error:
            raise settings.error("targets", f'["HOST:PORT", "http://…"]; {error}') from error


def _path(folder: Path, name: str) -> Path | None:
    return folder / name if name else None


def _paths(folder: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return patterns that start at `folder`, whose own name is no pattern."""
    return tuple(os.path.join(glob.escape(str(folder)), name) for name in names)
