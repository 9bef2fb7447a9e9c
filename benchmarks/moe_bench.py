"""Compares forward and backward of one rank's share of a model with many experts to megatron-core.

    python benchmarks/moe_bench.py [--experts 16] [--dispatcher alltoall|allgather]

The share is that of one rank with EP8 of a model like Nemotron-3-Nano: 16 of 128 experts, 6 experts
per token, and a shared expert. The packs are those of `model_step.py`. Each side draws its own
weights, so the losses are close but not equal. The results contain wall-clock and GPU-busy time,
launches, and the MFU of the GPU-busy time. The console also shows the longest kernels of each side.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

import harness
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.flops import model_flops
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.peak_flops import peak_flops
from model_step import DOCUMENTS, Ours, Theirs, begin_alone, make_batches, megatron_model, packings
from model_step import model_config as dense_config

CONFIG: dict[str, Any] = {
    "T": 8192,
    "pattern": "MEMEM*EMEME",
    "hidden": 2688,
    "heads": 32,
    "groups": 2,
    "ffn": 1856,
    "mamba_heads": 64,
    "mamba_groups": 8,
    "vocab": 32768,
    "expert_ffn": 1856,
}
SHARED_FFN = 3712
ROUTER: dict[str, Any] = {
    "moe_router_topk": 6,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_aux_loss_coeff": 1e-4,
}
"""Options of both sides. megatron_packed and megatron-core use the same names."""
WARM, REPEATS, PACKS = 6, 12, 4


def config_of(c: dict[str, Any], experts: int) -> ModelConfig:
    """Return the configuration of megatron_packed's model."""
    return dataclasses.replace(
        dense_config({**c, "experts": experts}),
        moe_shared_expert_intermediate_size=SHARED_FFN,
        **ROUTER,
    )


def ours(c: dict[str, Any], config: ModelConfig) -> HybridModel:
    return HybridModel(
        config,
        vocab_size=c["vocab"],
        max_positions=c["T"],
        device="cuda",
        dtype=torch.bfloat16,
        seed=1234,
    )


def theirs(c: dict[str, Any], experts: int, dispatcher: str) -> torch.nn.Module:
    return megatron_model(
        c,
        num_moe_experts=experts,
        moe_ffn_hidden_size=c["expert_ffn"],
        moe_shared_expert_intermediate_size=SHARED_FFN,
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
        moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="aux_loss",
        **ROUTER,
    )


def measured(side: Ours | Theirs, flops: float, kernels: int) -> dict[str, object]:
    """Measure one side over all packs in turn, and print its longest kernels."""
    numbers = iter(range(1 << 30))

    def step() -> None:
        side.step(next(numbers) % PACKS)

    wall = harness.wall(step, warm=WARM, repeats=REPEATS)
    busy = harness.gpu_busy(step, calls=PACKS)
    for kernel, milliseconds in busy.kernels[:kernels]:
        print(f"{milliseconds:9.3f}  {kernel[:120]}")
    peak = peak_flops(torch.device("cuda"))
    return {
        "loss": side.loss.item(),
        "wall_ms": wall,
        "busy_ms": round(busy.milliseconds, 3),
        "launches": busy.launches,
        "mfu_of_busy": round(flops / (busy.milliseconds / 1e3) / peak, 4) if peak else None,
    }


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each side that was measured."""
    return [
        {"path": label, **found, "wall_ms": harness.shown(found["wall_ms"])}
        for label, found in results["paths"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=16, help="number of experts on the rank")
    parser.add_argument("--dispatcher", choices=("alltoall", "allgather"), default="alltoall")
    parser.add_argument(
        "--kernels", type=int, default=26, help="number of longest kernels to print"
    )
    parser.add_argument("--skip-megatron", action="store_true", help="measure only megatron_packed")
    parser.add_argument("--name", default="moe_bench", help="name of the result file")
    parser.add_argument(
        "--results", type=Path, help="folder of the result file (default: benchmarks/results)"
    )
    arguments = parser.parse_args()
    begin_alone(port=29533)
    lengths = packings(CONFIG["T"], PACKS)
    batches = make_batches(CONFIG, lengths, DOCUMENTS)
    config = config_of(CONFIG, arguments.experts)
    flops = sum(model_flops(config, CONFIG["vocab"], row) for row in lengths) / PACKS
    sides: dict[str, Ours | Theirs] = {
        "megatron_packed": Ours(CONFIG, ours(CONFIG, config), batches)
    }
    if not arguments.skip_megatron:
        model = theirs(CONFIG, arguments.experts, arguments.dispatcher)
        sides["megatron_core"] = Theirs(CONFIG, model, batches)
    results: dict[str, Any] = {
        "tokens": CONFIG["T"],
        "experts": arguments.experts,
        "dispatcher": arguments.dispatcher,
        "plan_hash": hashlib.sha256(repr(lengths).encode()).hexdigest()[:12],
        "paths": {},
    }
    for label, side in sides.items():
        print(f"--- {label}")
        results["paths"][label] = measured(side, flops, arguments.kernels)
        path = harness.save(arguments.name, results, folder=arguments.results)
    print(harness.table(rows_of(results)))
    print(path)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
