"""`observe_collectives` for any torch.distributed program: its collectives as spans, one a call.

    from perfledger.instrumented_runtime import observe_collectives

    with observe_collectives() as observed:
        for number in range(steps):
            with observed.step(number):
                train(...)

Run it on all ranks alike: calls are matched over ranks by their numbers in their group.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from opentelemetry import trace
from torch.distributed.device_mesh import DeviceMesh

from perfledger.instrumented_runtime.collectives import calls, observing
from perfledger.instrumented_runtime.collectives.call_attributes import Attributes
from perfledger.instrumented_runtime.collectives.group_facts import rename
from perfledger.instrumented_runtime.collectives.observed import NOT_OBSERVED
from perfledger.instrumented_runtime.collectives.observing import Observation
from perfledger.instrumented_runtime.collectives.span_sink import SpanSink
from perfledger.instrumented_runtime.collectives.tracing import destination
from perfledger.schema.clocks import take_anchor
from perfledger.schema.errors import PerfledgerError

STEP_NAME = "step"

logger = logging.getLogger("perfledger.collectives")


class ObservedProgram:
    """What a program may say while it is observed, and what became of its telemetry so far."""

    def __init__(
        self,
        sink: SpanSink | None = None,
        observation: Observation | None = None,
        tracer: trace.Tracer | None = None,
        every: int | None = None,
    ) -> None:
        self._sink, self._observation, self._tracer = sink, observation, tracer
        self._every = every

    @property
    def told(self) -> int:
        """Calls that have become spans."""
        return self._sink.told if self._sink else 0

    @property
    def lost(self) -> int:
        """Calls whose span found no room, or was not accepted."""
        return self._sink.lost if self._sink else 0

    @property
    def errors(self) -> int:
        """Calls that could not be described; the program was not disturbed by it."""
        return self._observation.errors if self._observation else 0

    def name_groups(self, mesh: DeviceMesh) -> None:
        """Name the groups of a mesh after its dimensions, also one that is the whole world."""
        for name in mesh.mesh_dim_names or ():
            rename(mesh.get_group(name), name, name)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run one step of the program: a span, under which its collectives are."""
        sink, observation, tracer = self._sink, self._observation, self._tracer
        if sink is None or observation is None or tracer is None:
            yield
            return
        with ExitStack() as stack:
            attributes = {**sink.place(), "perfledger.step.seq": number}
            span = tracer.start_span(STEP_NAME, attributes=attributes)
            stack.callback(span.end)
            stack.enter_context(trace.use_span(span))
            sink.step_seq, sink.step_context = number, trace.set_span_in_context(span)
            stack.callback(self._between_steps, sink)
            if self._every and number % self._every == 0:
                stack.enter_context(observing.dispatching(observation))
            yield

    def _between_steps(self, sink: SpanSink) -> None:
        sink.step_seq, sink.step_context = NOT_OBSERVED, None


@contextmanager
def observe_collectives(
    *,
    full: bool = False,
    every: int | None = None,
    mesh: DeviceMesh | None = None,
    replica: str = "0",
) -> Iterator[ObservedProgram]:
    """Tell every collective of this process as a span, while inside.

    What torch.distributed's functions, FSDP, DTensor, pipelines and functional collectives call is
    always seen. With `full` also what only C++ calls (DDP's reducer), at about 25 us for each
    operator of the program; with `every` only in steps whose number it divides (see `step`; all
    ranks must number their steps alike). `mesh` names groups after its dimensions. Spans go to the
    program's TracerProvider, if it has set one, else by OTLP to where OTEL_* say; `replica` tells
    several jobs of one service apart. Telemetry that cannot be had or sent never stops the
    program: it is counted, and warned of when it cannot even begin.
    """
    anchor = take_anchor()
    try:
        going = destination(anchor)
    except PerfledgerError as error:
        logger.warning("collectives are not observed: %s", error)
        going = None
    if going is None:
        yield ObservedProgram()
        return

    here: Attributes = {"perfledger.replica": replica}

    def place() -> Attributes:
        if "perfledger.rank" not in here and dist.is_initialized():
            here["perfledger.rank"] = dist.get_rank()  # kept: the program may end its groups first
        return here

    sink = SpanSink(going, anchor, place)
    try:
        with observing.observe_collectives(sink, full=full and every is None) as observation:
            program = ObservedProgram(sink, observation, going.tracer, every if full else None)
            if mesh is not None:
                program.name_groups(mesh)
            yield program
            calls.flush(wait=True)
    finally:
        sink.stop()
        if sink.lost:
            logger.warning("%d collectives were lost: not sent, or too many at once", sink.lost)
