"""No host synchronisation in steady steps on two and four GPUs, in every layout that promises it,
by both proofs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_no_host_sync import VOCAB, T, host_batches

from megatron_packed.config.parallel_layout import ParallelLayout
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.testing import run_distributed
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_job import build_job
from support.host_waits import waiting

MODEL = ModelConfig(
    hybrid_layer_pattern="M*-E",
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
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=256,
    moe_shared_expert_intermediate_size=256,
    moe_aux_loss_coeff=1e-2,
    moe_router_enable_expert_bias=True,
    moe_router_score_function="sigmoid",
    moe_token_dispatcher_type="allgather",
)
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 200_000}
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
    "cp2 a2a": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "cp2 all_gather": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "cp2 p2p": {"context_parallel_size": 2, "cp_comm_type": "p2p"},
    "ep2": {"expert_model_parallel_size": 2},
    "ep2 zero": {"expert_model_parallel_size": 2, "use_distributed_optimizer": True},
}
_TP2_SP = LAYOUTS["tp2 sp"]
LAYOUTS_OF_FOUR: dict[str, dict[str, Any]] = {
    "tp2 sp cp2": _TP2_SP | LAYOUTS["cp2 a2a"],
    "tp2 sp ep2": _TP2_SP | LAYOUTS["ep2"],
    "cp2 dp2 zero overlap": LAYOUTS["cp2 a2a"] | LAYOUTS["dp2 zero overlap"],
}
EVERY_LAYOUT = [(name, 2) for name in LAYOUTS] + [
    pytest.param(name, 4, marks=pytest.mark.multi_gpu(4)) for name in LAYOUTS_OF_FOUR
]
"""Names, and how many processes they have."""
STEPS = 6


def batches(groups: ParallelGroups, alignment: int) -> list[list[MicroBatch]]:
    """Steps of two pinned micro-batches: of one process's packs, or with every document at a
    multiple of 4.
    """
    if alignment == 1:
        return host_batches(STEPS)
    random = np.random.default_rng(groups.dp_rank)
    return [
        [
            MicroBatch.build(
                [
                    (random.integers(0, VOCAB, length), None)
                    for length in random.integers(1, T // 8, size=3 + step)
                ],
                T,
                16,
                (1e-3, 0.5),
                alignment=alignment,
            ).pin_memory()
            for _ in range(2)
        ]
        for step in range(STEPS)
    ]


def steady_steps(groups: ParallelGroups, options: dict[str, Any]) -> dict[str, Any]:
    """What the host waited for in some steps that come after as many others."""
    config = RunConfig(
        model=MODEL,
        data=DataConfig(train_data_path=("none.jsonl",)),
        packing=PackingConfig(seq_length=T, global_batch_size=4),
        optim=OptimizerConfig(lr=1e-4),
        parallel=ParallelConfig(**options),
        training=TrainingConfig(
            train_iters=STEPS,
            bf16=True,
            device="cuda",
            loss_spike_policy="skip",
            loss_spike_window=4,
        ),
    )
    job = build_job(config, groups, VOCAB)
    return waiting(job.step, batches(groups, config.parallel.document_alignment))


@pytest.mark.shows(
    "no host sync", of=lambda name, processes: (processes, MODEL, (LAYOUTS | LAYOUTS_OF_FOUR)[name])
)
@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("name, processes", EVERY_LAYOUT)
def test_steady_steps_wait_for_nothing(name: str, processes: int) -> None:
    options = (LAYOUTS | LAYOUTS_OF_FOUR)[name]
    sizes = {
        axis: size
        for axis, size in ParallelConfig(**options).layout_sizes.items()
        if size is not None
    }
    for found in run_distributed(
        steady_steps, processes, options, backend="nccl", layout=sizes, timeout=300
    ):
        assert found["finite"] and found["events"] > 1000 and found["nccl"] > 0
        assert found["waits"] == [] and found["pageable"] == [], found
        assert found["to_host"] <= STEPS


@pytest.mark.parametrize("layouts, processes", [(LAYOUTS, 2), (LAYOUTS_OF_FOUR, 4)])
def test_every_layout_is_one_of_as_many_processes(
    layouts: dict[str, dict[str, Any]], processes: int
) -> None:
    """Here, too, so that what needs several GPUs is not found wrong there."""
    for options in layouts.values():
        assert (
            ParallelLayout(
                world_size=processes, **ParallelConfig(**options).layout_sizes
            ).world_size
            == processes
        )
