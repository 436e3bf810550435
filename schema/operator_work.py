"""The bytes and FLOPs of one step, operator by operator, as our engine computes it.

Left out, because they are small beside what they stand next to: index tensors and token ids, the
statistics of a row (mean of squares, log-sum-exp), scalars. Left out, because no step tells of
them: what drawing at random adds to greedy sampling. Messages of collectives are on other edges.
All arithmetic is on integers, or on numpy arrays of them; it is written for both.
"""

from perfledger.schema.model_shape import ModelShape
from perfledger.schema.step_work import BatchShape, Tally, Whole

WIDE = 4  # bytes of float32, in which statistics and the routing are computed
MOST_TURNED_ROWS = 64  # as in instrumented_runtime/linears.py


def step_work(shape: ModelShape, batch: BatchShape) -> dict[str, Whole]:
    """Return a value for each of step_work.WORK_COLUMNS: bytes, FLOPs and calls of operators.

    Ints, or arrays of int64 where the fields of `batch` are such.
    """
    tally = Tally()
    _move_blocks(tally, shape, batch)
    _embed(tally, shape, batch)
    _attention_halves(tally, shape, batch)
    if shape.experts:
        _mixtures(tally, shape, batch)
    else:
        _mlps(tally, shape, batch)
    if shape.vocabulary:
        _logits(tally, shape, batch)
    if shape.logits:
        _sample(tally, shape, batch)
    return tally.columns()


def _move_blocks(tally: Tally, shape: ModelShape, batch: BatchShape) -> None:
    """Copies before a write, and swaps: blocks are read together, then written where they go."""
    size = 2 * batch.moved_blocks * shape.block_bytes * shape.layers
    tally.read("attention", "gather", size)
    tally.write("attention", "gather", size)
    tally.launch(2 * shape.layers * batch.moved_kinds)


def _embed(tally: Tally, shape: ModelShape, batch: BatchShape) -> None:
    """Rows of the embedding, cosines and sines."""
    size = batch.rows * (shape.first * shape.row_bytes + 2 * shape.head_dim * shape.element)
    tally.read("embedding", "weights", size)
    tally.write("embedding", "activations", size)
    tally.launch(batch.microbatches * (shape.first + 2))
    if shape.microbatches > 1:  # which of the sampled rows are in each part: five small operators
        tally.launch(5 * batch.microbatches * batch.chosen)


