"""Configurations of runs with TransformerEngine's layers."""

from __future__ import annotations

from typing import Any

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from support.gpu_layouts import STEPS
from support.gpu_layouts import T as SLOTS

TRANSFORMER_ENGINE, LOCAL = "transformer_engine", "local"
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 64,
    "ffn_hidden_size": 512,
    "squared_relu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "mamba_state_dim": 64,
    "mamba_num_groups": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
TOKENS = 1024


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig(**{"hybrid_layer_pattern": "M*-", **SIZES, **changes})


def run_config(
    impl: str, parallel: dict[str, Any], *, deterministic: bool = False, graphs: bool = False
) -> RunConfig:
    return RunConfig(
        model=config_of(),
        data=DataConfig(train_data_path=("none.jsonl",)),
        packing=PackingConfig(seq_length=SLOTS, global_batch_size=2),
        optim=OptimizerConfig(lr=1e-4),
        parallel=ParallelConfig(**parallel),
        training=TrainingConfig(
            train_iters=2 * STEPS,
            bf16=True,
            device="cuda",
            transformer_impl=impl,
            deterministic_mode=deterministic,
        ),
        cuda_graph=CudaGraphConfig(cuda_graph_impl="local", cuda_graph_warmup_steps=1)
        if graphs
        else CudaGraphConfig(),
    )
