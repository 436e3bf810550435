"""One rank of a training run: the entry of its process.

It ends when the process that started it does, and says why before it ends for another reason.
"""

import os
import signal
import sys
import threading
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from perfledger.instrumented_runtime.child_processes import remove_rendezvous
from perfledger.instrumented_runtime.collectives.observed import NOT_OBSERVED
from perfledger.instrumented_runtime.collectives.recording import RingSink
from perfledger.instrumented_runtime.engine import prepare_process
from perfledger.instrumented_runtime.parallel.layout import RankPlace
from perfledger.instrumented_runtime.records import ShardMoved
from perfledger.instrumented_runtime.training.messages import (
    Finished,
    Joined,
    Message,
    PeerDidNotSaveError,
    RankFailed,
    StepDone,
)
from perfledger.instrumented_runtime.training.options import TrainOptions
from perfledger.instrumented_runtime.training.saving import stage_file
from perfledger.instrumented_runtime.training.traffic import Traffic, TrafficCount
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import PerfledgerError, UsageError

if TYPE_CHECKING:
    import torch

    from perfledger.instrumented_runtime.parallel.groups import Peers
    from perfledger.instrumented_runtime.training.recorder import TrainRecorder
    from perfledger.instrumented_runtime.training.steps import Trainer

SAVE = "save"  # in the place of a step's part: the gathering of the whole model at the end


def main(
    options: TrainOptions, place: RankPlace, connection: Connection, ring_name: str | None
) -> None:
    """Train until all steps are done; tell everything through `connection` (see messages.py)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent acts
    lifeline = threading.Thread(target=_end_with_parent, args=(connection, place), daemon=True)
    lifeline.start()
    prepare_process()
    try:
        Rank(options, place, connection, ring_name).train()
        lifeline.join()  # peers may still read what this rank sent last
    except PeerDidNotSaveError as error:
        _say(connection, RankFailed(place.rank, str(error), False, False, effect=True))
    except PerfledgerError as error:
        _say(connection, RankFailed(place.rank, str(error), isinstance(error, UsageError), False))
    except Exception as error:
        traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        _say(connection, RankFailed(place.rank, what, False, True))
    _end(1)


class Rank:
    """This process among its peers."""

    def __init__(
        self,
        options: TrainOptions,
        place: RankPlace,
        connection: Connection,
        ring_name: str | None,
    ) -> None:
        self._options, self._place, self._connection = options, place, connection
        self._recorder, self._sink = _recorder(ring_name)
        self._peers: Peers | None = None

    def train(self) -> None:
        """Do all steps. Raises PerfledgerError with the name of a peer that is gone."""
        device, threads = _set_up(self._options, self._place)
        if not self._place.alone:
            from perfledger.instrumented_runtime.parallel.groups import join

            self._peers = join(self._place, device, self._options.join_timeout_s)
        with nullcontext() if self._peers is None else self._peers.named():
            self._train(device, threads)

    def _train(self, device: "torch.device", threads: int) -> None:
        from perfledger.instrumented_runtime.training.checkpointing import RankCheckpoints
        from perfledger.instrumented_runtime.training.sharding import shard_elements
        from perfledger.instrumented_runtime.training.steps import Trainer

        trainer = Trainer(self._options, self._place, self._peers, device)
        traffic = TrafficCount(self._place.rank, self._sink)
        elements = shard_elements(trainer.model)
        backend = "none" if self._peers is None else _backend(device)
        self._say(Joined(self._place.rank, os.getpid(), str(device), backend, elements, threads))
        checkpoints = RankCheckpoints(
            self._options, self._place, self._peers, trainer, self._shard_moved
        )
        checkpoints.load()
        for number in range(self._options.first_step, self._options.steps):
            self._say(self._step(trainer, traffic, number))
            checkpoints.save_if_due(number + 1)
        self._say(Finished(self._place.rank, self._save(trainer, traffic)))

    def _step(self, trainer: "Trainer", traffic: TrafficCount, number: int) -> StepDone:
        observed = bool(self._options.observe) and number % self._options.observe == 0
        traffic.step = number
        start_ns = monotonic_ns()
        with _observing(traffic, observed):
            loss, held = trainer.step(number)
        end_ns, parts = monotonic_ns(), trainer.parts.take()
        sent = traffic.take(parts) if observed else None
        done = StepDone(self._place.rank, number, start_ns, end_ns, loss, held, sent)
        if self._recorder is not None:
            self._recorder.step(done, parts, trainer.tokens)
        return done

    def _save(self, trainer: "Trainer", traffic: TrafficCount) -> tuple[Traffic, ...]:
        """Gather the whole model; the first rank of each pipeline stage writes its layers."""
        if not self._options.save:
            return ()
        from safetensors.torch import save_file

        from perfledger.instrumented_runtime.training.sharding import whole_parameters

        traffic.step = NOT_OBSERVED
        with _observing(traffic, True):
            whole = whole_parameters(trainer.model)
        at = self._place.layout.coordinates(self._place.rank)
        stage = at.pop("pp")
        if not any(at.values()):
            save_file(whole, stage_file(self._options.save, stage))
        return traffic.take((), SAVE)

    def _shard_moved(self, moved: ShardMoved) -> None:
        if self._recorder is not None:
            self._recorder.shard(moved)
        self._say(moved)

    def _say(self, message: Message) -> None:
        _say(self._connection, message)


def _set_up(options: TrainOptions, place: RankPlace) -> tuple["torch.device", int]:
    """Return the rank's device and its number of threads."""
    import torch

    from perfledger.instrumented_runtime.devices import choose_device, set_threads

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, (cores or 1) // place.layout.world)
    threads = set_threads(options.threads or share)
    device = choose_device(options.device)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if place.layout.world > count:
            raise UsageError(
                f"{place.layout.world} ranks on {count} CUDA devices", fix="--device cpu"
            )
        device = torch.device("cuda", place.rank)
        torch.cuda.set_device(device)
    torch.manual_seed(options.seed)
    return device, threads


def _backend(device: "torch.device") -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _recorder(ring_name: str | None) -> "tuple[TrainRecorder | None, RingSink | None]":
    """Return what writes steps, and what writes collectives, into the rank's ring."""
    if ring_name is None:
        return None, None
    from perfledger.instrumented_runtime.ring import Writer
    from perfledger.instrumented_runtime.training.recorder import TrainRecorder

    write = Writer.attach(ring_name).write
    return TrainRecorder(write), RingSink(write)


def _observing(traffic: TrafficCount, observed: bool) -> "AbstractContextManager[object]":
    """Observe the collectives of a step, those of torch's own code too."""
    if not observed:
        return nullcontext()
    from perfledger.instrumented_runtime.collectives.observing import observe_collectives

    return observe_collectives(traffic)


def _end_with_parent(connection: Connection, place: RankPlace) -> None:
    """End this process when its parent's end of the connection closes: it never sends."""
    with suppress(EOFError, OSError):
        connection.recv()
    remove_rendezvous(place)  # the parent may have been killed
    _end(0)


def _say(connection: Connection, message: Message) -> None:
    """Tell the parent; if it is gone, this process ends by itself."""
    with suppress(OSError):
        connection.send(message)


def _end(code: int) -> NoReturn:
    """End at once: threads of gloo that wait for a dead peer would hold up an ordinary end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
