"""What ``--deterministic-mode`` sets: the environment of the kernel libraries first, torch's own switches after.

Imports torch only inside ``configure_determinism``, so that the environment can be set before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType

DETERMINISTIC_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "MAMBA_DETERMINISTIC": "1",
        "CAUSAL_CONV1D_DETERMINISTIC": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "TRITON_CACHE_AUTOTUNING": "1",
        "NCCL_ALGO": "Ring",
    }
)
"""Read by the libraries at import or at first use, so they must stand in the environment before those."""

_NCCL_ALGORITHMS = {"Ring", "CollnetDirect", "CollnetChain", "^NVLS"}
"""Algorithms that add in a fixed order, as Megatron accepts them; NCCL takes a list separated by commas."""


def set_deterministic_environment(environment: MutableMapping[str, str] | None = None) -> None:
    """Put ``DETERMINISTIC_ENVIRONMENT`` in place; values that are as good are kept.

    Args:
        environment: in place of ``os.environ``.
    Raises:
        ValueError: variables are set to values that break the promise; names all of them.
    """
    environment = os.environ if environment is None else environment
    wrong = [
        f"{name} is {environment[name]!r}, needs {value!r}"
        for name, value in DETERMINISTIC_ENVIRONMENT.items()
        if name in environment and not _keeps_promise(name, environment[name])
    ]
    if wrong:
        raise ValueError(f"deterministic mode contradicts the environment: {'; '.join(wrong)}. Unset these variables.")
    for name, value in DETERMINISTIC_ENVIRONMENT.items():
        environment.setdefault(name, value)


def configure_determinism() -> None:
    """Make torch refuse operations without a deterministic implementation, and pick no kernel by timing.

    From then on torch raises RuntimeError, naming the operation, when one is called that has none.

    Raises:
        ValueError: see ``set_deterministic_environment``.
    """
    set_deterministic_environment()
    import torch

    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN finds reads of unwritten memory: a debugging aid that costs a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _keeps_promise(name: str, value: str) -> bool:
    if name == "CUBLAS_WORKSPACE_CONFIG":
        return value in (":4096:8", ":16:8")
    if name == "NCCL_ALGO":
        return all(algorithm in _NCCL_ALGORITHMS for algorithm in value.split(","))
    return value == DETERMINISTIC_ENVIRONMENT[name]
