"""What is scraped: one URL, and what is said about it in everything that it tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from perfledger.collectors.scraping.config import ScrapeConfig, url_of

_SCHEME, _PATH = "__scheme__", "__metrics_path__"
_JOB, _INSTANCE = "job", "instance"


@dataclass(frozen=True)
class Target:
    """One endpoint. `labels` are sorted and become resource attributes."""

    job: str
    instance: str
    url: str
    labels: tuple[tuple[str, str], ...]

    def resource(self) -> dict[str, str | int]:
        """Return the resource attributes, named as OpenTelemetry's Prometheus compatibility does.

        The URL is told without its query, which may hold a secret.
        """
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return {
            **dict(self.labels),
            "service.name": self.job,
            "service.instance.id": self.instance,
            "server.address": parts.hostname or "",
            "server.port": port,
            "url.scheme": parts.scheme,
            "url.full": parts._replace(query="", fragment="").geturl(),
        }


def make_target(config: ScrapeConfig, address: str, labels: Mapping[str, str]) -> Target:
    """Return the target of an address (URL or HOST:PORT) with the labels that discovery gave.

    As in Prometheus `job` and `instance` override, `__scheme__` and `__metrics_path__` are
    obeyed, and other names that begin with `__` are not kept. Raises ValueError.
    """
    scheme, path = labels.get(_SCHEME, config.scheme), labels.get(_PATH, config.path)
    if not path.startswith("/"):
        raise ValueError(f"not a path: {path!r}")
    url = url_of(address, scheme, path)
    kept = {**config.labels, **labels}
    job, instance = kept.pop(_JOB, config.job), kept.pop(_INSTANCE, _host_port(url))
    pairs = sorted((name, value) for name, value in kept.items() if not name.startswith("__"))
    return Target(job, instance, url, tuple(pairs))


def static_targets(config: ScrapeConfig) -> list[Target]:
    """Return the targets that stand in the configuration itself."""
    return [make_target(config, address, {}) for address in config.targets]


def _host_port(url: str) -> str:
    """Return the part of a URL that tells targets apart: HOST:PORT, as Prometheus does."""
    return urlsplit(url).netloc
