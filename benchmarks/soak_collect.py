"""Kill the collector at random instants under load; every acknowledged span must be there, once.

    python benchmarks/soak_collect.py [--kills 50] [--seed 0] [--rate 40000]

Clients over gRPC and HTTP send all the time and send again what was not acknowledged, as OTLP's
exporters do. SIGKILL comes while the collector serves and, about one time in four, while it still
starts and replays. At the end the ids that the reader finds are compared with those acknowledged.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfledger.schema.store import Store

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from collect_servers import collect_command, free_port, listens, wait_until  # noqa: E402
from fresh_requests import Words  # noqa: E402
from otlp_load import Acks, Load, RunningLoad, write_bodies  # noqa: E402
from recording import write_result  # noqa: E402
from reference_payload import SPANS_A_REQUEST  # noqa: E402

GOAL = "SIGKILL at 50 random instants under load: every acknowledged span once through the reader"
_STARTS_WITHIN_S = 60.0
_ENDS_WITHIN_S = 120.0
_LOWEST_DELAY_S, _HIGHEST_DELAY_S = 0.05, 4.0
_WHILE_STARTING = 0.25  # of the kills
_STARTING_S = 3.0
_LAST_LOAD_S = 2.0


@dataclass(frozen=True)
class Kill:
    """When the collector was killed, s after its process began, and whether it served by then."""

    after_s: float
    serving: bool


@dataclass(frozen=True)
class Found:
    """What the reader found, beside what the clients were told. The first five must be 0."""

    missing: int  # acknowledged and not there
    twice: int  # there more than once
    foreign: int  # there and never sent
    half_requests: int  # never acknowledged, and there in part
    refused: int  # requests refused for good
    acknowledged: int
    unacknowledged_there: int  # stored, and the client did not hear of it: allowed
    sent_again: int
    dropped_by_reader: int  # re-sent rows that lie in two files

    @property
    def is_right(self) -> bool:
        return not (
            self.missing or self.twice or self.foreign or self.half_requests or self.refused
        )


class Restarting:
    """A collector on one store and two ports, killed and started again."""

    def __init__(self, folder: Path, *extra: str) -> None:
        self.store = Store.at(str(folder / "store"))
        self.ports = {"grpc": free_port(), "http": free_port()}
        self.kills: list[Kill] = []
        self.log = folder / "collect.log"
        self._command = collect_command(folder / "store", self.ports, *extra)
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0

    def start(self) -> None:
        with open(self.log, "ab") as sink:
            self._process = subprocess.Popen(
                self._command, stdout=sink, stderr=sink, start_new_session=True
            )
        self._began_s = time.monotonic()

    def wait_until_serving(self) -> None:
        """Raises SystemExit with its log if it ends instead: it must always start."""
        wait_until(self.serves, _STARTS_WITHIN_S, "a restarted collector")

    def serves(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise SystemExit(f"the collector ended: {self.log.read_text()[-4000:]}")
        return all(listens(port) for port in self.ports.values())

    def kill(self) -> None:
        assert self._process is not None
        self.kills.append(Kill(time.monotonic() - self._began_s, self.serves()))
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """End it in order, so that all it holds is written."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(_ENDS_WITHIN_S)
        if code != 0:
            raise SystemExit(f"the collector ended with {code}: {self.log.read_text()[-4000:]}")


def soak(
    folder: Path, bodies: Path, kills: int, seed: int, spans_per_s: float
) -> tuple[Found, Any]:
    """Kill a collector under load; return what its store holds afterwards, and the kills."""
    draw, server = random.Random(seed), Restarting(folder)
    server.start()
    server.wait_until_serving()
    with sending(server.ports, folder, bodies, spans_per_s) as loads:
        for _ in range(kills):
            _kill_at_random(server, draw)
        server.wait_until_serving()
        time.sleep(_LAST_LOAD_S)
        for load in loads:
            load.stop()
        acks = [load.result() for load in loads]
    server.end()
    return compare(server.store, acks), server.kills


def _kill_at_random(server: Restarting, draw: random.Random) -> None:
    if server.kills and draw.random() < _WHILE_STARTING:
        time.sleep(draw.uniform(0, _STARTING_S))
    else:
        server.wait_until_serving()
        time.sleep(draw.uniform(_LOWEST_DELAY_S, _HIGHEST_DELAY_S))
    server.kill()
    server.start()


@contextmanager
def sending(
    ports: dict[str, int], folder: Path, bodies: Path, spans_per_s: float
) -> Iterator[list[RunningLoad]]:
    """Run a client for each protocol, each at half the rate."""
    rate = spans_per_s / SPANS_A_REQUEST / len(ports)
    with ExitStack() as stack:
        loads = []
        for seed, (protocol, port) in enumerate(ports.items(), 1):
            plan = Load(protocol, port, bodies, seed=seed, rate=rate)
            loads.append(stack.enter_context(RunningLoad(plan, folder / f"{protocol}.npz")))
        for load in loads:
            load.start()
        yield loads


# --- Comparing ------------------------------------------------------------------------------------


def compare(store: Store, acks: list[Acks]) -> Found:
    """Compare the ids that the reader finds with what was sent and acknowledged."""
    there = stored_ids(store)
    different = np.unique(there)
    told = np.concatenate([one.ids(acknowledged=True) for one in acks])
    untold = np.concatenate([one.ids(acknowledged=False) for one in acks])
    untold_there = np.isin(untold, different).reshape(-1, SPANS_A_REQUEST).sum(axis=1)
    return Found(
        missing=len(np.setdiff1d(told, different)),
        twice=len(there) - len(different),
        foreign=len(np.setdiff1d(different, np.concatenate([told, untold]))),
        half_requests=int(((untold_there > 0) & (untold_there < SPANS_A_REQUEST)).sum()),
        refused=sum(one.refused for one in acks),
        acknowledged=len(told),
        unacknowledged_there=int(untold_there.sum()),
        sent_again=sum(int((one.attempts - 1).sum()) for one in acks),
        dropped_by_reader=_rows_in_files(store) - len(there),
    )


def stored_ids(store: Store) -> Words:
    """Return the span ids that the reader shows, one a row, the 8 bytes of each as one word."""
    ids = store.scan("spans").select("span_id").collect()["span_id"].to_list()
    return np.frombuffer(b"".join(ids), np.uint64)


def _rows_in_files(store: Store) -> int:
    return int(store.scan_as_received("spans").select("span_id").collect().height)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=40_000, help="spans a second")
    parser.add_argument("--folder", type=Path, help="work here instead of in a temporary folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="soak-collect-") as name:
        folder = Path(name)
        bodies = write_bodies(folder / "bodies", "reference", 64)
        found, kills = soak(folder, bodies, asked.kills, asked.seed, asked.rate)
        said = (folder / "collect.log").read_text()[-2000:]
    print(found)
    given = {"kills": asked.kills, "seed": asked.seed, "spans_per_s": asked.rate}
    result = {**given, **vars(found), "right": found.is_right, "log_ends_with": said}
    write_result("collect_soak", GOAL, {**result, "each_kill": [vars(one) for one in kills]})
    sys.exit(0 if found.is_right else 1)


if __name__ == "__main__":
    main()
