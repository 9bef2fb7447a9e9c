"""Low-rank adapters of routed experts: ``y = x W_e^T + s (x A_e^T) B_e^T`` with e the expert of a row.

Each expert has a pair (A, B) of its own. The products are those of the experts' backend
(`ops.grouped_mlp`), so shapes do not depend on the routing, and experts without rows get gradients of
zero. There is no dropout: Hugging Face's format has none for experts. [Note: matrices of
one weight] in `layers.lora` describes weights that hold several matrices.

Letters: R rows sorted by expert, E experts of this rank, I input width, O output width, P adapted
matrices of a weight, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.layers.build import Build
from megatron_packed.layers.lora import LoraScale
from megatron_packed.ops.quack_tiles import ALIGNMENT


class ExpertLora(nn.Module):
    """Adapters of a weight ``(E, O, I)`` of experts, one for each expert.

    Args:
        matrix_O: as in `layers.lora.Lora`; it is the same for all experts.
        matrices: P.
        weight_shape: ``(E, O, I)`` on this rank.
        shared: rank and scale; experts have no dropout.
        build: arguments that all layers share.
    """

    _own_OP1: Tensor | None

    def __init__(
        self,
        matrix_O: Tensor,
        matrices: int,
        weight_shape: tuple[int, ...],
        shared: LoraScale,
        build: Build,
    ) -> None:
        super().__init__()
        experts, outputs, inputs = weight_shape
        self.scale = shared.scale
        self.A = build.new_parameter(experts, matrices * shared.rank, inputs)
        self.B = build.new_parameter(experts, outputs, shared.rank)
        own_OP = matrix_O[:, None] == torch.arange(matrices)
        spreads = matrices > 1 or not bool(own_OP.all())
        own_OP1 = own_OP.unsqueeze(-1).to(build.device, build.dtype) if spreads else None
        self.register_buffer("_own_OP1", own_OP1, persistent=False)
        self._padding = -matrices * shared.rank % ALIGNMENT

    def forward(
        self,
        backend: ModuleType,
        which: str,
        x_RI: Tensor,
        weight_EOI: Tensor,
        offsets_E: Tensor,
    ) -> Tensor:
        """Return the product of the rows with the weight, with the updates, ``(R, O)``.

        Args:
            backend: backend of `ops.grouped_mlp`.
            which: step of the backend, ``fc1`` or ``fc2``; it decides about rows after the last offset.
            x_RI: rows sorted by expert.
            weight_EOI: frozen weight.
            offsets_E: end of the rows of each expert.
        """
        A_EPI, B_EOP = self._padded_A(), self._padded_B()
        if hasattr(backend, "PRODUCTS"):
            from megatron_packed.ops.grouped_mlp.adapted_linear import adapted_linear

            return adapted_linear(
                backend.PRODUCTS, which, x_RI, weight_EOI, A_EPI, B_EOP, self.scale, offsets_E
            )
        product = getattr(backend, which)
        low_RP = backend.fc1(x_RI, A_EPI, offsets_E).mul_(self.scale)
        y_RO: Tensor = product(x_RI, weight_EOI, offsets_E)
        return y_RO.add_(product(low_RP, B_EOP, offsets_E))

    def spread(self, B_EOr: Tensor) -> Tensor:
        """Return B as ``(E, O, P r)``, with zeros in the columns of other matrices."""
        if self._own_OP1 is None:
            return B_EOr
        return (B_EOr.unsqueeze(2) * self._own_OP1.to(B_EOr.dtype)).flatten(2)

    def update(self, dtype: torch.dtype) -> Tensor:
        """Return ``s B_e A_e`` of all experts, ``(E, O, I)``, for a merge with the weight."""
        return self.scale * (self.spread(self.B.to(dtype)) @ self.A.to(dtype))

    # The kernels need rows that start at multiples of 16 bytes. Columns of zeros change no sum.
    def _padded_A(self) -> Tensor:
        return F.pad(self.A, (0, 0, 0, self._padding)) if self._padding else self.A

    def _padded_B(self) -> Tensor:
        spread_EOP = self.spread(self.B)
        return F.pad(spread_EOP, (0, self._padding)) if self._padding else spread_EOP


def step_of(
    backend: ModuleType, which: str, lora: ExpertLora | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return ``fc1`` or ``fc2`` of a backend, with the updates of adapters if there are any."""
    if lora is not None:
        return partial(lora, backend, which)
    step: Callable[[Tensor, Tensor, Tensor], Tensor] = getattr(backend, which)
    return step
