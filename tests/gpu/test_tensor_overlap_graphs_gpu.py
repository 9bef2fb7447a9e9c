"""Steps with ``--tp-comm-overlap`` in graphs of both kinds, on one GPU.

NCCL does not accept two ranks on one GPU. So a tensor-parallel group of one rank runs all collectives
and fused products here: it shows that they can be captured, and that replayed steps equal eager steps
without overlap. ``test_parallel_graphs_gpu.py`` has the same for two GPUs (``tp2 sp overlap``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.init_process_groups import options_under_products
from megatron_packed.distributed.sequence_parallel_products import (
    NO_OVERLAP,
    SequenceParallelProducts,
    TensorOverlap,
)
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.models import run_model as building
from megatron_packed.models import tensor_overlap
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_job import build_job
from support.gpu_graph_steps import (
    DEVICE,
    captured,
    config_of,
    different,
    state_of,
    steps_of,
    with_graphs,
)
from support.gpu_layouts import VOCAB

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(
    hybrid_layer_pattern="M*-",
    hidden_size=256,
    num_attention_heads=4,
    ffn_hidden_size=512,
    squared_relu=True,
    normalization="RMSNorm",
    add_bias_linear=False,
    mamba_num_heads=8,
    mamba_head_dim=64,
    mamba_state_dim=64,
    mamba_num_groups=2,
)
GROUPS = ParallelGroups.single(DEVICE)
STEPS = 3
BULK = TensorOverlap(bulk_dgrad=True, bulk_wgrad=True)
DEFAULT = dataclasses.replace(BULK, all_gather=True, reduce_scatter=True)
EVERYTHING = dataclasses.replace(DEFAULT, reduce_scatter_dgrad=True)
CASES = {"in bulk": BULK, "Megatron's default": DEFAULT, "everything": EVERYTHING}


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """Yield a group of NCCL with this rank only, made as a run makes its tensor-parallel group."""
    configure_determinism()
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    made, _ = dist.new_subgroups_by_enumeration(
        [[0]], backend="nccl", group_desc="tp", pg_options=options_under_products("nccl")
    )
    yield made
    dist.destroy_process_group()


@contextmanager
def of_one_rank(group: dist.ProcessGroup, overlap: TensorOverlap) -> Iterator[None]:
    """Let a model of one process run the collectives of sequence parallelism."""
    products = SequenceParallelProducts(group, overlap)
    tp = TensorParallel(group=group, sequence_parallel=True, products=products)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(TensorParallel, "from_groups", lambda *_, **__: tp))
        for module in (building, tensor_overlap):
            stack.enter_context(mock.patch.object(module, "overlap_of", lambda _: overlap))
        yield


@pytest.fixture(scope="module")
def wanted(group: dist.ProcessGroup) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the metrics of eager steps without overlap, and the state after them."""
    with of_one_rank(group, NO_OVERLAP):
        job = build_job(config_of(MODEL), GROUPS, VOCAB)
    return [job.step(packs, 1e-3).clone() for packs in steps()], state_of(job)


def steps() -> list[list[MicroBatch]]:
    return steps_of(GROUPS, 1, overflow=False)[:STEPS]


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
@pytest.mark.parametrize("overlap", CASES.values(), ids=list(CASES))
def test_replayed_steps_are_the_eager_ones_without_overlap(
    impl: str,
    overlap: TensorOverlap,
    group: dist.ProcessGroup,
    wanted: tuple[list[Tensor], dict[str, Tensor]],
) -> None:
    config = with_graphs(config_of(MODEL), impl)
    with of_one_rank(group, overlap):
        job = build_job(config, GROUPS, VOCAB)
        tensor_overlap.connect_overlap(job.model, config, GROUPS)  # a run of one process does not
    products = job.model.tp.products
    assert products is not None and products.memory is not None, products.reason
    with captured(config, GROUPS, job) as (_, graphs):
        metrics = [job.step(packs, 1e-3).clone() for packs in steps()]
        torch.cuda.synchronize()
        job.step.graphs = None
        counters = graphs.counters
    assert counters.replays > 0 and counters.fallbacks.total() == 0
    assert counters.module_fallbacks.total() == 0 and not products.unfused
    assert all(torch.equal(a, b) for a, b in zip(metrics, wanted[0], strict=True))
    assert not different(state_of(job), wanted[1])
    job.close()
