"""Peak FLOP/s of GPUs, by which the share of a step in it (MFU) is computed."""

from __future__ import annotations

import re

import torch

PEAK_BF16_FLOPS = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989.5e12,
    "H200 NVL": 835.5e12,
    "H200": 989.5e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.5e12,
    "H800 PCIe": 756e12,
    "H800": 989.5e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}
"""Dense bf16 peak in FLOP/s from the vendor's datasheets, which is half of the figure with sparsity.

The first key that occurs in the device's name as whole words applies; so an RTX A1000 is no A100.
"""


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of the device in FLOP/s.

    Returns None on a CPU, an unknown GPU or a slice of a GPU; no MFU is shown then.
    """
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(device_name: str) -> float | None:
    """Return the dense bf16 peak for the name of a device, e.g. ``NVIDIA H100 80GB HBM3``."""
    # A MIG slice has a part of the device's peak, and the name does not tell which part.
    if " MIG " in device_name:
        return None
    return next(
        (peak for key, peak in PEAK_BF16_FLOPS.items() if re.search(rf"\b{key}\b", device_name)),
        None,
    )
