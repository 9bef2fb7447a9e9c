"""Options that change what a graph holds: replayed steps equal eager ones, also in a second phase."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers import side_stream
from megatron_packed.training.build_graphs import audit_graphs
from megatron_packed.training.build_job import build_job
from support.captured_runs import assert_same_run
from support.gpu_graph_steps import config_of, state_of, steps_of
from support.gpu_layouts import MODEL, VOCAB, T
from support.gpu_memory_modes import PACKS, STEPS, captured, compared, packs, run, without
from support.phases import phase_options
from support.runs import REPOSITORY, command_line, in_folder, steps
from support.te_runs import SIZES

pytestmark = pytest.mark.gpu


def of_samples() -> RunConfig:
    """Return a configuration whose packs have two samples, each with its own auxiliary loss."""
    model = dataclasses.replace(MODEL, moe_router_load_balancing_type="seq_aux_loss")
    packing = PackingConfig(seq_length=T // 2, micro_batch_size=2, global_batch_size=2 * PACKS)
    return dataclasses.replace(config_of(model), packing=packing)


def of_random_routing() -> RunConfig:
    return config_of(dataclasses.replace(MODEL, moe_router_force_load_balancing=True))


def of_documents() -> RunConfig:
    """Return a configuration in which each document has its own auxiliary loss."""
    per_document = {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_per_document": True,
    }
    return config_of(dataclasses.replace(MODEL, **per_document))


def of_loads_of_steps() -> RunConfig:
    """Return a configuration whose auxiliary loss has the loads of earlier micro-batches."""
    model = dataclasses.replace(MODEL, moe_router_load_balancing_type="global_aux_loss")
    return config_of(model)


def of_shared_expert_overlap() -> RunConfig:
    """Return a configuration whose shared expert runs on a stream of its own."""
    return config_of(dataclasses.replace(MODEL, moe_shared_expert_overlap=True))


OPTIONS = {
    "shared expert": (of_shared_expert_overlap, {}),
    "samples": (of_samples, {}),
    "documents": (of_documents, {}),
    "loads of steps": (of_loads_of_steps, {}),
    "random routing": (of_random_routing, {}),
    "no warm-up": (config_of, {"cuda_graph_warmup_steps": 0}),
}
"""Functions that return a configuration, and options of its graphs."""
SAME_NUMBERS = ("no warm-up",)
"""Options that change no bit of the steps."""
IMPLS = [
    "local",
    "full_iteration",
    pytest.param(
        "transformer_engine",
        marks=pytest.mark.skipif(
            find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
        ),
    ),
]


@pytest.mark.shows(lambda impl: f"graphs: {impl}", of=lambda: (1, MODEL))
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("option", OPTIONS)
def test_replayed_steps_are_the_eager_ones(option: str, impl: str, groups: ParallelGroups) -> None:
    make, graph_options = OPTIONS[option]
    config = make()
    eager = build_job(config, groups, VOCAB)
    expected = run(eager, packs(groups)), state_of(eager)
    plain = without(0.0, transformer_engine=False)[0][0]
    assert torch.equal(expected[0][0], plain) == (option in SAME_NUMBERS)
    options = CudaGraphConfig(cuda_graph_impl=impl, **graph_options)
    with captured(dataclasses.replace(config, cuda_graph=options), groups) as (job, graphs):
        compared(job, run(job, packs(groups)), expected)
        counters = graphs.counters
        assert (counters.replays, counters.fallbacks.total()) == (STEPS * PACKS - 1, 1)
        assert not counters.module_fallbacks
        pack = steps_of(groups, 1, overflow=False)[0][0]
        audited = audit_graphs(graphs, job.step, pack, deterministic=True, seed=0)
        assert audited is not None and audited.endswith("(largest difference 0.0e+00)")


def test_a_stream_of_its_own_changes_no_bit(
    groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared expert beside the rest equals the same order of work on one stream."""
    config = of_shared_expert_overlap()
    beside = build_job(config, groups, VOCAB)
    expected = run(beside, packs(groups)), state_of(beside)
    monkeypatch.setattr(side_stream, "_stream", torch.cuda.current_stream)
    alone = build_job(config, groups, VOCAB)
    compared(alone, run(alone, packs(groups)), expected)
    plain = without(0.0, transformer_engine=False)[0][0]
    torch.testing.assert_close(expected[0][0], plain, rtol=1e-3, atol=0)


def phases_on_a_gpu(folder: Path) -> list[dict[str, Any]]:
    """Return two phases without dropout; the second has packs of twice the length."""
    sizes = {**SIZES, "moe_ffn_hidden_size": 256, "mamba_chunk_size": 128}
    del sizes["add_bias_linear"]  # given as --disable-bias-linear
    changes = {**sizes, "device": "cuda", "bf16": True, "deterministic_mode": True}
    # This packer ignores the capacities of graphs, so that eager runs have the same packs.
    changes |= {"hidden_dropout": None, "packing_method": "best_fit_decreasing"}
    first, second, _ = phase_options(folder, seq_length=256)
    return [{**first, **changes}, {**second, **changes}]


def test_a_phase_with_longer_packs_captures_its_own_graphs(tmp_path: Path) -> None:
    """Two phases with graphs equal two eager phases: logs, and all bits of the checkpoint.

    The three runs share the GPU.
    """
    phases = phases_on_a_gpu(tmp_path)
    impls = ("none", "local", "full_iteration")
    for options in phases:
        started = {impl: _start(options, impl, tmp_path / impl) for impl in impls}
        for impl, process in started.items():
            console, _ = process.communicate(timeout=150)
            assert process.returncode == 0, f"{impl}: {console[-4000:]}"
    for impl in impls[1:]:
        assert_same_run(tmp_path / impl, tmp_path / "none", phases[-1]["train_iters"])
        found = [one for one in steps(tmp_path / impl / "log.jsonl") if "lm_loss" in one]
        assert len(found) == phases[-1]["train_iters"]
        assert all(one["graph_replays"] and not one["graph_fallbacks"] for one in found), impl


UNTUNED = """
import runpy, sys
from megatron_packed.config import environment_variables

sys.path.insert(0, sys.argv[1])
true = environment_variables.apply_environment

def apply_environment(*options):
    true(*options)
    import harness  # imports torch, which must not be imported earlier
    harness.tune_over(1)

environment_variables.apply_environment = apply_environment
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Program that runs a script with one tiling of each Triton kernel.

Processes that run at the same time could choose different tilings, and so have other bits.
"""


def _start(options: dict[str, Any], impl: str, folder: Path) -> subprocess.Popen[str]:
    """Start the script in a process of its own: a forked one could not use the GPU."""
    script = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "pretrain_hybrid.py")]
    options = {**options, **in_folder(folder), "cuda_graph_impl": impl}
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", UNTUNED, *script, *command_line(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
