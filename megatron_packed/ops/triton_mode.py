"""Where our own Triton kernels can run."""

from __future__ import annotations

import os


def device_reasons(device_type: str) -> list[str]:
    """Why a Triton kernel cannot run on this kind of device; on a CPU only Triton's interpreter (tests) can."""
    if device_type == "cuda" or (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return []
    return [f"its Triton kernel needs a CUDA device, not {device_type!r} (TRITON_INTERPRET=1 interprets it on a CPU)"]
