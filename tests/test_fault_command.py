"""`perfledger fault list`: every fault, in lines that a terminal shows whole."""

import pytest

from perfledger.cli import main
from perfledger.instrumented_runtime.faults.catalogue import FAULTS


def test_the_list_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fault", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for fault in FAULTS:
        needs = f" (needs {fault.needs})" if fault.needs else ""
        told = " ".join(" ".join(lines).split())
        assert f"{fault.name}: {fault.meaning}{needs}" in told
