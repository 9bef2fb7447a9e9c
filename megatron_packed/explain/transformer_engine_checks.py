"""Checks that TransformerEngine is usable for ``--transformer-impl`` and ``--cuda-graph-impl``.

The checks run before ranks wait for each other.
"""

from __future__ import annotations

import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.cuda_graphs.transformer_engine import maker
from megatron_packed.layers.transformer_impl import implementation
from megatron_packed.models.run_model import dtype_of


def check_implementation(config: RunConfig, device: torch.device) -> None:
    """Check TransformerEngine's linear layers, norms and capture of layers, if the options use them.

    Its attention is checked together with the other kernels (`kernel_reasons.py`).

    Raises:
        ValueError: a requested part cannot be used; the message has the reason and the cure.
    """
    implementation(config.training.transformer_impl, device, dtype_of(config))
    if config.cuda_graph.uses_transformer_engine and device.type == "cuda":
        maker()
