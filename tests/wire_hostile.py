"""Bodies of up to 64 MiB made to cost time or memory, and what each costs; a child of a test.

Prints what became of each, the peak of memory in MiB beside the body, and the seconds.
"""

import time
from collections.abc import Callable
from pathlib import Path

from perfledger.collectors.wire.assemble import in_order, spans_table
from perfledger.collectors.wire.span_batch import Malformed, SpanBatch, SpanReader

_IDS = b"\x0a\x10" + b"t" * 16 + b"\x12\x08" + b"s" * 8


def size(length: int) -> bytes:
    """Return a length as a varint of five bytes."""
    return bytes(length >> 7 * i & 0x7F | 0x80 for i in range(4)) + bytes([length >> 28])


def field(tag: int, content: bytes) -> bytes:
    return bytes([tag]) + size(len(content)) + content


def request(scope_spans: bytes) -> bytes:
    return field(0x0A, field(0x12, scope_spans))


def a_span(fields: bytes) -> bytes:
    return request(field(0x12, _IDS + fields))


def attribute(value: bytes, key: bytes = b"k") -> bytes:
    return field(0x4A, b"\x0a" + bytes([len(key)]) + key + field(0x12, value))


def nested(levels: int, tag: bytes = b"\x2a") -> bytes:
    """Return arrays in arrays, without copying the inner ones again and again."""
    heads, inner = [], 0
    for _ in range(levels):
        heads.append(b"\x0a" + size(inner) if len(heads) % 2 else tag + size(inner))
        inner += 6
    return b"".join(reversed(heads))


def keyed(count: int, value: bytes) -> bytes:
    """Return attributes that all have another key."""
    return b"".join(
        b"\x4a" + bytes([12 + len(value)]) + b"\x0a\x08%08x\x12" % i + bytes([len(value)]) + value
        for i in range(count)
    )


# How many MiB, and what makes them. What Python has to look at comes in small numbers.
BODIES: dict[str, tuple[int, Callable[[int], bytes]]] = {
    "empty spans": (16, lambda n: request(b"\x12\0" * (n // 2))),
    "many small spans": (16, lambda n: request((b"\x12\x1c" + _IDS) * (n // 30))),
    "empty attributes": (24, lambda n: a_span(b"\x4a\0" * (n // 2))),
    "one long text": (24, lambda n: a_span(attribute(field(0x0A, b"x" * n)))),
    "tiny events": (4, lambda n: a_span(b"\x5a\0" * (n // 2))),
    "too many events": (24, lambda n: a_span(b"\x5a\0" * (n // 2))),
    "tiny links": (4, lambda n: a_span(b"\x6a\0" * (n // 2))),
    "deep arrays": (24, lambda n: a_span(attribute(nested(n // 12 * 2 - 1)))),
    "long array": (24, lambda n: a_span(attribute(field(0x2A, b"\x0a\0" * (n // 2))))),
    "deep groups": (24, lambda n: a_span(b"\xa3\x01" * (n // 2))),
    "empty resources": (16, lambda n: b"\x0a\0" * (n // 2)),
    "empty scopes": (24, lambda n: field(0x0A, b"\x12\0" * (n // 2))),
    "many pieces": (24, lambda n: field(0x0A, b"\x1a\0" * (n // 2))),
    "keys": (1, lambda n: a_span(keyed(n // 40, b"\x18\1"))),
    "maps": (
        1,
        lambda n: a_span(keyed(n // 300, b"\x32\x0d\x0a\x0b\x0a\1a\x12\6\x0a\4\xc3\xa9ab")),
    ),
    "bad texts": (1, lambda n: a_span((b"\x4a\x08\x0a\1k\x12\3\x0a\1\xff") * (n // 20))),
}


def peak_bytes() -> int:
    """Return the most memory that this process has held since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    SpanBatch(SpanReader(2048)).add(a_span(attribute(b"\x0a\1x")), 1)
    for name, (mebibytes, make) in BODIES.items():
        body = make(mebibytes * 2**20 - 512)
        assert len(body) <= mebibytes * 2**20
        forget_peak()
        before = peak_bytes()
        batch, began = SpanBatch(SpanReader(2048)), time.process_time()
        try:
            _, tally = batch.add(body, 1)
            reasons = " ".join(tally.rejected) or "none"
            found = f"{batch.rows} rows, cut {tally.cut}, rejected {reasons}"
            spans_table(batch, in_order(batch))
        except Malformed:
            found = "malformed"
        peak = (peak_bytes() - before) >> 20
        print(name, found, peak, f"{time.process_time() - began:.2f}", sep="|", flush=True)
        del batch, body


if __name__ == "__main__":
    main()
