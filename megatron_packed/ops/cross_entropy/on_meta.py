"""Cross-entropy on the meta device: the loop over chunks, whose kernels need no workspace."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_packed.memory_purpose import Purpose, counted_as
from megatron_packed.ops.cross_entropy.reference import run_chunked


def run(*tensors: Tensor, shard: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the loss and the losses of all tokens; see `api.linear_cross_entropy`."""
    with counted_as(Purpose.LOSS):
        return run_chunked(_in_place, *tensors, **options)


def _in_place(*arguments: object) -> None:
    """Do nothing: ``api.Step`` only writes into its arguments."""
