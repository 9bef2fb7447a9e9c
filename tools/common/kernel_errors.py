"""Parts of gradients, and errors of kernels compared with those of plain PyTorch in bf16."""

from __future__ import annotations

import math

from torch import Tensor

from megatron_packed.distributed.tensor_parallel_shards import shard_of
from megatron_packed.layers.attention import Attention
from megatron_packed.models.hybrid_model import HybridModel

FACTOR = 2.5
"""Largest error of the kernels, as a multiple of the error of plain bf16."""
FLOOR, ROW_FLOOR = 0.02, 0.06
"""Errors that are always allowed: of a whole tensor and of its worst row."""
FEW = 8
"""Number of values of which plain bf16 may compute all exactly by chance."""
SMALL = 0.003
"""A gradient whose values are smaller than this share of the largest of its layer is measured by
that share: it may contain only rounding, like the gradient of a key's bias."""


def parts_of(model: HybridModel, name: str, gradient: Tensor) -> dict[str, Tensor]:
    """Return a gradient as rows, and those of a fused projection in its parts.

    The gradient of queries may be much smaller than that of values, so a fault would be hidden.
    """
    *path, module, kind = name.split(".")
    mixer = model.get_submodule(".".join(path))
    pieces = shard_of(model.get_parameter(name), 1).pieces
    if isinstance(mixer, Attention) and module == "qkv":
        core = mixer.core_attn
        names = ("q", "gate", "k", "v") if len(core.split_sizes) == 4 else ("q", "k", "v")
        grouped = gradient.view(core.num_groups, -1, *gradient.shape[1:])
        parts = [part.flatten(0, 1) for part in grouped.split(core.split_sizes, dim=1)]
    elif gradient.dim() < 3 and len(pieces) > 1:
        names = tuple(f"part {number}" for number in range(len(pieces)))
        dim = shard_of(model.get_parameter(name), 1).dim
        parts = gradient.split([piece.length for piece in pieces], dim=dim)
    else:
        names, parts = ("",), [gradient]
    rows = (part.flatten(1) if part.dim() > 1 else part[None] for part in parts)
    found = {f"{name} {part}".strip(): row for part, row in zip(names, rows)}
    if kind == "bias":
        # Sums of terms that cancel, because a common addition to all keys changes no output. The
        # rounding of a kernel is left over. Faults are seen in the weights of the same rows.
        for part in ("q", "k"):
            found.pop(f"{name} {part}", None)
    return found


def errors(found: Tensor, exact: Tensor, least: float) -> tuple[float, float]:
    """Return the relative errors of a whole tensor and of its worst row.

    Args:
        least: least mean square root of the values to which an error is relative.
    """
    root = max(float(exact.square().mean().sqrt()), least, 1e-30)
    difference = found - exact
    rows_R = exact.norm(dim=1).clamp(min=root * exact.shape[1] ** 0.5)
    whole = float(difference.norm()) / (root * exact.numel() ** 0.5)
    return whole, float((difference.norm(dim=1) / rows_R).max())


def compare(
    draws: list[tuple[dict[str, Tensor], dict[str, Tensor]]], kernels: dict[str, Tensor]
) -> list[tuple[float, str]]:
    """Return the errors of the kernels as a share of the allowed error, largest first.

    Args:
        draws: results in float32 and of plain bf16, first with the weights of ``kernels``, then with
            similar weights, for other errors of rounding. The largest error of plain bf16 counts.
    """
    exact = draws[0][0]
    layers: dict[str, list[str]] = {}
    for name in exact:
        layers.setdefault(".".join(name.split(".")[:2]), []).append(name)
    shares = []
    for names in layers.values():
        least = SMALL * max(float(exact[name].square().mean().sqrt()) for name in names)
        ordinary = {
            name: tuple(map(max, zip(*(errors(b[name], a[name], least) for a, b in draws))))
            for name in names
        }
        middle = sorted(whole for whole, _ in ordinary.values())[len(names) // 2]
        few = [name for name in names if exact[name].numel() <= FEW]
        for name in names:
            # Few values may be exact by chance in plain bf16, so similar tensors count too.
            similar = few if name in few else [name]
            typical = max(middle, *(ordinary[other][0] for other in similar))
            plain_errors = (max(other, typical) for other in ordinary[name])
            found = errors(kernels[name], exact[name], least)
            bounds = zip(("", ", worst row"), found, (FLOOR, ROW_FLOOR), plain_errors)
            for kind, error, floor, other in bounds:
                allowed = floor + FACTOR * other
                share = error / allowed
                text = f"{name}{kind}: error {error:.2g}, plain bf16 {other:.2g}, allowed {allowed:.2g}"
                shares.append((share if math.isfinite(share) else math.inf, text))
    return sorted(shares, reverse=True)
