"""How a runtime is started: one frozen dataclass, built at the edge and passed down."""

from dataclasses import dataclass

from perfledger.instrumented_runtime.parallel.layout import Layout

MIB = 1024 * 1024


@dataclass(frozen=True)
class RuntimeOptions:
    """Options of `perfledger serve`; the command line's help is made of the same words."""

    model: str = "reference"  # a checkpoints.resolve.REFERENCES name, smollm2 or a folder
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    quantization: str = "none"  # none, int8, fp8: of the weights' matrices
    threads: int = 0  # torch threads of the engine; 0 takes one a core
    max_num_seqs: int = 16  # sequences in a batch at most
    max_num_batched_tokens: int = 256  # tokens in a step at most: long prompts go in chunks
    block_size: int = 16  # tokens in a KV block
    kv_memory_bytes: int = 512 * MIB
    max_model_len: int = 0  # tokens in prompt and answer at most; 0 takes the checkpoint's limit
    prefix_cache: bool = True  # share KV blocks of equal prefixes within a tenant
    preemption: str = "recompute"  # recompute, swap: what becomes of a preempted sequence's KV
    swap_memory_bytes: int = 128 * MIB  # host memory for swapped KV
    watermark: float = 0.01  # share of the KV blocks kept free at an admission
    degrade: tuple[str, ...] = ()  # steps of the degrading policy, in order (degrading.STEPS)
    replicas: int = 1  # engines behind the API
    route: str = "least-queue"  # round-robin, least-queue, prefix-affinity
    health_timeout_s: float = 10.0  # an engine silent for so long while it has work is unhealthy
    tensor_parallel: int = 1  # ranks of one replica in each dimension; their product are its
    pipeline_parallel: int = 1  # processes
    expert_parallel: int = 1
    context_parallel: int = 1
    microbatches: int = 0  # pieces of a step that go through the pipeline; 0: one a stage
    run_id: str = ""  # resource attribute perfledger.run.id
    service_name: str = "perfledger-runtime"
    telemetry: bool = True
    allow_faults: bool = False  # honour the header x-perfledger-fault (tests and drills)
    ring_slots: int = 65_536  # records kept for the exporter before records are dropped

    @property
    def layout(self) -> Layout:
        """Return how the ranks of one replica are laid out."""
        return Layout(
            pp=self.pipeline_parallel,
            cp=self.context_parallel,
            ep=self.expert_parallel,
            tp=self.tensor_parallel,
        )