def _attention_halves(tally: Tally, shape: ModelShape, batch: BatchShape) -> None:
    """Norm, projection, rotary, attention, output, residual; of all layers."""
    rows, layers = batch.rows * shape.layers, shape.layers
    calls = batch.microbatches * layers
    key_bytes = shape.kv_bytes // 2
    _norm(tally, shape, rows, shape.hidden, calls)
    projected = shape.query_bytes + shape.kv_bytes
    sizes = (shape.hidden, projected // shape.element)
    _matrix(tally, shape, "linear", rows, sizes, calls, shape.qkv_bias)
    if shape.qk_norm:
        _norm(tally, shape, rows * shape.heads, shape.head_dim, calls)
        _norm(tally, shape, rows * shape.kv_heads, shape.head_dim, calls)
        _elementwise(tally, rows * (shape.query_bytes + key_bytes), 1, 1, calls)
    # roll, times the cosines, and added to the other half's times the sines
    rotated = rows * (shape.query_bytes + key_bytes)
    _elementwise(tally, rotated, 4, 3, 3 * calls)
    tally.read("elementwise", "activations", 2 * rows * shape.head_dim * shape.element)
    _attend(tally, shape, batch)
    sizes = (shape.heads * shape.head_dim, shape.hidden)
    _matrix(tally, shape, "linear", rows, sizes, calls, shape.output_bias)
    _elementwise(tally, rows * shape.row_bytes, 2, 1, calls)
    # of all matrices of a layer but experts: read once, and again in each microbatch
    tally.read("linear", "weights", shape.matrices * calls)


def _attend(tally: Tally, shape: ModelShape, batch: BatchShape) -> None:
    layers, rows = shape.layers, batch.rows * shape.layers
    stored = rows * shape.kv_bytes
    tally.read("attention", "activations", stored)
    tally.write("attention", "kv", stored)
    tally.launch(2 * layers * batch.microbatches)
    gathered = batch.decode_gathered_blocks + batch.chunk_gathered_blocks
    tally.read("attention", "gather", gathered * shape.block_bytes * layers)
    tally.write("attention", "gather", gathered * shape.block_bytes * layers)
    keys = batch.decode_gathered_blocks * shape.block + batch.chunk_key_tokens
    tally.read("attention", "kv", keys * shape.kv_bytes * layers)
    pairs = batch.decode_gathered_blocks * shape.block + batch.chunk_pairs
    # scores and the sum of values: a product of head_dim each
    tally.compute("attention", 4 * pairs * shape.heads * shape.head_dim * layers)
    tally.read("attention", "activations", rows * shape.query_bytes)
    tally.write("attention", "activations", rows * shape.query_bytes)
    _mask(tally, shape, batch)
    _put_together(tally, shape, batch)
    # two gathers, a mask and the attention, or the attention alone
    masked = batch.decoding + batch.continued_chunks
    tally.launch(layers * (4 * masked + batch.chunks - batch.continued_chunks))


def _mask(tally: Tally, shape: ModelShape, batch: BatchShape) -> None:
    """A mask of bools becomes one of numbers to add, anew in each layer; attention reads it."""
    places = (batch.decode_gathered_blocks * shape.block + batch.continued_pairs) * shape.layers
    tally.read("attention", "activations", places * (1 + shape.element))
    tally.write("attention", "activations", places * shape.element)


def _put_together(tally: Tally, shape: ModelShape, batch: BatchShape) -> None:
    """Outputs of decodes and chunks become one tensor; on the CPU each is in the order of rows."""
    outputs = batch.decoding + batch.chunks
    _, together = _several(outputs, batch.microbatches)
    regrouped = shape.device != "cpu" and shape.heads > shape.kv_heads
    size = batch.rows * shape.query_bytes * shape.layers * ((together > 0) * 1 + regrouped)
    tally.read("attention", "activations", size)
    tally.write("attention", "activations", size)
    tally.launch(shape.layers * (together + regrouped * outputs))


def _mlps(tally: Tally, shape: ModelShape, batch: BatchShape) -> None:
    """Norm, SwiGLU between two matrices, residual; of all layers."""
    rows, calls = batch.rows * shape.layers, batch.microbatches * shape.layers
    _norm(tally, shape, rows, shape.hidden, calls)
    _gated(tally, shape, "linear", rows, calls)
    _elementwise(tally, rows * shape.row_bytes, 2, 1, calls)


def _mixtures(tally: Tally, shape: ModelShape, batch: BatchShape) -> None:
    """The same with a router, and experts that compute the rows sent to them."""
    rows, calls = batch.rows * shape.layers, batch.microbatches * shape.layers
    _norm(tally, shape, rows, shape.hidden, calls)
    tally.compute("moe", 2 * rows * shape.hidden * shape.experts)
    tally.read("moe", "weights", shape.experts * shape.row_bytes * calls)
    tally.read("moe", "activations", rows * shape.row_bytes)
    tally.write("moe", "activations", rows * shape.experts * shape.element)
    tally.launch(calls)
    tally.read("moe", "weights", shape.expert_bytes * batch.touched_experts)
    _gated(tally, shape, "moe", batch.assignments, batch.touched_experts)
    _route(tally, shape, rows, calls)
    _combine(tally, shape, batch, calls)
    _elementwise(tally, rows * shape.row_bytes, 2, 1, calls)


def _route(tally: Tally, shape: ModelShape, rows: Whole, calls: Whole) -> None:
    """Softmax over the router's answers, the best of them, and their weights."""
    logits, chosen = rows * shape.experts, rows * shape.per_token
    widened = shape.element != WIDE
    tally.read("moe", "activations", widened * logits * shape.element + 2 * logits * WIDE)
    tally.write("moe", "activations", (widened + 1) * logits * WIDE + chosen * (WIDE + 8))
    if shape.normalized:
        tally.read("moe", "activations", 2 * chosen * WIDE)
        tally.write("moe", "activations", chosen * WIDE)
    tally.launch(calls * (2 + widened + 2 * shape.normalized))


def _combine(tally: Tally, shape: ModelShape, batch: BatchShape, calls: Whole) -> None:
    """Rows go to their experts, come back, are weighed in float32, and added."""
    rows, narrowed = batch.rows * shape.layers, shape.element != WIDE
    sent, wide = batch.assignments * shape.row_bytes, batch.assignments * shape.hidden * WIDE
    answers = rows * shape.hidden * WIDE
    tally.read("moe", "activations", 4 * sent + wide + narrowed * answers)
    tally.write("moe", "activations", 3 * sent + wide + answers + narrowed * rows * shape.row_bytes)
    tally.launch(calls * (10 + narrowed))


def _gated(tally: Tally, shape: ModelShape, operator: str, rows: Whole, calls: Whole) -> None:
    """Gate and up as one matrix, silu(gate) * up, down."""
    _matrix(tally, shape, operator, rows, (shape.hidden, 2 * shape.ffn), calls)
    _matrix(tally, shape, operator, rows, (shape.ffn, shape.hidden), calls)
    size = rows * shape.ffn * shape.element
    _elementwise(tally, size, 3, 2, 2 * calls, "moe" if operator == "moe" else "elementwise")


def _logits(tally: Tally, shape: ModelShape, batch: BatchShape) -> None:
    """Of the sampled rows: chosen, normed, and through the head."""
    rows = batch.sampled_rows
    # A stage of a pipeline leaves out what has no row; else it is called with none.
    calls = batch.sampled_microbatches if shape.microbatches > 1 else 1
    size = rows * shape.row_bytes * batch.chosen
    _elementwise(tally, size, 1, 1, batch.microbatches * batch.chosen)
    _norm(tally, shape, rows, shape.hidden, calls, batch.sampled_microbatches)
    tally.read("linear", "weights", batch.sampled_microbatches * shape.vocabulary * shape.row_bytes)
    tally.read("linear", "activations", rows * shape.row_bytes)
    tally.write("linear", "logits", rows * shape.vocabulary * shape.element)
    tally.compute("linear", 2 * rows * shape.hidden * shape.vocabulary)
    tally.launch(calls)
    _turn(tally, shape, "linear", (rows, shape.vocabulary), calls)
    if shape.shards > 1:  # those of all ranks come one rank after another: several rows are sorted
        several, sorting = _several(rows, calls)
        size = several * shape.vocabulary * shape.shards * shape.element
        _elementwise(tally, size, 1, 1, sorting)


def _sample(tally: Tally, shape: ModelShape, batch: BatchShape) -> None:
    """The largest logit of each row; on the CPU numpy finds it, among float32."""
    logits = batch.sampled_rows * shape.logits
    tally.read("sampling", "logits", logits * shape.element)
    if shape.device == "cpu" and shape.element != WIDE:
        tally.read("sampling", "logits", logits * WIDE)
        tally.write("sampling", "logits", logits * WIDE)


# --- kinds of operators ---


def _elementwise(
    tally: Tally,
    size: Whole,
    read: int,
    written: int,
    calls: Whole,
    operator: str = "elementwise",
) -> None:
    """Operators that together read tensors of `size` bytes so many times, and write some."""
    tally.read(operator, "activations", read * size)
    tally.write(operator, "activations", written * size)
    tally.launch(calls)


def _norm(
    tally: Tally,
    shape: ModelShape,
    rows: Whole,
    columns: int,
    calls: Whole,
    weighed: Whole | None = None,
) -> None:
    """RMSNorm: squared, averaged, scaled, weighed; from and to float32 if rows are narrower.

    Off the CPU, one kernel. `weighed` is how many calls read the gains, if not all.
    """
    size = rows * columns
    weighed = calls if weighed is None else weighed
    tally.read("norm", "weights", weighed * columns * shape.element)
    if shape.device != "cpu":
        tally.read("norm", "activations", size * shape.element)
        tally.write("norm", "activations", size * shape.element)
        tally.launch(calls)
        return
    narrow = shape.element != WIDE
    tally.read("norm", "activations", 4 * size * WIDE + narrow * size * (shape.element + WIDE))
    tally.write("norm", "activations", 3 * size * WIDE + narrow * size * (shape.element + WIDE))
    tally.launch(calls * (6 + 2 * narrow))


def _matrix(
    tally: Tally,
    shape: ModelShape,
    operator: str,
    rows: Whole,
    sizes: tuple[int, int],
    calls: Whole,
    bias: int = 0,
) -> None:
    """Rows through matrices of (inputs, outputs); their weights are counted elsewhere."""
    inputs, outputs = sizes
    tally.compute(operator, 2 * rows * inputs * outputs)
    read, written, launches = inputs * shape.element, outputs * shape.element, 1
    if shape.quantization == "int8":
        if shape.element != WIDE:
            read += (inputs + outputs) * WIDE
            written += (inputs + outputs) * WIDE
            launches = 3
    elif shape.quantization == "fp8" and not (inputs % 16 or outputs % 16):
        # the largest of each row, the row as float32, scaled, as fp8, which the product reads
        read = inputs * (3 * shape.element + 2 * WIDE + 1)
        written += inputs * (shape.element + 2 * WIDE + 1)
        launches = 9
    else:
        _turn(tally, shape, operator, (rows, outputs), calls, bias)
    tally.read(operator, "activations", rows * read)
    tally.write(operator, "activations", rows * written)
    tally.launch(calls * launches)


def _turn(
    tally: Tally,
    shape: ModelShape,
    operator: str,
    sizes: tuple[Whole, int],
    calls: Whole,
    bias: int = 0,
) -> None:
    """Few rows, but more than one, are multiplied from the weights' side on the CPU: turned back.

    `sizes` are the rows of all calls, and outputs.
    """
    if shape.device != "cpu":
        return
    rows, outputs = sizes
    several, turning = _several(rows, calls)
    few = rows <= MOST_TURNED_ROWS * calls
    size = few * several * outputs * shape.element
    tally.read(operator, "activations", (1 + bias) * size)
    tally.write(operator, "activations", (1 + bias) * size)
    tally.launch((1 + bias) * few * turning)


def _several(rows: Whole, calls: Whole) -> tuple[Whole, Whole]:
    """Return the rows of those calls that have more than one, and how many such calls there are.

    Each call is taken to have about as many rows as any other, and at least one.
    """
    more = (rows > calls) * (rows - calls)
    everywhere, somewhere = more >= calls, more < calls
    return everywhere * rows + somewhere * 2 * more, everywhere * calls + somewhere * more
