"""Which fault is on stands in the sealed answer and nowhere else: no span, point, log, manifest."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfledger.instrumented_runtime.faults.catalogue import BY_NAME, FAULTS
from perfledger.instrumented_runtime.faults.sealing import unseal
from perfledger.schema.store import Store
from perfledger.schema.tables import TABLES


def ask(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200


def everything_in(store: Path) -> str:
    """Return all rows of all tables, and all other files, as one text."""
    found = [path.read_bytes().decode("latin-1") for path in store.rglob("*") if path.is_file()]
    for table in TABLES:
        found.append(str(Store(store).scan(table).collect().to_dicts()))
    return "\n".join(found)


@pytest.mark.parametrize("name", ["few_kv_blocks", "slow_tokenizer", "gil_contention"])
def test_nothing_but_the_answer_names_the_fault(
    name: str,
    tmp_path: Path,
    start_collector: Callable[..., Any],
    start_runtime: Callable[..., Any],
) -> None:
    answer = tmp_path / "answer.json"
    under = ("fault", "run", "--fault", name, "--answer", str(answer), "--")
    with start_collector(tmp_path) as collector:
        with start_runtime(tmp_path, otlp_port=collector.grpc_port, under=under) as runtime:
            ask(runtime.url)
            with urllib.request.urlopen(f"{runtime.url}/health") as response:
                told = response.read().decode()
        printed = runtime.log.read_text()
    stored = everything_in(collector.store)
    assert "tokenize" in stored and "forward" in stored  # it was looked at
    for fault in FAULTS:
        for text in (told, printed, stored):
            assert fault.name not in text.replace("-", "_")
    opened = unseal(answer)
    assert (opened.fault, opened.blamed) == (name, BY_NAME[name].blamed)
    assert opened.digest in printed
