"""Layouts of a small model on GPUs, and the micro-batches of its ranks."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.packed.micro_batch import MicroBatch

T, VOCAB = 2048, 512
SCALES = (1e-3, 0.5, 1e-3, 1e-3)


def host_batches(count: int) -> list[list[MicroBatch]]:
    """Return steps of two pinned micro-batches, one of exact capacity and one padded.

    Every pack contains other documents.
    """
    random = np.random.default_rng(0)
    steps = []
    for step in range(count):
        batches = []
        for part in range(2):
            lengths = random.integers(1, 2 * T // (3 + step + part), size=2 + step + part)
            documents = [(random.integers(0, VOCAB, length), None) for length in lengths if length]
            while sum(len(tokens) for tokens, _ in documents) > T:
                documents.pop()
            batches.append(
                MicroBatch.build(documents, T, (None, 32)[part], scales=SCALES).pin_memory()
            )
        steps.append(batches)
    return steps


LAYERS: dict[str, Any] = {
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 64,
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "mamba_state_dim": 64,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": None,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "squared_relu": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": False,
}
"""Options of models that one micro-batch compares on one and two GPUs."""
MODEL = ModelConfig(
    hybrid_layer_pattern="M*-EG",
    hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=64,
    ffn_hidden_size=512,
    squared_relu=True,
    normalization="RMSNorm",
    add_bias_linear=False,
    position_embedding_type="rope",
    mamba_num_heads=8,
    mamba_head_dim=64,
    mamba_state_dim=64,
    mamba_num_groups=2,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    num_experts=8,
    moe_router_topk=2,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_ffn_hidden_size=256,
    moe_latent_size=128,
    moe_shared_expert_intermediate_size=256,
    moe_shared_expert_gate=True,
    moe_aux_loss_coeff=1e-2,
    moe_router_enable_expert_bias=True,
    moe_router_score_function="sigmoid",
    moe_token_dispatcher_type="allgather",
)
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 200_000}
ZIGZAG = {"cp_partition_mode": "zigzag"}
CP2_HEADS = {
    "context_parallel_size": 2,
    "mamba_cp_comm_type": "heads",
    "linear_cp_mode": "headwise",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero": {"use_distributed_optimizer": True},
    "dp2 overlap": {"overlap_grad_reduce": True, "ddp_bucket_size": 200_000},
    "dp2 zero overlap": {"use_distributed_optimizer": True, **OVERLAP},
    "ep2 zero overlap": {
        "expert_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        **OVERLAP,
    },
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp2 sp overlap": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "tp_comm_overlap": True,
    },
    "tp2 sp etp1": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
    },
    "cp2 a2a": {**CP2_HEADS, "cp_comm_type": "a2a"},
    "cp2 all_gather": {**CP2_HEADS, **ZIGZAG, "cp_comm_type": "all_gather"},
    "cp2 p2p": {**CP2_HEADS, **ZIGZAG, "cp_comm_type": "p2p"},
    "cp2 contiguous": {
        **CP2_HEADS,
        "cp_comm_type": "all_gather",
        "cp_partition_mode": "contiguous",
    },
    "cp2 p2p contiguous state": {
        "context_parallel_size": 2,
        "cp_comm_type": "p2p",
        "cp_partition_mode": "contiguous",
        "mamba_cp_comm_type": "state",
    },
    "cp2 state": {"context_parallel_size": 2, "mamba_cp_comm_type": "state"},
    "cp2 chunkwise": {**CP2_HEADS, "linear_cp_mode": "chunkwise"},
    "cp2 p2p state": {
        **ZIGZAG,
        "context_parallel_size": 2,
        "cp_comm_type": "p2p",
        "mamba_cp_comm_type": "state",
    },
    "ep2": {"expert_model_parallel_size": 2},
    "ep2 zero": {"expert_model_parallel_size": 2, "use_distributed_optimizer": True},
}
GLOBAL_LOADS = ("dp2 zero", "ep2 zero overlap", "tp2 sp ep2")
"""Layouts with ``global_aux_loss``, whose passes have a sum over ranks with other packs."""
DEPTHS = ("tp2 sp", "cp2 a2a", "cp2 p2p", "ep2 zero", "dp2 zero overlap", "tp2 sp ep2")
"""Layouts with two depths of multi-token prediction that share their layers."""
_TP2_SP = LAYOUTS["tp2 sp"]
LAYOUTS_OF_FOUR: dict[str, dict[str, Any]] = {
    "tp2 sp cp2": _TP2_SP | LAYOUTS["cp2 a2a"],
    "tp2 sp ep2": _TP2_SP | LAYOUTS["ep2"],
    "tp4 sp etp2": {
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 2,
    },
    "cp2 dp2 zero overlap": LAYOUTS["cp2 a2a"] | LAYOUTS["dp2 zero overlap"],
}
EVERY_LAYOUT = [(name, 2) for name in LAYOUTS] + [
    pytest.param(name, 4, marks=pytest.mark.multi_gpu(4)) for name in LAYOUTS_OF_FOUR
]
"""Names of layouts, each with its number of processes."""
STEPS = 6


def model_of(name: str) -> ModelConfig:
    """Return the model of a layout."""
    balancing = "global_aux_loss" if name in GLOBAL_LOADS else "aux_loss"
    model = dataclasses.replace(MODEL, moe_router_load_balancing_type=balancing)
    return with_depths(model) if name in DEPTHS else model


def sizes_of(options: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of the process groups of a layout's options."""
    sizes = ParallelConfig(**options).layout_sizes.items()
    return {axis: size for axis, size in sizes if size is not None}


def with_depths(model: ModelConfig) -> ModelConfig:
    """Return the model with two depths of multi-token prediction that share their layers."""
    return dataclasses.replace(
        model,
        hybrid_layer_pattern=f"{model.main_layers}/*E/*E",
        mtp_num_layers=None,
        mtp_use_repeated_layer=True,
    )


def batches(groups: ParallelGroups, alignment: int) -> list[list[MicroBatch]]:
    """Return steps of two pinned micro-batches, with documents padded to ``alignment``."""
    if alignment == 1:
        return host_batches(STEPS)
    random = np.random.default_rng(groups.dp.rank)
    return [
        [
            MicroBatch.build(
                [
                    (random.integers(0, VOCAB, length), None)
                    for length in random.integers(1, T // 8, size=3 + step)
                ],
                T,
                16,
                SCALES,
                alignment=alignment,
            ).pin_memory()
            for _ in range(2)
        ]
        for step in range(STEPS)
    ]
