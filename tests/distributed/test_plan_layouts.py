"""Memory that the plan predicts without processes, compared with jobs in real processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_packed.config.parser.parse import parse
from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.estimate.run_estimate import estimates
from megatron_packed.training.build_job import build_job
from support.process_pools import WorkerPools

VOCAB = 61
FLAGS = """--hybrid-layer-pattern M*-E --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --mamba-head-dim 8
    --mamba-num-groups 2 --mamba-state-dim 8 --num-experts 4 --disable-bias-linear --bf16 --device cpu --seq-length 64
    --global-batch-size 4 --lr 1e-3 --train-iters 1 --ddp-bucket-size 1000"""
LOW_STATE = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
LAYOUTS = [{"tp_size": 2, "cp_size": 2}, {"tp_size": 2, "ep_size": 2, "expert_tp_size": 1}]
NAMES = {
    "tp_size": "tensor_model_parallel_size",
    "cp_size": "context_parallel_size",
    "ep_size": "expert_model_parallel_size",
    "expert_tp_size": "expert_tensor_parallel_size",
}


def built(groups: ParallelGroups, config: RunConfig) -> tuple[int, int, int]:
    """Return the bytes of this rank's parameters, gradients and optimizer state."""
    job = build_job(config, groups, VOCAB)
    parameters = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in job.buffers.params.values()
    }
    optimizer = job.optimizer
    masters = [master for _, master in optimizer._low_masters]
    moments = (optimizer.exp_avg, optimizer.exp_avg_sq)
    state = sum(t.nbytes for t in (*masters, optimizer.remainders, *moments))
    return sum(parameters.values()), job.buffers.storage.untyped_storage().nbytes(), state


@pytest.mark.parametrize("state", [{}, LOW_STATE], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_holds_what_the_plan_says(
    pools: WorkerPools, layout: dict[str, int], state: dict[str, Any]
) -> None:
    base = parse([*FLAGS.split(), "--data-path", __file__], 1)
    sizes = {"expert_tensor_parallel_size": layout["tp_size"]} | {
        NAMES[name]: size for name, size in layout.items()
    }
    config = replace(
        base,
        parallel=replace(base.parallel, use_distributed_optimizer=True, **sizes),
        optim=replace(base.optim, **state),
    )
    [one] = estimates(config, 4, VOCAB, 4).values()
    expected = (one.static.parameters, one.static.gradients, one.static.optimizer)
    assert pools.run(built, 4, config, layout=layout) == [expected] * 4
