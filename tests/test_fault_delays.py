"""The header that plants delays: what it may say."""

import pytest

from perfledger.instrumented_runtime.faults.delays import for_engine, parse_faults
from perfledger.instrumented_runtime.openai_protocol import RefusedError


def test_faults() -> None:
    faults = parse_faults("template=50ms, decode=1s,queue=7us", True)
    assert faults == {"template": 50_000_000, "decode": 1_000_000_000, "queue": 7_000}
    assert for_engine(faults) == {"decode": 1_000_000_000, "queue": 7_000}
    assert parse_faults(None, False) == {}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "decode",
        "decode=5",
        "decode=-5ms",
        "sleep=5ms",
        "decode=5ms,decode=6ms",
        "decode=11s",
        "decode=5ms;",
        "x" * 300,
    ],
)
def test_bad_faults_are_refused(header: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_faults(header, True)
    assert (caught.value.code, caught.value.param) == ("invalid_header", "x-perfledger-fault")


def test_faults_are_off_by_default() -> None:
    with pytest.raises(RefusedError, match="--allow-faults"):
        parse_faults("decode=5ms", False)
