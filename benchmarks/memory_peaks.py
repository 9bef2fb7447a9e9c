"""Compares measured peaks of GPU memory with the memory that `megatron-packed plan` estimates.

    python benchmarks/memory_peaks.py

The script runs nothing on a GPU. It reads every measured peak from `benchmarks/results` and
estimates the memory of the same step on the meta device. `tables.py` writes the table to the page
of measurements.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch

import expert_graphs
import full_step
import harness
import layouts
import offload
import real_sizes
import recipe_mfu
import state_precision
from megatron_packed.config.parser.parse import parse, parse_with_sources
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.distributed.flat_buffers import flat_layout_of
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.zero1_layout import Ownership
from megatron_packed.models.estimate.parameter_count import count_parameters
from megatron_packed.models.estimate.rank_memory import GIB, MIB, estimate
from megatron_packed.models.estimate.run_estimate import estimates, usual
from megatron_packed.models.estimate.step_memory import Work
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.ops.backend_dispatch import complete_machine
from megatron_packed.ops.cross_entropy import api as cross_entropy
from model_step import CONFIGS, model_config
from train_real import ROOT
from workloads import SHAPES

RESULTS = (
    "graph_step",
    *(MODEL_STEPS := tuple(f"model_step_{name}" for name in CONFIGS)),
    "metadata_sync",
    "packed_vs_padded",
    "train_real",
    *(
        f"layouts_{world}_{name}"
        for world, name in product(layouts.LAYOUTS, layouts.IN_ALL_LAYOUTS)
    ),
    "offload",
    "full_step",
    *(RECIPES := ("recipe_gated_delta_1b", "recipe_gated_delta_1b_previous_delta_rule")),
    OVERLAPPED := "layouts_2_hybrid1b_tp_overlap",
    "expert_graphs",
    *(SMALL_PACKS := {f"expert_graphs_{tokens}": tokens for tokens in (4096, 2048)}),
    BESIDE := "expert_graphs_shared_overlap",
    *real_sizes.RESULTS,
    "state_precision",
    IN_PARTS := "layouts_2_hybrid1b_cp_overlap",
    STATES := "layouts_2_hybrid1b_cp_state",
    ROWS := "layouts_4_hybrid1b_tp_rows",
    *(
        IN_ORDER := {
            "layouts_2_hybrid1b_cp_contiguous": ("hybrid1b", "in the order of the pack"),
            "layouts_2_hybrid1b_cp_zero": ("hybrid1b", "beside ZeRO-1"),
            "layouts_2_hybrid1b_delta": ("hybrid1b_delta", "states of delta rules"),
        }
    ),
    *(KINDS := {f"layouts_2_{name}_kinds": name for name in layouts.IN_ALL_LAYOUTS}),
)
"""Result files that contain a measured peak, in the order of the table."""
OF_DATA = ("train-data", "valid-data", "data-cache", "tokenizer", "log-jsonl", "eval", "sft")
DATA = ["--data-path", __file__]
CONVERSATIONS = 32
"""Conversations in a pack of the models of real sizes."""
LOCAL = CudaGraphConfig(cuda_graph_impl="local")
MEASURED_SCAN = "mamba_ssm"
"""Backend of the scan in runs that are older than the choice of our kernels by default."""


class Peak(NamedTuple):
    """Estimated and measured peak of one kind of step, in GiB."""

    name: str
    estimated: float
    measured: float


def results(name: str) -> dict[str, Any]:
    return json.loads((harness.RESULTS / f"{name}.json").read_text())["results"]


def as_measured(config: RunConfig) -> RunConfig:
    """Return the configuration with the kernels of the older runs."""
    return replace(config, training=replace(config.training, ssd_backend=MEASURED_SCAN))


def older_chunk_tokens(tokens: int, vocab_rows: int) -> int:
    """Return the tokens of a chunk of logits in the older runs, whose packs had at least 512 tokens."""
    return min(max(1024, 2**26 // vocab_rows // 128 * 128), -(-tokens // 256) * 128)


def gib(
    config: Any,
    vocab: int,
    tokens: int,
    documents: int,
    *,
    optimizer: bool = False,
    graphs: CudaGraphConfig | None = None,
    positions: int | None = None,
    deterministic: bool = False,
) -> float:
    """Return the estimated peak of a step of one process, in GiB."""
    model = HybridModel(
        config,
        vocab_size=vocab,
        max_positions=positions or tokens,
        device="meta",
        dtype=torch.bfloat16,
        backends={"deterministic": deterministic},
    )
    work = Work(tokens=tokens, documents=documents)
    layout = flat_layout_of(model, Ownership())
    return estimate(model, layout, work, graphs=graphs, with_optimizer=optimizer).allocated / GIB


def graph_steps() -> Iterator[tuple[str, float, float]]:
    """Yield forward and backward without an optimizer, eagerly and with a graph per layer.

    The graphs have a capacity of up to 512 documents.
    """
    for name, found in results("graph_step").items():
        c, memory = CONFIGS[name], found["memory"]
        one = (model_config(c), c["vocab"], c["T"])
        yield f"{name} eager", gib(*one, max(found["documents"])), memory["eager"]["allocated_gib"]
        held = memory["graphs"]["allocated_gib"] + memory["mib"] * MIB / GIB
        yield f"{name} graphs", gib(*one, memory["capacities"][-1], graphs=LOCAL), held


def model_steps() -> Iterator[tuple[str, float, float]]:
    """Yield steps in a process that also holds megatron-core's bf16 weights and gradients."""
    for name, found in (entry for file in MODEL_STEPS for entry in results(file).items()):
        c = CONFIGS[name]
        theirs = 4 * found["parameters"] / GIB
        ours = gib(model_config(c), c["vocab"], c["T"], found["documents"])
        yield f"{name} beside megatron-core", ours + theirs, found["megatron_packed"]["peak_gib"]


