"""Conditions under which our own Triton kernels can run."""

from __future__ import annotations

import os

import torch


def device_reasons(device_type: str) -> list[str]:
    """Return why a Triton kernel cannot run on this kind of device; on a CPU only Triton's
    interpreter (tests) can.
    """
    if device_type == "cuda" or (
        device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    ):
        return []
    return [
        f"its Triton kernel needs a CUDA device, not {device_type!r} (TRITON_INTERPRET=1 interprets it on a CPU)"
    ]


def fp32_reasons(device_type: str, dtype: torch.dtype) -> list[str]:
    """Return why a Triton kernel that computes in fp32 cannot serve tensors of this dtype on this
    kind of device.
    """
    reasons = device_reasons(device_type)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reasons.append(f"it computes in fp32, too little for {dtype}")
    return reasons
