"""Time of a training step on GPUs whose rates were measured, computed without a GPU.

The trace of a micro-batch (`traced_work.py`) has the kernels and exchanges of a rank, and `GpuRates`
their times. The sum is the time of a step in CUDA graphs with the default kernels: one kernel after
the other, exchanges that nothing hides, and the update. Experts are balanced, and packs are full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.collectives import SYMMETRIC_MEMORY
from megatron_packed.distributed.collectives import PlannedExchange
from megatron_packed.distributed.flat_buffers import flat_layout_of
from megatron_packed.distributed.gradient_precision import GradientPrecision
from megatron_packed.distributed.zero1_layout import FlatLayout, Ownership
from megatron_packed.layers.moe.expert_room import Load
from megatron_packed.models.estimate.gpu_rates import GpuRates
from megatron_packed.models.estimate.rows_of_ranks import slowest_rank
from megatron_packed.models.estimate.step_memory import KnownUnits, MetaStep, Work
from megatron_packed.models.estimate.traced_work import (
    ELEMENTWISE,
    GROUPED,
    LOSS_PRODUCT,
    PRODUCT,
    Calls,
    TracedKernel,
)
from megatron_packed.models.flops import visible_pairs
from megatron_packed.models.trace import Imagined
from megatron_packed.optim.state_precision import FLOAT32_STATE, StatePrecision

_APART = torch.device("cpu")
"""Device whose ops join no products, so that the trace does not depend on the GPU of this machine."""
_BF16, _REMAINDER, _FP32 = 2, 2, 4
_ROUTER_PARTS = 3
"""Products of bf16 parts that compute a router's product in fp32."""
COMPUTE, EXCHANGES, UPDATE, HOST = "compute", "exposed exchanges", "update", "copies to the host"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of a step of one rank."""

    parts: Mapping[str, float]
    """Part of the step -> seconds."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def step_time(
    config: RunConfig,
    imagined: Imagined,
    documents: int,
    lengths: NDArray[np.int64],
    rates: GpuRates,
    known: KnownUnits | None = None,
) -> StepTime:
    """Return the time of a step of a planned run, with balanced experts.

    Args:
        config: configuration of the run.
        imagined: the model of a rank. If the bounds of its expert buffers would follow the routing,
            they become those of balanced experts.
        documents: capacity of a pack in documents.
        lengths: tokens of the documents' pieces, which fill the packs.
        rates: rates of the GPUs.
        known: units that step times of other configurations have traced.
    """
    model, groups = imagined
    if model.expert_room.measured and not model.expert_room.observed:
        model.expert_room.fit(Load(1.0, 1.0))
    work = Work(tokens=config.packing.tokens_per_pack, documents=documents)
    step = MetaStep(model, work, known, _APART).run()
    micro_batches = config.micro_batches_per_step(groups.dp.size)
    layout = owned_layout(config, imagined)
    kernels = KernelTimes(rates, step.calls, config, lengths)
    compute = micro_batches * kernels.total()
    copied = 2 * step.host / rates.host_bytes  # to the host and back, beside the kernels
    exchanged = micro_batches * _pass_exchanges(config, rates, step.calls)
    return StepTime(
        parts={
            COMPUTE: compute,
            EXCHANGES: exchanged + _replica_exchanges(config, imagined, layout, rates),
            UPDATE: _update(layout, rates, StatePrecision.from_config(config)),
            HOST: max(0.0, micro_batches * copied - compute),
        }
    )


def owned_layout(config: RunConfig, imagined: Imagined) -> FlatLayout:
    """Return the layout of the flat buffers of a planned rank."""
    model, groups = imagined
    ownership = (
        Ownership.over if config.parallel.use_distributed_optimizer else Ownership.undivided
    )(groups)
    precision = GradientPrecision.from_config(config.parallel)
    return flat_layout_of(model, ownership, config.parallel.ddp_bucket_size, precision)


