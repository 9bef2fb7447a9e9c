"""One predicated optimizer step over flat buffers: norm, flag, AdamW, bf16 weights, without a host
read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.zero1_layout import Bucket, BufferPart, FlatRange, ParamSlot
from megatron_packed.optim.adamw import (
    MAX_SLICE_ELEMENTS,
    OP,
    AdamWInputs,
    Control,
    Slices,
    check_constants,
)
from megatron_packed.optim.clipping import Counted, clip_divisor, norm_and_flag
from megatron_packed.optim.spikes import WATCHED, SpikeDetector
from megatron_packed.optim.statistics import Statistics

if TYPE_CHECKING:
    from megatron_packed.config.sections.optim import OptimizerConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class StepStats:
    """Report of a step: 0-d float32 on the device, the same memory every step.

    Copy it before the next one.
    """

    grad_norm: Tensor
    """L2 norm of all gradients before clipping; inf or nan when they are."""
    nonfinite: Tensor
    """1.0 when a gradient or the loss was not finite, so that the step was skipped, else 0.0."""
    skipped: Tensor
    """1.0 when the step changed nothing, for whatever reason, else 0.0."""
    params_norm: Tensor
    """L2 norm of all parameters after the step; 0 where it is not asked for."""
    grad_zeros: Tensor
    """``(2,)``: gradients that are exactly zero, as `Statistics` holds them; 0 where they are not
    counted.
    """
    spikes: Tensor
    """``(2,)``: `SpikeDetector.medians`; 0 where nothing is compared."""


class Optimizer:
    """AdamW with float32 masters, clipping and a device-side predicate.

    bf16 parameters have a float32 master and are rewritten from it after each step by one copy;
    float32 parameters are their own master. Learning rate, step count, flag and state live on the
    device at fixed addresses.

    Among several owners (ZeRO-1) a rank keeps masters and moments of the parameters that it owns
    and updates those; all ranks then gather the parameters. ``step``, ``write_params`` and
    ``load_state`` are collectives there. Reads: [Note: ownership].

    Args:
        buffers: parameters and gradients; gradients must be summed over ranks (``buffers.reduce``)
        before ``step``.
        beta1, beta2, eps, weight_decay: constants of AdamW (``adamw.py``); weight decay skips
            parameters marked ``no_weight_decay``.
        clip_grad: largest global norm; 0 or less: no clipping.
        norm_group: ranks that together hold every gradient; by default the owners of ``buffers``.
        copies: part of ``buffers`` -> how many ranks of ``norm_group`` own the same of it; 1 where
        not said.
        counted_elsewhere: elements ``[start, end)`` of the gradient buffer that another rank of
            ``norm_group`` holds too and counts.
        params_norm: whether steps tell the norm of the parameters.
        count_zeros_of: elements of the whole model, each once, if steps are to tell how many
        gradients are zero.
        implementation: 'auto' or a name of ``adamw.OP``.
        spikes: compares each step with those before it; None for no comparison. Steps need a
        ``loss`` then.
    Raises:
        ValueError: a constant is out of range.
        NoBackendError: the implementation cannot serve; the message says why.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        clip_grad: float = 1.0,
        norm_group: dist.ProcessGroup | None = None,
        copies: Mapping[BufferPart, int] | None = None,
        counted_elsewhere: Sequence[tuple[int, int]] = (),
        params_norm: bool = False,
        count_zeros_of: int | None = None,
        implementation: str = "auto",
        spikes: SpikeDetector | None = None,
    ) -> None:
        check_constants(beta1, beta2, eps, weight_decay)
        backend = OP.select(AdamWInputs(device_type=buffers.device.type), implementation)
        self.implementation = backend.name
        self._run = backend.loaded.run
        self.buffers = buffers
        self.clip_grad = clip_grad
        self.spikes = spikes
        self._betas = (beta1, beta2)
        self._eps = eps
        device, layout = buffers.device, buffers.layout
        self._owned = [buffers.owned_span(bucket) for bucket in layout.buckets]
        self._norm_group = norm_group or buffers.ownership.group
        # By number of the bucket.
        self._masters = [self._master_of(bucket) for bucket in layout.buckets]
        self._state_base = list(accumulate((end - start for start, end in self._owned), initial=0))
        numel = self._state_base.pop()
        self.exp_avg = torch.zeros(numel, dtype=buffers.grads.dtype, device=device)
        """First moments of what this rank owns, one bucket after the other."""
        self.exp_avg_sq = torch.zeros(numel, dtype=buffers.grads.dtype, device=device)
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self.steps = torch.zeros((), dtype=torch.float32, device=device)
        """Steps taken, skipped ones not counted."""
        gradients, masters = self._counted(copies or {}, counted_elsewhere)
        self._gradients = gradients
        self._statistics = Statistics(
            gradients,
            masters,
            elements=count_zeros_of,
            params_norm=params_norm,
            group=self._norm_group,
            device=device,
        )
        self._stats = self._make_stats()
        self._slices = self._slices_by_decay(weight_decay)
        self.reset_masters()

    @classmethod
    def from_config(
        cls,
        buffers: FlatBuffers,
        config: OptimizerConfig,
        *,
        norm_group: dist.ProcessGroup | None = None,
        copies: Mapping[BufferPart, int] | None = None,
        counted_elsewhere: Sequence[tuple[int, int]] = (),
        params_norm: bool = False,
        count_zeros_of: int | None = None,
        spikes: SpikeDetector | None = None,
    ) -> Optimizer:
        """An optimizer with the values of ``config``."""
        return cls(
            buffers,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            norm_group=norm_group,
            copies=copies,
            counted_elsewhere=counted_elsewhere,
            params_norm=params_norm,
            count_zeros_of=count_zeros_of,
            implementation=config.optimizer_backend,
            spikes=spikes,
        )

    def _counted(
        self, copies: Mapping[BufferPart, int], counted_elsewhere: Sequence[tuple[int, int]]
    ) -> tuple[Counted, Counted]:
        """Return what this rank adds to sums over gradients and over masters, so that all ranks
        together count each element once.
        """
        buffers = self.buffers
        elsewhere = self._owned_pieces(counted_elsewhere)
        owned_grads = buffers.owned_grads()
        gradients = Counted(
            [grads for _, grads in owned_grads],
            [buffers.grads[start:end] for _, start, end in elsewhere],
            [copies.get(part, 1) for part, _ in owned_grads],
        )
        masters = Counted(
            self._masters,
            [self._master(*piece) for piece in elsewhere],
            [copies.get(bucket.part, 1) for bucket in buffers.layout.buckets],
        )
        return gradients, masters

    def _make_stats(self) -> StepStats:
        """Return the memory that every step reports in."""
        device, spikes = self.buffers.device, self.spikes
        return StepStats(
            grad_norm=torch.zeros((), dtype=torch.float32, device=device),
            nonfinite=torch.zeros((), dtype=torch.float32, device=device),
            skipped=torch.zeros((), dtype=torch.float32, device=device),
            params_norm=self._statistics.params_norm,
            grad_zeros=self._statistics.grad_zeros,
            spikes=torch.zeros(len(WATCHED), device=device) if spikes is None else spikes.medians,
        )

    def _slices_by_decay(self, weight_decay: float) -> list[Slices]:
        """Return what this rank updates: with weight decay, and without."""
        ranges = self.buffers.owned_ranges()
        return [
            self._slices_of(
                [item for item in ranges if item.decay == decay], weight_decay if decay else 0.0
            )
            for decay in (True, False)
            if any(item.decay == decay for item in ranges)
        ]

    def set_lr(self, lr: float) -> None:
        """Write the learning rate into its place on the device. Outside a captured region: a graph
        would freeze it.
        """
        self.lr.fill_(lr)  # the value travels as a kernel argument: no host memory to wait for

    @torch.no_grad()
    def step(
        self, lr: float | None = None, *, loss: Tensor | None = None, hold: Tensor | None = None
    ) -> StepStats:
        """Queue one step; nothing waits for the device.

        Reads: [Note: predicated step]. Gradients may hold their clipped values afterwards.

        Args:
            lr: learning rate of this step; None keeps what ``set_lr`` wrote (for a captured step).
            loss: any tensor on the device whose elements must all be finite, else the step is
            skipped.
            hold: 0-d on the device, the same on all ranks; above 0 the step is skipped too.
        """
        if lr is not None:
            self.set_lr(lr)
        norm, nonfinite = norm_and_flag(self._gradients, loss, group=self._norm_group)
        skip = nonfinite if hold is None else nonfinite.maximum((hold > 0).to(torch.float32))
        if self.spikes is not None:
            assert loss is not None, "the loss of each step is watched"
            skip = self.spikes.observe(loss, norm, skip)
        self.steps.add_(1.0 - skip)
        control = Control(
            lr=self.lr,
            step=self.steps,
            skip=skip,
            grad_divisor=clip_divisor(norm, self.clip_grad) if self.clip_grad > 0 else None,
            beta1=self._betas[0],
            beta2=self._betas[1],
            eps=self._eps,
        )
        self._statistics.before_update()
        self._run(self._slices, control)
        self._statistics.after_update()  # before the parameters are on their way to other ranks
        self.write_params()
        self._stats.grad_norm.copy_(norm)
        self._stats.nonfinite.copy_(nonfinite)
        self._stats.skipped.copy_(skip)
        return self._stats

    @torch.no_grad()
    def write_params(self) -> None:
        """Rewrite the parameters from their masters, a copy for each bucket. Call it after masters
        were loaded.
        """
        self.buffers.wait_params()
        for bucket, master in self._low_masters():
            self.buffers.owned_params(bucket).copy_(master)
        self.buffers.gather_params()

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Take the masters from the bf16 parameters. Call it after weights were loaded into the
        module without them.
        """
        self.buffers.wait_params()
        for bucket, master in self._low_masters():
            master.copy_(self.buffers.owned_params(bucket))

    def _master_of(self, bucket: Bucket) -> Tensor:
        """Return what this rank updates of a bucket: float32 parameters, or a float32 copy of bf16
        ones.
        """
        params = self.buffers.owned_params(bucket)
        return params.float() if bucket.part.dtype == torch.bfloat16 else params

    def _low_masters(self) -> list[tuple[Bucket, Tensor]]:
        """Masters that are copies, each with its bucket."""
        pairs = zip(self.buffers.layout.buckets, self._masters)
        return [(bucket, master) for bucket, master in pairs if bucket.part.dtype == torch.bfloat16]

    def state_shards(self) -> dict[str, Tensor]:
        """This rank's state as 1-D float32 views by global name; load by writing into them, then
        ``write_params()``.

        ``master/<name>`` (for a float32 parameter that is the parameter itself),
        ``exp_avg/<name>``, ``exp_avg_sq/<name>`` and ``step`` (one element, alike on all ranks).
        Together those of all ranks also determine every parameter. An only owner has every tensor
        whole; among several it begins where ``state_starts`` says, and names of which the rank owns
        nothing are absent.
        """
        shards = {}
        for slot in self.buffers.layout.slots:
            if (owned := self._owned_part(slot)) is not None:
                in_state = self._state_slice(slot.bucket, *owned)
                shards[f"master/{slot.name}"] = self._master(slot.bucket, *owned)
                shards[f"exp_avg/{slot.name}"] = self.exp_avg[in_state]
                shards[f"exp_avg_sq/{slot.name}"] = self.exp_avg_sq[in_state]
        shards["step"] = self.steps.view(1)
        return shards

    def state_starts(self) -> dict[str, int]:
        """Return where in the flattened tensor each entry of ``state_shards`` begins."""
        starts = {"step": 0}
        for slot in self.buffers.layout.slots:
            if (owned := self._owned_part(slot)) is not None:
                kinds = ("master", "exp_avg", "exp_avg_sq")
                starts |= {f"{kind}/{slot.name}": owned[0] - slot.start for kind in kinds}
        return starts

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the whole state, whichever ranks own it."""
        shapes: dict[str, tuple[int, ...]] = {"step": (1,)}
        for slot in self.buffers.layout.slots:
            shapes |= {
                f"{kind}/{slot.name}": slot.shape for kind in ("master", "exp_avg", "exp_avg_sq")
            }
        return shapes

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy a whole state (names of ``global_shapes``, any shape of the right size) in place.

        Raises:
            ValueError: names are missing or unknown, or a size differs; nothing was changed then.
        """
        shapes = self.global_shapes()
        missing, unknown = (
            sorted(shapes.keys() - state.keys()),
            sorted(state.keys() - shapes.keys()),
        )
        if missing or unknown:
            raise ValueError(
                f"the optimizer state does not fit: missing {missing}, unknown {unknown}."
            )
        for name, shape in shapes.items():
            if state[name].numel() != math.prod(shape):
                raise ValueError(
                    f"optimizer state {name} has {state[name].numel()} elements, expected {math.prod(shape)}."
                )
        starts = self.state_starts()
        for name, view in self.state_shards().items():
            view.copy_(state[name].reshape(-1)[starts[name] : starts[name] + view.numel()])
        self.write_params()

    def _owned_pieces(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Return what this rank owns of elements ``[start, end)`` of the gradient buffer: bucket, first
        and last element.
        """
        return [
            (bucket, max(start, first), min(end, last))
            for start, end in ranges
            for bucket, (first, last) in enumerate(self._owned)
            if max(start, first) < min(end, last)
        ]

    def _owned_part(self, slot: ParamSlot) -> tuple[int, int] | None:
        """Elements of ``slot`` that this rank owns; an empty parameter is the first rank's."""
        if slot.start == slot.end:
            return (slot.start, slot.end) if self.buffers.owners(slot.part).rank == 0 else None
        first, last = self._owned[slot.bucket]
        start, end = max(slot.start, first), min(slot.end, last)
        return (start, end) if start < end else None

    def _state_slice(self, bucket: int, start: int, end: int) -> slice:
        """Elements ``[start, end)`` of the gradient buffer, as they are numbered in the moments."""
        shift = self._state_base[bucket] - self._owned[bucket][0]
        return slice(start + shift, end + shift)

    def _slices_of(self, ranges: list[FlatRange], weight_decay: float) -> Slices:
        pieces = [
            (item.bucket, start, min(start + MAX_SLICE_ELEMENTS, item.end))
            for item in ranges
            for start in range(item.start, item.end, MAX_SLICE_ELEMENTS)
        ]
        return Slices(
            weight_decay=weight_decay,
            params=[self._master(*piece) for piece in pieces],
            grads=[self.buffers.grads[start:end] for _, start, end in pieces],
            exp_avgs=[self.exp_avg[self._state_slice(*piece)] for piece in pieces],
            exp_avg_sqs=[self.exp_avg_sq[self._state_slice(*piece)] for piece in pieces],
        )

    def _master(self, bucket: int, start: int, end: int) -> Tensor:
        """Masters of elements ``[start, end)`` of the gradient buffer."""
        offset = self._owned[bucket][0]
        return self._masters[bucket][start - offset : end - offset]
