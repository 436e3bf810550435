"""Planted delays: the header `x-perfledger-fault: template=50ms,decode=2ms` of tests and drills.

Honoured only where the server was started with --allow-faults. The API process sleeps in its own
stages and hands the others to the engine.
"""

import asyncio
import re
import time

from perfledger.instrumented_runtime.openai_protocol import RefusedError
from perfledger.schema.clocks import monotonic_ns

HEADER = "x-perfledger-fault"
API_STAGES = frozenset({"template", "tokenize", "detokenize", "stream"})
ENGINE_STAGES = frozenset({"queue", "context", "prefill", "decode", "sample", "host_gap"})

MAX_DELAY_NS = 10_000_000_000
MAX_HEADER_CHARS = 256
UNIT_NS = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_DELAY = re.compile(r"([a-z_]+)=(\d{1,8})(us|ms|s)")
# A timer of the event loop may be this late; the rest is slept without giving way.
_TIMER_SLACK_NS = 2_000_000


def parse_faults(header: str | None, allowed: bool) -> dict[str, int]:
    """Return the delay of each stage named, ns. Raises RefusedError on anything else."""
    if header is None:
        return {}
    if not allowed:
        raise _refused(f"{HEADER} is off on this server: start it with --allow-faults")
    if len(header) > MAX_HEADER_CHARS:
        raise _refused(f"{HEADER} is longer than {MAX_HEADER_CHARS} characters")
    delays_ns: dict[str, int] = {}
    for part in header.split(","):
        match = _DELAY.fullmatch(part.strip())
        if match is None or match[1] not in API_STAGES | ENGINE_STAGES or match[1] in delays_ns:
            stages = ", ".join(sorted(API_STAGES | ENGINE_STAGES))
            raise _refused(f"{HEADER} must be like decode=50ms, each stage once, of: {stages}")
        delays_ns[match[1]] = int(match[2]) * UNIT_NS[match[3]]
        if delays_ns[match[1]] > MAX_DELAY_NS:
            raise _refused(f"{HEADER}: a delay is at most {MAX_DELAY_NS // UNIT_NS['s']} s")
    return delays_ns


def for_engine(delays_ns: dict[str, int]) -> dict[str, int]:
    """Return the delays that the engine plants."""
    return {stage: delay for stage, delay in delays_ns.items() if stage in ENGINE_STAGES}


async def plant(delays_ns: dict[str, int], stage: str) -> None:
    """Sleep for the delay of `stage`, if it has one, exact to the timer of the kernel."""
    delay_ns = delays_ns.get(stage, 0)
    if not delay_ns:
        return
    until_ns = monotonic_ns() + delay_ns
    await asyncio.sleep(max(0, delay_ns - _TIMER_SLACK_NS) / 1e9)
    time.sleep(max(0, until_ns - monotonic_ns()) / 1e9)


def _refused(what: str) -> RefusedError:
    return RefusedError(what, code="invalid_header", param=HEADER)
