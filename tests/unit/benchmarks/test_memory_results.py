"""Peaks that the benchmarks measured on an H200, against the estimate; from the committed results,
nothing is run.
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import full_step
import layouts
import offload
import plan_peaks
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.distributed.flat_buffers import flat_layout_of
from megatron_packed.distributed.zero1_layout import Ownership
from megatron_packed.models.estimate.footprint import Work
from megatron_packed.models.estimate.parameter_count import count_parameters
from megatron_packed.models.estimate.rank_memory import GIB, MIB, estimate
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.training.run_estimate import estimates, usual
from model_step import CONFIGS, model_config
from workloads import SHAPES

ROOT = Path(__file__).parents[3]
TOLERANCE = 0.10
"""The promise. Found is -4.5 to +0.9 %: the estimate knows no fragmentation."""
OF_DATA = ("train-data", "valid-data", "data-cache", "tokenizer", "log-jsonl", "eval", "sft")
DATA = ["--data-path", __file__]
LOCAL = CudaGraphConfig(cuda_graph_impl="local")


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]


def gib(
    config,
    vocab,
    tokens,
    documents,
    *,
    optimizer=False,
    graphs=None,
    positions=None,
    deterministic=False,
):
    model = HybridModel(
        config,
        vocab_size=vocab,
        max_positions=positions or tokens,
        device="meta",
        dtype=torch.bfloat16,
        backends={"deterministic": deterministic},
    )
    work = Work(tokens=tokens, documents=documents, element=2)
    layout = flat_layout_of(model, Ownership())
    return estimate(model, layout, work, graphs=graphs, with_optimizer=optimizer).allocated / GIB


def graph_steps():
    """Forward and backward without an optimizer: eager, and with a graph per layer for up to 512
    documents.
    """
    for name, found in results("graph_step").items():
        c, memory = CONFIGS[name], found["memory"]
        one = (model_config(c), c["vocab"], c["T"])
        yield f"{name} eager", gib(*one, max(found["documents"])), memory["eager"]["allocated_gib"]
        held = memory["graphs"]["allocated_gib"] + memory["mib"] * MIB / GIB
        yield f"{name} graphs", gib(*one, memory["capacities"][-1], graphs=LOCAL), held


def model_steps():
    """Beside megatron-core's model in the same process: its weights and gradients, in bf16 both."""
    for name, found in results("model_step").items():
        c = CONFIGS[name]
        theirs = 4 * found["parameters"] / GIB
        ours = gib(model_config(c), c["vocab"], c["T"], found["documents"])
        yield f"{name} beside megatron-core", ours + theirs, found["megatron_packed"]["peak_gib"]


def metadata_sync():
    """Whole steps; started with the workspaces of deterministic runs."""
    for name, found in results("metadata_sync").items():
        shape = SHAPES[name.removesuffix("_sdpa")]
        documents = max(found["documents"])
        ours = gib(
            shape.config,
            shape.vocab,
            found["tokens"],
            documents,
            optimizer=True,
            deterministic=True,
        )
        yield f"step of {name}", ours, found["paths"]["once"]["peak_gib"]


