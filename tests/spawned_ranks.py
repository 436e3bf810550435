"""Real rank processes for tests: one function, run by every rank of a layout."""

import importlib.util
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace


def run_ranks(
    function: Callable[..., Any],
    layout: Layout,
    rendezvous: Path,
    *arguments: Any,
    timeout_s: float = 60,
    ranks: tuple[int, ...] | None = None,
) -> list[Any]:
    """Run `function(place, *arguments)` in a process a rank; return what each returned.

    What a rank raised comes back in its place; so does the text "killed" of one that said nothing.
    The function must stand in a file's top level. `ranks`: only these are started.
    """
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for rank in range(layout.world) if ranks is None else ranks:
        place = RankPlace(layout, rank, f"file://{rendezvous}")
        near, far = context.Pipe(duplex=False)
        found = (function.__code__.co_filename, function.__name__)
        process = context.Process(target=_run, args=(far, *found, place, arguments), daemon=True)
        process.start()
        far.close()
        ends.append(near)
        processes.append(process)
    try:
        return [_result(end, timeout_s) for end in ends]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()


def _result(end: Connection, timeout_s: float) -> Any:
    if not wait([end], timeout_s):
        return "nothing in time"
    try:
        return end.recv()
    except EOFError:
        return "killed"


def _run(
    end: Connection, file: str, name: str, place: RankPlace, arguments: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        end.send(_function(file, name)(place, *arguments))
    except Exception as error:
        traceback.print_exc()
        end.send(error)


def _function(file: str, name: str) -> Callable[..., Any]:
    """Load it from its file: pytest imports test modules under names that no path leads to."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function
