"""Checks of this machine for what ``--transformer-impl`` and ``--cuda-graph-impl`` need of
TransformerEngine, before ranks wait for each other.
"""

from __future__ import annotations

import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.cuda_graphs.transformer_engine import maker
from megatron_packed.layers.transformer_impl import implementation
from megatron_packed.training.build_job import dtype_of


def check_implementation(config: RunConfig, device: torch.device) -> None:
    """Check linear layers and norms, and the capture of layers; attention is checked with the
    kernels (`kernels.py`).

    Raises:
        ValueError: one of them cannot serve; says why, and what can.
    """
    implementation(config.training.transformer_impl, device, dtype_of(config))
    if config.cuda_graph.uses_transformer_engine and device.type == "cuda":
        maker()
