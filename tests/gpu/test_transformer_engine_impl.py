"""Layers by TransformerEngine and local layers agree: gradients, steps, checkpoints and graphs.

The tests use one and two GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_packed.checkpoint.load import load_checkpoint
from megatron_packed.checkpoint.save import save_checkpoint
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.transformer_impl import implementation
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.isolation import check_isolation
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.resume.run_and_random_state import held_state
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import Job, build_job
from support.gpu_layouts import STEPS, VOCAB, batches
from support.gpu_layouts import T as SLOTS
from support.graph_jobs import Job as GraphJob
from support.graph_jobs import different, pack
from support.host_waits import waiting
from support.process_pools import run_distributed
from support.te_runs import LOCAL, TOKENS, TRANSFORMER_ENGINE, config_of, run_config

CASES: dict[str, dict[str, Any]] = {
    "rms norm, squared relu": {},
    "layer norm, biases, gelu": {
        "normalization": "LayerNorm",
        "squared_relu": False,
        "add_bias_linear": True,
    },
    "swiglu, one group for all": {
        "squared_relu": False,
        "swiglu": True,
        "add_qkv_bias": True,
        "num_query_groups": 1,
        "mamba_num_groups": 1,
    },
    "gate, norms of queries and keys, weights minus one": {
        "attention_output_gate": True,
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
    },
    "gated delta net": {"hybrid_layer_pattern": "G*-"},
    "shared expert": {
        "hybrid_layer_pattern": "M*-E",
        "num_experts": 4,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 256,
        "moe_shared_expert_intermediate_size": 256,
    },
    "latent experts, multi-token prediction": {
        "hybrid_layer_pattern": "M*-E/*E",
        "num_experts": 4,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 256,
        "moe_latent_size": 128,
    },
}
"""Model options by case. With experts, every token uses all experts, so rounding cannot change the
routing.
"""
LENGTHS = [[1, 3, 130, 257, 2, 300, 64, 90], [700, 200, 100]]
FACTOR, FLOOR = 2.0, 5e-3
"""Largest error of TransformerEngine against float32: `FACTOR` times the error of local bf16, or
`FLOOR` times the norm of a tensor.
"""
LOSS_BOUND = 2e-3


def make_model(
    config: ModelConfig,
    groups: ParallelGroups | None,
    sequence_parallel: bool,
    backends: Any,
    dtype: torch.dtype,
) -> HybridModel:
    return HybridModel(
        config,
        vocab_size=VOCAB,
        max_positions=TOKENS,
        groups=groups,
        sequence_parallel=sequence_parallel,
        device="cuda",
        dtype=dtype,
        backends=backends,
    ).train()


def micro_batches() -> list[MicroBatch]:
    random = torch.Generator().manual_seed(0)
    packs = [
        [(torch.randint(0, VOCAB, (n,), generator=random).numpy(), None) for n in lengths]
        for lengths in LENGTHS
    ]
    return [
        MicroBatch.build(documents, TOKENS, scales=(1e-3, 0.5)).to("cuda") for documents in packs
    ]


def losses_and_gradients(model: HybridModel) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and gradients of two micro-batches, accumulated in flat buffers."""
    buffers = FlatBuffers(model)
    addresses = {
        name: parameter.main_grad.data_ptr() for name, parameter in buffers.parameters.items()
    }
    losses = []
    for micro_batch in micro_batches():
        output = model(micro_batch)
        output.loss.backward()
        losses.append(output.loss.item())
    model.shared_gradients().sum()
    buffers.check_addresses()
    for name, parameter in buffers.parameters.items():
        assert parameter.grad is None and parameter.main_grad.data_ptr() == addresses[name], name
    return losses, {
        name: parameter.main_grad.double() for name, parameter in buffers.parameters.items()
    }


