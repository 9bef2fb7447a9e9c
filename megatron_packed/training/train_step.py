"""Optimizer step: forward and backward of every micro-batch, one reduction, one predicated update.

The step never waits for the device. Its metrics are copied to the host as one small vector
(``training/late_metrics.py``).

[Note: parts of a step]
A step has a beginning, a part for each micro-batch, and an end. The beginning is a few kernel
launches with numbers of the host: learning rate, stop flag. The end is the sums over ranks, the
norm, the update and the metrics. The parts read everything that changes from step to step from the
device, including the number of the micro-batch. So each part can be captured in a CUDA graph
(``cuda_graphs/whole_step_graphs.py``), and a replay does the same as the functions of `TrainStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.hang_detection import UNWATCHED, DeviceWatch
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.lm_head_and_loss import HybridOutput
from megatron_packed.models.metrics_layout import ASSIGNED, ExpertCounts, MetricsLayout
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.packed.micro_batch import MicroBatch

if TYPE_CHECKING:
    from megatron_packed.cuda_graphs.step_graphs import StepGraphs
    from megatron_packed.distributed.overlapped_collectives import OverlappedReduce

MICRO_BATCH, LAST_MICRO_BATCH, VALIDATION = "micro-batch", "last micro-batch", "validation"
"""Names of `TrainStep.parts`.

