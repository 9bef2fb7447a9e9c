"""Generation inside a training job of two ranks, in every kind of parallel layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.decoder import Decoder
from megatron_packed.models.generate import generate
from megatron_packed.models.run_model import build_model
from megatron_packed.models.sampling import Sampling
from megatron_packed.training.build_job import Job, job_of_model
from support.covering_layouts import NONE, VOCAB, Way, config_of, micro_batches
from support.process_pools import WorkerPools
from support.whole_state import Shards, everything, same_bits

PROMPTS = [[5, 9, 2], [7], list(range(40, 57))]
SAMPLING = Sampling(temperature=1.0, top_p=0.9, seed=5)
ALONE = Way(1, 1, NONE, 1, NONE, 1, "allgather", NONE, "copied", "after", 1)
LAYOUTS = [
    ALONE._replace(processes=2, ep=2, optimizer="shared", sums="beside"),
    ALONE._replace(processes=2, tp=2, tokens="shared", matrices="shared"),
    ALONE._replace(processes=2, tp=2, tokens="shared", matrices="whole"),
    ALONE._replace(processes=2, tp=2, tokens="whole", matrices="whole", dispatcher="alltoall"),
    ALONE._replace(processes=2, cp=2, comm="a2a"),
    ALONE._replace(processes=2, cp=2, comm="p2p", ep=2, dispatcher="alltoall"),
]


def job_in(groups: ParallelGroups, way: Way, rank: int | None = None) -> Job:
    """Return the job of a layout, with adapters of a rank."""
    config = config_of(way)
    changes = {"hybrid_layer_pattern": "MG*-E/*E/*E", "linear_num_key_heads": 4}
    changes |= {"linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    config = replace(config, model=replace(config.model, **changes, lora_rank=rank))
    model = build_model(config, VOCAB, "cpu", groups).train()
    with torch.no_grad():
        for layer in model.moe_layers:
            # Enlarge differences between router scores, so that rounding changes no expert choice.
            layer.mixer.router.weight.mul_(4)
        for name, sharded in model.sharded_parameters().items():
            if name.endswith("lora.B"):
                draw = torch.Generator().manual_seed(sum(map(ord, name)))
                whole = torch.randn(sharded.stored_shape, generator=draw) * 0.02
                sharded.parameter.copy_(sharded.shard.take(whole))
    return job_of_model(model, config, groups)


def answers_of(job: Job, groups: ParallelGroups) -> list[list[int]]:
    job.buffers.wait_params()
    options = {"ends": [3], "group": groups.world_group}
    return [
        *generate(job.model, PROMPTS, 4, **options),
        *generate(job.model, PROMPTS, 4, sampling=SAMPLING, **options),
    ]


def train(
    groups: ParallelGroups, way: Way, generates: bool
) -> tuple[Shards, Tensor, list[list[int]], Tensor]:
    """Take two steps, with generation before each of them or not.

    Returns:
        State after the steps, random state, answers and logits of the initial weights.
    """
    torch.manual_seed(11)
    job, answers, logits = job_in(groups, way), [], torch.zeros(0)
    for step in range(2):
        if generates:
            found = answers_of(job, groups)
            if step == 0:
                answers, decoder = found, Decoder(job.model)
                decoder.prefill(PROMPTS)
                logits = decoder.step([3, 4, 5])
        job.step(micro_batches(config_of(way), groups, step), 1.0)
    return everything(job), torch.get_rng_state(), answers, logits


def both(groups: ParallelGroups, way: Way) -> tuple[list[list[int]], Tensor]:
    """Train with and without generation, and compare all state of this rank bit for bit."""
    plain, rng, _, _ = train(groups, way, False)
    state, rng_after, answers, logits = train(groups, way, True)
    assert torch.equal(rng, rng_after)
    assert len(state) > 20 and [shard[:3] for shard in state] == [shard[:3] for shard in plain]
    assert all(same_bits(one[3], other[3]) for one, other in zip(state, plain))
    return answers, logits


def adapted(groups: ParallelGroups, way: Way) -> Tensor:
    """Return logits of a model with adapters."""
    decoder = Decoder(job_in(groups, way, rank=2).model)
    decoder.prefill(PROMPTS)
    return decoder.step([3, 4, 5])


@pytest.mark.parametrize("way", [LAYOUTS[0], LAYOUTS[1]], ids=str)
def test_adapters_take_part_in_every_layout(way: Way, pools: WorkerPools) -> None:
    layout = {"tp_size": way.tp, "ep_size": way.ep, "expert_tp_size": way.tp}
    logits = adapted(ParallelGroups.single(), ALONE)
    assert (logits - alone()[1]).abs().max() > 0.01
    for found in pools.run(adapted, 2, way, layout=layout):
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)


@cache
def alone() -> tuple[list[list[int]], Tensor]:
    return both(ParallelGroups.single(), ALONE)


@pytest.mark.parametrize("way", LAYOUTS, ids=str)
def test_answers_are_those_of_one_process_and_training_is_unmoved(
    way: Way, pools: WorkerPools
) -> None:
    """Answers and logits equal those of one process, and no bit of the training state changes."""
    layout = {"tp_size": way.tp, "cp_size": way.cp, "ep_size": way.ep}
    layout["expert_tp_size"] = way.tp if way.matrices == "shared" else 1
    answers, logits = alone()
    assert len(answers) == 6 and answers[:3] != answers[3:]
    for found, found_logits in pools.run(both, 2, way, layout=layout):
        assert found == answers
        torch.testing.assert_close(found_logits, logits, rtol=0, atol=1e-5)
