"""The model of one rank: its part of the whole, made parallel by torch's own APIs.

Tensor parallelism splits the Linears of each half (columns, then rows: one all-reduce a half and
pass); FSDP shards every parameter; DDP averages the gradients of ranks that see other tokens;
expert parallelism deals the experts out; context parallelism gives each rank a piece of every
sequence; a pipeline stage holds some of the layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.collectives.group_facts import rename
from perfledger.instrumented_runtime.parallel.groups import Group, Peers
from perfledger.instrumented_runtime.parallel.layout import RankPlace
from perfledger.instrumented_runtime.training.context import positions_of, ring_attend
from perfledger.instrumented_runtime.training.experts import Experts
from perfledger.instrumented_runtime.training.memory import local_part
from perfledger.instrumented_runtime.training.model import Decoder, build, rotary
from perfledger.instrumented_runtime.training.options import TrainOptions

# Ranks of these dimensions see other tokens and hold the same parameters (ep: but the experts).
GRADIENT_DIMENSIONS = ("dp", "cp", "ep")


@dataclass(frozen=True)
class RankModel:
    """`module` is what computes (the model, or DDP around it); `decoder` is the model itself."""

    module: nn.Module
    decoder: Decoder
    experts: tuple[Experts, ...]  # dealt out among the ranks of ep; empty without ep
    expert_peers: Group | None  # ranks of dp that hold the same experts
    data_ranks: int  # how many ranks see other sequences


def layers_of_stage(layers: int, stages: int, stage: int) -> range:
    """Return the layers of a pipeline stage; where they do not divide, early ones hold one more."""
    each, more = divmod(layers, stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def shard(
    options: TrainOptions, place: RankPlace, peers: Peers | None, device: torch.device
) -> RankModel:
    """Build this rank's part of the model on its device, and make it parallel with its peers."""
    decoder = _build_part(options, place, device)
    if peers is None:
        return RankModel(decoder, decoder, (), None, 1)
    used = place.layout.used()
    for name in used:  # else a mesh of one dimension would be called world
        rename(peers.groups[name].handle, name, name)
    experts: tuple[Experts, ...] = ()
    if "cp" in used:
        for attention in decoder.attentions():
            attention.attend = ring_attend(peers.groups["cp"])
    if "tp" in used:
        _split_linears(decoder, peers.mesh["tp"])
    if "ep" in used:
        experts = tuple(module for module in decoder.modules() if isinstance(module, Experts))
        for one in experts:
            one.keep_share(peers.groups["ep"])
    if "fsdp" in used:
        for layer in decoder.layers.values():
            fully_shard(layer, mesh=peers.mesh["fsdp"], reshard_after_forward=True)
        fully_shard(decoder, mesh=peers.mesh["fsdp"], reshard_after_forward=True)
    module = _replicate(decoder, peers, bool(experts))
    same_experts = peers.groups.get("dp") if experts else None
    return RankModel(module, decoder, experts, same_experts, options.data_parallel)


def whole_parameters(model: RankModel) -> dict[str, Tensor]:
    """Gather the whole value of every parameter of this rank's layers, on the host.

    All ranks must call it. Names are those of the whole model; a pipeline stage has its own only.
    """
    dealt = {id(p): one.group for one in model.experts for p in (one.gate_up, one.down)}
    whole = {}
    for name, parameter in model.decoder.named_parameters():
        value = parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        elif (group := dealt.get(id(parameter))) is not None:
            value = _gather(value, group)
        whole[name] = value.cpu().clone()
    return whole


def shard_elements(model: RankModel) -> int:
    """Return how many elements of parameters this rank holds."""
    return sum(local_part(parameter).numel() for parameter in model.decoder.parameters())


def _build_part(options: TrainOptions, place: RankPlace, device: torch.device) -> Decoder:
    shape, stages = options.shape, place.layout.pp
    at = place.layout.coordinates(place.rank)
    layers = layers_of_stage(shape.layers, stages, at["pp"])
    decoder = build(shape, options.seed, layers, first=at["pp"] == 0, last=at["pp"] == stages - 1)
    positions = positions_of(options.sequence, place.layout.cp, at["cp"])
    cos, sin = rotary(shape, positions)
    decoder.cos, decoder.sin = cos.to(device), sin.to(device)
    return decoder.to(device)


def _split_linears(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Columns for what reads a half's input, rows for what writes its output.

    The input becomes one replicated DTensor for all its readers, so that their gradients are
    added before the one all-reduce of the backward pass.
    """
    shared = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    attention_input = PrepareModuleInput(
        input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    plan = {
        "self_attn": attention_input,
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp": shared,
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in decoder.layers.values():
        parallelize_module(layer, mesh, plan)


def _replicate(decoder: Decoder, peers: Peers, dealt: bool) -> nn.Module:
    """Wrap in DDP over all ranks that hold the same parameters, if there are such."""
    names = tuple(name for name in peers.place.layout.used() if name in GRADIENT_DIMENSIONS)
    if not names:
        return decoder
    mesh = peers.mesh[names] if len(names) == 1 else peers.mesh[names]._flatten("_".join(names))
    if dealt:
        ignored = [name for name, _ in decoder.named_parameters() if _is_expert(name)]
        leave_alone = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        leave_alone(decoder, ignored)  # type: ignore[no-untyped-call]
    group = mesh.get_group()
    if len(names) > 1:
        rename(group, "_".join(names), "_".join(names))
    return DistributedDataParallel(decoder, process_group=group)


def _is_expert(name: str) -> bool:
    return name.endswith((".mlp.gate_up", ".mlp.down"))


def _gather(value: Tensor, group: Group) -> Tensor:
    whole = value.new_empty(group.size * len(value), *value.shape[1:])
    calls.all_gather(whole, value.contiguous(), group)
    return whole
