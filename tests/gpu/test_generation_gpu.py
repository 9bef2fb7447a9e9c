"""Generation on a GPU: precision of the states with the fast kernels, and training with graphs."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.transformer_impl import transformer_engine_refusal
from megatron_packed.models.decoder import Decoder
from megatron_packed.models.generate import generate
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.sampling import Sampling
from megatron_packed.packed.params import PackedSeqParams
from megatron_packed.training.build_job import build_job
from support.gpu_graph_steps import (
    DEVICE,
    captured,
    config_of,
    state_of,
    steps_of,
    with_graphs,
)
from support.gpu_layouts import LAYOUTS, MODEL, VOCAB, T, sizes_of
from support.process_pools import WorkerPools

pytestmark = pytest.mark.gpu
PROMPTS = [
    [(17 * n + 5 * at) % VOCAB for at in range(length)] for n, length in enumerate((1, 3, 300, 64))
]
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def transformer_engine_first() -> None:
    """Import TransformerEngine, if it is installed, before torch loads its own cuDNN.

    Attention of one token asks torch for its version of cuDNN, and a process can load only one
    version. Models with TransformerEngine's layers import it before they generate.
    """
    transformer_engine_refusal(DEVICE, torch.bfloat16)


def model_of(dtype: torch.dtype, backends: Backends, topk: int = 2) -> HybridModel:
    config = dataclasses.replace(
        MODEL,
        init_method_std=0.05,
        moe_router_topk=topk,
        moe_router_group_topk=min(MODEL.moe_router_num_groups, topk),
    )
    return HybridModel(
        config,
        vocab_size=VOCAB,
        max_positions=T,
        device=DEVICE,
        dtype=dtype,
        seed=7,
        backends=backends,
    ).eval()


def recomputed(model: HybridModel, texts: list[list[int]]) -> Tensor:
    """Return the logits after each text, from a training forward pass over the text alone."""
    logits = []
    for text in texts:
        packed = PackedSeqParams.from_lengths([len(text)], len(text), device=DEVICE)
        tokens = torch.tensor(text, dtype=torch.int32, device=DEVICE)
        with torch.no_grad():
            logits.append(model.logits(tokens, packed)[-1])
    return torch.stack(logits)


def each_step(model: HybridModel) -> Iterator[tuple[list[list[int]], Tensor]]:
    """Yield the texts so far and their logits, for the prompts and some further tokens."""
    decoder, texts = Decoder(model), [list(prompt) for prompt in PROMPTS]
    logits = decoder.prefill(texts)
    yield texts, logits
    for step in range(STEPS):
        tokens = [(31 * step + 7 * n) % VOCAB for n in range(len(texts))]
        texts = [[*text, token] for text, token in zip(texts, tokens)]
        yield texts, decoder.step(tokens)


def test_float32_logits_are_those_of_recomputing() -> None:
    """With reference kernels the logits agree to 1e-4, and greedy answers are equal."""
    model = model_of(torch.float32, Backends.reference())
    for texts, logits in each_step(model):
        torch.testing.assert_close(logits, recomputed(model, texts), rtol=0, atol=1e-4)
    answers = generate(model, PROMPTS, 8)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        text = list(prompt)
        for token in answer:
            assert int(recomputed(model, [text])[0].argmax()) == token
            text.append(token)


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_bfloat16_logits_err_like_those_of_recomputing(impl: str) -> None:
    """Against float32, logits of steps err at most twice as much as those of recomputing.

    Each token uses all experts, so rounding changes no choice of experts.
    """
    if impl == "transformer_engine" and find_spec("transformer_engine") is None:
        pytest.skip("TransformerEngine is not installed")
    model = model_of(torch.bfloat16, Backends(transformer_impl=impl), topk=8)
    exact = model_of(torch.float32, Backends.reference(), topk=8)
    exact.load_state_dict(model.state_dict())
    for texts, logits in each_step(model):
        expected = recomputed(exact, texts)
        error = (logits - expected).abs().max().item()
        usual = (recomputed(model, texts) - expected).abs().max().item()
        assert error <= 2 * usual + 1e-3 * expected.abs().max().item(), (error, usual)


def answers_on(groups: ParallelGroups, options: dict[str, Any]) -> list[list[int]]:
    """Return greedy and drawn answers inside a job of several ranks, after one step."""
    job = build_job(config_of(deterministic=False, **options), groups, VOCAB)
    job.step(steps_of(groups, 1, overflow=False)[0], 1e-3)
    job.buffers.wait_params()
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=3)
    return [
        *generate(job.model, PROMPTS, 6, group=groups.world_group),
        *generate(job.model, PROMPTS, 6, group=groups.world_group, sampling=sampling),
    ]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ["tp2 sp", "cp2 a2a", "ep2 zero overlap"])
def test_ranks_give_the_same_answers(name: str, nccl_pools: WorkerPools) -> None:
    options = LAYOUTS[name]
    first, second = nccl_pools.run(answers_on, 2, options, layout=sizes_of(options), timeout=300)
    assert first == second and [len(answer) for answer in first] == [6] * 2 * len(PROMPTS)


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_training_with_graphs_is_unmoved(impl: str, groups: ParallelGroups) -> None:
    """Generation between the steps changes no bit of the training state, and no replay."""
    found = []
    for generates in (False, True):
        torch.manual_seed(11)
        with captured(with_graphs(config_of(), impl), groups) as (job, graphs):
            for micro_batches in steps_of(groups, 1, overflow=False)[:3]:
                if generates:
                    sampling = Sampling(temperature=1.0, top_p=0.9, seed=3)
                    assert generate(job.model, PROMPTS, 6) == generate(job.model, PROMPTS, 6)
                    generate(job.model, PROMPTS, 6, sampling=sampling)
                job.step(micro_batches, 1e-3)
            counters = graphs.counters
            counts = (counters.replays, counters.fallbacks.total(), counters.captures)
            assert counters.replays > 0
            found.append((state_of(job), torch.cuda.get_rng_state(DEVICE), counts))
        del job, graphs
        gc.collect()
    (plain, rng, counts), (state, rng_after, counts_after) = found
    assert torch.equal(rng, rng_after) and counts == counts_after
    assert [name for name in plain if not torch.equal(plain[name], state[name])] == []
