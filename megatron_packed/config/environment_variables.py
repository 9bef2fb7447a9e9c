"""Environment variables that a run sets before any library reads them, with
``--deterministic-mode`` and without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.sections.training import TrainingConfig

FASTEST: dict[str, str] = {
    # cuBLAS without a workspace takes kernels with a static schedule. Given one, it takes kernels
    # that count tiles in it and clears the counter first, and a memset is costly in a graph.
    # benchmarks/cublas_workspace.py compares them.
    "CUBLAS_WORKSPACE_CONFIG": ":0:0",
    # Triton keeps tuning results beside its compiled kernels: the next run need not tune again
    # (mamba-ssm has some 90 configurations). Kept for sizes of heads and states, not of packs: the
    # isolation self-test tunes at full size.
    "TRITON_CACHE_AUTOTUNING": "1",
}
"""Set when they are not set yet, without ``deterministic_mode``."""

ALWAYS: dict[str, str] = {
    # Replays of one rank may meet eager passes, or replays of other graphs, of another: NCCL must
    # not write to buffers that it has registered with a captured collective.
    "NCCL_GRAPH_REGISTER": "0",
}
"""Set when they are not set yet."""

DETERMINISTIC: dict[str, str] = {
    "MAMBA_DETERMINISTIC": "1",  # mamba-ssm: no atomic additions in the scan's backward
    # causal-conv1d >= 1.6: the same for the convolution's weight gradient
    "CAUSAL_CONV1D_DETERMINISTIC": "1",
    # Triton: a tuning result is kept, so the next run takes the same configuration
    "TRITON_CACHE_AUTOTUNING": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # TransformerEngine and cuDNN attention
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS: one fixed workspace per stream
    "NCCL_ALGO": "Ring",  # NCCL: additions in ring order, whatever the message's size
}
"""flash-attn has no variable: its ``deterministic`` argument is set by the attention backends."""

_ALSO_DETERMINISTIC: dict[str, frozenset[str]] = {
    "CUBLAS_WORKSPACE_CONFIG": frozenset({":16:8"}),
    "NCCL_ALGO": frozenset({"CollnetDirect", "CollnetChain", "^NVLS"}),
}


def environment(training: TrainingConfig) -> dict[str, str]:
    """The variables of a run."""
    return ALWAYS | (DETERMINISTIC if training.deterministic_mode else FASTEST)


def environment_problems(
    training: TrainingConfig, environ: MutableMapping[str, str] | None = None
) -> list[Problem]:
    """With ``deterministic_mode``: variables that are already set, to something that is not
    deterministic.
    """
    current = os.environ if environ is None else environ
    found = []
    for name, value in DETERMINISTIC.items() if training.deterministic_mode else ():
        given = current.get(name, "")
        accepted = {value, *_ALSO_DETERMINISTIC.get(name, ())}
        if given and not set(given.split(",") if name == "NCCL_ALGO" else [given]) <= accepted:
            found.append(
                Problem(
                    name,
                    given,
                    "the environment variable contradicts --deterministic-mode",
                    f"unset it, or set it to {value}",
                    node_dependent=True,
                )
            )
    return found


def apply_environment(
    training: TrainingConfig, environ: MutableMapping[str, str] | None = None
) -> dict[str, str]:
    """Set the variables that are not set yet, and return them.

    Raises:
        ConfigError: one is set to a value that is not deterministic.
        RuntimeError: with ``deterministic_mode``, torch is already imported: libraries may have
            read the variables.
    """
    if training.deterministic_mode and "torch" in sys.modules:
        raise RuntimeError(
            "--deterministic-mode sets environment variables that libraries read when they are imported, and torch is "
            "already imported; parse the configuration and call apply_environment() before importing torch."
        )
    problems = environment_problems(training, environ)
    if problems:
        raise ConfigError(problems)
    current = os.environ if environ is None else environ
    missing = {
        name: value for name, value in environment(training).items() if not current.get(name)
    }
    current.update(missing)
    return missing
