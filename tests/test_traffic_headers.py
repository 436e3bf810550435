"""What callers say of their requests in headers: read, refused by name, joined with the body."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.openai_protocol import RefusedError
from perfledger.instrumented_runtime.traffic_headers import Traffic, parse_traffic

LABEL = "1 to 128 letters, digits or . _ : / @ + -"
INTEGER = "an integer from -2147483648 to 2147483647"
MILLISECONDS = "milliseconds, 1 to 999999999"


def test_all_headers() -> None:
    traffic = parse_traffic(
        {
            "x-perfledger-tenant": "acme",
            "x-perfledger-class": "batch",
            "x-perfledger-session": "s:1/2",
            "x-perfledger-priority": "-3",
            "x-perfledger-deadline-ms": "1500",
        }
    )
    assert traffic == Traffic("acme", "batch", "s:1/2", -3, 1500)
    assert traffic.attributes() == {
        "perfledger.tenant": "acme",
        "perfledger.class": "batch",
        "perfledger.session": "s:1/2",
        "perfledger.priority": -3,
        "perfledger.deadline_ms": 1500,
    }
    assert parse_traffic({}) == Traffic()
    assert Traffic().attributes() == {}
    assert parse_traffic({"x-perfledger-priority": "0"}).attributes() == {"perfledger.priority": 0}


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        ("x-perfledger-tenant", "", LABEL),
        ("x-perfledger-tenant", "a" * 129, LABEL),
        ("x-perfledger-tenant", "a\n", LABEL),
        ("x-perfledger-class", "two words", LABEL),
        ("x-perfledger-session", "-s", LABEL),
        ("x-perfledger-priority", "high", INTEGER),
        ("x-perfledger-priority", "1.5", INTEGER),
        ("x-perfledger-priority", "2147483648", INTEGER),
        ("x-perfledger-priority", "9" * 5000, INTEGER),
        ("x-perfledger-deadline-ms", "-5", MILLISECONDS),
        ("x-perfledger-deadline-ms", "0", MILLISECONDS),
        ("x-perfledger-deadline-ms", "1.5", MILLISECONDS),
        ("x-perfledger-deadline-ms", "soon", MILLISECONDS),
        ("x-perfledger-deadline-ms", "\u0665", MILLISECONDS),
        ("x-perfledger-deadline-ms", "9" * 5000, MILLISECONDS),
    ],
)
def test_bad_headers_are_refused_by_name(header: str, value: str, expected: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_traffic({header: value})
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "invalid_header", header)
    assert error.what == f"{header} must be {expected}"


@given(st.text(max_size=12))
def test_any_header_is_taken_or_refused(value: str) -> None:
    for header in ("tenant", "class", "session", "priority", "deadline-ms"):
        try:
            traffic = parse_traffic({f"x-perfledger-{header}": value})
        except RefusedError as error:
            assert error.code == "invalid_header"
        else:
            assert len(traffic.attributes()) == 1


def test_the_body_may_give_the_priority() -> None:
    none, five = Traffic(tenant="a"), Traffic(tenant="a", priority=5)
    assert [none.or_of_body(None), none.or_of_body(5)] == [none, five]
    assert [five.or_of_body(None), five.or_of_body(5)] == [five, five]
    with pytest.raises(RefusedError) as caught:
        five.or_of_body(0)
    assert (caught.value.param, caught.value.what) == (
        "priority",
        "priority is 0 but x-perfledger-priority is 5: give one of them",
    )
