"""A Stepper over a small real model, in this process, and everything it said and recorded."""

from functools import cache

from perfledger.instrumented_runtime.attention import PagedKvCache
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.loading import load_rank
from perfledger.instrumented_runtime.messages import (
    Admitted,
    Failed,
    SamplingParams,
    StepOutput,
    Submit,
)
from perfledger.instrumented_runtime.options import MIB, RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.parallel.served_model import StepModel
from perfledger.instrumented_runtime.recorder import Recorder
from perfledger.instrumented_runtime.records import KINDS, Record
from perfledger.instrumented_runtime.scheduling.limits import Limits
from perfledger.instrumented_runtime.stepping import Stepper
from perfledger.schema.clocks import monotonic_ns

MODEL = "reference-small"
ROOMY = Limits(
    max_num_seqs=16, max_num_batched_tokens=64, max_model_len=256, block_size=16, kv_blocks=128
)


@cache
def small_model() -> StepModel:
    options = RuntimeOptions(threads=1, kv_memory_bytes=MIB)
    return load_rank(options, resolve(MODEL), RankPlace(Layout())).model


class Engine:
    """`answers` of a request of several choices are under (request, choice)."""

    def __init__(self, limits: Limits, model: StepModel | None = None) -> None:
        model = model or small_model()
        kv = PagedKvCache(
            model.config,
            limits.kv_blocks,
            limits.block_size,
            model.dtype,
            model.device,
            limits.swap_blocks,
        )
        self.records: list[Record] = []
        recorder = Recorder(lambda kind, fields: self.records.append(KINDS[kind](*fields)))
        self.stepper = Stepper(model, kv, limits, recorder)
        self.answers: dict[int | tuple[int, int], list[int]] = {}
        self.finished: dict[int | tuple[int, int], str] = {}
        self.admitted: list[Admitted] = []
        self.failed: list[Failed] = []
        self.outputs: list[StepOutput] = []
        self._choices: dict[int, int] = {}

    def submit(self, number: int, prompt: list[int], **options: object) -> Failed | None:
        """Submit a request; options are those of SamplingParams, and some of Submit."""
        own = ("delays_ns", "tenant", "priority", "deadline_ns")
        of_submit = {name: options.pop(name) for name in own if name in options}
        sampling = SamplingParams(**{"max_tokens": 24, **options})
        self._choices[number] = sampling.n
        for choice in range(sampling.n):
            self.answers[self._key(number, choice)] = []
        ids = (1 << 127 | number, 1 << 63 | number)
        return self.stepper.submit(
            Submit(number, prompt, sampling, *ids, monotonic_ns(), **of_submit)
        )

    def step(self) -> None:
        for output in self.stepper.step():
            if isinstance(output, Failed):
                self.failed.append(output)
                continue
            assert isinstance(output, StepOutput)
            self.outputs.append(output)
            self.admitted += output.admitted
            for token in output.tokens:
                key = self._key(token.request, token.choice)
                self.answers[key].append(token.token)
                if token.finish is not None:
                    self.finished[key] = token.finish

    def run(self) -> "Engine":
        while self.stepper.idle_ns(monotonic_ns()) is not None:
            self.step()
        return self

    def of(self, kind: type[Record]) -> list[Record]:
        return [record for record in self.records if isinstance(record, kind)]

    def _key(self, number: int, choice: int) -> int | tuple[int, int]:
        return number if self._choices[number] == 1 else (number, choice)


def prompt_of(number: int) -> list[int]:
    return [(number * 37 + 11 * at) % 8000 + 3 for at in range(5 + 17 * number % 90)]
