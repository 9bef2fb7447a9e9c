"""Seeds for each purpose of random numbers, and saved states of all random generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_for(seed: int, purpose: str, *keys: int | str) -> int:
    """Return a 63-bit seed for one purpose.

    Equal arguments give equal seeds on every rank, on every machine and in every Python version.

    Example:
        ``seed_for(1234, "init", "layers.0.norm.weight")``, ``seed_for(1234, "dropout", dp_rank)``.
    """
    # The type of each key is part of the text, so that 1 and "1" give different seeds. Python's
    # `hash` of a string differs between processes, so it cannot be used.
    text = "\x1f".join([str(int(seed)), purpose, *(f"{type(key).__name__}:{key}" for key in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_for_ranks(seed: int, purpose: str, *, dp_rank: int = 0, **ranks: int) -> int:
    """Return a seed for one purpose that differs between the ranks of the given axes only.

    Leave out an axis whose ranks must draw the same numbers. Rank 0 of a further axis gives the
    same seed as leaving out the axis. So rank 0 draws the same numbers in layouts with and without
    that axis.

    Args:
        seed: seed of the run.
        purpose: name of the use of the random numbers.
        dp_rank: data-parallel rank.
        ranks: ranks on further axes, e.g. ``cp_rank=1, tp_rank=0, ep_rank=3``.
    Example:
        ``seed_for_ranks(1234, "dropout", dp_rank=2, cp_rank=1)`` is the same on all tensor-parallel
        ranks. Without sequence parallelism they hold the same tokens, so they need the same
        dropout.
    """
    return seed_for(
        seed, purpose, dp_rank, *(f"{axis}={rank}" for axis, rank in sorted(ranks.items()) if rank)
    )


def generators_kept(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores torch's generators, on the host and of ``device``, at its end."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def seed_all(seed: int, dp_rank: int = 0, *, cp_rank: int = 0, tp_rank: int = 0) -> None:
    """Seed the generators of Python, numpy and torch (all devices) for this rank.

    Ranks with different tokens get different seeds, and so different dropout masks. Initial
    parameters and the order of the data do not use these generators. Their seeds come from
    ``seed_for`` and do not depend on a rank.

    Args:
        seed: seed of the run.
        dp_rank: data-parallel rank.
        cp_rank: context-parallel rank.
        tp_rank: tensor-parallel rank; give it only under sequence parallelism. Without sequence
            parallelism the tensor-parallel ranks hold the same hidden states and must use the same
            dropout mask.
    """
    # All three libraries get the same seed, because none of them draws numbers for parameters or
    # data.
    mixed = seed_for_ranks(seed, "dropout", dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=tp_rank)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    torch.manual_seed(mixed)


@dataclass(frozen=True, kw_only=True)
class RngState:
    """State of all random generators of one process, in a form that needs no pickle.

    The state is a set of 1-D uint8 tensors and a dict that can be written as JSON. Restoring a
    captured state is exact to the bit.
    """

    tensors: Mapping[str, Tensor]
    """CPU tensors ``python``, ``numpy``, ``torch`` and, if CUDA is in use, ``cuda``."""
    metadata: Mapping[str, Any]

    @classmethod
    def capture(cls, device: torch.device | str = "cpu") -> RngState:
        """Return the current state of all generators, without device work.

        Args:
            device: device of the run; the generator of a CUDA device is read too.
        """
        version, generator_words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        if kind != "MT19937":
            raise ValueError(
                f"numpy's global generator is {kind}, not MT19937; do not replace the bit generator of np.random."
            )
        tensors = {
            "python": _bytes_tensor(np.asarray(generator_words, dtype=np.uint32)),
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
        """Set all generators to this state.

        The CUDA generator is left unchanged if the state contains no ``cuda`` tensor.

        Args:
            device: device of the run; the generator of a CUDA device is set too.
        Raises:
            ValueError: a tensor is missing, or its size differs from the size of the generator's
                state.
        """
        sizes = {"python": 2500, "numpy": 2496, "torch": torch.get_rng_state().numel()}
        for name, size in sizes.items():
            num_bytes = self.tensors[name].numel() if name in self.tensors else 0
            if num_bytes != size:
                raise ValueError(
                    f"random state {name!r} has {num_bytes} bytes, but the generator needs {size}."
                )
        python, numpy_state = self.metadata["python"], self.metadata["numpy"]
        generator_words = _words(self.tensors["python"])
        random.setstate((int(python["version"]), tuple(generator_words.tolist()), python["gauss"]))
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


def _bytes_tensor(generator_words: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(generator_words.astype("<u4").view(np.uint8).copy())


def _words(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().contiguous().numpy().view("<u4").astype(np.uint32)