The last micro-batch is a separate part only if the gradient reduction overlaps with it.
"""


_OPTIMIZER_TENSORS = ("exp_avg", "exp_avg_sq", "remainders", "lr", "weight_decay", "steps")
"""Attributes of the optimizer that a step reads or writes."""


class StepChecks(NamedTuple):
    """Checks of one step; None for a check that this step does not run."""

    weights: Callable[[], None] | None = None
    """Function that is called after all gradients are complete and before the update."""
    gradients: Callable[[Callable[[], None]], None] | None = None
    """Function that receives the function that sums gradients over replicas.

    It calls that function and checks the sums.
    """


UNCHECKED = StepChecks()
"""Checks of a step without any check, as most steps are."""


class TrainStep:
    """Optimizer step of one model.

    [Note: which ranks a sum goes over]
    Gradients, losses and counts are summed over the ranks that hold the same shard (``dp_cp``); each
    of these ranks has other tokens. Tensor-parallel ranks compute the same losses and counts. They
    compute different gradients for parameters that they hold together, so those gradients are first
    summed over ``tp``. Signs are values of one rank: whether it must stop, whether tensors of its
    graphs have moved, and its first bad micro-batch. They differ between all ranks and are summed
    over both groups.

    [Note: steps without targets]
    The host knows the number of target tokens of its micro-batches. ``_begin`` writes it into a slot
    that is summed with the gradients. So every rank has the sum on the device, also in a replayed
    ``finish``. If the sum is zero, the step is skipped like a non-finite step; otherwise momentum and
    weight decay would still move the weights.

    [Note: steps that are done again]
    If an expert buffer overflows on any rank, the step is not applied. A flag on the device also
    holds all later steps until the host has read the flag and calls ``redo``. So steps take effect
    in their order, and the weights equal those of a run with buffers for all rows.

    Args:
        model: the model, whose parameters are in ``buffers``.
        buffers: flat parameters and gradients, with the slots of `MetricsLayout`.
        optimizer: optimizer of the same buffers.
        groups: process groups of this rank.
        overlap: reduce gradients over data-parallel ranks while the last backward pass still runs.
    """

    def __init__(
        self,
        model: HybridModel,
        buffers: FlatBuffers,
        optimizer: Optimizer,
        groups: ParallelGroups,
        *,
        overlap: bool = False,
    ) -> None:
        self.model = model
        self.buffers = buffers
        self.optimizer = optimizer
        self.groups = groups
        self.device = buffers.device
        self.graphs: StepGraphs | None = None
        """Captured graphs of layers or of whole parts of a step; None: everything runs eagerly."""
        self.hang_detector: DeviceWatch = UNWATCHED
        """Gets a sign before every micro-batch. See [Note: hangs that no timeout sees]."""
        self.layout = MetricsLayout.from_model(model, groups)
        self._extras = buffers.tail
        self._signs = self._extras[self.layout.signs]
        # Flags of this rank: stop requested, weights moved. They are in pinned memory, so that
        # their copy does not block the host.
        self._own_signs = torch.zeros(2, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        # Tensor-parallel ranks compute different gradients for parameters that all of them hold.
        # These gradients are summed over ``tp`` before the sum over replicas.
        self._shared = model.shared_gradients()
        self.overlapped: OverlappedReduce | None = None
        if overlap:
            from megatron_packed.distributed.overlapped_collectives import OverlappedReduce

            self.overlapped = OverlappedReduce(
                buffers, groups, model.stages, late=self._shared.parameters
            )
        size, counts = self.layout.size, sum(self.layout.counters.values())
        self.numbers = torch.zeros(size + counts, dtype=torch.float32, device=self.device)
        """Metrics and counters, copied to the host by one copy; `layout` describes the slots."""
        # A view of ``numbers``, so that one copy takes metrics and counters from a fixed address.
        self.metrics = self.numbers[:size]
        # float64, because a validation adds up too many losses for the digits of float32.
        self.validation_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        """Sum of the losses that `validate` has added on this rank; set it to zero first."""
        self.validation_overflow = torch.zeros((), dtype=torch.float32, device=self.device)
        """Number of micro-batches whose expert buffers overflowed; set it to zero first."""
        self._has_experts = model.num_moe_layers > 0
        self._experts = ExpertCounts(buffers, groups)
        # The flag is on the device: steps after an overflow must be held before the host has read
        # the overflow.
        self._held = torch.zeros(1, dtype=torch.float32, device=self.device)
        self._input_grad_sum = torch.zeros((), dtype=torch.float32, device=self.device)
        # A non-finite value in any part of the backward pass reaches the gradient of the embedding's
        # output. Graphs of layers do not contain the embedding, so its hooks run for every
        # micro-batch.
        model.embedding.register_forward_hook(self._watch_gradient)

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        lr: float,
        *,
        weight_decay: float | None = None,
        stop_requested: bool = False,
        checks: StepChecks = UNCHECKED,
    ) -> Tensor:
        """Queue one step. See [Note: parts of a step].

        Args:
            micro_batches: micro-batches of this rank, on the device or in pinned host memory; each
                is copied to the device in one copy.
            lr: learning rate of this step.
            weight_decay: weight decay of this step, if it changes between steps; None keeps the
                previous one.
            stop_requested: this rank has a request to stop; the returned vector reports it to all
                ranks.
            checks: checks of this step, on all ranks. If gradient sums are checked, the reduction
                does not overlap with the backward pass, and the end of the step is not replayed.
        Returns:
            The metrics vector ``(layout.size,)`` float32 on the device; the same memory
            every step.
        Raises:
            GraphFallbackError: ``--cuda-graph-strict``, and a micro-batch would run eagerly.
        """
        targets = sum(micro_batch.num_target_tokens for micro_batch in micro_batches)
        self._begin(lr, weight_decay, stop_requested, targets)
        # Only the last backward pass completes gradients, so only this pass can overlap with the
        # reduction.
        for number, micro_batch in enumerate(micro_batches, start=1):
            sums = (
                self.overlapped is not None
                and checks.gradients is None
                and number == len(micro_batches)
            )
            if sums:
                self._run(LAST_MICRO_BATCH, self.last_micro_batch, micro_batch)
            else:
                self._run(MICRO_BATCH, self.micro_batch, micro_batch)
        # Check weights before the update: its cast from the masters would hide a corrupted weight.
        if checks.weights is not None:
            checks.weights()
        if checks.gradients is not None:
            self.finish(checks.gradients)
        elif self.graphs is not None:
            self.graphs.finish_step(self.finish)
        else:
            self.finish()
        return self.metrics

    def redo(
        self,
        micro_batches: Sequence[MicroBatch],
        lr: float,
        *,
        weight_decay: float | None = None,
        stop_requested: bool = False,
        checks: StepChecks = UNCHECKED,
    ) -> Tensor:
        """Repeat the first held step with room for all experts' rows; all ranks call it together.

        Arguments and result are those of a step. The caller then runs the later held steps again as
        usual. See [Note: steps that are done again].
        """
        self._held.zero_()
        with self.room_for_experts():
            return self(
                micro_batches,
                lr,
                weight_decay=weight_decay,
                stop_requested=stop_requested,
                checks=checks,
            )

    @contextmanager
    def room_for_experts(self) -> Iterator[None]:
        """Give expert buffers the size that they need inside the block, so that none overflows.

        Graphs that were captured with bounded buffers are not replayed inside the block.
        """
        with ExitStack() as stack:
            stack.enter_context(self.model.full_expert_buffers())
            if self.graphs is not None and self.model.bounds_expert_buffers:
                reason = (
                    "it needs an expert buffer for all rows, and its graphs have a smaller buffer"
                )
                stack.enter_context(self.graphs.bypassed(reason))
            yield

    def validate(self, micro_batch: MicroBatch) -> None:
        """Add the loss of one micro-batch, summed over its target tokens, to ``validation_loss``.

        If an expert buffer overflows, ``validation_overflow`` becomes positive. The validation must
        then be repeated inside ``room_for_experts()``.
        """
        self._run(VALIDATION, self.validation_micro_batch, micro_batch)

    @property
    def parts(self) -> Mapping[str, Callable[[MicroBatch], object]]:
        """Name of a part -> function that runs the part on a micro-batch of the device.

        The functions write their results to fixed addresses.
        """
        return {
            MICRO_BATCH: self.micro_batch,
            LAST_MICRO_BATCH: self.last_micro_batch,
            VALIDATION: self.validation_micro_batch,
        }

    def forward_backward(self, micro_batch: MicroBatch) -> HybridOutput:
        """Run forward and backward of a micro-batch; only the flat buffer's gradients change."""
        with nullcontext() if self.model.offload is None else self.model.offload.whole_pass():
            return self.model.forward_backward(micro_batch)

    def micro_batch(self, micro_batch: MicroBatch) -> None:
        """Run a micro-batch and add its gradients, losses and counts to those of the step."""
        output = self.forward_backward(micro_batch)
        extras = self.buffers.extras
        with torch.no_grad():
            # The scales are device tensors, because a graph would freeze a number of the host.
            extras["loss"].add_(output.loss_sum * micro_batch.scales[0])
            if "mtp_losses" in extras:
                scales = micro_batch.depth_scales[: self.layout.depths]
                extras["mtp_losses"].add_(output.depth_loss_sums * scales)
            if self._has_experts:
                extras["aux_loss"].add_(output.aux_loss * micro_batch.scales[1])
                extras["overflow"].add_(output.expert_overflow)
                self._experts.add(output)
            # Store the number of the first bad micro-batch only: a later one does not overwrite it.
            number = extras["micro_batches"].add_(1)[0]
            slot = extras["bad_micro_batches"][self.groups.rank]
            nonfinite = ~torch.isfinite(output.loss) | ~torch.isfinite(self._input_grad_sum)
            slot.copy_(torch.where(nonfinite & (slot == 0), number, slot))

    def last_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Run the last micro-batch of a step, and reduce gradients during its backward pass.

        Otherwise it does the same as `micro_batch`. When it returns, the current stream waits for
        the reductions.
        """
        assert self.overlapped is not None
        # Hooks of the backward pass start a bucket's sum as soon as its gradients are complete.
        self.overlapped.begin()
        try:
            self.micro_batch(micro_batch)
        except BaseException:
            # For example, a capture has failed. Later backward passes must not start reductions.
            self.overlapped.abandon()
            raise
        self.overlapped.join()

    def validation_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Add the results of a micro-batch to ``validation_loss`` and ``validation_overflow``."""
        self.model.eval()  # a validation runs without dropout
        try:
            with torch.no_grad():
                output: HybridOutput = self.model(micro_batch)
                self.validation_loss.add_(output.loss_sum)
                self.validation_overflow.add_(output.expert_overflow)
        finally:  # restore the mode after a failed capture, too, since training continues
            self.model.train()

    def finish(self, check: Callable[[Callable[[], None]], None] | None = None) -> None:
        """Finish a step after its last micro-batch: sums over ranks, update, and metrics.

        Args:
            check: called with the function that sums over replicas; it calls that function and
                checks the sums. No micro-batch of the step may have started the sums.
        """
        if check is None:
            self._reduce_over_tp()
            self._reduce_over_replicas()
        else:
            if self.overlapped is not None:
                self.overlapped.begin()
                self.overlapped.join()
            self._reduce_over_tp()
            check(self._reduce_over_replicas)
        extras = self.buffers.extras
        # Read after the sums over ranks, so that an overflow on one rank holds the step on all ranks.
        self._held.add_(extras["overflow"])
        with record_function("optim::step"):
            # The decision is on the device, so it works in a replay. See [Note: steps without
            # targets].
            no_targets = (extras["targets"][0] == 0).to(torch.float32)
            stats = self.optimizer.step(loss=extras["loss"], hold=self._held[0] + no_targets)
        if self._has_experts:
            counts = self._experts.sums()
            self.numbers[self.metrics.numel() :].copy_(torch.cat(list(counts.values())))
            # A skipped step does not change expert biases. Otherwise a repeated step would change
            # them twice.
            config = self.model.config
            if config.moe_router_enable_expert_bias and config.balances_experts:
                self.model.update_expert_bias(counts[ASSIGNED], skip=stats.skipped.bool())
        computed = {
            "grad_norm": stats.grad_norm,
            "nonfinite": stats.nonfinite,
            "held": self._held,
            "params_norm": stats.params_norm,
            "grad_zeros": stats.grad_zeros,
            "spikes": stats.spikes,
        }
        self.layout.write(self._extras, computed, out=self.metrics)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Allow parts of a step to run inside the block on any data, without a lasting effect.

        All ranks enter the block together. Gradients are zero afterwards.
        """
        from megatron_packed.cuda_graphs.slots import values_restored

        # A capture and its warm-up run the real step. The flag ``_held`` keeps it from changing
        # weights and moments; the other tensors that it changes are restored.
        sums = [self.numbers, self.validation_loss, self.validation_overflow]
        changed = [self._held, self.optimizer.skipped, *sums, *self.model.buffers()]
        with values_restored(changed):
            self._held.fill_(1.0)
            yield
        self.buffers.zero_grad()

    def places(self) -> list[tuple[Mapping[str, Any], str]]:
        """Return (container, name) of every tensor that parts of a step use and that outlives a step.

        Graphs verify that these tensors have not been reallocated.
        """
        optimizer, buffers, spikes = vars(self.optimizer), vars(self.buffers), self.optimizer.spikes
        parameters = self.buffers.parameters.values()
        modules = (
            place for part in self.model.modules() for place in (part._parameters, part._buffers)
        )
        return [
            *((place, name) for place in modules for name in place),
            *((vars(parameter), "main_grad") for parameter in parameters),
            *((optimizer, name) for name in _OPTIMIZER_TENSORS),
            *((vars(spikes), name) for name in ("recent", "medians") if spikes is not None),
            (buffers, "storage"),
        ]

    def reset_sums(self) -> None:
        """Set to zero what the micro-batches of a step add up: gradients, losses, counts, loads."""
        self.buffers.zero_grad()
        if self.model.global_balance is not None:
            self.model.global_balance.begin_step()

    def _begin(
        self, lr: float, weight_decay: float | None, stop_requested: bool, targets: int
    ) -> None:
        self.reset_sums()
        self.optimizer.set_lr(lr)
        # Like the rate, it is on the device, because a graph would freeze a number of the host.
        if weight_decay is not None:
            self.optimizer.set_weight_decay(weight_decay)
        # The number is passed as a kernel argument, so no copy from host memory is needed.
        self.buffers.extras["targets"].fill_(targets)
        # The previous step's copy of the pinned flags may still run and read the new values early.
        # This is harmless: a flag stays set until all ranks have seen it.
        self._own_signs[0] = stop_requested
        self._own_signs[1] = self.graphs is not None and self.graphs.addresses_changed
        self._signs[:2].copy_(self._own_signs, non_blocking=True)

    def _run(
        self, part: str, function: Callable[[MicroBatch], object], micro_batch: MicroBatch
    ) -> None:
        """Run one of ``parts`` on a micro-batch, by replay if possible."""
        # Send the heartbeat before queueing, because the host may then block in the driver.
        self.hang_detector.beat()
        if self.graphs is not None:
            self.graphs.run(part, function, micro_batch)
        else:
            function(micro_batch.to(self.device, non_blocking=True))

    def _reduce_over_tp(self) -> None:
        """Sum gradients and signs over ranks. See [Note: which ranks a sum goes over]."""
        if self.groups.tp.group is None:
            return
        with record_function("tp::reduce"):
            self._shared.sum()
            all_reduce_sum(self._signs, self.groups.tp.group)

    def _reduce_over_replicas(self) -> None:
        with record_function("dp::reduce"):
            if self.overlapped is not None:
                self.overlapped.finish()
            else:
                self.buffers.reduce(self.groups)

    def _watch_gradient(self, _module: nn.Module, _inputs: object, embedded_TD: Tensor) -> None:
        if embedded_TD.requires_grad:
            embedded_TD.register_hook(self._keep_sum)  # type: ignore[no-untyped-call]

    def _keep_sum(self, grad_TD: Tensor) -> None:
        self._input_grad_sum.copy_(grad_TD.sum(dtype=torch.float32))
