"""Layouts of a pairwise covering list, with their configurations and micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.packed.micro_batch import MicroBatch
from support import hybrid_cases as cases
from support.layouts import MODEL

SLOTS, ALIGNMENT, STEPS, VOCAB = 64, 8, 2, 211
LENGTHS = [1, 2, 3, 40, 8, 9, 5, 64, 17, 30, 33, 12, 1, 25, 50, 7, 16, 21, 3, 11] * 2
"""Lengths of documents: shorter than the convolution, cut at and between rank boundaries, and
spread over four ranks.
"""
BETA1 = 0.9


class Way(NamedTuple):
    """Row of the list: a layout and its options."""

    processes: int
    tp: int
    tokens: str
    """Tokens between the layers of tensor-parallel ranks: ``whole``, or ``shared`` with sequence
    parallelism.
    """
    cp: int
    comm: str
    ep: int
    dispatcher: str
    matrices: str
    """Matrices of an expert: ``whole``, or ``shared`` by the tensor-parallel ranks."""
    optimizer: str
    """Optimizer state: ``copied`` on all ranks, or ``shared`` (ZeRO-1)."""
    sums: str
    """Reduction of gradients: ``after`` the passes, or ``beside`` them (overlapped). The all-gather
    of a shared optimizer's weights is overlapped too.
    """
    accumulate: int
    """Number of micro-batches of a rank in one step."""

    @property
    def dp(self) -> int:
        return self.processes // (self.tp * self.cp)

    @property
    def packs(self) -> int:
        """Number of packs of a step, over all ranks."""
        return self.dp * self.accumulate

    @property
    def choices(self) -> dict[str, object]:
        """Values of which the list covers all pairs; `NONE` for an option without a choice."""
        return {**self._asdict(), "dp": self.dp}

    def __str__(self) -> str:
        return "-".join(
            f"{name}_{value}" for name, value in self._asdict().items() if value != NONE
        )


NONE = "none"


def config_of(way: Way) -> RunConfig:
    model = replace(
        MODEL,
        hybrid_layer_pattern="M*-EG/*E/*E",
        mtp_num_layers=None,
        mtp_use_repeated_layer=True,
        mtp_loss_scaling_factor=0.5,
        mamba_state_dim=8,
        moe_ffn_hidden_size=16,
        moe_latent_size=24,
        moe_shared_expert_gate=True,
        moe_token_dispatcher_type=way.dispatcher,
        # So the list has both, beside every value of the other options.
        moe_comm_overlap_parts=way.accumulate,
    )
    return RunConfig(
        model=model,
        data=DataConfig(train_data_path=("absent.jsonl",)),
        packing=PackingConfig(
            seq_length=SLOTS, global_batch_size=way.packs, pad_packed_seq_alignment=ALIGNMENT
        ),
        # An epsilon far above all gradients: the update is then proportional to the gradient, as in
        # SGD with momentum.
        optim=OptimizerConfig(
            lr=1.0, clip_grad=0.5, adam_beta1=BETA1, adam_eps=1.0, weight_decay=0.01
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=way.tp,
            sequence_parallel=way.tokens == "shared",
            context_parallel_size=way.cp,
            cp_comm_type="a2a" if way.comm == NONE else way.comm,
            # The list has both values of these options beside each communication.
            cp_partition_mode="contiguous" if way.sums == "beside" else "zigzag",
            mamba_cp_comm_type="state" if way.accumulate == 2 else "heads",
            linear_cp_mode="chunkwise" if way.optimizer == "shared" else "headwise",
            expert_model_parallel_size=way.ep,
            expert_tensor_parallel_size=way.tp if way.matrices == "shared" else 1,
            use_distributed_optimizer=way.optimizer == "shared",
            overlap_grad_reduce=way.sums == "beside",
            overlap_param_gather=way.sums == "beside" and way.optimizer == "shared",
            ddp_bucket_size=4000,
        ),
        training=TrainingConfig(train_iters=STEPS, device="cpu"),
    )


def micro_batches(config: RunConfig, groups: ParallelGroups, step: int) -> list[MicroBatch]:
    """Return this rank's micro-batches of a step, according to the plan."""
    documents = cases.make_documents(LENGTHS)
    plan = PackPlan(
        Pieces.cut(np.array(LENGTHS), SLOTS),
        np.array([np.count_nonzero(mask[1:]) for _, mask in documents]),
        packer=Packer.from_config(config.packing, config.document_alignment),
        packs_per_step=config.packs_per_step(),
        dp_size=groups.dp.size,
        depth_targets=[
            np.array([np.count_nonzero(mask[1 + depth :]) for _, mask in documents])
            for depth in range(1, config.model.mtp_depths + 1)
        ],
    ).step(step)
    return [
        MicroBatch.build(
            [documents[n] for n in pieces],
            SLOTS,
            scales=plan.scales,
            alignment=config.document_alignment,
        )
        for pieces in plan.packs[groups.dp.rank]
    ]
