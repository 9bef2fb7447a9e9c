"""Random numbers: one seed per purpose; the state of every generator saved and restored bit for bit."""

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
    """A 63-bit seed for one purpose: equal arguments give equal seeds on every rank, machine and version.

    Example:
        ``seed_for(1234, "init", "layers.0.norm.weight")``, ``seed_for(1234, "dropout", dp_rank)``.
    """
    text = "\x1f".join([str(int(seed)), purpose, *(f"{type(key).__name__}:{key}" for key in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(seed: int, dp_rank: int = 0) -> None:
    """Seed python, numpy and torch (all devices) for this rank: data-parallel ranks draw different dropout masks.

    Parameters and data do not draw from these streams: their seeds come from ``seed_for`` and no rank enters them.
    """
    mixed = seed_for(seed, "dropout", dp_rank)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    torch.manual_seed(mixed)


@dataclass(frozen=True, kw_only=True)
class RngState:
    """The generators of one process: 1-D uint8 tensors and a JSON-able dict, for a checkpoint without pickles."""

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
            "numpy": {"position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)},
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
                raise ValueError(f"random state {name!r} has {found} bytes, its generator needs {size}.")
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
