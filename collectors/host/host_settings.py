"""Settings of the host sampler: the table [host] of the TOML file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perfledger.collectors.settings_table import SettingsTable

_DEVICES = r"loop\d+|ram\d+"
_INTERFACES = r"veth.*|cali.*|ifb\d+|dummy\d+"


@dataclass(frozen=True)
class HostSettings:
    """How often the host is sampled, and what is left out.

    Names that match an `excluded` pattern whole are left out. `root` is where the host's /proc and
    /sys are found, "/host" in a container that mounts them there.
    """

    interval_s: float = 1.0
    slow_interval_s: float = 5.0
    per_core: bool = False
    excluded_devices: re.Pattern[str] = re.compile(_DEVICES)
    excluded_interfaces: re.Pattern[str] = re.compile(_INTERFACES)
    root: Path = Path("/")

    @classmethod
    def from_toml(cls, values: Mapping[str, object]) -> "HostSettings":
        """Read the table [host]. Raises UsageError on an unknown key or a bad value."""
        table = SettingsTable("host", values)
        settings = cls(
            interval_s=table.number("interval_s", 1.0, 0.1, 3600),
            slow_interval_s=table.number("slow_interval_s", 5.0, 0.1, 3600),
            per_core=table.flag("per_core", False),
            excluded_devices=pattern(table, "excluded_devices", _DEVICES),
            excluded_interfaces=pattern(table, "excluded_interfaces", _INTERFACES),
            root=Path(table.text("root", "/")),
        )
        if not settings.root.is_dir():
            raise table.error("root", "a folder that is there")
        table.end()
        return settings


def pattern(table: SettingsTable, key: str, default: str) -> re.Pattern[str]:
    """Take a regular expression out of a table. Raises UsageError where it is none."""
    try:
        return re.compile(table.text(key, default))
    except re.error as error:
        raise table.error(key, f"a regular expression ({error})") from error
