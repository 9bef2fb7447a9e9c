"""Choice of the tiles of recurrent kernels before a run: Triton tunes a kernel at its first call."""

from __future__ import annotations

import torch

from megatron_packed.config.layer_pattern import GATED_DELTA_NET, MAMBA
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.ops.gated_delta_rule import api as gated_delta_rule
from megatron_packed.ops.gated_delta_rule.tables import CHUNK
from megatron_packed.ops.ssd import api as ssd

CHUNKS_TO_TUNE = 64
"""Number of chunks that, with all heads of the model, fill a GPU like a pack in training."""


def tune_recurrences(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    backends: Backends,
    tp: TensorParallel,
    cp: ContextParallel,
) -> None:
    """Tune the kernels of the scan and of the gated delta rule that the model uses.

    The heads of a kernel's call are those of a rank, or of a part in which the rank exchanges them.

    Args:
        config: the model of the run, with the sizes of all ranks together.
    """
    if MAMBA in config.layer_types:
        heads, groups = config.mamba_num_heads // tp.size, config.mamba_num_groups // tp.size
        parts = cp.parts(heads, max(groups, 1))
        calls = tp.size * (1 if cp.passes_states else cp.size * parts)
        _tune_the_scan(config, device, dtype, backends, calls)
    if GATED_DELTA_NET in config.layer_types:
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        parts = cp.parts(keys // tp.size, values // tp.size)
        _tune_the_delta_rule(config, device, dtype, backends, tp.size * cp.size * parts)


def _tune_the_scan(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, backends: Backends, calls: int
) -> None:
    """Choose the tiles of the scan's kernels for sizes as in training.

    Tiles are chosen once for packs of any size, so the small packs of this check must not decide.
    """
    heads, groups = config.mamba_num_heads // calls, max(config.mamba_num_groups // calls, 1)
    inputs = ssd.SSDInputs(
        tokens=CHUNKS_TO_TUNE * config.mamba_chunk_size,
        heads=heads,
        head_dim=config.mamba_head_dim,
        groups=groups,
        state_dim=config.mamba_state_dim,
        chunk_size=config.mamba_chunk_size,
        row_stride=max(heads * config.mamba_head_dim, groups * config.mamba_state_dim),
        dtype=dtype,
        device_type=device.type,
    )
    ssd.tune(inputs, device, backend=backends.ssd)


def _tune_the_delta_rule(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, backends: Backends, calls: int
) -> None:
    """Choose the tiles of the kernels of gated delta nets for sizes as in training."""
    inputs = gated_delta_rule.GatedDeltaRuleInputs(
        tokens=CHUNKS_TO_TUNE * CHUNK,
        key_heads=config.linear_num_key_heads // calls,
        value_heads=config.linear_num_value_heads // calls,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        allow_neg_eigval=config.linear_allow_neg_eigval,
        deterministic=backends.deterministic,
        dtype=dtype,
        device_type=device.type,
    )
    gated_delta_rule.tune(inputs, device, backend=backends.gated_delta_rule)