def metadata_sync() -> Iterator[tuple[str, float, float]]:
    """Yield whole steps of runs that allocate the cuBLAS workspaces of deterministic runs."""
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


def packed_vs_padded() -> Iterator[tuple[str, float, float]]:
    """Yield forward and backward of packed batches."""
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


def train_real() -> Iterator[tuple[str, float, float]]:
    """Yield training runs of models with experts.

    The size of the vocabulary is computed from the parameter count in the results.
    """
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


def layouts_of_several() -> Iterator[tuple[str, float, float]]:
    """Yield eager steps of one, two and four processes, with the optimizer."""
    for world, name in product(layouts.LAYOUTS, layouts.IN_ALL_LAYOUTS):
        yield from layouts_of(f"layouts_{world}_{name}", world, name)


def layouts_of(
    result: str,
    world: int,
    name: str,
    as_run: Callable[[RunConfig], RunConfig] = as_measured,
) -> Iterator[tuple[str, float, float]]:
    """Yield the layouts of one result file; one process has a row for the layouts of two."""
    c, choices = layouts.MODELS[name], layouts.recorded_layouts(world)
    found = results(result)[name]["layouts"]
    for layout, options in {**({layouts.ONE: {}} if world == 2 else {}), **choices}.items():
        if layout not in found:
            continue
        config = layouts.config_of(c, 4, options, torch.device("cuda"))
        processes = 1 if layout == layouts.ONE else world
        one = usual(estimates(as_run(config), processes, c["vocab"], layouts.CAPACITY))
        # In this case the measured process still held the weights of the previous job: a process
        # group kept them alive, because nothing had waited for their last all-gather.
        held = (name, layout) == ("hybrid1b_moe", "tp2")
        before = 2 * found[layouts.ONE]["parameters"] if held else 0
        beside = " beside the job before" if before else ""
        estimated = (one.allocated + before) / GIB
        yield f"{name} {layout}{beside}", estimated, found[layout]["peak_gib"]


def overlapped() -> Iterator[tuple[str, float, float]]:
    """Yield the layouts that were measured with and without collectives under products."""
    for name, *peak in layouts_of(OVERLAPPED, 2, "hybrid1b"):
        if layouts.ONE not in name:
            yield f"{name}, second run", *peak


def in_parts() -> Iterator[tuple[str, float, float]]:
    """Yield the layouts that exchange heads in one part and in several."""
    for name, *peak in layouts_of(IN_PARTS, 2, "hybrid1b", as_run=lambda config: config):
        yield f"{name}, our scan", *peak


def with_states() -> Iterator[tuple[str, float, float]]:
    """Yield the layouts that pass the states of Mamba layers."""
    for name, *peak in layouts_of(STATES, 2, "hybrid1b", as_run=lambda config: config):
        if layouts.ONE not in name and "a2a" not in name:
            yield name, *peak


def with_rows() -> Iterator[tuple[str, float, float]]:
    """Yield the layouts of four GPUs that exchange rows under products, and without this."""
    for name, *peak in layouts_of(ROWS, 4, "hybrid1b", as_run=lambda config: config):
        yield f"{name}, joined products", *peak


def in_order() -> Iterator[tuple[str, float, float]]:
    """Yield the layouts with contiguous rows in attention, and those beside them."""
    for result, (model, words) in IN_ORDER.items():
        for name, *peak in layouts_of(result, 2, model, as_run=lambda config: config):
            yield f"{name}, {words}", *peak


def of_each_kind() -> Iterator[tuple[str, float, float]]:
    """Yield the layouts with one kind of parallelism that were measured with today's kernels."""
    for result, model in KINDS.items():
        for name, *peak in layouts_of(result, 2, model, as_run=lambda config: config):
            yield f"{name}, joined products", *peak


