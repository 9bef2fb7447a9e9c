"""The scan as it is defined, one token after the other: the oracle of the other backends.

Slow on purpose (T steps), in float64, and it takes the documents' boundaries from ``cu_seqlens``
where the others use ``seq_idx``. Differentiable by autograd. It reads ``cu_seqlens`` on the host,
so it must be asked for by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import softplus

if TYPE_CHECKING:
    from megatron_packed.ops.ssd.api import SSDInputs


def not_supported_reasons(inputs: SSDInputs) -> list[str]:
    """Return no reason: it runs wherever PyTorch runs."""
    return []


def run(
    x_TNP: Tensor,
    dt_TN: Tensor,
    A_log_N: Tensor,
    B_TGS: Tensor,
    C_TGS: Tensor,
    D_N: Tensor,
    dt_bias_N: Tensor,
    seq_idx_1T: Tensor,
    cu_seqlens: Tensor,
    *,
    chunk_size: int,
) -> Tensor:
    """See ``api.ssd``; computed in float64, returned in x's dtype."""
    starts = set(cu_seqlens.tolist())
    heads_per_group = x_TNP.shape[1] // B_TGS.shape[1]
    x, A, D = x_TNP.double(), -A_log_N.double().exp(), D_N.double()
    B_TNS = B_TGS.double().repeat_interleave(heads_per_group, dim=1)
    C_TNS = C_TGS.double().repeat_interleave(heads_per_group, dim=1)
    dt = softplus(dt_TN.double() + dt_bias_N.double())
    state_NPS = x.new_zeros(x.shape[1], x.shape[2], B_TGS.shape[2])
    outputs: list[Tensor] = []
    for t in range(x.shape[0]):
        written_NPS = (dt[t, :, None] * x[t])[:, :, None] * B_TNS[t, :, None, :]
        kept_N = torch.exp(dt[t] * A) * (0.0 if t in starts else 1.0)
        state_NPS = kept_N[:, None, None] * state_NPS + written_NPS
        outputs.append((state_NPS * C_TNS[t, :, None, :]).sum(-1) + D[:, None] * x[t])
    return torch.stack(outputs).to(x_TNP.dtype)
