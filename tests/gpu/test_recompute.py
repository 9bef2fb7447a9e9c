"""Recomputation on GPUs: equal bits with and without it, eager and replayed; no waits; less
memory.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from megatron_packed.config.sections.memory import RECOMPUTED_IN, MemoryConfig
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.build_job import build_job
from support.gpu_graph_steps import (
    GATHERED_LATER,
    config_of,
    different,
    state_of,
    steps_of,
    with_graphs,
)
from support.gpu_layouts import LAYOUTS, MODEL, VOCAB, sizes_of, with_depths
from support.gpu_memory_modes import (
    HIDDEN,
    NONE,
    PATTERN,
    TOKENS,
    compared,
    config_with,
    kept_and_peak,
    packs,
    replayed,
    run,
    without,
)
from support.host_waits import assert_no_wait, waiting
from support.process_pools import WorkerPools

pytestmark = pytest.mark.gpu
needs_transformer_engine = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
)


def full(method: str, number: int) -> MemoryConfig:
    return MemoryConfig(
        recompute_granularity="full", recompute_method=method, recompute_num_layers=number
    )


def selective(*modules: str) -> MemoryConfig:
    return MemoryConfig(recompute_granularity="selective", recompute_modules=modules)


MODES = {
    "layers": full("uniform", 1),
    "groups": full("uniform", 3),
    "two layers": full("block", 2),
    **{module: selective(module) for module in (*RECOMPUTED_IN, "layernorm")},
    "parts": selective(*RECOMPUTED_IN, "layernorm"),
    "small parts": selective("core_attn", "layernorm", "moe_act"),
}


@pytest.mark.shows("recompute", of=lambda: (1, MODEL))
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mode", MODES)
def test_steps_are_those_without(mode: str, dropout: float, groups: ParallelGroups) -> None:
    job = build_job(config_with(MODES[mode], dropout=dropout), groups, VOCAB)
    compared(job, run(job, packs(groups)), without(dropout, transformer_engine=False))
    assert not torch.equal(
        without(0.1, transformer_engine=False)[0][0], without(0.0, transformer_engine=False)[0][0]
    )


@pytest.mark.shows("recompute", of=lambda: (1, with_depths(MODEL)))
@pytest.mark.parametrize("mode", ["layers", "parts"])
def test_depths_that_share_their_layers(mode: str, groups: ParallelGroups) -> None:
    job = build_job(config_with(MODES[mode], depths=True), groups, VOCAB)
    expected = without(0.0, transformer_engine=False, depths=True)
    compared(job, run(job, packs(groups)), expected)


@pytest.mark.shows("recompute", "TE layers", of=lambda: (1, MODEL))
@needs_transformer_engine
@pytest.mark.parametrize("mode", ["groups", "parts", "small parts"])
def test_with_transformer_engines_layers(mode: str, groups: ParallelGroups) -> None:
    job = build_job(config_with(MODES[mode], transformer_engine=True), groups, VOCAB)
    compared(job, run(job, packs(groups)), without(0.0, transformer_engine=True))


@pytest.mark.shows(lambda impl: f"graphs: {impl}", "recompute", of=lambda: (1, MODEL))
@pytest.mark.parametrize(
    ("impl", "mode"),
    [("local", mode) for mode in MODES if mode != "groups"]
    + [("full_iteration", mode) for mode in ("layers", "groups", "parts", "small parts")]
    + [
        pytest.param("transformer_engine", mode, marks=needs_transformer_engine)
        for mode in ("layers", "two layers", "core_attn", "parts", "small parts")
    ],
)
def test_replayed_steps_are_those_without_and_wait_for_nothing(
    impl: str, mode: str, groups: ParallelGroups
) -> None:
    replayed(with_graphs(config_with(MODES[mode]), impl), groups)


@pytest.mark.shows("graphs: transformer_engine", "recompute", "TE layers", of=lambda: (1, MODEL))
@needs_transformer_engine
@pytest.mark.parametrize("mode", ["parts", "small parts"])
def test_replays_of_transformer_engines_layers(mode: str, groups: ParallelGroups) -> None:
    config = config_with(MODES[mode], transformer_engine=True)
    replayed(with_graphs(config, "transformer_engine"), groups, transformer_engine=True)


@pytest.mark.shows("no host sync", "recompute", of=lambda: (1, MODEL))
@pytest.mark.parametrize("mode", ["layers", "groups", "parts", "small parts"])
def test_eager_steps_wait_for_nothing_random_states_included(
    mode: str, groups: ParallelGroups
) -> None:
    job = build_job(config_with(MODES[mode], dropout=0.1, deterministic=False), groups, VOCAB)
    assert_no_wait(waiting(job.step, steps_of(groups, 1, overflow=False)[:6]))


# Memory.


def test_memory_falls_by_what_sizes_of_tensors_say(groups: ParallelGroups) -> None:
    modes = {"none": NONE, **MODES, "one group": full("uniform", len(PATTERN))}
    found = {name: kept_and_peak(memory, groups) for name, memory in modes.items()}
    for name, (kept, peak) in found.items():
        print(
            f"{name:12} kept between the passes {kept / 2**20:8,.1f} MiB, at the peak {peak / 2**20:8,.1f} MiB"
        )
    hidden = TOKENS * HIDDEN * torch.bfloat16.itemsize
    assert found["layers"][0] - found["one group"][0] == (len(PATTERN) - 1) * hidden
    assert found["groups"][0] - found["one group"][0] == (len(PATTERN) // 3 - 1) * hidden
    assert found["none"][0] - found["layernorm"][0] >= (len(PATTERN) - PATTERN.count("E")) * hidden
    for name in MODES:
        # Experts of one function (`quack_joined`) do not save their activation in any case. Then the
        # peaks differ by blocks of the allocator, each of which may be 1 MiB larger than its tensor.
        nothing = name == "moe_act"
        assert found[name][0] < found["none"][0] + nothing, name
        assert found[name][1] <= found["none"][1] + nothing * 4 * 2**20, name
    assert found["layers"][0] < found["none"][0] / 5
    assert found["layers"][1] < found["groups"][1] < found["none"][1]
    assert max(found["layers"][1], found["parts"][1]) < 0.75 * found["none"][1]


# Two GPUs.


def compare(groups: ParallelGroups, options: dict[str, Any]) -> dict[str, tuple[bool, list[str]]]:
    """Return for each mode whether metrics are equal, and the parts of the state that differ."""
    configure_determinism()
    alignment = config_of(**options).document_alignment
    expected: tuple[list[torch.Tensor], dict[str, torch.Tensor]] | None = None
    answers = {}
    for name, memory in {
        "none": NONE,
        **{mode: MODES[mode] for mode in ("groups", "two layers", "parts")},
    }.items():
        job = build_job(config_with(memory, dropout=0.1, **options), groups, VOCAB)
        found = run(job, packs(groups, alignment))
        expected = expected or (found, state_of(job))
        same = all(torch.equal(*pair) for pair in zip(found, expected[0], strict=True))
        answers[name] = (same, different(state_of(job), expected[1]))
    return answers


@pytest.mark.shows("recompute", of=lambda name: (2, config_of(**LAYOUTS[name])))
@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ["dp2 zero overlap", "tp2 sp", "cp2 a2a", "cp2 p2p", "ep2"])
def test_layouts_of_two_gpus(name: str, nccl_pools: WorkerPools) -> None:
    options = {key: value for key, value in LAYOUTS[name].items() if key not in GATHERED_LATER}
    for found in nccl_pools.run(compare, 2, options, layout=sizes_of(options), timeout=300):
        assert all(answer == (True, []) for answer in found.values()), found
