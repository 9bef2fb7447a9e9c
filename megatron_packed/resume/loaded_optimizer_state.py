"""Load of an optimizer state that a checkpoint stores in other data types than the run.

A checkpoint stores masters in float32 and moments in their data type. So masters that are pairs of
weight and remainder, and moments of another data type, are loaded into other tensors and then
converted. Float32 moments become bf16 by rounding to the nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.checkpoint.manifest import Manifest
from megatron_packed.checkpoint.tensor_shard import TensorShard
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.resume.held_state import held_optimizer_state

_CONVERTED = {torch.float32, torch.bfloat16}
"""Data types of moments, each of which is converted to the other."""


class LoadedOptimizerState:
    """Optimizer state of one load: first `wanted`, then the load, then `convert`."""

    def __init__(self, model: HybridModel, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._targets: dict[str, Tensor] = {}
        """Tensors that are converted after the load, by name of the state."""

    def wanted(self, manifest: Manifest) -> list[TensorShard]:
        """Return the shards to load from a checkpoint."""
        device = self._optimizer.buffers.device
        self._targets = {
            f"master/{name}": torch.empty(pair.numel(), dtype=torch.float32, device=device)
            for name, pair in self._optimizer.pairs().items()
            if f"optimizer/master/{name}" in manifest.tensors
        }
        for name, view in self._optimizer.state_shards().items():
            stored = manifest.tensors.get(f"optimizer/{name}")
            if stored is None or not name.startswith("exp_avg"):
                continue
            if {stored.dtype, view.dtype} == _CONVERTED:
                self._targets[name] = torch.empty_like(view, dtype=stored.dtype)
        return [
            held.shard for held in held_optimizer_state(self._model, self._optimizer, self._targets)
        ]

    @torch.no_grad()
    def convert(self) -> None:
        """Write the loaded values of other data types to the optimizer's state."""
        pairs, views = self._optimizer.pairs(), self._optimizer.state_shards()
        for name, values in self._targets.items():
            if name in views:
                views[name].copy_(values)
            else:
                pairs[name.removeprefix("master/")].set(values)
        self._targets.clear()
