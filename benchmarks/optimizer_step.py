"""Times one update of AdamW for each precision of its state, against the device's copy bandwidth.

    python benchmarks/optimizer_step.py

The parameters are matrices of 4,096 columns, once whole and once every fourth column of a tensor-parallel
rank, which changes how the numbers of the random draws are computed. ``bytes`` is what an update must
read and write per parameter. The share of the copy bandwidth divides it by the time and by the
bandwidth of a copy, which the same run measures. ``torch`` is torch's fused kernel with float32 state, and the copy
of the masters to bf16 weights that follows it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import harness
from megatron_packed.distributed.tensor_parallel_shards import Shard, ShardedParameter, SplitSegment
from megatron_packed.distributed.zero1_layout import BufferPart, ParamSlot
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.optim.adamw import OP, AdamWInputs, Control, Slices
from megatron_packed.optim.stochastic_rounding import ElementNumbers
from workloads import device_from

COLUMNS = 4096
FULL_ELEMENTS, QUICK_ELEMENTS = 2**30, 2**16
BF16, F32 = torch.bfloat16, torch.float32
STATES: dict[str, dict[str, Any]] = {
    "fp32 masters and moments": {"moments": F32, "remainders": False, "stochastic": False},
    "fp32 masters, bf16 moments": {"moments": BF16, "remainders": False, "stochastic": True},
    "remainders, fp32 moments": {"moments": F32, "remainders": True, "stochastic": False},
    "remainders, bf16 moments": {"moments": BF16, "remainders": True, "stochastic": True},
    "remainders, bf16 moments to nearest": {
        "moments": BF16,
        "remainders": True,
        "stochastic": False,
    },
}


def numbers_of(elements: int, ranks: int, device: torch.device) -> ElementNumbers:
    """Number the elements of matrices that ``ranks`` tensor-parallel ranks split by columns."""
    rows = min(elements // COLUMNS, 4096)
    shard = Shard.from_segments(
        [SplitSegment(noun="channels", count=COLUMNS * ranks)], 0, ranks, dim=1
    )
    slots, shards = [], {}
    for start in range(0, elements, rows * COLUMNS):
        name = f"weight {start}"
        weight = nn.Parameter(torch.empty(rows, COLUMNS, device="meta"))
        shards[name] = ShardedParameter(name=name, parameter=weight, shard=shard, rank=0)
        end = start + rows * COLUMNS
        slots.append(
            ParamSlot(
                name=name,
                shape=tuple(weight.shape),
                part=BufferPart(BF16),
                decay=True,
                start=start,
                end=end,
                bucket=0,
            )
        )
    return ElementNumbers.in_slice(slots, shards, 0, elements, 1, device)


def control_of(device: torch.device) -> Control:
    def scalar(value: float) -> torch.Tensor:
        return torch.full((), value, device=device)

    return Control(
        lr=scalar(1e-4),
        step=scalar(7.0),
        skip=scalar(0.0),
        grad_divisor=scalar(1.5),
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
    )


def slices_of(
    elements: int,
    numbers: ElementNumbers,
    *,
    moments: torch.dtype,
    remainders: bool,
    stochastic: bool,
) -> Slices:
    """Return one slice with random gradients and weights, and moments of zero."""
    device = numbers.runs.device
    weights = torch.randn(elements, dtype=BF16, device=device)
    return Slices(
        weight_decay=0.1,
        params=[weights if remainders else weights.float()],
        grads=[torch.randn(elements, device=device)],
        exp_avgs=[torch.zeros(elements, dtype=moments, device=device)],
        exp_avg_sqs=[torch.zeros(elements, dtype=moments, device=device)],
        weights=() if remainders else [weights],
        remainders=[torch.zeros(elements, dtype=torch.int16, device=device)] if remainders else (),
        numbers=[numbers],
        stochastic=stochastic,
    )


def copy_of(elements: int, device: torch.device) -> Callable[[], object]:
    source = torch.zeros(elements, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def bytes_of(group: Slices) -> int:
    """Return the bytes that an update reads and writes for one parameter."""
    both = [group.params, group.remainders, group.exp_avgs, group.exp_avg_sqs]
    state = sum(tensor.element_size() for tensors in both for tensor in tensors)
    written = sum(tensor.element_size() for tensor in group.weights)
    return 2 * state + written + group.grads[0].element_size()


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table, from results in the form of a result file."""
    return [
        {
            "state": name,
            "ms": harness.shown(found["ms"]),
            "bytes": found["bytes"],
            "share": f"{100 * found['share of copy']:.0f} %",
        }
        for name, found in results["updates"].items()
    ]


def main() -> None:
    """Measure, and save the results after each state."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    elements = QUICK_ELEMENTS if arguments.quick else FULL_ELEMENTS
    timed = harness.wall if device.type == "cpu" else harness.device_time
    control = control_of(device)
    copy = timed(copy_of(elements, device))
    bandwidth = 8 * elements / copy.median
    results: dict[str, Any] = {"elements": elements, "copy": copy, "updates": {}}

    def measure(name: str, update: Callable[[], object], bytes_each: int) -> None:
        time = timed(update)
        share = bytes_each * elements / time.median / bandwidth
        results["updates"][name] = {"ms": time, "bytes": bytes_each, "share of copy": share}
        print(
            f"{name}: {harness.shown(time)}, {bytes_each} bytes, {share:.3f} of a copy", flush=True
        )
        harness.save("optimizer_step", results, folder=arguments.results)

    for name, state in STATES.items():
        inputs = AdamWInputs(
            device_type=device.type,
            exp_avg_dtype=state["moments"],
            exp_avg_sq_dtype=state["moments"],
            remainders=state["remainders"],
        )
        try:
            run = OP.select(inputs, "triton").loaded.run
        except NoBackendError:  # on a CPU, where only the shapes are tried
            run = OP.select(inputs, "reference").loaded.run
        for ranks in (1, 4):
            group = slices_of(elements, numbers_of(elements, ranks, device), **state)
            measure(
                f"{name}, {ranks} rank(s)",
                lambda group=group, run=run: run([group], control),
                bytes_of(group),
            )
            del group
    torch_run = OP.select(AdamWInputs(device_type=device.type), "torch").loaded.run
    group = slices_of(
        elements, numbers_of(elements, 1, device), **STATES["fp32 masters and moments"]
    )

    def today() -> None:
        torch_run([group], control)
        group.weights[0].copy_(group.params[0])

    measure("torch and a copy", today, bytes_of(group))


if __name__ == "__main__":
    main()
