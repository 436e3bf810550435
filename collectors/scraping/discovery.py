"""Targets that stand in files: Prometheus file_sd as JSON, and Kubernetes objects.

Files are read again when they change; one that is unreadable or wrong keeps its last good targets
and is counted, one that is gone has none.
"""

import glob
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from perfledger.collectors.scraping.config import ScrapeConfig
from perfledger.collectors.scraping.kubernetes import Found, kubernetes_addresses
from perfledger.collectors.scraping.targets import Target, make_target, static_targets

log = logging.getLogger("perfledger.scrape")
_LARGEST_FILE_BYTES = 64 * 2**20

_Version = tuple[int, ...]


class _Read(NamedTuple):
    """What one version of a file said."""

    version: _Version
    targets: list[Target]
    refused: int


class Discovery:
    """The targets of one job.

    `failures` counts versions of files that could not be used, `refused` the targets that now
    stand in a file and are none, or are too many.
    """

    def __init__(self, config: ScrapeConfig) -> None:
        self.failures = 0
        self.refused = 0
        self._config = config
        self._static = static_targets(config)
        self._files: dict[str, _Read] = {}

    def targets(self) -> list[Target]:
        """Return all targets as they stand now, each once, at most `max_targets`. Reads files."""
        reads = [self._of_file(path, file_sd_addresses) for path in _paths(self._config.files)]
        reads += [
            self._of_file(path, kubernetes_addresses)
            for path in _paths(self._config.kubernetes_files)
        ]
        found = dict.fromkeys([*self._static, *(target for r in reads for target in r.targets)])
        kept = list(found)[: self._config.limits.max_targets]
        self.refused = len(found) - len(kept) + sum(read.refused for read in reads)
        return kept

    def _of_file(self, path: str, read: Callable[[object], Iterator[Found]]) -> "_Read":
        known = self._files.get(path, _Read((), [], 0))
        try:
            version = _version(path)
            if version == known.version:
                return known
            # Kept even when reading fails: a wrong version is counted once.
            self._files[path] = known._replace(version=version)
            self._files[path] = _Read(version, *self._targets_in(Path(path), read))
        except FileNotFoundError:
            self._files.pop(path, None)
            return _Read((), [], 0)
        except (OSError, ValueError) as error:
            self.failures += 1
            log.error("%s: targets stay as they were: %s", path, error)
        return self._files.get(path, known)

    def _targets_in(
        self, path: Path, read: Callable[[object], Iterator[Found]]
    ) -> tuple[list[Target], int]:
        """Return targets, and how many were none.

        Raises OSError, and ValueError where the document as a whole is not what it should be.
        """
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
        if len(content) > _LARGEST_FILE_BYTES:
            raise ValueError(f"over {_LARGEST_FILE_BYTES} bytes")
        targets, refused = [], 0
        for address, labels in read(orjson.loads(content)):
            try:
                targets.append(make_target(self._config, address, labels))
            except ValueError as error:
                refused += 1
                log.error("%s: not a target: %s", path, error)
        return targets, refused


def file_sd_addresses(document: object) -> Iterator[Found]:
    """Yield address and labels of each target in a Prometheus file_sd list.

    Raises ValueError where the document is not such a list.
    """
    if not isinstance(document, list):
        raise ValueError("not a list of target groups")
    for group in document:
        targets = group.get("targets") if isinstance(group, dict) else None
        labels = (group.get("labels") or {}) if isinstance(group, dict) else None
        if not isinstance(targets, list) or not isinstance(labels, dict):
            raise ValueError('a target group is {"targets": ["HOST:PORT"], "labels": {…}}')
        if not all(isinstance(text, str) for text in (*targets, *labels.values())):
            raise ValueError("a target or a label is not text")
        yield from ((target, labels) for target in targets)


def _paths(patterns: Iterable[str]) -> list[str]:
    return sorted({path for pattern in patterns for path in glob.glob(pattern)})


def _version(path: str) -> _Version:
    """Return what differs when a file was written again or replaced (a link followed)."""
    status = os.stat(path)
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
