"""Settings of the device sampler: the table [device] of the TOML file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perfledger.collectors.settings_table import SettingsTable


@dataclass(frozen=True)
class DeviceSettings:
    """How often devices are sampled, and which.

    Samples are sent on together, once a `report_interval_s`. `replay` is a recording that stands
    in for NVML.
    """

    period_s: float = 0.1
    slow_interval_s: float = 1.0
    report_interval_s: float = 1.0
    gpus: bool = True
    rapl: bool = True
    perf: bool = True
    replay: Path | None = None

    @classmethod
    def from_toml(cls, values: Mapping[str, object], folder: Path = Path()) -> "DeviceSettings":
        """Read the table; paths start at `folder`. Raises UsageError on an unknown or bad value."""
        table = SettingsTable("device", values)
        replay = table.text("replay")
        settings = cls(
            period_s=table.number("period_s", 0.1, 0.01, 3600),
            slow_interval_s=table.number("slow_interval_s", 1.0, 0.1, 3600),
            report_interval_s=table.number("report_interval_s", 1.0, 0.1, 3600),
            gpus=table.flag("gpus", True),
            rapl=table.flag("rapl", True),
            perf=table.flag("perf", True),
            replay=folder / replay if replay else None,
        )
        table.end()
        return settings
