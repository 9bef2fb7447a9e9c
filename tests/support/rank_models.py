"""Models whose ranks must compute the results of one process, and mutations to detect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_packed.distributed.collectives import all_gather_rows, own_rows
from megatron_packed.distributed.differentiable import linear_map
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.micro_batch import MicroBatch
from support import hybrid_cases as cases
from support.recorder import Recorder

QUESTIONS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "tolist")
"""Parts of the names of operations that read device values on the host."""


def build(
    pattern: str,
    changes: Mapping[str, Any],
    groups: ParallelGroups | None,
    *,
    dtype: torch.dtype,
    max_positions: int = 64,
    **options: Any,
) -> HybridModel:
    """Build a tiny model in training mode; with float64, all its parameters are float64."""
    config = cases.tiny_config(pattern, **changes)
    model = HybridModel(
        config,
        vocab_size=cases.VOCAB,
        max_positions=max_positions,
        groups=groups,
        dtype=dtype,
        seed=7,
        **options,
    ).train()
    if config.moe_router_load_balancing_type == "seq_aux_loss":
        model.pack_tables.sample_shape = (4, 28)  # for at most 112 slots
    sharded = model.sharded_parameters()
    with torch.no_grad():
        for (
            name,
            parameter,
        ) in model.named_parameters():  # zeros and ones would hide which part a rank has
            if name.endswith("bias") or "norm" in name:
                shape = sharded[name].global_shape
                parameter.copy_(
                    sharded[name].shard.take(torch.linspace(0.5, 1.5, shape.numel()).view(shape))
                )
        for layer in model.moe_layers:
            layer.mixer.router.weight.mul_(4)  # rounding then changes no expert choice
    if dtype == torch.float64:
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    return model


def observe(model: HybridModel, batch: MicroBatch) -> dict[str, Tensor]:
    """Return losses of this rank's tokens, and gradients of its rows of the embedding's output."""
    inputs: list[Tensor] = []
    handle = model.embedding.register_forward_hook(
        lambda _module, _inputs, output: inputs.append(output)
    )
    output = model(batch)
    handle.remove()
    (gradient_TD,) = torch.autograd.grad(output.loss, inputs)
    return {"loss": output.per_token_loss_T.detach(), "input gradients": gradient_TD}


def described(model: HybridModel) -> dict[str, Any]:
    """Return the positions of this rank's shards in this layout and in a checkpoint."""
    return {
        name: (
            p.shard,
            tuple(p.global_shape),
            tuple(p.stored_shape),
            p.stored_pieces(),
        )
        for name, p in model.sharded_parameters().items()
    }


def whole(
    ranks: list[dict[str, Any]], kind: str, name: str, *, exact: bool = True, replicas: bool = False
) -> Tensor:
    """Assemble the unsplit tensor from the shards of all ranks, whose places `described` gives.

    With ``exact`` the copies of a shard must agree bit for bit. Without ``replicas`` each range has
    one owner among these ranks.
    """
    _, shape, stored_shape, *_ = ranks[0]["shards"][name]
    result = torch.full(shape, float("nan"), dtype=ranks[0][kind][name].dtype)
    stored = torch.full(stored_shape, float("nan"), dtype=result.dtype).flatten()
    for rank in ranks:
        shard, *shapes, stored_pieces = rank["shards"][name]
        assert shapes == [shape, stored_shape]
        local = rank[kind][name]
        for piece in stored_pieces:
            for here, there in piece.runs():
                place = stored[there : there + piece.length]
                assert replicas or not piece.owned or place.isnan().all(), (
                    f"{name}: two ranks own a range of a checkpoint"
                )
                place.copy_(local.flatten()[here : here + piece.length])
        taken = shard.take(result)
        assert not exact or torch.equal(torch.where(taken.isnan(), local, taken), local), (
            f"{name}: copies differ"
        )
        shard.place(local, result)
    assert torch.equal(stored.view(stored_shape), result[: stored_shape[0]]), (
        f"{name}: a checkpoint has other ranges"
    )
    return result[: stored_shape[0]]


TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}


def assert_small(found: dict[str, float], run: Any) -> None:
    """Check the relative errors of a run by its dtype."""
    where = max(found, key=found.__getitem__)
    assert found[where] <= TOLERANCES[run.dtype], f"{run}: {where} differs by {found[where]:.2e}"


def two_packs() -> Iterator[MicroBatch]:
    """Yield two packs of different documents and of the same sizes."""
    for lengths, tail, spare in (([5, 20, 3, 1, 30], 5, 2), ([40, 2], 22, 5)):
        yield cases.make_pack(cases.make_documents(lengths), tail=tail, spare=spare, aux_scale=1.0)


def with_other_token(batch: MicroBatch, at: int) -> MicroBatch:
    """Return a copy of the pack with another token at this slot."""
    other = batch.with_buffer(batch.buffer.clone())
    other.tokens[at] = (other.tokens[at] + 1) % cases.VOCAB
    other.labels[at - 1] = other.tokens[at]
    return other


def leaks(
    model: HybridModel, batch: MicroBatch, at: int, groups: ParallelGroups
) -> dict[str, float]:
    """Change a token in one document of rank 0's pack; return the largest changes elsewhere.

    The change of the losses in the document itself is returned too, to show that the test sees
    changes.
    """
    first = groups.dp.rank == 0
    before = observe(model, batch)
    after = observe(model, with_other_token(batch, at) if first else batch)
    others_T = batch.packed.seq_idx[0] != batch.packed.seq_idx[0, at]
    changes = {"own": float((before["loss"] - after["loss"]).abs().max())}
    for name, value in before.items():
        rows_T = others_T if first else slice(None)
        if first and name == "input gradients" and len(value) < len(others_T):
            rows_T = own_rows(others_T, groups.tp.group)  # sequence parallelism
        changes[name] = float((value[rows_T] - after[name][rows_T]).abs().max())
    return changes


def recorded_calls(model: HybridModel, packs: Iterable[MicroBatch]) -> list[list[Any]]:
    """Record the operations that a model calls for each pack, with flat gradients."""
    FlatBuffers(model)
    shared = model.shared_gradients()
    found = []
    for batch in packs:
        with Recorder() as recorder, mock.patch.object(Tensor, "tolist", recorder.tolist):
            model(batch).loss.backward()
            shared.sum()
        found.append(recorder.calls)
    return found


def asks(calls: list[Any], *, alone: bool = False) -> bool:
    """Return whether recorded calls read a device value; on several ranks they have collectives."""
    names = {name for name, _ in calls}
    assert alone or any("c10d" in name for name in names), "collectives must be seen"
    assert alone or len(calls) > 100
    return any(question in name for question in QUESTIONS for name in names)


Patches = Mapping[str, tuple[Any, str, Callable[..., Any]]]
"""Name of a mutation -> owner, attribute, and the replacement of the attribute."""


@contextmanager
def mutated(patches: Patches, name: str | None) -> Iterator[None]:
    """Apply the mutation ``name`` inside a ``with`` block, if ``patches`` has it."""
    if name not in patches:
        yield
        return
    with mock.patch.object(*patches[name]):
        yield


def gathered_without_sum(x: Tensor, group: Any) -> Tensor:
    return linear_map(x, group, all_gather_rows, own_rows)


def only_own_rows(x: Tensor, group: Any) -> Tensor:
    return linear_map(x, group, own_rows, all_gather_rows)


def own_value(ranks: Any, x: Tensor) -> Tensor:
    return x
