"""Optimizer over flat buffers: norm, non-finite flag, AdamW and bf16 weights, without a host sync."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.tensor_parallel_shards import ShardedParameter, shard_of
from megatron_packed.distributed.zero1_layout import Bucket, BufferPart, FlatRange, ParamSlot
from megatron_packed.optim.adamw import (
    MAX_CONVERTED_ELEMENTS,
    MAX_SLICE_ELEMENTS,
    OP,
    Control,
    Slices,
    check_constants,
    run_on,
)
from megatron_packed.optim.clipping import Counted, clip_divisor, norm_and_flag
from megatron_packed.optim.master_remainders import MasterPair, Masters
from megatron_packed.optim.spikes import WATCHED, SpikeDetector
from megatron_packed.optim.state_precision import FLOAT32_STATE, StatePrecision
from megatron_packed.optim.stochastic_rounding import ElementNumbers

if TYPE_CHECKING:
    from megatron_packed.config.sections.optim import OptimizerConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class StepStats:
    """Statistics of a step: 0-d float32 on the device.

    Every step writes to the same memory, so copy the values before the next step.
    """

    grad_norm: Tensor
    """L2 norm of all gradients before clipping; inf or nan if a gradient is."""
    nonfinite: Tensor
    """1.0 if the step was skipped because a gradient or the loss was not finite, else 0.0."""
    skipped: Tensor
    """1.0 if the step changed nothing, for any reason, else 0.0."""
    params_norm: Tensor
    """L2 norm of all trained parameters after the step; 0 if it is not requested."""
    grad_zeros: Tensor
    """``(2,)``: number of gradient elements that are exactly zero, in the format of `Statistics`;
    0 if they are not counted.
    """
    spikes: Tensor
    """``(2,)``: `SpikeDetector.medians`; 0 without a detector."""


class Optimizer:
    """AdamW with masters, clipping and a device-side predicate.

    bf16 parameters have a float32 master. After each step, one copy writes the masters to the
    parameters. With ``remainders``, the parameter is the upper half of its master, and the update
    writes both halves. Float32 parameters are their own masters. Learning rate, step count, flag and
    state are on the device at fixed addresses.

    With several owners (ZeRO-1), a rank stores and updates masters and moments of the parameters
    that it owns, and all ranks then gather the parameters. In this case, ``step``, ``write_params``
    and ``load_state`` are collectives. See [Note: ownership].

    Args:
        buffers: parameters and gradients; gradients must be summed over ranks (``buffers.reduce``)
            before ``step``.
        beta1, beta2, eps, weight_decay: constants of AdamW (``adamw.py``); parameters marked
            ``no_weight_decay`` have no weight decay.
        weight_decay_changes: the weight decay differs between steps (``set_weight_decay``).
        clip_grad: largest global norm; 0 or less disables clipping.
        norm_group: ranks that together hold every gradient; by default the owners of ``buffers``.
        copies: part of ``buffers`` -> number of ranks of ``norm_group`` that own the same elements;
            1 for parts that are not listed.
        counted_elsewhere: ranges ``[start, end)`` of the gradient buffer that another rank of
            ``norm_group`` also holds and counts.
        params_norm: report the norm of the parameters.
        count_zeros_of: number of elements of the whole model, to report the number of gradients that
            are zero; None does not count them.
        implementation: 'auto' or a name of ``adamw.OP``.
        spikes: detector that compares each step with previous steps, for which ``step`` needs a
            ``loss``; None for no comparison.
        precision: precision of moments and masters.
    Raises:
        ValueError: a constant is out of range.
        NoBackendError: the implementation cannot be used; the message has the reasons.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        weight_decay_changes: bool = False,
        clip_grad: float = 1.0,
        norm_group: dist.ProcessGroup | None = None,
        copies: Mapping[BufferPart, int] | None = None,
        counted_elsewhere: Sequence[tuple[int, int]] = (),
        params_norm: bool = False,
        count_zeros_of: int | None = None,
        implementation: str = "auto",
        spikes: SpikeDetector | None = None,
        precision: StatePrecision = FLOAT32_STATE,
    ) -> None:
        check_constants(beta1, beta2, eps, weight_decay)
        backend = OP.select(precision.inputs(buffers.device.type), implementation)
        self.implementation = backend.name
        self.precision = precision
        one_pass = getattr(backend.loaded, "one_pass", False)
        self._run = backend.loaded.run if one_pass else partial(run_on, backend.loaded.run)
        self._writes_weights = precision.remainders or one_pass
        """True if the update writes bf16 weights; otherwise a copy after it does."""
        self.buffers = buffers
        self.clip_grad = clip_grad
        self.spikes = spikes
        self._betas = (beta1, beta2)
        self._eps = eps
        device, layout = buffers.device, buffers.layout
        self._owned = [buffers.owned_span(bucket) for bucket in layout.buckets]
        self._norm_group = norm_group or buffers.ownership.group
        # The masters of these buckets are their weights and remainders.
        paired = [
            self.precision.remainders and bucket.part.dtype == torch.bfloat16
            for bucket in layout.buckets
        ]
        sizes = [end - start for start, end in self._owned]
        of_pairs = [size for size, pair in zip(sizes, paired) if pair]
        self.remainders = torch.zeros(sum(of_pairs), dtype=torch.int16, device=device)
        """Remainders of the masters that this rank owns as pairs, one bucket after the other."""
        remainders = iter(torch.split(self.remainders, of_pairs) if of_pairs else ())
        # Indexed by the number of the bucket.
        self._masters: list[Masters] = [
            MasterPair(buffers.owned_params(bucket), next(remainders))
            if pair
            else self._master_of(bucket)
            for bucket, pair in zip(layout.buckets, paired)
        ]
        self._low_masters = [
            (bucket, master)
            for bucket, master in zip(layout.buckets, self._masters)
            if bucket.part.dtype == torch.bfloat16 and isinstance(master, Tensor)
        ]
        """Float32 masters of bf16 parameters, each with its bucket."""
        self._state_base = list(accumulate(sizes, initial=0))
        numel = self._state_base.pop()
        # Gradients may have fewer bits than float32; those of float64 have moments of float64.
        wide = torch.promote_types(buffers.grads.dtype, torch.float32)
        of_moments = [
            dtype if dtype == torch.bfloat16 else wide
            for dtype in (precision.exp_avg, precision.exp_avg_sq)
        ]
        self.exp_avg = torch.zeros(numel, dtype=of_moments[0], device=device)
        """First moments of the elements that this rank owns, one bucket after the other."""
        self.exp_avg_sq = torch.zeros(numel, dtype=of_moments[1], device=device)
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self.weight_decay = torch.full((), weight_decay, dtype=torch.float32, device=device)
        """Weight decay on the device, used if it changes. See [Note: weight decay on the device]."""
        self.steps = torch.zeros((), dtype=torch.float32, device=device)
        """Number of applied steps; skipped steps are not counted."""
        gradients, masters = self._counted(copies or {}, counted_elsewhere)
        self._gradients = gradients
        self._statistics: Statistics | None = None
        if params_norm or count_zeros_of is not None:
            from megatron_packed.optim.statistics import Statistics

            self._statistics = Statistics(
                gradients,
                masters,
                elements=count_zeros_of,
                params_norm=params_norm,
                group=self._norm_group,
                device=device,
            )
        self._stats = self._make_stats()
        self._slices = self._slices_by_decay(
            self.weight_decay if weight_decay_changes else weight_decay
        )
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
        precision: StatePrecision = FLOAT32_STATE,
    ) -> Optimizer:
        """Build an optimizer with the values of ``config``; for other arguments see `Optimizer`."""
        return cls(
            buffers,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            weight_decay_changes=config.weight_decay_changes,
            clip_grad=config.clip_grad,
            norm_group=norm_group,
            copies=copies,
            counted_elsewhere=counted_elsewhere,
            params_norm=params_norm,
            count_zeros_of=count_zeros_of,
            implementation=config.optimizer_backend,
            spikes=spikes,
            precision=precision,
        )

    def _counted(
        self, copies: Mapping[BufferPart, int], counted_elsewhere: Sequence[tuple[int, int]]
    ) -> tuple[Counted, Counted]:
        """Return the gradients and the masters of this rank for sums over ranks.

        The information on copies lets all ranks together count each element once.
        """
        buffers = self.buffers
        elsewhere = self._owned_pieces(counted_elsewhere)
        owned_grads = buffers.owned_grads()
        gradients = Counted(
            [grads for _, grads in owned_grads],
            [buffers.gradients(start, end) for _, start, end in elsewhere],
            [copies.get(part, 1) for part, _ in owned_grads],
        )
        masters = Counted(
            self._masters,
            [self._master(*piece) for piece in elsewhere],
            [copies.get(bucket.part, 1) for bucket in buffers.layout.buckets],
        )
        return gradients, masters

    def _make_stats(self) -> StepStats:
        """Return the tensors into which every step writes its statistics."""
        zero = partial(torch.zeros, dtype=torch.float32, device=self.buffers.device)
        statistics, spikes = self._statistics, self.spikes
        return StepStats(
            grad_norm=zero(()),
            nonfinite=zero(()),
            skipped=zero(()),
            params_norm=zero(()) if statistics is None else statistics.params_norm,
            grad_zeros=zero(2) if statistics is None else statistics.grad_zeros,
            spikes=zero(len(WATCHED)) if spikes is None else spikes.medians,
        )

    def _slices_by_decay(self, weight_decay: float | Tensor) -> list[Slices]:
        """Return the slices that this rank updates.

        Slices are apart by weight decay, by the dtype of their gradients, and by `_stands_apart`.
        """
        alike: dict[tuple[bool, bool, bool], list[FlatRange]] = {}
        for item in self.buffers.owned_ranges():
            kind = (item.decay, item.part.low, self._stands_apart(item.part))
            alike.setdefault(kind, []).append(item)
        return [
            self._slices_of(items, weight_decay if decay else 0.0)
            for (decay, _, _), items in alike.items()
        ]

    def set_lr(self, lr: float) -> None:
        """Write the learning rate to the device.

        Do not call it inside a capture, because a graph would freeze the value.
        """
        self.lr.fill_(lr)  # the value is a kernel argument, so no copy from host memory is needed

    def set_weight_decay(self, weight_decay: float) -> None:
        """Write the weight decay of the next step to the device, as `set_lr` does.

        Only an optimizer with ``weight_decay_changes`` reads it.
        """
        self.weight_decay.fill_(weight_decay)

    @property
    def skipped(self) -> Tensor:
        """0-d float32: 1.0 if the last step changed nothing, else 0.0."""
        return self._stats.skipped

    @torch.no_grad()
    def step(
        self, lr: float | None = None, *, loss: Tensor | None = None, hold: Tensor | None = None
    ) -> StepStats:
        """Queue one step, without a wait for the device.

        See [Note: predicated step]. Gradients may hold their clipped values afterwards.

        Args:
            lr: learning rate of this step; None uses the value of ``set_lr`` (for a captured step).
            loss: any tensor on the device; the step is skipped if an element is not finite.
            hold: 0-d tensor on the device, the same on all ranks; the step is skipped if it is
                above 0.
        """
        if lr is not None:
            self.set_lr(lr)
        norm, nonfinite = norm_and_flag(self._gradients, loss, group=self._norm_group)
        skip = nonfinite if hold is None else nonfinite.maximum((hold > 0).to(torch.float32))
        divisor = clip_divisor(norm, self.clip_grad) if self.clip_grad > 0 else None
        if self.spikes is not None:
            assert loss is not None, "the loss of each step is watched"
            skip = self.spikes.observe(loss, norm, skip)
        self.steps.add_(1.0 - skip)
        control = Control(
            lr=self.lr,
            step=self.steps,
            skip=skip,
            grad_divisor=divisor,
            beta1=self._betas[0],
            beta2=self._betas[1],
            eps=self._eps,
        )
        if self._statistics is not None:
            self._statistics.before_update()
        if self._writes_weights:
            self.buffers.wait_params()
        self._run(self._slices, control)
        if self._statistics is not None:
            self._statistics.after_update()  # before the gather of the parameters begins
        self.write_params(by_update=self._writes_weights)
        self._stats.grad_norm.copy_(norm)
        self._stats.nonfinite.copy_(nonfinite)
        self._stats.skipped.copy_(skip)
        return self._stats

    @torch.no_grad()
    def write_params(self, *, by_update: bool = False) -> None:
        """Copy the masters to the parameters, one copy per bucket; call it after masters are loaded.

        The weights of pairs are written with their masters, so ranks only gather them.

        Args:
            by_update: the update has written all weights, so ranks only gather them.
        """
        self.buffers.wait_params()
        for bucket, master in () if by_update else self._low_masters:
            self.buffers.owned_params(bucket).copy_(master)
        self.buffers.gather_params()

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Copy the bf16 parameters to the masters; call it after weights are loaded without masters."""
        self.buffers.wait_params()
        for bucket, master in self._low_masters:
            master.copy_(self.buffers.owned_params(bucket))
        self.remainders.zero_()

    def _stands_apart(self, part: BufferPart) -> bool:
        """Return whether slices of a part have tensors that those of float32 parameters lack."""
        return part.dtype == torch.bfloat16 and self._writes_weights

    def _master_of(self, bucket: Bucket) -> Tensor:
        """Return this rank's masters of a bucket: its float32 parameters, or a float32 copy of bf16."""
        params = self.buffers.owned_params(bucket)
        return params.float() if bucket.part.dtype == torch.bfloat16 else params

    def state_shards(self) -> dict[str, Tensor]:
        """Return this rank's state as 1-D views by global name.

        To load a state, write into the views and call ``write_params()``. Names are
        ``master/<name>``, ``exp_avg/<name>``, ``exp_avg_sq/<name>`` and ``step``. The master of a
        float32 parameter is the parameter itself. ``step`` has one element, the same on all ranks.
        A pair has ``remainder/<name>`` in place of ``master/<name>``; see `pairs`.
        The shards of all ranks together determine every parameter. A single owner has whole tensors.
        With several owners, a view begins at the element that ``state_starts`` returns, and a
        parameter of which the rank owns no element is absent.
        """
        shards = {}
        for slot in self.buffers.layout.slots:
            if (owned := self._owned_part(slot)) is not None:
                in_state = self._state_slice(slot.bucket, *owned)
                master = self._master(slot.bucket, *owned)
                if isinstance(master, Tensor):
                    shards[f"master/{slot.name}"] = master
                else:
                    shards[f"remainder/{slot.name}"] = master.remainders
                shards[f"exp_avg/{slot.name}"] = self.exp_avg[in_state]
                shards[f"exp_avg_sq/{slot.name}"] = self.exp_avg_sq[in_state]
        shards["step"] = self.steps.view(1)
        return shards

    def pairs(self) -> dict[str, MasterPair]:
        """Return this rank's masters that are pairs, by the name of the parameter.

        Each begins at the element of ``master/<name>`` in `state_starts`. After a change of masters,
        ``write_params()`` gives the weights to the other ranks.
        """
        masters = {
            slot.name: self._master(slot.bucket, *owned)
            for slot in self.buffers.layout.slots
            if (owned := self._owned_part(slot)) is not None
        }
        return {name: pair for name, pair in masters.items() if isinstance(pair, MasterPair)}

    def state_starts(self) -> dict[str, int]:
        """Return the index in the flattened tensor at which each view of ``state_shards`` begins."""
        starts = {"step": 0}
        for slot in self.buffers.layout.slots:
            if (owned := self._owned_part(slot)) is not None:
                kinds = ("master", "remainder", "exp_avg", "exp_avg_sq")
                starts |= {f"{kind}/{slot.name}": owned[0] - slot.start for kind in kinds}
        return starts

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> unsharded shape of every tensor of the state; a pair is one master."""
        shapes: dict[str, tuple[int, ...]] = {"step": (1,)}
        for slot in self.buffers.layout.slots:
            shapes |= {
                f"{kind}/{slot.name}": slot.shape for kind in ("master", "exp_avg", "exp_avg_sq")
            }
        return shapes

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy an unsharded state (names of ``global_shapes``, any shape of the right size) in place.

        Raises:
            ValueError: names are missing or unknown, or a size differs; nothing is changed then.
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

        def stored(name: str, numel: int) -> Tensor:
            return state[name].reshape(-1)[starts[name] : starts[name] + numel]

        for name, pair in self.pairs().items():
            values = stored(f"master/{name}", pair.numel())
            pair.set(values.to(self.buffers.device, torch.float32))
        for name, view in self.state_shards().items():
            if not name.startswith("remainder/"):
                view.copy_(stored(name, view.numel()))
        self.write_params()

    def _owned_pieces(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Return the parts of ranges of the gradient buffer that this rank owns.

        Each part is the number of its bucket, its first element, and the element after its last.
        """
        return [
            (bucket, max(start, first), min(end, last))
            for start, end in ranges
            for bucket, (first, last) in enumerate(self._owned)
            if max(start, first) < min(end, last)
        ]

    def _owned_part(self, slot: ParamSlot) -> tuple[int, int] | None:
        """Return the range of ``slot`` that this rank owns; the first owner owns empty parameters."""
        if slot.start == slot.end:
            return (slot.start, slot.end) if self.buffers.owners(slot.part).rank == 0 else None
        first, last = self._owned[slot.bucket]
        start, end = max(slot.start, first), min(slot.end, last)
        return (start, end) if start < end else None

    def _state_slice(self, bucket: int, start: int, end: int) -> slice:
        """Return the slice of the moments for elements ``[start, end)`` of the gradient buffer."""
        shift = self._state_base[bucket] - self._owned[bucket][0]
        return slice(start + shift, end + shift)

    def _slices_of(self, ranges: list[FlatRange], weight_decay: float | Tensor) -> Slices:
        """Return slices of ranges of one kind; see `_slices_by_decay`."""
        longest = MAX_CONVERTED_ELEMENTS if ranges[0].part.low else MAX_SLICE_ELEMENTS
        pieces = [
            (item.bucket, start, min(start + longest, item.end))
            for item in ranges
            for start in range(item.start, item.end, longest)
        ]
        masters = [self._master(*piece) for piece in pieces]
        pairs = [master for master in masters if isinstance(master, MasterPair)]
        params = [
            master.weights if isinstance(master, MasterPair) else master for master in masters
        ]
        apart = self._stands_apart(ranges[0].part)
        return Slices(
            weight_decay=weight_decay,
            params=params,
            grads=[self.buffers.gradients(start, end) for _, start, end in pieces],
            exp_avgs=[self.exp_avg[self._state_slice(*piece)] for piece in pieces],
            exp_avg_sqs=[self.exp_avg_sq[self._state_slice(*piece)] for piece in pieces],
            weights=[self._weights(*piece) for piece in pieces] if apart and not pairs else (),
            remainders=[pair.remainders for pair in pairs],
            numbers=[self._numbers(start, end) for _, start, end in pieces]
            if self.precision.draws or self.implementation == "triton"
            else (),
            stochastic=self.precision.draws,
        )

    def _numbers(self, start: int, end: int) -> ElementNumbers:
        """Return the numbers of elements ``[start, end)`` of the gradient buffer."""
        # The rank decides only which copy of a piece is saved.
        shards = {
            name: ShardedParameter(name=name, parameter=item, shard=shard_of(item, 1), rank=0)
            for name, item in self.buffers.parameters.items()
        }
        return ElementNumbers.in_slice(
            self.buffers.layout.slots,
            shards,
            start,
            end,
            self.precision.seed,
            self.buffers.device,
        )

    def _master(self, bucket: int, start: int, end: int) -> Masters:
        """Return the masters of elements ``[start, end)`` of the gradient buffer."""
        offset, masters = self._owned[bucket][0], self._masters[bucket]
        if isinstance(masters, MasterPair):
            return masters.part(start - offset, end - offset)
        return masters[start - offset : end - offset]

    def _weights(self, bucket: int, start: int, end: int) -> Tensor:
        """Return the bf16 parameters of elements ``[start, end)`` of the gradient buffer."""
        owned = self.buffers.owned_params(self.buffers.layout.buckets[bucket])
        offset = self._owned[bucket][0]
        return owned[start - offset : end - offset]
