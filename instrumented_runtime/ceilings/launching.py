"""What is paid whatever is moved: per torch operator, and per step of the engine.

Measured with the runtime's own decoder and its own steps, on a model so small that its arithmetic
takes next to no time. Matrix products and attention have ceilings of their own, in which their
launches are; so they are taken out here.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from perfledger.instrumented_runtime.attention import DecodeRows, PagedKvCache, StepRows
from perfledger.instrumented_runtime.ceilings.cells import FEWEST, Cell
from perfledger.instrumented_runtime.checkpoints.config import parse_config
from perfledger.instrumented_runtime.linears import Dense
from perfledger.instrumented_runtime.messages import SamplingParams, Submit
from perfledger.instrumented_runtime.model import Decoder, Ends, GatedMlp, LayerWeights
from perfledger.instrumented_runtime.moe import RoutingCounts
from perfledger.instrumented_runtime.scheduling.limits import Limits
from perfledger.instrumented_runtime.stepping import Stepper
from perfledger.schema.ceilings import HOST
from perfledger.schema.decode_products import other_launches
from perfledger.schema.model_shape import ModelShape
from perfledger.schema.step_work import BatchShape

ROWS, QUICK_ROWS = (1, 4, 16, 32), (1, 16)
BLOCK, PROMPT, TOKENS = 16, 16, 48
LONGER = 5  # times as long as other cells: one sample is a whole forward pass
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": PROMPT + TOKENS,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
ONE_ROW = BatchShape(
    decode_rows=1, decode_context_tokens=BLOCK, decode_gathered_blocks=1, sampled_rows=1
)
LAUNCH_NOTE = "mean over a decoder's operators, but matrix products and attention"
STEP_NOTE = "scheduling, building rows, sampling and bookkeeping: all but the forward pass"
# Read in passing by the products of one forward pass on a CPU, as a model's weights are: what
# comes next finds its code and objects gone from the caches.
PASSING_BYTES = 96 << 20


def launch_cells(device: torch.device, *, quick: bool) -> list[Cell]:
    """Return the cells of what a step costs beside its bytes and FLOPs, in ns."""
    cells = [Cell(HOST, "launch", "operator", "ns", _launches(device), LAUNCH_NOTE)]
    for rows in QUICK_ROWS if quick else ROWS:
        cells.append(Cell(HOST, "step", f"rows={rows}", "ns", _steps(rows, device), STEP_NOTE))
    return cells


class Stopwatch:
    """Adds up the time of calls."""

    def __init__(self) -> None:
        self.taken_ns = 0

    def time(self, call: Callable[[], Tensor]) -> Tensor:
        """Return what the call returns."""
        started_ns = time.perf_counter_ns()
        result = call()
        self.taken_ns += time.perf_counter_ns() - started_ns
        return result


@dataclass(frozen=True)
class TimedMatrix:
    """A small matrix that reads other memory in passing; a stopwatch is told."""

    matrix: Dense
    passing: Tensor | None
    watch: Stopwatch

    @property
    def bytes(self) -> int:
        """See Matrix."""
        return self.matrix.bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """See Matrix."""
        return self.watch.time(lambda: self._multiply(rows))

    def _multiply(self, rows: Tensor) -> Tensor:
        if self.passing is not None:
            self.passing.sum()
        return self.matrix(rows)


class TimedCache(PagedKvCache):
    """A cache that tells a stopwatch of attention."""

    watch: Stopwatch

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: StepRows
    ) -> Tensor:
        """See PagedKvCache."""
        attend = super().attend
        return self.watch.time(lambda: attend(layer, query, key, value, rows))


class TimedDecoder:
    """A decoder as the engine's steps see it, which tells a stopwatch of its forward pass."""

    routing: RoutingCounts | None = None

    def __init__(self, decoder: Decoder, watch: Stopwatch) -> None:
        self._decoder, self._watch = decoder, watch
        self.config, self.dtype, self.device = decoder.config, decoder.dtype, decoder.device
        self.parameters, self.weights_bytes = decoder.parameters, decoder.weights_bytes

    def forward(self, rows: StepRows, cache: PagedKvCache) -> Tensor:
        """See StepModel."""
        return self._watch.time(lambda: self._decoder.forward(rows, cache))


