"""Measures what sums of gradients in bf16 lose over the micro-batches of a step.

    python benchmarks/gradient_sums.py [--quick]

A hybrid model in bf16 computes the gradients of many packs, each in float32. They are added in float64,
and in bf16 with one rounding for each pack, as ``--grad-reduce-in-bf16`` does. The difference of the two
sums is compared with the sum. Weights are random, and a few tokens are frequent, as in text.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

import harness
from layouts import frequent
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.gradient_precision import GradientPrecision
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.micro_batch import MicroBatch
from workloads import SHAPES, Shape, device_from, filled_packs, random_documents

MOST, QUICK_MOST = 512, 4
SMALL, CPU_PATTERN = SHAPES["hybrid"].shrunk(), "M-*-"


def bf16_model(shape: Shape, device: torch.device) -> HybridModel:
    return HybridModel(
        shape.config,
        vocab_size=shape.vocab,
        max_positions=shape.slots,
        device=device,
        dtype=torch.bfloat16,
    ).train()


def losses_of_sums(shape: Shape, device: torch.device, most: int) -> dict[str, Any]:
    """Return the relative errors of the sum of 1, 2, 4, ... packs, and the share of lost additions."""
    model = bf16_model(shape, device)
    buffers = FlatBuffers(model)
    low = GradientPrecision(low=True)
    slots = [
        slot
        for slot in buffers.layout.slots
        if low.is_low(slot.name, buffers.parameters[slot.name])
    ]
    exact = torch.zeros(sum(slot.end - slot.start for slot in slots), dtype=torch.float64)
    rounded = torch.zeros_like(exact, dtype=torch.bfloat16)
    found: dict[str, Any] = {"elements": exact.numel(), "sums": {}}
    for number, lengths in enumerate(filled_packs(shape.slots, most, mean=180), start=1):
        documents = random_documents(lengths, shape.vocab, number)
        pack = [(frequent(tokens, shape.vocab), None) for tokens in documents]
        buffers.zero_grad()
        model.forward_backward(MicroBatch.build(pack, shape.slots).to(device))
        gradients = torch.cat([buffers.gradients(slot.start, slot.end) for slot in slots]).cpu()
        exact += gradients
        before, added = rounded.clone(), gradients != 0
        rounded = (rounded.float() + gradients).to(torch.bfloat16)
        if number & (number - 1) == 0:
            found["sums"][number] = {
                "error": float((rounded.double() - exact).norm() / exact.norm()),
                "lost": float(((rounded == before) & added).sum() / added.sum()),
            }
    return found


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each number of micro-batches, from results in the form of a result file."""
    return [
        {
            "micro-batches": number,
            "error of the sum": f"{100 * sums['error']:.2f} %",
            "last additions without effect": f"{100 * sums['lost']:.1f} %",
        }
        for number, sums in results["sums"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    shape = SHAPES["hybrid"] if device.type == "cuda" else replace(SMALL, pattern=CPU_PATTERN)
    results = losses_of_sums(shape, device, QUICK_MOST if arguments.quick else MOST)
    path = harness.save("gradient_sums", results, folder=arguments.results)
    print(harness.table(rows_of(harness.plain(results))))
    print(path)


if __name__ == "__main__":
    main()
