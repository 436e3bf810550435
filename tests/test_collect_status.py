"""The table that `perfledger collect` prints at its end adds up, within 80 columns."""

from collections import Counter

import pytest

from perfledger.collect_status import print_counts

FATES = ("written", "rejected", "waiting", "deduplicated", "sampled_away")


@pytest.mark.parametrize("size", [1, 10**7, 10**9])
def test_the_table_adds_up_within_80_columns(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    parts = dict(zip(FATES, (size, 3, 4, 5 * size, size * 3), strict=True))
    counts = Counter({f"spans_{fate}": count for fate, count in parts.items()})
    counts |= Counter(spans_received=sum(parts.values()), requests_written=7, values_cut=2)
    print_counts(counts)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[-2:] == ["deduplicated", "sampled away"]
    assert max(map(len, lines)) <= 80
    received, *rest = [int(cell.replace(",", "")) for cell in lines[2].split()[1:]]
    assert rest == list(parts.values()) and received == sum(rest)
    assert lines[-2].split() == ["requests", "–", "7", "–", "–", "–", "–"]
    assert lines[-1] == "values cut: 2"
