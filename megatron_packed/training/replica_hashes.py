"""Hashes of bits that replicas should hold alike, and sentences about those that differ."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 24
"""Elements that are looked at together."""
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_hash(tensor: Tensor, dtype: torch.dtype | None = None, *, one_nan: bool = False) -> Tensor:
    """Return a 0-d int64 of the bits of ``tensor``, rounded to ``dtype``; one flipped bit makes it
    another one.

    Every element counts with an odd factor that follows from its place, modulo 2^64. With
    ``one_nan`` the bits of a NaN do not matter.
    """
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    # In chunks: int64 copies of a whole parameter would take four times its memory.
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK].to(dtype or flat.dtype)
        if one_nan:
            part = torch.where(part.isnan(), torch.nan, part)
        bits = part.view(_WORDS[part.element_size()]).to(torch.int64)
        # Odd factors have an inverse modulo 2^64, so that no single change can vanish.
        places = torch.arange(start, start + bits.numel(), dtype=torch.int64, device=flat.device)
        total = total + (bits * (2 * places + 1)).sum()
    return total


def mismatches(hashes: Sequence[Mapping[str, int]]) -> list[str]:
    """Return a sentence for each name of which ranks hold several versions.

    Args:
        hashes: by rank, what it holds and its hash.
    """
    found = []
    for key in dict.fromkeys(key for one in hashes for key in one):
        held = {rank: one[key] for rank, one in enumerate(hashes) if key in one}
        versions = Counter(held.values())
        if len(versions) == 1:
            continue
        usual, count = versions.most_common(1)[0]
        # A majority is right more often than not; without one no rank can be named.
        if 2 * count > len(held):
            found.append(
                f"{key}: {_ranks([r for r, value in held.items() if value != usual])} of {_ranks(list(held))}"
            )
        else:
            found.append(f"{key}: {_ranks(list(held))} have no majority")
    return found


def against_masters(wrong: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a sentence for each name that some rank has found wrong by itself, from what each has
    found.
    """
    found = []
    for name in dict.fromkeys(name for one in wrong for name in one):
        reasons: dict[str, list[int]] = {}
        for rank, one in enumerate(wrong):
            if name in one:
                reasons.setdefault(one[name], []).append(rank)
        found += [
            f"{name}: {_ranks(ranks)} with other bits {reason}" for reason, ranks in reasons.items()
        ]
    return found


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def on_host(numbers: Sequence[Tensor]) -> list[int]:
    """Return 0-d integers on the device as numbers of the host, by one copy."""
    return torch.stack(list(numbers)).tolist()  # type: ignore[no-any-return]


def digest(hashes: Sequence[int]) -> int:
    """Return one number for many."""
    data = ",".join(map(str, hashes)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
