"""Tensors of a run in checkpoints: the shards of parameters, buffers and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.checkpoint.tensor_shard import Extent, TensorShard, shards_of
from megatron_packed.distributed.tensor_parallel_shards import ShardedParameter
from megatron_packed.layers.lora import is_adapter
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer


class HeldPart(Enum):
    """HeldPart of a model's weights that a checkpoint holds."""

    WHOLE = auto()
    """All weights."""
    BASE = auto()
    """Weights that the model has without its adapters."""
    ADAPTERS = auto()
    """Adapters, and weights that are trained beside them."""

    def has(self, name: str, *, trained: bool) -> bool:
        """Return whether a parameter is in this part."""
        return self is HeldPart.WHOLE or (
            not is_adapter(name) if self is HeldPart.BASE else is_adapter(name) or trained
        )


class Held(NamedTuple):
    """HeldPart of a run's state that this rank holds."""

    shard: TensorShard
    owned: bool
    """True if no lower tensor-parallel rank holds the same shard."""
    replicated: bool
    """True if all ranks of ``dp_cp`` hold the shard; for experts, all ranks of ``expert_dp``."""
    expert: bool = False
    """True if the shard belongs to an expert."""


def held_state(
    model: HybridModel, optimizer: Optimizer | None = None, part: HeldPart = HeldPart.WHOLE
) -> Iterator[Held]:
    """Yield this rank's shards of parameters, persistent buffers and optimizer state.

    The names do not depend on the parallel layout. A tied parameter is yielded once. Training changes
    buffers, so each part has all of them.
    """
    if optimizer is not None:
        optimizer.buffers.wait_params()
    parameters, persistent, first = (
        model.sharded_parameters(),
        model.state_dict(),
        model.tp.rank == 0,
    )
    for name, sharded in parameters.items():
        if part.has(name, trained=sharded.parameter.requires_grad):
            yield from held_parameter(f"model/{name}", sharded, sharded.parameter.detach().view(-1))
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield Held(TensorShard.whole(f"model/{name}", buffer), owned=first, replicated=True)
    if optimizer is None:
        return
    yield from held_optimizer_state(model, optimizer)


def held_optimizer_state(
    model: HybridModel, optimizer: Optimizer, targets: Mapping[str, Tensor] | None = None
) -> Iterator[Held]:
    """Yield this rank's shards of the optimizer state.

    Masters that are pairs of weight and remainder are shards of float32 masters, whose values a save
    computes.

    Args:
        targets: name of `Optimizer.state_shards` or master of a pair -> tensor of equal length, which
            the shards view in place of the state.
    """
    parameters, buffers, starts = (
        model.sharded_parameters(),
        optimizer.buffers,
        optimizer.state_starts(),
    )
    pairs = {f"master/{name}": pair for name, pair in optimizer.pairs().items()}
    views = {
        name: view
        for name, view in optimizer.state_shards().items()
        if not name.startswith("remainder/")
    }
    views |= {
        name: torch.empty(pair.numel(), dtype=torch.float32, device="meta")
        for name, pair in pairs.items()
    }
    has_one_owner = {
        slot.name: buffers.owners(slot.part).size == 1 for slot in buffers.layout.slots
    }
    for name, state in views.items():
        kind, _, of = name.partition("/")
        target = None if targets is None else targets.get(name)
        view = state if target is None else target
        compute = pairs[name].values if name in pairs and target is None else None
        if name == "step":
            first_tp = model.tp.rank == 0
            yield Held(TensorShard.whole("optimizer/step", view), owned=first_tp, replicated=True)
        # float32 parameters are their own masters, and are saved once.
        elif kind != "master" or parameters[of].parameter.dtype == torch.bfloat16:
            yield from held_parameter(
                f"optimizer/{name}",
                parameters[of],
                view,
                starts[name],
                replicated=has_one_owner[of],
                compute=compute,
            )


def held_parameter(
    name: str,
    sharded: ShardedParameter,
    view: Tensor,
    start: int = 0,
    *,
    replicated: bool = True,
    compute: Callable[[int, int], Tensor] | None = None,
) -> Iterator[Held]:
    """Yield the parts of the unsharded tensor that ``view`` holds.

    Args:
        name: name of the unsharded tensor.
        sharded: the parameter, with its place in the unsharded tensor.
        view: consecutive elements of this rank's part of the parameter, or of an optimizer state of
            the same shape.
        start: index of the first element of ``view`` in this rank's flattened part.
        replicated: see `Held`.
        compute: function that computes values of ``view``, see `TensorShard`.
    """
    for piece in sharded.stored_pieces():
        extent = Extent(
            piece.global_start, piece.global_start + piece.length, piece.rows, piece.global_stride
        )
        # On this rank, the rows of most pieces are contiguous in memory. If they are not, each row
        # becomes a separate extent.
        together = piece.rows == 1 or piece.local_stride == piece.length
        extents = (
            [(piece.local_start, extent)]
            if together
            else zip((at for at, _ in piece.runs()), extent.each_row())
        )
        for at, its_extent in extents:
            first, last = max(at, start), min(at + its_extent.numel, start + view.numel())
            if first < last:
                parts = its_extent.cut(first - at, last - at)
                for shard in shards_of(
                    name,
                    tuple(sharded.stored_shape),
                    parts,
                    view[first - start : last - start],
                    compute,
                    first - start,
                ):
                    yield Held(shard, piece.owned, replicated, sharded.is_expert)
