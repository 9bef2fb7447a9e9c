"""AdamW by torch's fused kernel, CPU and CUDA.

``torch._fused_adamw_`` is what ``torch.optim.AdamW(fused=True)`` calls. In torch 2.11 to 2.13 it

* reads ``lr`` from a float32 tensor on the device (on the CPU it reads the value on the host);
* returns without touching anything where ``found_inf`` is 1;
* divides gradients by ``grad_scale`` and writes the quotients back, when one is given;
* only reads ``state_steps``, which must already count this step. torch.optim adds 1 before the call
  and subtracts ``found_inf`` after it; our ``step`` arrives with both done, and one tensor serves
  all slices.

On CUDA (2.11, H200) its second moments with beta2 = 0.999 are up to 1.3e-5 off, relatively, and
with a beta2 whose distance from 1 is exact in float32 they are not: the mark of ``1 - beta2`` taken
in float32, as in ``multi_tensor``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_packed.optim.adamw import Control, Inputs, Slices
from megatron_packed.torch_private import fused_adamw_


def not_supported_reasons(inputs: Inputs) -> list[str]:
    if inputs.device_type not in ("cpu", "cuda"):
        return [f"torch._fused_adamw_ is checked on cpu and cuda, not on {inputs.device_type}."]
    return []


@torch.no_grad()
def run(slices: Sequence[Slices], control: Control) -> None:
    """Reads: [Note: predicated step]. One call per weight decay; clipped gradients are written
    back.
    """
    for group in slices:
        fused_adamw_(
            list(group.params),
            list(group.grads),
            list(group.exp_avgs),
            list(group.exp_avg_sqs),
            [],
            [control.step] * len(group.params),
            lr=control.lr,
            beta1=control.beta1,
            beta2=control.beta2,
            weight_decay=group.weight_decay,
            eps=control.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=control.grad_divisor,
            found_inf=control.skip,
        )