def compare(
    groups: ParallelGroups | None, sequence_parallel: bool, changes: dict[str, Any]
) -> dict[str, Any]:
    """Return errors of local and TransformerEngine's gradients against float32 on equal weights."""
    config = config_of(**changes)
    local = make_model(config, groups, sequence_parallel, None, torch.bfloat16)
    engine = make_model(
        config, groups, sequence_parallel, {"transformer_impl": TRANSFORMER_ENGINE}, torch.bfloat16
    )
    exact = make_model(config, groups, sequence_parallel, Backends.reference(), torch.float32)
    parts = implementation(TRANSFORMER_ENGINE, "cuda", torch.bfloat16)
    assert sum(type(module) in parts for module in engine.modules()) >= 2 * config.num_layers + 1
    assert engine.backends.varlen_attention == TRANSFORMER_ENGINE
    assert list(engine.state_dict()) == list(local.state_dict())
    assert [held.shard.name for held in held_state(engine)] == [
        held.shard.name for held in held_state(local)
    ]
    pairs = zip(engine.parameters(), local.parameters(), exact.parameters(), strict=True)
    with torch.no_grad():
        for mine, other, wide in pairs:
            assert torch.equal(mine, other)
            wide.copy_(other)
    (wanted_losses, wanted), (local_losses, local_grads), (losses, grads) = (
        losses_and_gradients(model) for model in (exact, local, engine)
    )
    assert list(grads) == list(local_grads)

    def distance(found: Tensor, name: str) -> float:
        return ((found - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-30)).item()

    return {
        "losses": (losses, local_losses, wanted_losses),
        "gradients": {
            name: (distance(grads[name], name), distance(local_grads[name], name)) for name in grads
        },
    }


def judge(found: dict[str, Any]) -> None:
    for mine, local, wanted in zip(*found["losses"], strict=True):
        assert mine == pytest.approx(wanted, rel=LOSS_BOUND) and mine == pytest.approx(
            local, rel=LOSS_BOUND
        )
    bad = {
        name: both
        for name, both in found["gradients"].items()
        if not both[0] <= FACTOR * both[1] + FLOOR
    }
    assert bad == {}, "(TransformerEngine, local) from float32"


@pytest.mark.shows("TE layers", of=lambda name: (1, config_of(**CASES[name])))
@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_one_gpu(name: str) -> None:
    judge(compare(None, False, CASES[name]))


@pytest.mark.shows(
    "TE layers",
    of=lambda name, sequence_parallel: (
        2,
        {"tp_size": 2, "sequence_parallel": sequence_parallel},
        config_of(**CASES[name]),
    ),
)
@pytest.mark.multi_gpu
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_two_tensor_parallel_gpus(name: str, sequence_parallel: bool) -> None:
    arguments = (sequence_parallel, CASES[name])
    for found in run_distributed(
        compare, 2, *arguments, backend="nccl", layout={"tp_size": 2}, timeout=300
    ):
        judge(found)


# Training and checkpoints.


def make_job(groups: ParallelGroups, impl: str, **parallel: Any) -> Job:
    return build_job(run_config(impl, parallel), groups, VOCAB)


def train_both(groups: ParallelGroups, parallel: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        waiting(make_job(groups, impl, **parallel).step, batches(groups, 1))
        for impl in (LOCAL, TRANSFORMER_ENGINE)
    ]


def judge_training(local: dict[str, Any], engine: dict[str, Any]) -> None:
    """Compare losses and gradient norms of the same steps, and check that the host does not
    wait.
    """
    assert (
        engine["waits"] == engine["pageable"] == []
        and engine["to_host"] <= STEPS
        and engine["events"] > 1000
    )
    found, expected = (
        [StepValues.from_list(values) for values in one["values"]] for one in (engine, local)
    )
    for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert mine.loss == pytest.approx(other.loss, rel=1e-2), f"step {number}"
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=3e-2), f"step {number}"
    losses = [values.loss for values in found]
    assert sum(losses[STEPS - 1 :]) < sum(losses[: STEPS - 1]), "the same packs a second time"


@pytest.mark.shows("no host sync", "TE layers")
@pytest.mark.gpu
def test_steps_through_flat_buffers_wait_for_nothing() -> None:
    judge_training(*train_both(ParallelGroups.single(torch.device("cuda", 0)), {}))


@pytest.mark.shows("no host sync", "TE layers")
@pytest.mark.multi_gpu
def test_steps_of_two_tensor_parallel_gpus() -> None:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for found in run_distributed(
        train_both, 2, parallel, backend="nccl", layout={"tp_size": 2}, timeout=300
    ):
        judge_training(*found)


