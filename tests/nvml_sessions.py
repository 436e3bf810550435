"""Synthetic sessions with NVML, and what a sampler says while it replays one."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from metrics_sink import attributes
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from perfledger.collectors.device.device_sampler import DeviceSampler
from perfledger.collectors.device.device_settings import DeviceSettings

SESSIONS = Path(__file__).parent / "data" / "nvml"
NAMES = ("h100_pair", "a100_half_working", "lost_and_found", "driver_late")
FIRST_WALL_NS = 1_790_000_000_000_000_000
FIRST, SECOND = (f"GPU-00000000-0000-4000-8000-0000000000a{n}" for n in (0, 1))

# (ms since the first sample, ms since then of the counted interval's start or None, value)
Point = tuple[float, float | None, float]
Points = dict[tuple[str, frozenset[tuple[str, str | int]]], list[Point]]


def run_counters(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `perfledger counters`."""
    command = [sys.executable, "-P", "-m", "perfledger", "counters", *flags]
    variables = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120)


def session(name: str) -> Path:
    return SESSIONS / f"{name}.jsonl"


def replaying(name: str, **settings: float) -> DeviceSampler:
    return DeviceSampler(DeviceSettings(replay=session(name), **settings))  # type: ignore[arg-type]


def everything_said(sampler: DeviceSampler) -> tuple[Points, list[bytes]]:
    """Sample to the end of the recording; return all points, and the requests of events."""
    bodies, events = [], []
    while not sampler.ended():
        bodies.append(sampler.sample())
        events.append(sampler.events())
    bodies.append(sampler.close())
    points: Points = defaultdict(list)
    for body in bodies:
        if body is not None:
            _gather(points, ExportMetricsServiceRequest.FromString(body))
    del points["perfledger.device.sampler.cpu_time", frozenset()]  # it is not in the recording
    return points, [body for body in events if body is not None]


def _gather(points: Points, request: ExportMetricsServiceRequest) -> None:
    for group in request.resource_metrics:
        for metric in group.scope_metrics[0].metrics:
            for point in getattr(metric, metric.WhichOneof("data")).data_points:
                series = metric.name, frozenset(attributes(point.attributes).items())
                start_ns = point.start_time_unix_nano
                value = getattr(point, point.WhichOneof("value"))
                points[series].append(
                    (
                        (point.time_unix_nano - FIRST_WALL_NS) / 1e6,
                        (start_ns - FIRST_WALL_NS) / 1e6 if start_ns else None,
                        value,
                    )
                )


def of(points: Points, name: str, **wanted: str | int) -> list[Point]:
    """Return the points of the one series of a name with these attributes (`_` for a dot)."""
    asked = {key.replace("_", ".") if key != "hw_id" else "hw.id": v for key, v in wanted.items()}
    found = [
        series
        for (metric, attrs), series in points.items()
        if metric == name and asked.items() <= dict(attrs).items()
    ]
    assert len(found) == 1, (name, asked, len(found))
    return found[0]
