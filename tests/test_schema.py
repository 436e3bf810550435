"""The declarations are consistent, and the reference pages are made from them."""

import re
from pathlib import Path

import pyarrow as pa
import pytest

from perfledger.schema import attributes, clocks, stages, tables
from perfledger.schema.attributes import is_content
from perfledger.schema.tables import REQUESTS, SPANS, TABLES, Table

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_keys_and_sort_orders_are_columns_and_no_name_comes_twice(table: Table) -> None:
    names = table.names()
    assert len(names) == len(set(names))
    assert {*table.key, *table.sort} <= set(names)
    assert all(column.meaning for column in table.columns)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_times_are_integers_and_say_their_unit(table: Table) -> None:
    for column in table.columns:
        if re.search(r"(_ns|_ms|_bytes|_tokens)$", column.name):
            assert column.type in (pa.int64(), pa.list_(pa.int64())), column.name


def test_every_promoted_attribute_has_its_column() -> None:
    promoted = {
        a.column for a in (*attributes.RESOURCE_ATTRIBUTES, *attributes.SPAN_ATTRIBUTES) if a.column
    }
    assert promoted <= set(SPANS.names())


def test_a_request_has_a_column_for_every_stage_and_sub_stage() -> None:
    assert {*stages.STAGE_COLUMNS, *stages.SUB_STAGE_COLUMNS} <= set(REQUESTS.names())


@pytest.mark.parametrize(
    ("page", "made"),
    [("tables.md", tables.reference()), ("attributes.md", attributes.reference())],
)
def test_reference_pages_are_as_made(page: str, made: str) -> None:
    assert (DOCS / page).read_text() == made, "run: python docs/make_reference.py"


@pytest.mark.parametrize(
    ("key", "denied"),
    [
        ("gen_ai.input.messages", True),
        ("gen_ai.prompt.0.content", True),
        ("llm.input_messages.3.message.content", True),
        ("gen_ai.usage.input_tokens", False),
        ("gen_ai.prompts", False),
        ("messages", True),
        ("messages.count", True),
        ("", False),
    ],
)
def test_content_keys_and_their_children_are_denied(key: str, denied: bool) -> None:
    assert is_content(key) is denied


def test_an_anchor_turns_monotonic_into_wall_exactly(tmp_path: Path) -> None:
    anchor = clocks.ClockAnchor(monotonic_ns=5, wall_ns=1_700_000_000_000_000_000, boot_id="b")
    assert anchor.to_wall_ns(7) == 1_700_000_000_000_000_002
    assert clocks.read_boot_id(tmp_path / "none") == ""


def test_a_taken_anchor_lies_between_two_readings() -> None:
    before = clocks.monotonic_ns()
    anchor = clocks.take_anchor()
    assert before <= anchor.monotonic_ns <= clocks.monotonic_ns()


@pytest.mark.parametrize(
    ("key", "is_denied"),
    [
        ("http.request.body", True),
        ("http.request.body.content", True),
        ("http.request.body.size", False),
        ("HTTP.Response.Body.Size", False),
        ("http.request.body.size.text", True),
        ("http.request.body.sizes", True),
        ("gen_ai.prompt.size", True),
        ("input.size", True),
    ],
)
def test_a_size_is_no_content(key: str, is_denied: bool) -> None:
    assert attributes.is_content(key) is is_denied
