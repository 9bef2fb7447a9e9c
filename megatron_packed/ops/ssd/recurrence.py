"""Scan by its definition, token by token, as the reference in tests of the other backends.

The computation is float64, has T sequential steps and is slow by design. Autograd differentiates it.
It reads the document boundaries from ``cu_seqlens`` on the host, while the other backends read
``seq_idx``. Because of the host read it runs only if it is requested by name.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus


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
    """Run the op in float64 and return the result in x's dtype; see ``api.ssd``."""
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
