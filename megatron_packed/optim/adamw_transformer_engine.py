"""AdamW by TransformerEngine's multi-tensor kernel: the one its FusedAdam launches with
``capturable=True``.

The kernel is called without the FusedAdam class, for two reasons read off its source (2.20.2). The
class advances ``step`` by the overflow flag of the step *before*, so that a skipped step counts
until the next one; and it makes ``step`` by a copy from pageable memory, which waits for the host.
The kernel itself does all that is asked: learning rate and step from device tensors, nothing
written where ``noop_flag`` is 1, gradients multiplied by ``inv_scale``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformer_engine.pytorch.optimizers import multi_tensor_adam_capturable, multi_tensor_applier

from megatron_packed.optim.adamw import Control, Inputs, Slices
from megatron_packed.optim.multi_tensor import launch


def not_supported_reasons(inputs: Inputs) -> list[str]:
    return (
        []
        if inputs.device_type == "cuda"
        else [f"the kernel runs on cuda, not on {inputs.device_type}."]
    )


@torch.no_grad()
def run(slices: Sequence[Slices], control: Control) -> None:
    """Reads: [Note: predicated step]. One launch per weight decay; clipped gradients are written
    back.
    """
    launch(multi_tensor_applier, multi_tensor_adam_capturable, slices, control)
