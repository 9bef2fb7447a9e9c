"""Compares building a pack's metadata once on the host to rebuilding it in every layer on the GPU.

    python benchmarks/metadata_sync.py [case ...]

Two or three paths run through the same model on the same packs:

- ``once`` is the path of megatron_packed. Document offsets, longest document, positions and
  document numbers are computed on the host and reach the GPU in the one copy of the micro-batch.
  Kernel tables are derived once. No layer waits for the device.
- ``per layer`` exists only in this script, as the comparison. Every attention layer derives offsets
  and the longest document from a device tensor of lengths, which makes the host wait once. With
  SDPA it also builds an additive block-causal (T, T) mask, document by document, which makes the
  host wait a second time. Every Mamba layer derives the document numbers, with one wait.
- ``per layer, one mask kernel`` runs only with SDPA. It is ``per layer``, but a fixed number of
  operations builds the mask.

The results contain times of forward and backward (the device is drained around each) and of whole
training steps (blocks of steps, drained only at their end). They also contain paired ratios, host
waits per step counted in two ways, peak memory, and whether the losses are equal. One case compares
the paths over 61 deterministic optimizer steps, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.attention import Attention, WindowTables
from megatron_packed.layers.kinds.mamba import MambaMixer
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.metrics_layout import MetricsLayout, StepValues
from megatron_packed.ops.varlen_attention.tables import MaskTable, visible_pairs
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.packed.params import PackedSeqParams, SharedTables
from megatron_packed.training.train_step import TrainStep
from workloads import (
    build_model,
    device_from,
    filled_packs,
    hash_of,
    pinned,
    random_documents,
    shape_of,
)

ONCE, PER_LAYER, PER_LAYER_ONE_MASK_KERNEL = "once", "per layer", "per layer, one mask kernel"


class Case(NamedTuple):
    shape: str
    attention: str
    """Backend of varlen attention."""


CASES = {
    "llama1b_sdpa": Case("llama1b", "sdpa"),
    "qwen0.6b_sdpa": Case("qwen0.6b", "sdpa"),
    "thin16": Case("thin16", "auto"),
    "thin28": Case("thin28", "auto"),
    "wide": Case("wide", "auto"),
    "hybrid": Case("hybrid", "auto"),
}
EQUAL_OVER_STEPS, EQUAL_STEPS = "thin28", 61
PACKS, STEPS_PER_BLOCK = 4, 5
LEARNING_RATE = 1e-4


class PerLayerRebuild:
    """Hooks that make each layer of a model derive its metadata itself, unless ``path`` is `ONCE`."""

    def __init__(self, model: HybridModel, attention: str) -> None:
        self.path = ONCE
        self._uses_mask = attention == "sdpa"
        self._lengths_D = torch.empty(0, dtype=torch.int32)
        model.register_forward_pre_hook(self._give_lengths)
        for layer in model.layers:
            if isinstance(layer.mixer, MambaMixer):
                layer.register_forward_pre_hook(self._rebuild_for_mamba)
            elif isinstance(layer.mixer, Attention):
                layer.register_forward_pre_hook(self._rebuild_for_attention)

    def _give_lengths(
        self, _model: nn.Module, arguments: tuple[MicroBatch]
    ) -> tuple[MicroBatch] | None:
        """Return a micro-batch with lengths and positions, without the tables that layers share."""
        if self.path == ONCE:
            return None
        (micro_batch,) = arguments
        packed = micro_batch.packed
        self._lengths_D = packed.cu_seqlens.diff()
        prepared = packed.with_tables(
            SharedTables(rope_position_ids=packed.position_ids * packed.valid)
        )
        return (dataclasses.replace(micro_batch, packed=prepared),)

    def _rebuild_for_attention(
        self, _layer: nn.Module, arguments: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any] | None:
        if self.path == ONCE:
            return None
        hidden_TD, packed = arguments
        lengths_D = self._lengths_D
        cu_seqlens = F.pad(lengths_D.cumsum(0, dtype=torch.int32), (1, 0))
        max_seqlen = int(lengths_D.max())  # waits for the device
        rebuilt = dataclasses.replace(packed, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        if self._uses_mask:
            mask = MaskTable(mask_TT=self._mask(hidden_TD, packed), window_size=None)
            rebuilt = rebuilt.with_tables(
                dataclasses.replace(
                    packed.tables, of_kinds={WindowTables: WindowTables({None: mask})}
                )
            )
        return hidden_TD, rebuilt

    def _mask(self, hidden_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        if self.path == PER_LAYER_ONE_MASK_KERNEL:
            return visible_pairs(packed.seq_idx.view(-1), None)
        tokens = hidden_TD.shape[0]
        mask_TT = hidden_TD.new_full((tokens, tokens), float("-inf"))
        start = 0
        for length in self._lengths_D.tolist():  # waits for the device
            block = slice(start, start + length)
            mask_TT[block, block] = torch.triu(
                hidden_TD.new_full((length, length), float("-inf")), diagonal=1
            )
            start += length
        return mask_TT

    def _rebuild_for_mamba(
        self, _layer: nn.Module, arguments: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any] | None:
        if self.path == ONCE:
            return None
        hidden_TD, packed = arguments
        lengths_D = self._lengths_D
        number_D = torch.arange(lengths_D.numel(), dtype=torch.int32, device=lengths_D.device)
        # waits for the device, to learn the number of elements
        seq_idx_1T = torch.repeat_interleave(number_D, lengths_D)[None]
        return hidden_TD, dataclasses.replace(packed, seq_idx=seq_idx_1T)


class Run:
    """Model with its optimizer, and the packs on which it trains."""

    def __init__(self, case: Case, device: torch.device, *, deterministic: bool = False) -> None:
        self.shape = shape_of(case.shape, device)
        backends = {"varlen_attention": case.attention, "deterministic": deterministic}
        self.model = build_model(
            self.shape, device, max_positions=self.shape.slots, backends=backends
        )
        groups = ParallelGroups.single(device)
        layout = MetricsLayout.from_model(self.model, groups)
        buffers = FlatBuffers(self.model, extras=layout.extras, counters=layout.counters)
        self.step_once = TrainStep(self.model, buffers, Optimizer(buffers), groups)
        self.rebuild = PerLayerRebuild(self.model, case.attention)
        self.lengths = filled_packs(self.shape.slots, PACKS, mean=min(180.0, self.shape.slots / 8))
        self.batches = []
        for seed, lengths in enumerate(self.lengths):
            documents = [
                (tokens, None) for tokens in random_documents(lengths, self.shape.vocab, seed)
            ]
            targets = sum(lengths) - len(lengths)
            batch = MicroBatch.build(documents, self.shape.slots, scales=(1 / targets, 1.0))
            self.batches.append(pinned(batch, device))
        self.device, self._calls = device, 0

    def _next_batch(self) -> MicroBatch:
        self._calls += 1
        return self.batches[self._calls % PACKS]

    def loss(self, path: str, number: int = 0) -> float:
        self.rebuild.path = path
        with torch.no_grad():
            return float(self.model(self.batches[number].to(self.device)).loss)

    def steps(self, path: str, count: int) -> None:
        """Queue ``count`` whole training steps one after the other."""
        self.rebuild.path = path
        for _ in range(count):
            self.step_once([self._next_batch()], LEARNING_RATE)

    def forward_backward(self, path: str, batch: MicroBatch) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward pass.

        The device is drained before and after each pass.
        """
        self.rebuild.path = path
        harness.synchronize()
        start = time.perf_counter()
        placed = batch.to(self.device, non_blocking=True)
        loss_scale = placed.scales[0]
        output = self.model(placed, grad_scale=loss_scale)
        harness.synchronize()
        middle = time.perf_counter()
        output.loss_sum.backward(loss_scale)
        harness.synchronize()
        return middle - start, time.perf_counter() - middle


