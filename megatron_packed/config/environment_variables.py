"""Environment variables that a run sets before libraries read them, with and without
``--deterministic-mode``; one of them chooses the ptxas of Triton.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import MutableMapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.kernel_options import may_have_gpu

if (
    TYPE_CHECKING
):  # Kernels import this module, and all sections would double the time of an import.
    from megatron_packed.config.sections.training import TrainingConfig


STORE_SOCKET = "MEGATRON_PACKED_STORE_SOCKET"
"""Variable that the launcher of one machine sets for each rank.

For rank 0 it holds the descriptor of a socket bound to 127.0.0.1, so that no other machine reaches
the store of torch.distributed; for the other ranks it is empty.
"""

FASTEST: dict[str, str] = {
    # Without a workspace, cuBLAS uses kernels with a static schedule. With a workspace, it uses
    # kernels that count tiles in the workspace. The counter must be cleared first, and a memset is
    # costly in a CUDA graph: 18 of 27 products had one. Eagerly all 27 take 5.9 ms with and without.
    "CUBLAS_WORKSPACE_CONFIG": ":0:0",
    # Triton stores tuning results with its compiled kernels, so the next run need not tune again
    # (mamba-ssm has some 90 configurations). The results are stored by the sizes of heads and
    # states, not of packs. For this reason the isolation self-test tunes at the full pack size.
    "TRITON_CACHE_AUTOTUNING": "1",
}
"""Variables that are set without ``deterministic_mode``, if they are not set yet."""

ALWAYS: dict[str, str] = {
    # A rank may replay a graph while another rank runs eagerly or replays a different graph. NCCL
    # must then not write to buffers that it has registered with a captured collective.
    "NCCL_GRAPH_REGISTER": "0",
    # Fused products of --tp-comm-overlap use no multicast. torch would set it up with the symmetric
    # memory, and some machines refuse that.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # flash-attn 4 has wrong gradients for some head dimensions (ops/varlen_attention/flash_attn_4.py).
    # TransformerEngine would choose it for them where cuDNN has no kernel.
    "NVTE_FLASH_ATTN_V4": "0",
    # quack loads compiled kernels from a folder. Its default is in /tmp, which other users can write.
    "QUACK_CACHE_DIR": os.path.expanduser("~/.cache/quack"),
}
"""Variables that every run sets, if they are not set yet."""

DETERMINISTIC: dict[str, str] = {
    "MAMBA_DETERMINISTIC": "1",  # mamba-ssm: no atomic additions in the backward pass of the scan
    # causal-conv1d >= 1.6: no atomic additions in the weight gradient of the convolution
    "CAUSAL_CONV1D_DETERMINISTIC": "1",
    # Triton: tuning results are stored, so the next run uses the same configuration
    "TRITON_CACHE_AUTOTUNING": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # TransformerEngine and cuDNN attention
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS: one fixed workspace per stream
    "NCCL_ALGO": "Ring",  # NCCL: additions in ring order for all message sizes
}
"""Variables that are set with ``deterministic_mode``. flash-attn has none: the attention backends
set its ``deterministic`` argument.
"""

_ALSO_DETERMINISTIC: dict[str, frozenset[str]] = {
    "CUBLAS_WORKSPACE_CONFIG": frozenset({":16:8"}),
    "NCCL_ALGO": frozenset({"CollnetDirect", "CollnetChain", "^NVLS"}),
}


def environment(training: TrainingConfig) -> dict[str, str]:
    mode = DETERMINISTIC if training.deterministic_mode else FASTEST
    return ALWAYS | assembler_variables() | mode


def environment_problems(
    training: TrainingConfig, environ: MutableMapping[str, str] | None = None
) -> list[Problem]:
    """Return problems of environment variables that are already set to values that are not
    deterministic. Only ``deterministic_mode`` has such problems.
    """
    current = os.environ if environ is None else environ
    problems = []
    for name, value in DETERMINISTIC.items() if training.deterministic_mode else ():
        preset = current.get(name, "")
        accepted = {value, *_ALSO_DETERMINISTIC.get(name, ())}
        if preset and not set(preset.split(",") if name == "NCCL_ALGO" else [preset]) <= accepted:
            problems.append(
                Problem(
                    name,
                    preset,
                    "the environment variable contradicts --deterministic-mode",
                    f"unset it, or set it to {value}",
                    node_dependent=True,
                )
            )
    return problems


def apply_environment(
    training: TrainingConfig, environ: MutableMapping[str, str] | None = None
) -> dict[str, str]:
    """Set the variables that are not set yet, and return them.

    Raises:
        ConfigError: a variable is set to a value that is not deterministic.
        RuntimeError: a variable of ``deterministic_mode`` is not set and torch is already imported,
            so libraries may have read it.
    """
    current = os.environ if environ is None else environ
    missing = {
        name: value for name, value in environment(training).items() if not current.get(name)
    }
    if (
        missing.keys() & DETERMINISTIC.keys()
        and training.deterministic_mode
        and "torch" in sys.modules
    ):
        raise RuntimeError(
            "--deterministic-mode sets environment variables that libraries read when they are "
            "imported, but torch is already imported; parse the configuration and call "
            "apply_environment() before importing torch."
        )
    problems = environment_problems(training, environ)
    if problems:
        raise ConfigError(problems)
    current.update(missing)
    return missing


RIGHT_PTXAS = (12, 9)
"""First ptxas without a fault: 12.8 takes a wrong register for the address of a product in some kernels.

Triton 3.4 to 3.7 use 12.8 for Hopper and older GPUs. Triton 3.6 also has 12.9, for Blackwell, which
supports those GPUs too. The ptxas 13.1 of Triton 3.7 is not chosen, because it was not tried.
"""


@cache
def assembler_variables() -> dict[str, str]:
    """Return ``TRITON_PTXAS_PATH`` if Triton has an old ptxas and ptxas 12.9; else nothing."""
    folder = _folder()
    if folder is None or not may_have_gpu(os.environ):
        return {}
    usual, second = folder / "ptxas", folder / "ptxas-blackwell"
    version = _version(usual)
    if version is None or version >= RIGHT_PTXAS or _version(second) != RIGHT_PTXAS:
        return {}
    return {"TRITON_PTXAS_PATH": str(second)}


def _folder() -> Path | None:
    """Return the folder of Triton's programs; None without Triton, which is not imported."""
    try:
        triton = find_spec("triton")
    except ValueError:  # a module without a specification has this name
        return None
    if triton is None or triton.origin is None:
        return None
    return Path(triton.origin).parent / "backends" / "nvidia" / "bin"


def _version(ptxas: Path) -> tuple[int, int] | None:
    """Return the version, such as (12, 8); None if the program does not say it."""
    command = [str(ptxas), "--version"]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return release_of(run.stdout)


def release_of(text: str) -> tuple[int, int] | None:
    """Return the version in the output of ``ptxas --version``; None if it has none."""
    release = re.search(r"release (\d+)\.(\d+)", text)
    return (int(release[1]), int(release[2])) if release else None
