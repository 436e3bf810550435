"""Which part of a checkpoint one rank holds: a stage of layers, a slice of each matrix, experts.

Pure arithmetic over names and sizes: a split that cannot be is refused before anything is loaded.
"""

import dataclasses
import re
from dataclasses import dataclass

from perfledger.instrumented_runtime.checkpoints.config import ModelConfig
from perfledger.schema.errors import UsageError

# Matrices that a tensor-parallel rank holds some outputs of, or some inputs of: the second kind
# follows the first, so that two of them need one reduction ("Megatron-LM", Shoeybi et al. 2019).
_BY_OUTPUT = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|w1|w3)\.(weight|bias)$")
_BY_INPUT = re.compile(r"\.(o_proj|down_proj|w2)\.weight$")
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_NORM = "model.norm.weight"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A part of a model of `stages` x `shards` parts; the default is all of it."""

    stage: int = 0
    stages: int = 1
    shard: int = 0
    shards: int = 1
    experts: range | None = None  # numbers of those held, None for all

    @property
    def first(self) -> bool:
        """Whether tokens come in here."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether logits come out here."""
        return self.stage == self.stages - 1

    def layers(self, config: ModelConfig) -> range:
        """Return the layers of this stage; those left over go to the first stages."""
        each, more = divmod(config.layers, self.stages)
        start = self.stage * each + min(self.stage, more)
        return range(start, start + each + (self.stage < more))

    def largest(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of what the rank with the most layers holds, with its slice of each."""
        return dataclasses.replace(self, stage=0).held(config)

    def held(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of what is held here; the vocabulary stays whole."""
        return dataclasses.replace(
            config,
            layers=len(self.layers(config)),
            heads=config.heads // self.shards,
            kv_heads=config.kv_heads // self.shards,
            intermediate_size=config.intermediate_size // self.shards,
        )

    def holds(self, name: str, config: ModelConfig) -> bool:
        """Return whether any of this tensor is held here."""
        if found := _LAYER.match(name):
            if int(found[1]) not in self.layers(config):
                return False
            if self.experts is not None and (expert := _EXPERT.search(name)):
                return int(expert[1]) in self.experts
            # A bias behind a reduction is added once.
            return not (name.endswith(".o_proj.bias") and self.shard)
        if name == _EMBEDDING:
            return self.first or (self.last and config.tied_embeddings)
        return self.last

    def piece(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Return what is held of a tensor, as an index; None for all of it."""
        if self.shards == 1:
            return None
        if _BY_OUTPUT.search(name) or name == _HEAD:
            return (self._range(shape[0]),)
        if _BY_INPUT.search(name):
            return (slice(None), self._range(shape[1]))
        return None

    def vocabulary(self, config: ModelConfig) -> slice:
        """Return the tokens whose logits are computed here."""
        return self._range(config.vocab_size)

    def _range(self, size: int) -> slice:
        each = size // self.shards
        return slice(self.shard * each, (self.shard + 1) * each)


def check_split(config: ModelConfig, stages: int, shards: int) -> None:
    """Raise UsageError if the model does not divide among pipeline `stages` and tensor `shards`."""
    sizes = {
        "query heads": config.heads,
        "KV heads": config.kv_heads,
        "columns of the MLP (intermediate_size)": config.intermediate_size,
        "tokens of the vocabulary": config.vocab_size,
    }
    if config.experts is not None:
        sizes["columns of an expert"] = config.experts.intermediate_size
    for name, size in sizes.items():
        if size % shards:
            raise UsageError(
                f"{size} {name} do not divide among {shards} ranks (tp)",
                fix=_other_ways(config),
            )
    if stages > config.layers:
        raise UsageError(f"{config.layers} layers are too few for {stages} stages (pp)")


def _other_ways(config: ModelConfig) -> str:
    ways = [
        str(ranks)
        for ranks in range(2, config.kv_heads + 1)
        if not any(
            size % ranks
            for size in (config.heads, config.kv_heads, config.intermediate_size, config.vocab_size)
        )
    ]
    tensor = f"--tensor-parallel {' or '.join(ways)}, or " if ways else ""
    return f"{tensor}--pipeline-parallel 2, which splits layers instead"
