"""The way from the API process to the exporter: whole or counted, and never in the way."""

from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.telemetry import (
    MAX_RECORD_BYTES,
    OUTCOMES,
    EngineRecord,
    RequestRecord,
    SpanRecord,
    TelemetrySender,
    decode,
    encode,
    open_channel,
)

NS = st.integers(0, 2**63 - 1)
ID_64 = st.integers(1, 2**64 - 1)
TEXT = st.text(max_size=20)
VALUE = TEXT | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.lists(TEXT, max_size=3)
VALUE = VALUE | st.floats(allow_nan=False, allow_infinity=False)
ATTRIBUTES = st.dictionaries(TEXT, VALUE, max_size=4)
RECORD = st.builds(
    RequestRecord,
    request=st.integers(0, 2**62),
    trace_id=st.integers(1, 2**128 - 1),
    span_id=ID_64,
    parent_span_id=st.none() | ID_64,
    name=st.sampled_from(["chat", "text_completion"]),
    start_ns=NS,
    end_ns=NS,
    outcome=st.sampled_from(OUTCOMES),
    attributes=ATTRIBUTES,
    spans=st.lists(st.builds(SpanRecord, TEXT, NS, NS, ATTRIBUTES), max_size=3),
    sent_ns=st.none() | NS,
)
SMALL = RequestRecord(1, 2, 3, None, "chat", 4, 5, "ok", {}, [])


@given(
    record=RECORD | st.builds(EngineRecord, ATTRIBUTES, st.text(), st.integers(0, 63)),
    dropped=st.integers(0, 2**62),
)
def test_what_is_encoded_is_what_is_decoded(
    record: RequestRecord | EngineRecord, dropped: int
) -> None:
    assert decode(encode(record, dropped)) == (record, dropped)


def test_records_arrive_one_by_one_and_the_end_of_the_sender_is_seen() -> None:
    near, far = open_channel()
    with far:
        sender = TelemetrySender(near)
        engine = EngineRecord({"perfledger.device": "cpu"})
        sender.send(engine)
        sender.send(SMALL)
        sender.close()
        received = [decode(far.recv(MAX_RECORD_BYTES)) for _ in range(2)]
        assert received == [(engine, 0), (SMALL, 0)]
        assert far.recv(MAX_RECORD_BYTES) == b""


def test_a_full_socket_drops_counts_and_tells_with_the_next_record() -> None:
    near, far = open_channel()
    with near, far:
        sender = TelemetrySender(near)
        sent = 0
        while not sender.dropped:
            sender.send(SMALL)
            sent += 1
        sender.send(SMALL)
        assert (sent > 100, sender.dropped) == (True, 2)
        for _ in range(sent - 1):
            assert decode(far.recv(MAX_RECORD_BYTES)) == (SMALL, 0)
        sender.send(SMALL)
        assert decode(far.recv(MAX_RECORD_BYTES)) == (SMALL, 2)


def test_what_cannot_be_sent_is_dropped_and_counted() -> None:
    near, far = open_channel()
    with near:
        sender = TelemetrySender(near)
        sender.send(EngineRecord({"too large": "x" * MAX_RECORD_BYTES}))
        sender.send(EngineRecord({"beyond 64 bits": 2**64}))
        sender.send(EngineRecord({"no text": "\ud800"}))
        far.close()  # the exporter has died
        sender.send(SMALL)
        assert sender.dropped == 4