class KernelTimes:
    """Times of the kernels of a micro-batch.

    Args:
        rates: rates of the GPU.
        calls: kernels and exchanges -> number of calls.
        config: configuration of the run.
        lengths: tokens of the documents' pieces.
    """

    def __init__(
        self, rates: GpuRates, calls: Calls, config: RunConfig, lengths: NDArray[np.int64]
    ) -> None:
        self._rates = rates
        self._calls = {call: n for call, n in calls.items() if isinstance(call, TracedKernel)}
        self._lengths = np.asarray(lengths, dtype=np.float64)
        self._config = config
        routed = [call.shape[0] for call in self._calls if call.name == "router_logits"]
        # Buffers of experts have room for more rows than balanced experts get. Experts compute parts.
        balanced = max(routed, default=0) * (config.model.moe_router_topk or 0)
        self._expert_rows = -(-balanced // config.expert_parts)
        self._adapters = config.model.has_adapters

    def total(self) -> float:
        """Return the seconds of all kernels, one after the other."""
        return sum(self.by_op().values())

    def by_op(self) -> dict[str, float]:
        """Return op -> seconds of its kernels."""
        times: defaultdict[str, float] = defaultdict(float)
        for call, number in self._calls.items():
            forward, both = self._pair(call)
            times[call.name] += number * (both if call.forward else forward)
        return dict(times)

    def _pair(self, call: TracedKernel) -> tuple[float, float]:
        """Return the seconds of the forward pass, and of forward and backward, of one call."""
        rates = self._rates
        if call.name == PRODUCT:
            # The product of the input's gradient counts by itself.
            product = 2 * prod(call.shape) / rates.product_flops + rates.kernel
            return product, product if call.frozen else 2 * product
        if call.name == LOSS_PRODUCT:
            return self._loss(call.shape)
        if call.name == ELEMENTWISE:
            moved = call.shape[0] / rates.copy_bytes + rates.kernel
            return moved, moved
        if call.name in GROUPED:
            return self._grouped(call)
        if call.name == "router_logits":
            rows, experts = call.shape
            channels = call.inputs.channels
            product = _ROUTER_PARTS * 2 * rows * experts * channels / rates.product_flops
            forward = product + rows * channels * _BF16 / rates.copy_bytes + rates.kernel
            return forward, 3 * forward
        if call.name in ("varlen_attention", "context_parallel_attention"):
            return self._attention(call)
        return self._recurrence(call)

    def _loss(self, shape: tuple[int, ...]) -> tuple[float, float]:
        """Return the time of half of the loss of a chunk: it has two such products, the product of
        the weight's gradient, and a kernel over the logits."""
        rows, *sides = shape
        product = 2 * prod(shape) / self._rates.product_flops
        softmax = rows * max(sides) * _BF16 * self._rates.op_byte["softmax of the loss"][0]
        half = 1.5 * product + softmax / 2
        return half, half

    def _grouped(self, call: TracedKernel) -> tuple[float, float]:
        rates, inputs = self._rates, call.inputs
        rows, width, inner = min(call.shape[0], self._expert_rows), call.shape[1], call.inner
        product = 2 * rows * width * inner / rates.grouped_flops + rates.kernel
        weights = inputs.experts * width * inner
        forward = product + weights * _BF16 / rates.copy_bytes
        of_experts = ((inputs.hidden_in, inputs.channels), (inputs.channels, inputs.hidden_out))
        if self._adapters and (width, inner) in of_experts:
            return forward, 2 * forward  # the weights are frozen
        if self._adapters:
            # A factor of an adapter is so small that the rows decide.
            forward += rows * (width + inner) * _BF16 / rates.copy_bytes
            return forward, 3 * forward
        # The gradient of the input reads the weights, and that of the weights reads and writes sums.
        backward = 2 * product + weights * (_BF16 + 2 * _FP32) / rates.copy_bytes
        return forward, forward + backward

    def _attention(self, call: TracedKernel) -> tuple[float, float]:
        rates, inputs = self._rates, call.inputs
        rows = call.shape[0]
        pairs = visible_pairs(self._lengths, inputs.window_size) * rows / float(self._lengths.sum())
        parallel = self._config.parallel
        if parallel.has_keys_in_order:
            tokens, ranks = self._config.packing.tokens_per_pack, parallel.context_parallel_size
            pairs *= slowest_rank(self._lengths, tokens, ranks, inputs.window_size)
        channels = inputs.num_heads * inputs.head_dim
        both = 3 * 4 * channels * pairs / rates.attention_flops
        both += rows * channels * rates.attention_element + rates.attention_call
        return rates.attention_forward * both, both

    def _recurrence(self, call: TracedKernel) -> tuple[float, float]:
        """Return the time of an op whose time is proportional to the size of its result.

        An op that was not measured counts as a permutation, which reads and writes each row.
        """
        rates, inputs, size = self._rates, call.inputs, prod(call.shape)
        if call.name == "ssd":
            sizes = sorted(rates.scan_element)
            forward, both = (
                float(
                    np.interp(
                        inputs.state_dim, sizes, [rates.scan_element[each][i] for each in sizes]
                    )
                )
                * size
                + rates.scan_call[i]
                for i in range(2)
            )
        elif call.name in rates.state_entry:
            forward, both = (each * size * inputs.key_dim for each in rates.state_entry[call.name])
        else:
            name = inputs.kind if call.name == "activation" else call.name
            rows = call.shape[0]
            if call.name == "activation" and self._expert_rows:
                size = size // rows * min(rows, max(self._expert_rows, 1))
            forward, both = (
                each * size * call.itemsize + (i + 1) * rates.kernel
                for i, each in enumerate(rates.op_byte.get(name, rates.op_byte["permute"]))
            )
        return forward, both


def _pass_exchanges(config: RunConfig, rates: GpuRates, calls: Calls) -> float:
    """Return the exposed seconds of the exchanges inside a micro-batch."""
    total = 0.0
    for call, number in calls.items():
        if isinstance(call, PlannedExchange):
            exposed = rates.overlapped_share if call.overlaps else 1.0
            total += number * exposed * _exchange(config, rates, call)
        elif call.name == "context_parallel_attention":
            total += number * _keys_and_values(config, rates, call)
    return total


def _exchange(config: RunConfig, rates: GpuRates, call: PlannedExchange) -> float:
    """Return the seconds of an exchange inside the forward or backward pass."""
    size = len(call.ranks)
    others = (size - 1) / size
    of_group = rates.exchange_rates(size)
    if call.kind == "all_reduce":
        seconds = 2 * others * call.bytes / of_group.all_reduce
    elif call.kind == "all_to_all":
        sent = others * call.bytes
        seconds = sent / of_group.all_to_all
        if config.parallel.all_to_all_backend == SYMMETRIC_MEMORY:
            seconds = sent / of_group.all_to_all_copies
    elif call.kind in ("send", "broadcast"):
        seconds = call.bytes / of_group.all_to_all
    else:
        seconds = others * call.bytes / of_group.all_gather
    return rates.exchange_call + seconds


def _keys_and_values(config: RunConfig, rates: GpuRates, call: TracedKernel) -> float:
    """Return the seconds in which attention by ``all_gather`` or ``p2p`` exchanges keys and values:
    once in the forward pass, and twice in the backward pass, with their gradients."""
    inputs, ranks = call.inputs, config.parallel.context_parallel_size
    own: int = 2 * call.shape[0] * inputs.num_kv_heads * inputs.head_dim * _BF16
    seconds = rates.exchange_call + (ranks - 1) * own / rates.exchange_rates(ranks).all_gather
    return (3 if call.forward else 1) * seconds


def _replica_exchanges(
    config: RunConfig, imagined: Imagined, layout: FlatLayout, rates: GpuRates
) -> float:
    """Return the exposed seconds of the sums of gradients, and of the gathers of parameters."""
    parallel, groups = config.parallel, imagined.groups
    total = 0.0
    for bucket in layout.buckets:
        size = (groups.expert_dp if bucket.part.expert else groups.dp_cp).size
        if size == 1:
            continue
        of_group, elements = rates.exchange_rates(size), bucket.end - bucket.start
        others, gradient = (size - 1) / size, _BF16 if bucket.part.low else _FP32
        sums, gathers = 2 * others * elements * gradient / of_group.all_reduce, 0.0
        if parallel.use_distributed_optimizer:
            sums = others * elements * gradient / of_group.all_gather
            gathers = others * elements * bucket.part.dtype.itemsize / of_group.all_gather
        summed = rates.overlapped_share if parallel.overlap_grad_reduce else 1.0
        gathered = rates.overlapped_share if config.gathers_during_next_step else 1.0
        total += rates.exchange_call + summed * sums + gathered * gathers
    return total


def _update(layout: FlatLayout, rates: GpuRates, precision: StatePrecision) -> float:
    """Return the seconds in which gradients become zero and the optimizer updates owned parameters.

    The rate was measured with a float32 state. It is scaled by the bytes that the update of an
    element reads and writes, see `update_bytes`; these are 30 with a float32 state.
    """
    measured = update_bytes(FLOAT32_STATE)
    owned = 0.0
    for bucket in layout.buckets:
        start, end = layout.owned_span(bucket, 0)
        owned += (end - start) * update_bytes(precision, low=bucket.part.low) / measured
    return owned * rates.update_element + layout.numel * rates.zero_element


def update_bytes(precision: StatePrecision, *, low: bool = False) -> int:
    """Return the bytes that the update of a bf16 weight reads and writes.

    Args:
        precision: precision of the optimizer's state.
        low: the gradient is bf16. With a float32 state, kernels read a float32 copy of it.
    """
    of_pair, of_master = 2 * (_BF16 + _REMAINDER), 2 * _FP32 + _BF16
    master = of_pair if precision.remainders else of_master
    moments = 2 * (precision.exp_avg.itemsize + precision.exp_avg_sq.itemsize)
    gradient = _BF16 if low and not precision.inputs("cuda").wide else _FP32
    return master + moments + gradient
