"""Whether ranks that hold the same weights still do: ``--check-weight-hash-across-dp-replicas-interval``.

Data-parallel ranks apply the same updates to the same weights, so these stay alike to the last bit. A defective GPU or
link can make them differ, and nothing of the loss would tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_packed.checkpoint.ranks import Ranks
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel

_CHUNK = 1 << 24
"""Elements that are looked at together."""


class ReplicaMismatchError(RuntimeError):
    """Ranks hold other weights than those that should hold the same."""


def weight_hash(tensors: Sequence[Tensor]) -> Tensor:
    """0-d int64 of the bits of float32 or bfloat16 tensors, on their device; one flipped bit makes it another one.

    Every element counts with an odd factor that follows from its place, modulo 2^64.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else None)
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        total = total * 1_000_003
        for start in range(0, bits.numel(), _CHUNK):
            part = bits[start : start + _CHUNK].to(torch.int64)
            places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
            total = total + (part * (2 * places + 1)).sum()
    return total


def check_replicas(model: HybridModel, groups: ParallelGroups) -> None:
    """Compares the parameters of all ranks that hold the same ones; a collective that reads two numbers off the device.

    Raises:
        ReplicaMismatchError: on all ranks, naming those that differ from most of their kind.
    """
    parameters = model.sharded_parameters().values()
    hashes = torch.stack(
        [weight_hash([one.parameter for one in parameters if one.is_expert is expert]).to(groups.device)
         for expert in (False, True)]
    ).tolist()  # fmt: skip
    mine = {
        f"dense layers, tensor-parallel rank {groups.tp_rank}": hashes[0],
        f"experts, expert-parallel rank {groups.ep_rank}, tensor-parallel rank {groups.expert_tp_rank}": hashes[1],
    }
    ranks = Ranks(rank=groups.rank, world_size=groups.world_size, group=groups.world_group)
    wrong = mismatches([{str(key): int(value) for key, value in one.items()} for one in ranks.gather(mine)])
    if wrong:
        raise ReplicaMismatchError(
            f"weights differ between ranks that should hold the same: {'; '.join(wrong)}. Checkpoints "
            "from before the last check that passed are sound; look at the hardware of these ranks"
        )


def mismatches(hashes: Sequence[Mapping[str, int]]) -> list[str]:
    """A sentence for each kind of weights of which ranks hold several versions.

    Args:
        hashes: by rank, what it holds and its hash.
    """
    found = []
    for key in sorted({key for one in hashes for key in one}):
        held = {rank: one[key] for rank, one in enumerate(hashes) if key in one}
        versions = Counter(held.values())
        if len(versions) > 1:
            usual, _ = versions.most_common(1)[0]
            others = ", ".join(str(rank) for rank, value in held.items() if value != usual)
            found.append(f"{key}: rank {others} of ranks {', '.join(map(str, held))}")
    return found