@pytest.mark.shows("checkpoint", "TE layers")
@pytest.mark.gpu
@pytest.mark.parametrize(
    "saved, loaded", [(TRANSFORMER_ENGINE, LOCAL), (LOCAL, TRANSFORMER_ENGINE)]
)
def test_a_checkpoint_does_not_know_whose_layers_made_it(
    tmp_path: Path, saved: str, loaded: str
) -> None:
    groups = ParallelGroups.single(torch.device("cuda", 0))
    one, two = make_job(groups, saved), make_job(groups, loaded)
    for packs in batches(groups, 1):
        one.step(packs, 1e-4)
    states = [
        {held.shard.name: held.shard for held in held_state(job.model, job.optimizer)}
        for job in (one, two)
    ]
    assert list(states[0]) == list(states[1])
    save_checkpoint(tmp_path, 1, list(states[0].values()), {})
    load_checkpoint(tmp_path, list(states[1].values()))
    for name, shard in states[0].items():
        assert torch.equal(shard.tensor, states[1][name].tensor), name
    micro_batch = micro_batches()[0]
    with torch.no_grad():
        losses = [job.model(micro_batch).loss.item() for job in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=LOSS_BOUND)


# Graphs and isolation.


@pytest.mark.gpu
def test_replay_equals_eager_bit_for_bit() -> None:
    """Captured layers run changing packs, and all static tensors are NaN before each pack."""
    capture_sizes = CaptureSizes.from_capacities([8, 64], TOKENS)
    job = GraphJob(
        "M*-G*-", {"transformer_impl": TRANSFORMER_ENGINE, "deterministic": True}, capture_sizes
    ).capture()
    packings = ([TOKENS], [16] * 64, [127, 128, 129, 1, 2, 3], [500, 24, 500], [3] * 50, [1])
    for seed, lengths in enumerate(packings):
        micro_batch = pack(lengths, seed, capture_sizes)
        wanted = job.eager(micro_batch)
        assert different(job.eager(micro_batch), wanted) == [], "eager itself differs run to run"
        job.poison_statics()
        assert different(job.replay(micro_batch), wanted) == [], lengths[:8]
    job.runner.close()


def replayed_and_eager(groups: ParallelGroups, parallel: dict[str, Any]) -> dict[str, Any]:
    """Run training steps with graphs over all layers and their collectives, and eagerly."""
    capture_sizes = CaptureSizes.from_capacities([8, 32], SLOTS)
    eager = build_job(run_config(TRANSFORMER_ENGINE, parallel, deterministic=True), groups, VOCAB)
    config = run_config(TRANSFORMER_ENGINE, parallel, deterministic=True, graphs=True)
    job = build_job(config, groups, VOCAB)
    graphs = build_graphs(config, job, capture_sizes, groups, print)
    assert graphs is not None
    capture_graphs(graphs, job.step, 2, groups)
    job.step.graphs = graphs
    packings = ([[SLOTS], [60] * 32], [[127, 128, 129, 1, 2, 3], [900, 24, 1100]], [[1], [3] * 20])
    equal = []
    with released(graphs):
        for number, together in enumerate(packings):
            step = [
                pack(lengths, 10 * number + at, capture_sizes, SLOTS)
                for at, lengths in enumerate(together)
            ]
            found, wanted = (one.step(step, 1e-4).clone() for one in (job, eager))
            equal.append(torch.equal(found, wanted))
        counters = graphs.counters
        pairs = zip(job.model.parameters(), eager.model.parameters(), strict=True)
        return {
            "metrics": equal,
            "weights": all(torch.equal(mine, other) for mine, other in pairs),
            "replays": counters.replays,
            "fallbacks": {**counters.fallbacks, **counters.module_fallbacks},
        }


REPLAYED = {"metrics": [True] * 3, "weights": True, "replays": 6, "fallbacks": {}}


@pytest.mark.shows("graphs: local", "TE layers")
@pytest.mark.gpu
def test_replayed_steps_are_the_eager_ones() -> None:
    assert replayed_and_eager(ParallelGroups.single(torch.device("cuda", 0)), {}) == REPLAYED


@pytest.mark.shows("graphs: local", "TE layers", "TP + SP")
@pytest.mark.multi_gpu
def test_replayed_steps_of_two_tensor_parallel_gpus() -> None:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    layout = {"tp_size": 2}
    for found in run_distributed(
        replayed_and_eager, 2, parallel, backend="nccl", layout=layout, timeout=300
    ):
        assert found == REPLAYED


@pytest.mark.shows("isolation", "TE layers", of=lambda changes: (1, config_of(**changes)))
@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes", [CASES["rms norm, squared relu"], CASES["layer norm, biases, gelu"]]
)
def test_documents_stay_apart(changes: dict[str, Any]) -> None:
    results = check_isolation(
        config_of(**changes),
        torch.device("cuda", 0),
        torch.bfloat16,
        {"transformer_impl": TRANSFORMER_ENGINE},
    )
    assert [str(result) for result in results if not result.passed] == []