def packed_vs_padded():
    for name, found in results("packed_vs_padded").items():
        shape, packed = SHAPES[name.split("_")[0]], found["packed"]
        documents = -(-found["documents"] // packed["batches"])
        ours = gib(
            shape.config,
            shape.vocab,
            packed["largest_batch"],
            documents,
            positions=found["longest"] + 8,
        )
        yield f"packed {name}", ours, packed["peak_gib"]


def train_real():
    """Runs of the trainer, with experts; the tokenizer's vocabulary follows from the parameters."""
    for name, found in results("train_real").items():
        flags = [flag.split() for flag in found["command"].partition(" --")[2].split(" --")]
        kept = [flag for flag in flags if not flag[0].startswith(OF_DATA)]
        config = parse(
            [word for name, *values in kept for word in (f"--{name}", *values)] + DATA, 1
        )
        model, documents = config.model, round(1.5 * found["docs_per_pack"])
        table = model.padded_vocab_size(1)
        rows = (found["parameters"] - count_parameters(model, 1).total) / model.hidden_size + table
        assert rows == model.padded_vocab_size(int(rows))
        ours = gib(model, int(rows), config.packing.tokens_per_pack, documents, optimizer=True)
        yield f"train {name}", ours, found["memory_gib"]


def layouts_of_several():
    """Eager steps of one process, of two and of four, optimizer included."""
    for (world, choices), (name, c) in product(layouts.LAYOUTS.items(), layouts.MODELS.items()):
        found = results(f"layouts_{world}_{name}")[name]["layouts"]
        for layout, options in {**({layouts.ONE: {}} if world == 2 else {}), **choices}.items():
            if layout not in found:
                continue
            config = layouts.config_of(c, 4, options, torch.device("cuda"))
            one = usual(
                estimates(
                    config, 1 if layout == layouts.ONE else world, c["vocab"], layouts.CAPACITY
                )
            )
            # The process still held the weights of the job before, as nobody had waited for their
            # last gathering.
            before = (
                2 * found[layouts.ONE]["parameters"]
                if (name, layout) == ("hybrid1b_moe", "tp2")
                else 0
            )
            beside = " beside the job before" if before else ""
            yield (
                f"{name} {layout}{beside}",
                (one.allocated + before) / GIB,
                found[layout]["peak_gib"],
            )


def offloads():
    """Steps of 32,768 tokens that keep, recompute and move, eagerly and by replay."""
    for name, found in results("offload").items():
        c = offload.MODELS[name]
        cases = [("none", side, peak["peak_gib"]) for side, peak in found["peaks"].items()]
        cases += [
            (impl, side, one["peak_gib"] + one["graph_mib"] * MIB / GIB)
            for impl, sides in found["graphs"].items()
            for side, one in sides.items()
        ]
        for impl, side, measured in cases:
            config = offload.config_of(c, offload.SIDES[side], torch.device("cuda"), impl)
            one = usual(estimates(config, 1, c["vocab"], offload.CAPACITY))
            yield (
                f"32k {name} {'' if impl == 'none' else f'{impl} '}{side}",
                one.allocated / GIB,
                measured,
            )


def full_steps():
    """Steps of two micro-batches, eagerly and by replay, in a process that keeps a copy of its
    optimizer's state.
    """
    for name, found in results("full_step").items():
        c, copied = CONFIGS[name], 12 * found["parameters"] / GIB
        eager, replayed = found["eager_peak"]["allocated"], found["graphs_peak"]["allocated"]
        cases = (
            ("none", eager, found["documents"]),
            ("full_iteration", replayed + found["graph_mib"] * MIB / GIB, max(found["capacities"])),
        )
        for impl, measured, documents in cases:
            config = replace(
                full_step.config_of(c, 2, torch.device("cuda")),
                cuda_graph=CudaGraphConfig(cuda_graph_impl=impl),
            )
            one = usual(estimates(config, 1, c["vocab"], documents))
            steps = "eager steps" if impl == "none" else "whole steps"
            yield (
                f"{name} {steps} beside a copy of its state",
                one.allocated / GIB + copied,
                measured,
            )


MEASURED = [
    *graph_steps(),
    *model_steps(),
    *metadata_sync(),
    *packed_vs_padded(),
    *train_real(),
    *layouts_of_several(),
    *offloads(),
    *full_steps(),
]


@pytest.mark.parametrize(
    ("estimated", "measured"), [row[1:] for row in MEASURED], ids=[row[0] for row in MEASURED]
)
def test_estimate_is_within_ten_percent(estimated, measured):
    assert estimated == pytest.approx(measured, rel=TOLERANCE)


def has_peak(value):
    if not isinstance(value, dict):
        return False
    return any(
        "peak" in key or key == "memory_gib" or has_peak(inner) for key, inner in value.items()
    )


def test_every_result_with_a_peak_is_looked_at():
    files = {
        path.stem
        for path in (ROOT / "benchmarks/results").glob("*.json")
        if has_peak(results(path.stem))
    }
    assert files <= {
        "model_step",
        "metadata_sync",
        "packed_vs_padded",
        "train_real",
        "offload",
        "full_step",
        *(f"layouts_{world}_{name}" for world, name in product(layouts.LAYOUTS, layouts.MODELS)),
    }
    assert len(MEASURED) == 57


PLANNED = results("plan_peaks") if (ROOT / "benchmarks/results/plan_peaks.json").exists() else {}


@pytest.mark.parametrize("name", PLANNED)
def test_plan_is_within_ten_percent_of_whole_steps(name):
    c, config = plan_peaks.sizes_and_config(name, torch.device("cuda"))
    assert set(PLANNED) == set(plan_peaks.CASES)
    measured = PLANNED[name]["measured"]["gib"]
    assert plan_peaks.estimated(config, c["vocab"])["gib"] == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "estimated", "measured"), MEASURED, ids=[row[0] for row in MEASURED]
)
def test_table_of_the_docs(name, estimated, measured):
    row = (
        f"| {name} | {measured:.2f} | {estimated:.2f} | {100 * (estimated / measured - 1):+.1f} % |"
    )
    assert row in (ROOT / "docs/memory.md").read_text()