def paths_of(case: Case) -> list[str]:
    return [ONCE, PER_LAYER, *([PER_LAYER_ONE_MASK_KERNEL] if case.attention == "sdpa" else [])]


def measure(case: Case, device: torch.device, *, repeats: int, blocks: int) -> dict[str, Any]:
    harness.free_memory()
    run, paths = Run(case, device), paths_of(case)
    losses = {path: [run.loss(path, number) for number in range(PACKS)] for path in paths}
    for path in paths:
        run.steps(path, PACKS)
    phases: dict[str, dict[str, list[float]]] = {
        path: {"forward": [], "backward": [], "step": []} for path in paths
    }
    for number in range(repeats):
        for path in paths if number % 2 == 0 else paths[::-1]:
            forward, backward = run.forward_backward(path, run.batches[number % PACKS])
            phases[path]["forward"].append(forward)
            phases[path]["backward"].append(backward)
    block: dict[str, Callable[[], object]] = {
        path: lambda p=path: run.steps(p, STEPS_PER_BLOCK) for path in paths
    }
    for path, seconds in harness.interleaved_seconds(block, warm=0, repeats=blocks).items():
        phases[path]["step"] = [value / STEPS_PER_BLOCK for value in seconds]
    return {
        "like": run.shape.like,
        "attention": case.attention,
        "layers": {
            symbol: run.shape.pattern.count(symbol) for symbol in sorted(set(run.shape.pattern))
        },
        "tokens": run.shape.slots,
        "documents": [len(lengths) for lengths in run.lengths],
        "plan_hash": hash_of(run.lengths),
        "parameters": run.model.num_parameters,
        "losses_equal": all(losses[path] == losses[ONCE] for path in paths),
        "losses": losses,
        "paths": {
            path: {
                "forward_ms": harness.Spread.of(times["forward"]),
                "backward_ms": harness.Spread.of(times["backward"]),
                "step_ms": harness.Spread.of(times["step"]),
                "over_once": {
                    phase: harness.Spread.of_ratios(times[phase], phases[ONCE][phase])
                    for phase in times
                },
                "host_waits_per_step": harness.host_waits(lambda p=path: run.steps(p, 1)),
                "peak_gib": harness.peak_gib(lambda p=path: run.steps(p, PACKS)),
            }
            for path, times in phases.items()
        },
    }


