"""Parallel layouts of a tiny model, their configurations and their packs."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.logging import LoggingConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.resume.compared_runs import AskedRun
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.build_job import Job

SLOTS, VOCAB = 48, 211
MODEL = ModelConfig(
    hybrid_layer_pattern="M*-EG/E",
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    mamba_head_dim=8,
    mamba_num_heads=8,
    mamba_state_dim=16,
    mamba_num_groups=2,
    mamba_chunk_size=8,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
    add_bias_linear=False,
    normalization="RMSNorm",
    squared_relu=True,
    position_embedding_type="rope",
    num_experts=8,
    moe_ffn_hidden_size=24,
    moe_latent_size=4,
    moe_shared_expert_intermediate_size=16,
    moe_aux_loss_coeff=1e-2,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    make_vocab_size_divisible_by=16,
    init_method_std=0.1,
)
"""Model with tied embeddings. On 4 ranks, two ranks share a Mamba group and a key-value head, and
the vocabulary has more padding.
"""

step_values = partial(StepValues.from_list, depths=MODEL.mtp_depths)


class Way(NamedTuple):
    """Parallel layout and its options."""

    world_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    ep_size: int = 1
    expert_tp_size: int | None = None
    cp_size: int = 1
    comm_type: str = "a2a"
    dispatcher: str = "allgather"
    mamba: str = ParallelConfig.mamba_cp_comm_type
    """Communication of Mamba layers."""
    tp_overlap: bool = False
    """``--tp-comm-overlap``."""
    partition: str = "zigzag"
    """Rows of a rank in attention that exchanges keys and values."""
    linear: str = ParallelConfig.linear_cp_mode
    """Communication of gated delta nets."""

    @property
    def dp_size(self) -> int:
        return self.world_size // (self.tp_size * self.cp_size)

    @property
    def layout(self) -> dict[str, int]:
        sizes = {
            "tp_size": self.tp_size,
            "ep_size": self.ep_size,
            "expert_tp_size": self.expert_tp_size,
        }
        sizes["cp_size"] = self.cp_size
        return {name: size for name, size in sizes.items() if size is not None}

    def __str__(self) -> str:
        words = [
            f"tp{self.tp_size}",
            f"dp{self.dp_size}",
            "sp" * self.sequence_parallel,
            "zero" * self[3],
        ]
        words.insert(1, f"cp{self.cp_size}-{self.comm_type}" * (self.cp_size > 1))
        words.append("heads" * (self.mamba == "heads"))
        words.append("headwise" * (self.linear == "headwise"))
        words.append("overlap" * self.tp_overlap)
        words.append("contiguous" * (self.partition == "contiguous"))
        words += [
            f"ep{self.ep_size}" * (self.ep_size > 1),
            f"etp{self.expert_tp_size}" * bool(self.expert_tp_size),
        ]
        words.append("alltoall" * (self.dispatcher == "alltoall"))
        return "-".join(word for word in words if word)


def config_of(way: Way, *, bf16: bool = False, seed: int = 1, **model: Any) -> RunConfig:
    return RunConfig(
        model=dataclasses.replace(MODEL, **{"moe_token_dispatcher_type": way.dispatcher, **model}),
        data=DataConfig(train_data_path=("absent.jsonl",), sft=True),
        packing=PackingConfig(seq_length=SLOTS, global_batch_size=12),
        # An epsilon far above the rounding of gradients: updates follow the gradients even where they
        # are nearly zero.
        optim=OptimizerConfig(lr=1e-2, clip_grad=0.5, adam_eps=1e-3),
        parallel=ParallelConfig(
            tensor_model_parallel_size=way.tp_size,
            context_parallel_size=way.cp_size,
            cp_comm_type=way.comm_type,
            cp_partition_mode=way.partition,
            mamba_cp_comm_type=way.mamba,
            linear_cp_mode=way.linear,
            sequence_parallel=way.sequence_parallel,
            tp_comm_overlap=way.tp_overlap,
            use_distributed_optimizer=way.distributed_optimizer,
            expert_model_parallel_size=way.ep_size,
            expert_tensor_parallel_size=way.expert_tp_size,
        ),
        training=TrainingConfig(train_iters=5, device="cpu", bf16=bf16, seed=seed),
        logging=LoggingConfig(log_params_norm=True, log_num_zeros_in_grad=True),
    )


def packs_of(way: Way, step: int, count: int) -> list[MicroBatch]:
    """Return the packs of a step; if there are several, the last is empty."""
    draw = np.random.default_rng(step)
    packs = [
        [(draw.integers(0, VOCAB, n), None) for n in draw.permutation([19, 8, 3, 1])]
        for _ in range(count)
    ]
    if count > 2:
        packs[-1] = []
    scales = scales_of([[len(tokens) for tokens, _ in pack] for pack in packs])
    alignment = config_of(way).document_alignment
    return [MicroBatch.build(pack, SLOTS, scales=scales, alignment=alignment) for pack in packs]


def scales_of(packs: list[list[int]]) -> tuple[float, ...]:
    """Return the scales of a step, whose packs have documents of these lengths."""
    main, later = (sum(max(n - ahead, 0) for pack in packs for n in pack) for ahead in (1, 2))
    return 1 / main, 1 / sum(bool(pack) for pack in packs), 1 / later


def mine(groups: ParallelGroups, way: Way, step: int, count: int) -> list[MicroBatch]:
    return packs_of(way, step, count)[groups.dp.rank :: groups.dp.size]


def run_state(job: Job, groups: ParallelGroups, way: Way) -> RunState:
    run = AskedRun(config=config_of(way, bf16=True))
    return RunState(job.model, job.optimizer, groups, run)
