"""Which traces tail sampling keeps, as `[sampling]` of the TOML file says.

    [sampling]
    share = 0.1                  # of the traces that nothing below keeps; 1 keeps all
    slow_ms = 2000               # a trace whose root, or whose entry into a service, took longer
    slow_first_chunk_ms = 500    # time to the first chunk over its objective (ttfc_ns)
    tenants = ["gold"]
    classes = ["interactive"]
    wait_s = 10                  # how long a span waits for what the rest of its trace tells
    [sampling.slow_stages_ms]
    prefill = 200                # a span of this name that took longer

A trace with an error is always kept, and so is the trace of an engine's steps: requests link to
steps, and without them no request could be explained.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from perfledger.collectors.settings_table import SettingsTable
from perfledger.schema.attributes import REQUEST_ROOTS, STEP_NAMES
from perfledger.schema.stages import STAGE_NAMES

log = logging.getLogger("perfledger.collect")

# OpenTelemetry, "Probability sampling": the last 56 bits of a trace id are its randomness.
RANDOMNESS_BITS = 56
_LONGEST_MS = 7 * 24 * 3600 * 1e3
_SETTING_NAME = "sampling"
# Names of spans; these two stages are what is left between spans.
_KNOWN_SPANS = (
    *(name for name in STAGE_NAMES if name not in ("host_gap", "unattributed")),
    *sorted(REQUEST_ROOTS | STEP_NAMES),
)


@dataclass(frozen=True)
class SamplingPolicy:
    """What is always kept, and the share of the rest. Durations must be longer than a limit."""

    share: float = 1.0
    slow_ns: int | None = None
    slow_first_chunk_ns: int | None = None
    slow_stages_ns: tuple[tuple[str, int], ...] = ()
    tenants: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    sample_engine_steps: bool = False
    wait_s: float = 10.0
    remembered_traces: int = 1_000_000

    @property
    def threshold(self) -> int:
        """Return T: a trace is kept by chance where its randomness is at least T.

        T = (1 - share) 2^56 (OpenTelemetry, "Probability sampling": rejection threshold `th`), so
        collectors with the same share keep the same traces, and a smaller share keeps a subset.
        """
        return round((1 - self.share) * (1 << RANDOMNESS_BITS))

    @classmethod
    def from_toml(cls, values: Mapping[str, object]) -> Self:
        """Read the table [sampling]. Raises UsageError on an unknown key or a bad value."""
        table = SettingsTable(_SETTING_NAME, values)
        stages = table.numbers_by_name("slow_stages_ms", 0, _LONGEST_MS)
        policy = cls(
            share=table.number("share", 1.0, 0, 1),
            slow_ns=_ns(table.optional_number("slow_ms", 0, _LONGEST_MS)),
            slow_first_chunk_ns=_ns(table.optional_number("slow_first_chunk_ms", 0, _LONGEST_MS)),
            slow_stages_ns=tuple((name, round(ms * 1e6)) for name, ms in stages.items()),
            tenants=table.texts("tenants"),
            classes=table.texts("classes"),
            sample_engine_steps=table.flag("sample_engine_steps", False),
            wait_s=table.number("wait_s", 10.0, 0, 120),
            remembered_traces=table.integer("remembered_traces", 1_000_000, 1000, 100_000_000),
        )
        table.end()
        policy.warn_of_unknown_spans()
        return policy

    def warn_of_unknown_spans(self) -> None:
        """Log names in `slow_stages_ms` that are not ours: a mistake, or of another service."""
        unknown = [name for name, _ in self.slow_stages_ns if name not in _KNOWN_SPANS]
        if unknown:
            log.warning(
                "[%s.slow_stages_ms]: %s: no span of Perfledger has such a name, so only another"
                " service's can match; known are %s",
                *(_SETTING_NAME, ", ".join(unknown), ", ".join(_KNOWN_SPANS)),
            )


def _ns(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else round(milliseconds * 1e6)
