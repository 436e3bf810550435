"""Settings of the wait-state sampler: the table [wait_states] of the TOML file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perfledger.collectors.host.host_settings import pattern
from perfledger.collectors.settings_table import SettingsTable

LARGEST_PID = 2**22


@dataclass(frozen=True)
class WaitSettings:
    """Which processes are watched, and how often.

    Exactly one of `pid`, `command` (a pattern in the command line) and `port` (that it listens on)
    is set. A pattern or port stands for all processes that it finds, up to `most_processes`, and
    is looked for again; a pid that ends is the end.
    """

    pid: int | None = None
    command: re.Pattern[str] | None = None
    port: int | None = None
    children: bool = True
    rate_hz: float = 20.0
    report_interval_s: float = 1.0
    search_interval_s: float = 5.0
    python_names: bool = True
    most_processes: int = 32
    proc: Path = Path("/proc")

    @classmethod
    def from_toml(cls, values: Mapping[str, object]) -> "WaitSettings":
        """Read a table [[wait_states]]. Raises UsageError on an unknown key or a bad value."""
        table = SettingsTable("wait_states", values)
        chosen = [key for key in ("pid", "command", "port") if key in values]
        if len(chosen) != 1:
            raise table.error("pid, command or port", "set, and only one of the three")
        settings = cls(
            pid=table.integer("pid", 1, 1, LARGEST_PID) if "pid" in values else None,
            command=pattern(table, "command", "") if "command" in values else None,
            port=table.integer("port", 1, 1, 65_535) if "port" in values else None,
            children=table.flag("children", True),
            rate_hz=table.number("rate_hz", 20.0, 0.1, 200),
            report_interval_s=table.number("report_interval_s", 1.0, 0.1, 3600),
            search_interval_s=table.number("search_interval_s", 5.0, 0.5, 3600),
            python_names=table.flag("python_names", True),
            most_processes=table.integer("most_processes", 32, 1, 1024),
        )
        if settings.command is not None and settings.command.pattern == "":
            raise table.error("command", "a pattern that is not empty")
        table.end()
        return settings

    def __str__(self) -> str:
        """Return what is watched, for messages."""
        if self.pid is not None:
            return f"process {self.pid}"
        if self.port is not None:
            return f"what listens on port {self.port}"
        return f"command /{self.command.pattern if self.command else ''}/"