def experts(*files: str) -> Iterator[tuple[str, float, float]]:
    """Yield steps of two ranks with 16 experts each, with the memory of graphs."""
    world, device = 2, torch.device("cuda")
    model = expert_graphs.model_of(world)
    for result, words in (
        ("expert_graphs", ""),
        *((name, f", {tokens:,} tokens") for name, tokens in SMALL_PACKS.items()),
        (BESIDE, ", shared expert beside"),
    ):
        if result not in files:
            continue
        c = {**model, "T": SMALL_PACKS.get(result, model["T"])}
        for dispatcher, kinds in results(result).items():
            for name, found in kinds.items():
                kind, backend = expert_graphs.Case.named(name)
                config = expert_graphs.configured(
                    *(c, world, dispatcher, kind, device),
                    backend=backend,
                    dispatch="rows",  # the default when they were measured
                    shared_expert_overlap=result == BESIDE,
                )
                groups = ParallelGroups.unjoined(config.layout(world))
                estimated = expert_graphs.planned_gib(config, groups, c["vocab"])
                yield f"experts, {dispatcher}, {name}{words}", estimated, found["peak_gib"]


def offloads() -> Iterator[tuple[str, float, float]]:
    """Yield steps of 32,768 tokens that keep, recompute or offload activations.

    The steps run eagerly and by replay.
    """
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


def full_steps() -> Iterator[tuple[str, float, float]]:
    """Yield steps of two micro-batches, eagerly and by replay.

    The process also holds a copy of its optimizer state.
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


def recipes() -> Iterator[tuple[str, float, float]]:
    """Yield whole training runs of a recipe's model. Its file names the size of the vocabulary."""
    for result in RECIPES:
        found = results(result)
        model = f"@{ROOT}/examples/recipes/models/{found['recipe']}.args"
        for graphs, run in found["runs"].items():
            options = {
                f"--{name}": value
                for name, value in recipe_mfu.RUN.items()
                if not name.startswith(OF_DATA)
            }
            words = [
                word
                for name, value in {**options, "--cuda-graph-impl": graphs}.items()
                for word in ([name] if value is True else [name, str(value)])
            ]
            config = parse([model, *words, *DATA], 1)
            documents = config.packing.tokens_per_pack // 256
            one = usual(estimates(config, 1, config.model.vocab_size, documents))
            name = result.removeprefix("recipe_")
            yield f"{name} {graphs}", one.allocated / GIB, run["memory_gib"]


def real_models() -> Iterator[tuple[str, float, float]]:
    """Yield runs of models of real sizes, with as many documents in a pack as conversations of their
    data."""
    for result, flags in real_sizes.RESULTS.items():
        found = results(result)
        for name, words, run in real_sizes.measured_runs(found, flags):
            config = parse_with_sources(words, found["gpus"], on_this_machine=False).config
            one = usual(estimates(config, found["gpus"], config.model.vocab_size, CONVERSATIONS))
            yield name, one.allocated / GIB, run["peak_gib"]


def precisions() -> Iterator[tuple[str, float, float]]:
    """Yield whole runs with optimizer state in float32 and in bf16."""
    found = results("state_precision")
    for name in ("fp32", "bf16 moments, stochastic"):
        words = state_precision.command_words(name, found["steps"], quick=False, device="cuda")
        config = parse_with_sources([*words, *DATA], 1, on_this_machine=False).config
        one = usual(estimates(config, 1, config.model.vocab_size, CONVERSATIONS))
        measured = found["runs"][name]["memory_gib"]
        yield f"hybrid_1b, 2,048 tokens, {name}", one.allocated / GIB, measured


def peaks() -> list[Peak]:
    """Return all measured peaks of packed steps with their estimates."""
    older = (layouts_of_several(), overlapped())
    with mock.patch.object(cross_entropy, "default_chunk_tokens", older_chunk_tokens):
        found = [Peak(*row) for part in older for row in part]
    apart = (in_parts(), with_states(), experts(BESIDE))
    found += [Peak(*row) for part in apart for row in part]
    newest = (
        graph_steps(),
        train_real(),
        recipes(),
        metadata_sync(),
        packed_vs_padded(),
        offloads(),
        full_steps(),
        model_steps(),
        experts("expert_graphs", *SMALL_PACKS),
        of_each_kind(),
        with_rows(),
        in_order(),
        real_models(),
        precisions(),
    )
    with complete_machine():
        found += [Peak(*row) for part in newest for row in part]
    return found


def rows_of(*_: object) -> list[dict[str, object]]:
    """Return the rows of the table. The functions above read the result files."""
    return [
        {
            "steps": name,
            "measured GiB": f"{measured:.2f}",
            "estimated GiB": f"{estimated:.2f}",
            "difference": f"{100 * (estimated / measured - 1):+.1f} %",
        }
        for name, estimated, measured in peaks()
    ]


def main() -> None:
    print(harness.table(rows_of()))


if __name__ == "__main__":
    main()
