"""Random numbers: one seed per purpose; the state of every generator saved and restored bit for
bit.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_for(seed: int, purpose: str, *keys: int | str) -> int:
    """Return a 63-bit seed for one purpose: equal arguments give equal seeds on every rank, machine and
    version.

    Example:
        ``seed_for(1234, "init", "layers.0.norm.weight")``, ``seed_for(1234, "dropout", dp_rank)``.
    """
    # The type of each key is part of the text, so that 1 and "1" give different seeds. A hash of ours
    # instead of Python's: `hash` of a string differs from process to process.
    text = "\x1f".join([str(int(seed)), purpose, *(f"{type(key).__name__}:{key}" for key in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_for_ranks(seed: int, purpose: str, *, dp_rank: int = 0, **ranks: int) -> int:
    """Return a seed for one purpose that differs between the ranks of the given axes and of no others.

    An axis on which ranks must draw alike is left out. Rank 0 of an axis is as good as none, so
    that a layout with the axis continues what one without it draws on its first ranks.

    Args:
        dp_rank: the data-parallel rank.
        ranks: of further axes, e.g. ``cp_rank=1, tp_rank=0, ep_rank=3``.
    Example:
        Dropout of hidden states, seeded by ``seed_for_ranks(1234, "dropout", dp_rank=2,
        cp_rank=1)``, is the same on all tensor-parallel ranks, which hold the same tokens without
        sequence parallelism.
    """
    return seed_for(
        seed, purpose, dp_rank, *(f"{axis}={rank}" for axis, rank in sorted(ranks.items()) if rank)
    )


def seed_all(seed: int, dp_rank: int = 0, *, cp_rank: int = 0, tp_rank: int = 0) -> None:
    """Seed python, numpy and torch (all devices) for this rank: ranks with different tokens draw
    different masks.

    Parameters and data do not draw from these streams: their seeds come from ``seed_for`` and no
    rank enters them.

    Args:
        tp_rank: given under sequence parallelism alone: without it, tensor-parallel ranks hold the
            same hidden states and must drop the same of them.
    """
    # One seed for all three libraries: none of them draws for parameters or data.
    mixed = seed_for_ranks(seed, "dropout", dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=tp_rank)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    torch.manual_seed(mixed)


@dataclass(frozen=True, kw_only=True)
class RngState:
    """The generators of one process: 1-D uint8 tensors and a JSON-able dict, for a checkpoint
    without pickles.
    """

    tensors: Mapping[str, Tensor]
    """``python``, ``numpy``, ``torch`` and, where CUDA is in use, ``cuda``; on the CPU."""
    metadata: Mapping[str, Any]

    @classmethod
    def capture(cls, device: torch.device | str = "cpu") -> RngState:
        """Read all generators; no device work.

        Args:
            device: with a CUDA device its generator is read too.
        """
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        if kind != "MT19937":
            raise ValueError(
                f"numpy's global generator is {kind}, not MT19937; leave np.random's global state as it is."
            )
        tensors = {
            "python": _bytes_tensor(np.asarray(words, dtype=np.uint32)),
            "numpy": _bytes_tensor(np.asarray(keys, dtype=np.uint32)),
            "torch": torch.get_rng_state(),
        }
        device = torch.device(device)
        if device.type == "cuda":
            tensors["cuda"] = torch.cuda.get_rng_state(device)
        metadata = {
            "python": {"version": version, "gauss": gauss},
            "numpy": {
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
        }
        return cls(tensors=tensors, metadata=metadata)

    def restore(self, device: torch.device | str = "cpu") -> None:
        """Set all generators; those of a device kind that was not captured stay as they are.

        Raises:
            ValueError: a tensor is missing or has another size than its generator.
        """
        sizes = {"python": 2500, "numpy": 2496, "torch": torch.get_rng_state().numel()}
        for name, size in sizes.items():
            found = self.tensors[name].numel() if name in self.tensors else 0
            if found != size:
                raise ValueError(
                    f"random state {name!r} has {found} bytes, its generator needs {size}."
                )
        python, numpy_state = self.metadata["python"], self.metadata["numpy"]
        words = _words(self.tensors["python"])
        random.setstate((int(python["version"]), tuple(words.tolist()), python["gauss"]))
        np.random.set_state(
            (
                "MT19937",
                _words(self.tensors["numpy"]),
                int(numpy_state["position"]),
                int(numpy_state["has_gauss"]),
                float(numpy_state["cached"]),
            )
        )
        torch.set_rng_state(self.tensors["torch"].cpu())
        device = torch.device(device)
        if device.type == "cuda" and "cuda" in self.tensors:
            torch.cuda.set_rng_state(self.tensors["cuda"].cpu(), device)


def _bytes_tensor(words: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(words.astype("<u4").view(np.uint8).copy())


def _words(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().contiguous().numpy().view("<u4").astype(np.uint32)
