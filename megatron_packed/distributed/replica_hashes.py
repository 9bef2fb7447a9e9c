"""Hashes of tensors that must have the same bits on all replicas, and sentences about differences."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 24
"""Elements that are hashed at a time."""
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_hash(tensor: Tensor, dtype: torch.dtype | None = None, *, one_nan: bool = False) -> Tensor:
    """Return a hash of the bits of a tensor, as a 0-d int64 tensor; one flipped bit changes it.

    The hash is the sum of all elements' bits, each times an odd factor that depends on its index,
    modulo 2^64.

    Args:
        tensor: the tensor.
        dtype: type to which the elements are rounded first.
        one_nan: treat all NaNs as equal, whatever their bits.
    """
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    # Chunks bound the memory: an int64 copy of a whole bf16 parameter would take four times its
    # memory.
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK].to(dtype or flat.dtype)
        if one_nan:
            part = torch.where(part.isnan(), torch.nan, part)
        bits = part.view(_WORDS[part.element_size()]).to(torch.int64)
        # An odd factor has an inverse modulo 2^64, so a change of one element always changes the
        # sum.
        places = torch.arange(start, start + bits.numel(), dtype=torch.int64, device=flat.device)
        total = total + (bits * (2 * places + 1)).sum()
    return total


def mismatches(hashes: Sequence[Mapping[str, int]]) -> list[str]:
    """Return a sentence for each name whose hash differs between ranks.

    Args:
        hashes: for each rank, name -> hash.
    """
    found = []
    for key in dict.fromkeys(key for one in hashes for key in one):
        held = {rank: one[key] for rank, one in enumerate(hashes) if key in one}
        versions = Counter(held.values())
        if len(versions) == 1:
            continue
        usual, count = versions.most_common(1)[0]
        # The majority is most likely right. Without a majority, no rank can be blamed.
        if 2 * count > len(held):
            found.append(
                f"{key}: other bits on {_ranks([r for r, value in held.items() if value != usual])} than on most of "
                f"{_ranks(list(held))}"
            )
        else:
            found.append(f"{key}: different bits on {_ranks(list(held))}, without a majority")
    return found


def against_masters(wrong: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a sentence for each name that a rank has found to be wrong by its own comparison.

    Args:
        wrong: for each rank, name -> the value that it should equal, in words.
    """
    found = []
    for name in dict.fromkeys(name for one in wrong for name in one):
        reasons: dict[str, list[int]] = {}
        for rank, one in enumerate(wrong):
            if name in one:
                reasons.setdefault(one[name], []).append(rank)
        found += [
            f"{name}: other bits on {_ranks(ranks)} {reason}" for reason, ranks in reasons.items()
        ]
    return found


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def on_host(numbers: Sequence[Tensor]) -> list[int]:
    """Copy 0-d integer tensors to the host in one transfer and return them as integers."""
    return torch.stack(list(numbers)).tolist()


def digest(hashes: Sequence[int]) -> int:
    """Return one hash of a sequence of hashes."""
    data = ",".join(map(str, hashes)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