def equal_over_steps(case: Case, device: torch.device, steps: int) -> dict[str, Any]:
    """Return the largest difference of loss and of gradient norm between two paths.

    Each path trains from the same weights in deterministic mode.
    """
    configure_determinism()
    curves = {}
    for path in (ONCE, PER_LAYER):
        harness.free_memory()
        run = Run(case, device, deterministic=True)
        run.rebuild.path = path
        metrics = [
            run.step_once([run.batches[n % PACKS]], LEARNING_RATE).clone() for n in range(steps)
        ]
        curves[path] = [StepValues.from_list(one.tolist()) for one in metrics]
    torch.use_deterministic_algorithms(False)
    pairs = list(zip(curves[ONCE], curves[PER_LAYER]))
    return {
        "steps": steps,
        "max_loss_difference": max(abs(a.loss - b.loss) for a, b in pairs),
        "max_grad_norm_difference": max(abs(a.grad_norm - b.grad_norm) for a, b in pairs),
        "loss_first_last": [curves[ONCE][0].loss, curves[ONCE][-1].loss],
        "all_finite": not any(a.nonfinite or b.nonfinite for a, b in pairs),
    }


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table of paths, from results in the form of a result file."""
    rows = []
    for name, result in results.items():
        for path, found in result["paths"].items():
            waits = found["host_waits_per_step"]
            rows.append(
                {
                    "case": name,
                    "path": path,
                    **{
                        f"{phase} ms": harness.shown(found[f"{phase}_ms"])
                        for phase in found["over_once"]
                    },
                    **{
                        f"{phase} / once": harness.shown(ratio)
                        for phase, ratio in found["over_once"].items()
                    },
                    "waits per step (torch / runtime)": ""
                    if waits is None
                    else f"{waits[0]} / {waits[1]}",
                    "peak GiB": found["peak_gib"],
                    "losses equal": result["losses_equal"],
                }
            )
    return rows


def equality_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table that compares training on two paths.

    Only the cases that measured this comparison have a row.
    """
    return [
        {
            "case": name,
            "deterministic steps": found["steps"],
            "largest difference of losses": found["max_loss_difference"],
            "of gradient norms": found["max_grad_norm_difference"],
            "loss: first, last": ", ".join(f"{loss:.4f}" for loss in found["loss_first_last"]),
        }
        for name, result in results.items()
        if (found := result.get("equal_over_steps"))
    ] or [{"case": "none was measured"}]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"from {list(CASES)} (default: all)")
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # Deterministic steps need this setting, and cuBLAS reads it when it starts.
    device = device_from(arguments.device)
    repeats, blocks, steps = (2, 1, 3) if arguments.quick else (16, 8, EQUAL_STEPS)
    results: dict[str, Any] = {}
    for name in arguments.cases or CASES:
        started = time.perf_counter()
        results[name] = measure(CASES[name], device, repeats=repeats, blocks=blocks)
        if name == EQUAL_OVER_STEPS:
            results[name]["equal_over_steps"] = equal_over_steps(CASES[name], device, steps)
            print(f"{name}: {results[name]['equal_over_steps']}")
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        path = harness.save("metadata_sync", results, folder=arguments.results)
    print(harness.table(rows_of(harness.plain(results))))
    print(path)


if __name__ == "__main__":
    main()
