"""Conditions under which the Triton kernels of this package can run."""

from __future__ import annotations

import inspect
from functools import cache

import torch

from megatron_packed.config.environment_variables import release_of
from megatron_packed.ops.backend_dispatch import interprets


def splits_into_bf16() -> bool:
    """Return whether this Triton can multiply fp32 tiles as sums of two or three bf16 tiles."""
    from triton.backends.nvidia.compiler import CUDAOptions

    return "bf16x6" in CUDAOptions.allowed_dot_input_precisions and not interprets()


def device_reasons(device_type: str) -> list[str]:
    """Return the reasons why a Triton kernel cannot run on this type of device.

    On a CPU only Triton's interpreter can run kernels; tests use it.
    """
    if device_type == "cuda" or (device_type == "cpu" and interprets()):
        return []
    return [
        f"the Triton kernel needs a CUDA device, not {device_type!r} (on a CPU, TRITON_INTERPRET=1 interprets it)"
    ]


def fp32_reasons(device_type: str, dtype: torch.dtype) -> list[str]:
    """Return the reasons why a Triton kernel with fp32 arithmetic does not support these tensors."""
    reasons = device_reasons(device_type)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reasons.append(f"the kernel computes in fp32, which is not precise enough for {dtype}")
    return reasons


@cache
def ptxas_version() -> tuple[int, int]:
    """Return the version of the ptxas that makes Triton's machine code for this GPU, such as (12, 8).

    It is (0, 0) if ptxas does not say it.
    """
    from triton.backends.nvidia.compiler import get_ptxas_version

    major, minor = torch.cuda.get_device_capability()
    # Triton 3.4 and 3.5 have one ptxas for all GPUs.
    arch = (10 * major + minor,) if inspect.signature(get_ptxas_version).parameters else ()
    return release_of(get_ptxas_version(*arch)) or (0, 0)
