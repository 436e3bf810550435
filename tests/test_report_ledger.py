"""The ledger in pages: from a store, through the commands, to what a browser shows."""

from pathlib import Path

import pytest
from ledger_rows import BASE, BOOT, GB_CEILINGS, Row, ceilings, fill, step, step_span, work
from pictures_in_browser import look

from perfledger import analyzers
from perfledger.analyzers.edges import EdgeLedger
from perfledger.cli import main
from perfledger.report import ledger_or_why
from perfledger.schema.manifest import Manifest
from perfledger.schema.store import Store

DECODE = work(
    {"linear_weights_read": 8_000_000, "attention_kv_read": 1_000_000},
    {"linear": 9_000_000, "attention": 1_000_000},
    launches=10,
)
PREFILL = work({"linear_weights_read": 8_000_000}, {"linear": 900_000_000}, launches=10)


def filled(folder: Path, **more: tuple[Row, ...]) -> str:
    kinds = (("decode", DECODE), ("prefill", PREFILL), ("mixed", PREFILL), ("decode", DECODE))
    rows = tuple(
        step(seq, kind, 2 * seq, 2 * seq + 1, done) for seq, (kind, done) in enumerate(kinds)
    )
    fill(Store(folder), steps=rows, spans=tuple(step_span(row) for row in rows), **more)
    return str(folder)


@pytest.mark.parametrize("width", [1000, 360])
def test_the_page_of_a_store_is_clear_at_any_width(tmp_path: Path, width: int) -> None:
    store = filled(tmp_path / "store", runs=(ceilings(*GB_CEILINGS),))
    page = tmp_path / "pages" / "ledger.html"
    assert main(["ledger", "--store", store, "--page", str(page)]) == 0
    seen = look(page.read_text(), width, tmp_path)
    assert len(seen.pictures) == 2
    assert not seen.overflows
    for picture in seen.pictures:
        assert (picture.overlapping(), picture.outside()) == ([], [])
    said = {words.text for words in seen.pictures[0].words}
    assert {"device memory", "object storage", "registers and SRAM: not observable"} <= said


def test_a_page_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = filled(tmp_path / "store")
    assert main(["ledger", "--store", store, "--page", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_the_report_keeps_the_bytes_where_ceilings_are_of_another_host(tmp_path: Path) -> None:
    ours = {"runtime.threads": 2, "host.cpu_model": "this CPU", "host.boot_id": BOOT}
    run = {
        "run_id": "run-1",
        "kind": "record",
        "created_ns": BASE,
        "manifest": Manifest.of(ours).to_json(),
        "received_ns": BASE,
    }
    elsewhere = ceilings(*GB_CEILINGS, boot_id="elsewhere", cpu="another CPU")
    found = ledger_or_why(analyzers.open(filled(tmp_path, runs=(run, elsewhere))))
    assert isinstance(found, EdgeLedger)
    (memory,) = [edge for edge in found.edges if edge.edge == "device_memory"]
    assert memory.flows[0].forward_bytes == 2 * 9_000_000 + 2 * 8_000_000
    assert memory.ceiling is None
    (loss,) = found.losses
    assert loss.startswith("no measured ceilings: ") and "another host" in loss


def test_the_report_says_why_there_is_no_ledger(tmp_path: Path) -> None:
    assert ledger_or_why(analyzers.open(str(tmp_path))) == "no spans in this store"