def tiny_decoder(device: torch.device, watch: Stopwatch) -> Decoder:
    """Return a decoder of tiny layers, whose products tell the stopwatch."""
    config = parse_config(TINY)
    hidden, heads = config.hidden_size, config.heads * config.head_dim
    products = iter(range(4 * config.layers + 1))
    passing = None
    if device.type == "cpu":
        passing = torch.ones(4 * config.layers + 1, PASSING_BYTES // 4 // (4 * config.layers + 1))

    def matrix(outputs: int, inputs: int) -> TimedMatrix:
        weight = torch.randn(outputs, inputs, device=device) * inputs**-0.5
        own = None if passing is None else passing[next(products)]
        return TimedMatrix(Dense(weight), own, watch)

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=torch.ones(hidden, device=device),
            qkv=matrix(heads + 2 * config.kv_heads * config.head_dim, hidden),
            query_norm=None,
            key_norm=None,
            output=matrix(hidden, heads),
            ffn_norm=torch.ones(hidden, device=device),
            mlp=GatedMlp(
                matrix(2 * config.intermediate_size, hidden),
                matrix(hidden, config.intermediate_size),
            ),
        )

    layers = [layer() for _ in range(config.layers)]
    embedding = torch.randn(config.vocab_size, hidden, device=device)
    ends = Ends(embedding, torch.ones(hidden, device=device), matrix(config.vocab_size, hidden))
    return Decoder(config, layers, ends, torch.float32, device, parameters=0)


def _launches(device: torch.device) -> Callable[[float], list[float]]:
    """Return what samples the time of one operator of a decoder's forward pass."""

    def sample(seconds: float) -> list[float]:
        watch, others = Stopwatch(), other_launches(tiny_shape(), ONE_ROW)
        model, rows = tiny_decoder(device, watch), _one_row(device)
        cache = TimedCache(model.config, 1, BLOCK, torch.float32, device)
        cache.watch = watch
        model.forward(rows, cache)
        samples: list[float] = []
        deadline_ns = time.perf_counter_ns() + round(LONGER * seconds * 1e9)
        while len(samples) < FEWEST or time.perf_counter_ns() < deadline_ns:
            watch.taken_ns, started_ns = 0, time.perf_counter_ns()
            model.forward(rows, cache)
            elapsed_ns = time.perf_counter_ns() - started_ns
            samples.append(max(1.0, (elapsed_ns - watch.taken_ns) / others))
        return samples

    return sample


def _steps(rows: int, device: torch.device) -> Callable[[float], list[float]]:
    """Return what samples the time of one engine step in which so many sequences decode."""

    def sample(seconds: float) -> list[float]:
        samples: list[float] = []
        deadline_ns = time.perf_counter_ns() + round(LONGER * seconds * 1e9)
        while len(samples) < FEWEST or time.perf_counter_ns() < deadline_ns:
            samples += _run(rows, device)
        return samples

    return sample


def _run(rows: int, device: torch.device) -> list[float]:
    """Let `rows` requests decode together to their ends; return the host's ns of such steps."""
    watch = Stopwatch()
    model = TimedDecoder(tiny_decoder(device, Stopwatch()), watch)
    length, budget = PROMPT + TOKENS, rows * PROMPT
    blocks = rows * -(-length // BLOCK)
    limits = Limits(rows, budget, length, BLOCK, blocks)
    cache = PagedKvCache(model.config, blocks, BLOCK, torch.float32, device)
    stepper = Stepper(model, cache, limits, None)
    for number in range(rows):
        stepper.submit(Submit(number, [3] * PROMPT, SamplingParams(TOKENS), 0, 0, 0))
    stepper.step()  # the prompts
    samples = []
    for _ in range(TOKENS - 2):  # the last step also ends them
        watch.taken_ns, started_ns = 0, time.perf_counter_ns()
        stepper.step()
        samples.append(float(time.perf_counter_ns() - started_ns - watch.taken_ns))
    stepper.abort_all("shutdown")
    return samples


def _one_row(device: torch.device) -> StepRows:
    """Return a step in which one sequence of one block decodes."""
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    mask = torch.ones(1, 1, 1, BLOCK, dtype=torch.bool, device=device)
    return StepRows(nothing, nothing, nothing, DecodeRows(1, nothing, mask), (), None)


def tiny_shape() -> ModelShape:
    """Return the tiny decoder's shape, as an engine would tell it."""
    config = parse_config(TINY)
    inputs = config.heads * config.head_dim + 2 * config.kv_heads * config.head_dim
    outputs = config.heads * config.head_dim + 3 * config.intermediate_size
    return ModelShape(
        layers=config.layers,
        hidden=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ffn=config.intermediate_size,
        element=4,
        block=BLOCK,
        matrices=4 * config.hidden_size * (inputs + outputs),
        vocabulary=config.vocab_size,
        first=1,
        logits=config.vocab_size,
    )
