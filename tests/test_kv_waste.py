"""The simulation behind the figure of wasted KV memory, on a small workload."""

import sys
import xml.etree.ElementTree as ET
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from kv_waste import BLOCK_SIZE, WAYS, Workload, chat_like, figure, simulate


def test_paged_blocks_waste_little_and_reservation_much() -> None:
    result = simulate(Workload("chat", list(islice(chat_like(), 80)), 2048))
    assert result["paged_waste_pct"] < 4 < 60 < result["max_waste_pct"]
    ways = [result[f"{way}_waste_pct"] for way in WAYS]
    assert ways == sorted(ways)
    assert result["requests"] + result["requests_too_long"] == 80


def test_one_request_wastes_what_can_be_counted_by_hand() -> None:
    """33 prompt tokens in one step, then 15 more: three blocks throughout."""
    result = simulate(Workload("one", [(33, 16)], 256))
    written = sum(range(33, 49))
    assert result["steps"] == 16
    assert result["paged_waste_pct"] == round(100 * (1 - written / (16 * 3 * BLOCK_SIZE)), 2)
    assert result["oracle_waste_pct"] == round(100 * (1 - written / (16 * 49)), 2)
    assert result["max_waste_pct"] == round(100 * (1 - written / (16 * 256)), 2)


def test_the_figure_is_well_formed_and_says_each_number() -> None:
    result = {f"{way}_waste_pct": 10.0 * at for at, way in enumerate(WAYS)}
    texts = [node.text for node in ET.fromstring(figure({"some": result})).iter() if node.text]
    said = [text for text in texts if text.endswith("% waste")]
    assert said == ["0.0 % waste", "10.0 % waste", "20.0 % waste", "30.0 % waste"]
