"""Layers captured by TransformerEngine's make_graphed_callables: replays equal eager steps."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

# The libraries read these at import or first use; child processes inherit them. `graph_jobs` sets
# others.
os.environ |= {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_GRAPH_REGISTER": "0",
}

import pytest
import torch

from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.cuda_graphs.audit import AuditMismatchError
from megatron_packed.cuda_graphs.transformer_engine import maker
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_graphs import audit_graphs, build_graphs, capture_graphs
from megatron_packed.training.build_graphs import released as closed
from megatron_packed.training.build_job import build_job
from support.failed_captures import TROUBLES, fails_alone
from support.gpu_layouts import VOCAB
from support.gpu_layouts import T as SLOTS
from support.graph_jobs import CAPTURE_SIZES as CAPTURE_SIZES_OF_LAYERS
from support.graph_jobs import Job as GraphJob
from support.graph_jobs import different, pack, packings, released
from support.graph_slots import FAULTS, IN_FLIGHT, scheduled
from support.host_waits import watched
from support.process_pools import run_distributed
from support.te_runs import LOCAL, TOKENS, TRANSFORMER_ENGINE, run_config

STEPS = 10


def layers_of(impl: str) -> dict[str, Any]:
    return {"transformer_impl": impl, "deterministic": True}


CAPTURE_SIZES_OF = {
    LOCAL: CAPTURE_SIZES_OF_LAYERS,
    TRANSFORMER_ENGINE: CaptureSizes.from_capacities([8, 64], TOKENS),
}
"""Capture sizes by implementation. cuDNN's deterministic attention, which TransformerEngine's
layers use, does not support a document in every slot.
"""


@pytest.fixture(
    scope="module",
    params=[LOCAL, TRANSFORMER_ENGINE],
    ids=["local layers", "TransformerEngine's layers"],
)
def job(request: pytest.FixtureRequest) -> Any:
    made = GraphJob("M*-EG*", layers_of(request.param), CAPTURE_SIZES_OF[request.param]).capture(
        made_by=maker()
    )
    yield made
    made.runner.close()


def packs(job: Any, count: int, seed: int) -> list[MicroBatch]:
    """Return packs of all capture sizes of the job, in a changing order."""
    lists = [
        lengths for lengths in packings(count, seed) if len(lengths) <= job.capture_sizes.largest
    ]
    return [pack(lengths, number, job.capture_sizes) for number, lengths in enumerate(lists)]


@pytest.mark.gpu
def test_replay_equals_eager_bit_for_bit_over_twenty_packings(job: Any) -> None:
    """Outputs and gradients equal those of eager runs, and ``grad`` stays None.

    All static tensors are NaN before each replay.
    """
    micro_batches = packs(job, 20, seed=0)
    assert {batch.layout.capacity for batch in micro_batches} == set(job.capture_sizes.capacities)
    for number, micro_batch in enumerate(micro_batches):
        wanted = job.eager(micro_batch)
        assert number or different(job.eager(micro_batch), wanted) == [], (
            "eager itself differs run to run"
        )
        assert all(value.isfinite().all() for value in wanted.values())
        job.poison_statics()
        assert different(job.replay(micro_batch), wanted) == [], (
            number,
            micro_batch.packed.num_seqs,
        )
        assert all(parameter.grad is None for parameter in job.model.parameters())
    counters = job.runner.counters
    assert counters.captures == len(job.capture_sizes.sizes) * (1 + 2 * len(job.model.layers))


@pytest.mark.gpu
def test_replay_needs_nothing_of_what_lay_in_the_graphs_memory(job: Any) -> None:
    for number, micro_batch in enumerate(packs(job, 5, seed=1)):
        wanted = job.eager(micro_batch)
        job.poison_pool()
        assert different(job.replay(micro_batch), wanted) == [], number


@pytest.mark.gpu
def test_it_gives_what_local_graphs_give(job: Any) -> None:
    """Results of both kinds of graphs are equal; the test also prints the memory of both."""
    impl = job.model.backends.transformer_impl
    local = GraphJob("M*-EG*", layers_of(impl), job.capture_sizes).capture()
    for number, micro_batch in enumerate(packs(job, 5, seed=2)):
        assert different(job.replay(micro_batch), local.replay(micro_batch)) == [], number
    print(
        f"graphs hold {job.runner.counters.memory_mib:,.0f} MiB, local ones {local.runner.counters.memory_mib:,.0f}"
    )
    local.runner.close()


@pytest.mark.gpu
def test_evaluation_replays_and_leaves_gradients_alone(job: Any) -> None:
    micro_batch = pack([500, 24, 300], capture_sizes=job.capture_sizes)
    job.eager(micro_batch)
    before = job.buffers.grads.clone()
    job.model.eval()
    with torch.no_grad():
        job.runner.slot.vacate()
        wanted = job.model(micro_batch.to("cuda"))
        found = job.model(job.runner.place(micro_batch))
        assert all(torch.equal(mine, other) for mine, other in zip(found, wanted, strict=True))
    job.model.train()
    assert torch.equal(job.buffers.grads, before) and not job.runner.counters.module_fallbacks


@pytest.mark.gpu
def test_the_audit_passes_and_finds_a_fault(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = job.runner.audit(
        pack([400, 300, 200], capture_sizes=job.capture_sizes), deterministic=True
    )
    assert (
        found is not None
        and found.compared == len(job.model.layers)
        and found.largest_difference == 0
    )
    FAULTS["stale seq_idx"](job, monkeypatch)
    with pytest.raises(AuditMismatchError, match=r"layers\.\d"):
        job.runner.audit(
            pack([170, 250, 50, 120], capture_sizes=job.capture_sizes),
            deterministic=True,
        )


@pytest.mark.gpu
def test_a_replayed_micro_batch_waits_for_nothing(job: Any) -> None:
    batches = packs(job, 6, seed=2)

    def steps() -> None:
        for micro_batch in batches:
            job.buffers.zero_grad()
            job.drive(job.runner.place(micro_batch))

    steps()
    torch.cuda.synchronize()
    found = watched(steps)
    assert found["launches"] == len(batches) * (1 + 2 * len(job.model.layers))
    assert found["waits"] == [] and found["pageable"] == [] and found["to_host"] == 0, found


@pytest.mark.gpu
@pytest.mark.parametrize("text", IN_FLIGHT[:2])
def test_two_micro_batches_in_flight(text: str) -> None:
    two = GraphJob("M*-", layers_of(LOCAL)).capture(made_by=maker(), num_slots=2)
    wanted = scheduled(two, text, lambda micro_batch: micro_batch.to("cuda"))
    two.poison_statics()
    assert different(scheduled(two, text, two.runner.place), wanted) == []
    assert two.runner.counters.replays == 2 and not two.runner.counters.module_fallbacks
    two.runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_module_that_cannot_be_captured_fails_alone(trouble: Any) -> None:
    fails_alone(trouble, made_by=maker())


# Steps.


EXPERTS = {
    "hybrid_layer_pattern": "M*-EG",
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "moe_aux_loss_coeff": 1e-2,
}
WAYS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "tp2 sp": (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"tp_size": 2},
        {"hybrid_layer_pattern": "M*-G"},
    ),
    "cp2": ({"context_parallel_size": 2}, {"cp_size": 2}, {"hybrid_layer_pattern": "M*-G"}),
    "ep2": ({"expert_model_parallel_size": 2}, {"ep_size": 2}, EXPERTS),
}
"""Flags, sizes of the layout, and changes of the model."""


def replayed_and_eager(
    groups: ParallelGroups,
    impl: str,
    parallel: dict[str, Any],
    model: dict[str, Any],
    fails: bool = False,
) -> dict[str, Any]:
    """Run ten training steps of two micro-batches with graphs, and eagerly.

    Args:
        fails: True makes the capture of the second layer fail on the last rank only.
    """
    capture_sizes = CaptureSizes.from_capacities([8, 32], SLOTS)
    config = run_config(impl, {}, deterministic=True)
    config = replace(
        config, model=replace(config.model, **model), parallel=ParallelConfig(**parallel)
    )
    captured = replace(config, cuda_graph=CudaGraphConfig(cuda_graph_impl="transformer_engine"))
    eager, job = (build_job(one, groups, VOCAB) for one in (config, captured))
    if fails and groups.rank == groups.world_size - 1:
        _ask_under_capture(job.model.layers[1].mixer)
    graphs = build_graphs(captured, job, capture_sizes, groups, print)
    assert graphs is not None
    with closed(graphs):
        capture_graphs(graphs, job.step, 2, groups, first=True)
        job.step.graphs = graphs
        losses, equal = [], []
        lists = [
            [SLOTS],
            [60] * 32,
            [127, 128, 129, 1, 2, 3],
            [900, 24, 1100],
            [1],
            [3] * 20,
            [300] * 6,
        ]
        for number in range(STEPS):
            step = [
                pack(lists[(2 * number + at) % len(lists)], 2 * number + at, capture_sizes, SLOTS)
                for at in range(2)
            ]
            found, wanted = (one.step(step, 1e-4).clone() for one in (job, eager))
            losses.append((found[0].item(), wanted[0].item()))
            equal.append(torch.equal(found, wanted))
        audited = audit_graphs(graphs, job.step, step[0], deterministic=True, seed=1)
        pairs = zip(job.model.parameters(), eager.model.parameters(), strict=True)
        print(
            f"{impl}, {parallel}, rank {groups.rank}: graphs hold {graphs.counters.memory_mib:,.0f} MiB"
        )
        return {
            "losses": losses,
            "metrics": equal,
            "weights": all(torch.equal(mine, other) for mine, other in pairs),
            "replays": graphs.counters.replays,
            "fallbacks": {**graphs.counters.fallbacks, **graphs.counters.module_fallbacks},
            "audited": audited is not None,
        }


def _ask_under_capture(module: torch.nn.Module) -> None:
    forward = module.forward

    def asking(*args: Any) -> Any:
        result = forward(*args)
        if torch.cuda.is_current_stream_capturing():
            result.sum().item()
        return result

    module.forward = asking  # type: ignore[method-assign]


def judge(found: dict[str, Any], reason: str | None = None) -> None:
    losses, fallbacks = found.pop("losses"), found.pop("fallbacks")
    assert len(losses) == STEPS and all(mine == other for mine, other in losses), losses
    assert found == {
        "metrics": [True] * STEPS,
        "weights": True,
        "replays": 2 * STEPS,
        "audited": True,
    }
    if reason is None:
        assert fallbacks == {}
    else:
        assert sum(fallbacks.values()) == 2 * STEPS and all(
            one.startswith(reason) for one in fallbacks
        ), fallbacks


@pytest.mark.shows(
    "graphs: transformer_engine", "one process", of=lambda impl: (1, run_config(impl, {}))
)
@pytest.mark.gpu
@pytest.mark.parametrize("impl", [LOCAL, TRANSFORMER_ENGINE])
def test_ten_replayed_steps_are_the_eager_ones(impl: str) -> None:
    released()
    judge(replayed_and_eager(ParallelGroups.single(torch.device("cuda", 0)), impl, {}, EXPERTS))


@pytest.mark.shows(
    "graphs: transformer_engine",
    of=lambda impl, way: (2, run_config(impl, {}), ParallelConfig(**WAYS[way][0])),
)
@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("impl", [LOCAL, TRANSFORMER_ENGINE])
def test_ten_replayed_steps_of_two_gpus(impl: str, way: str) -> None:
    parallel, layout, model = WAYS[way]
    for found in run_distributed(
        replayed_and_eager, 2, impl, parallel, model, backend="nccl", layout=layout, timeout=300
    ):
        judge(found)


@pytest.mark.multi_gpu
def test_what_one_gpu_cannot_capture_none_does() -> None:
    """If one rank fails to capture a layer, both ranks run the layer eagerly, and no rank waits."""
    parallel, layout, model = WAYS["tp2 sp"]
    ranks = run_distributed(
        replayed_and_eager,
        2,
        LOCAL,
        parallel,
        model,
        True,
        backend="nccl",
        layout=layout,
        timeout=90,
    )
    for found, reason in zip(
        ranks, ("layers.1: rank 1 cannot capture it (", "layers.1: "), strict=True
    ):
        judge(found, reason)
