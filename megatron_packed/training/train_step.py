"""One optimizer step: forward and backward of every micro-batch, one reduction, one predicated
update.

Nothing here waits for the device. What the host wants to know leaves as one small vector
(``training/late_metrics.py``).

[Note: parts of a step]
A step is a beginning (a few launches with numbers of the host: learning rate, stop flag), a part
for each micro-batch, and an end (sums over ranks, norm, update, metrics). The parts read what
changes from step to step, the number of the micro-batch included, from the device, so each can be
captured in a CUDA graph; `TrainStep` says what they do, and whether a function or a graph does it
makes no difference (``cuda_graphs/whole_step_graphs.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_packed.cuda_graphs.slots import values_restored
from megatron_packed.cuda_graphs.step_graphs import StepGraphs
from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.overlapped_collectives import OverlappedReduce
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.lm_head_and_loss import HybridOutput
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.metrics_layout import MetricsLayout
from megatron_packed.training.replica_checks import UNCHECKED, StepChecks

MICRO_BATCH, LAST_MICRO_BATCH, VALIDATION = "micro-batch", "last micro-batch", "validation"
"""Names of `TrainStep.parts`. The last one is another part only where sums overlap with it."""


class TrainStep:
    """Runs optimizer steps of one model.

    [Note: which ranks a sum goes over]
    Gradients, losses and counts: over the ranks that hold the same shard (``dp_cp``), each with
    tokens of its own. Tensor-parallel ranks have found the same losses and counts, and different
    gradients; what they found of the gradients of parameters that they hold together is summed
    before. Signs (this rank was asked to stop, what its graphs use has moved, its first bad
    micro-batch) differ between all ranks: their sum goes over both groups.

    [Note: steps without targets]
    The host knows the target tokens of its micro-batches. ``_begin`` writes their number into a
    slot that is summed with the gradients, so every rank sees the sum on the device, in a replayed
    ``finish`` too. Where it is zero the step is skipped like a non-finite one: momentum and weight
    decay alone would move the weights.

    [Note: steps that are done again]
    A step in which a buffer for experts overflowed anywhere is not applied, and nor is any step
    behind it, until the host has learnt of it and calls ``redo``: the flag stays up on the device.
    So steps take effect in their order, and weights are those of a run with room for everything.

    Args:
        model: the model, its parameters living in ``buffers``.
        buffers: flat parameters and gradients with the slots of `MetricsLayout`.
        optimizer: steps over the same buffers.
        groups: process groups of this rank.
        overlap: whether gradients are summed over data-parallel ranks while the last backward pass
            still runs.
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
        """Replays what it has captured, of the model or of whole parts of a step; None: all of it
        runs eagerly.
        """
        self.beat: Callable[[], None] = lambda: None
        """Told of every micro-batch. See [Note: hangs that no timeout sees]."""
        self.layout = MetricsLayout.of(groups, model)
        self._extras = buffers.tail
        self._signs = self._extras[self.layout.signs]
        # Stop requested, weights moved. Pinned, so that the copy does not wait for the device.
        self._own_signs = torch.zeros(2, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        # Parameters that tensor-parallel ranks hold alike get different gradients on each: their
        # sum over ``tp`` precedes the one over replicas.
        self._shared = model.shared_gradients()
        self.overlapped: OverlappedReduce | None = None
        if overlap:
            self.overlapped = OverlappedReduce(
                buffers, groups, model.stages, late=self._shared.parameters
            )
        size, counts = self.layout.size, sum(self.layout.counters.values())
        self.numbers = torch.zeros(size + counts, dtype=torch.float32, device=self.device)
        """Numbers that one copy takes to the host, as `layout` says."""
        # A view: one copy takes metrics and counters to the host, and their address never changes.
        self.metrics = self.numbers[:size]
        # float64: a validation adds up more losses than float32 has digits for.
        self.validation_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        """What `validate` has added up on this rank; set it to zero first."""
        # On the device: steps that follow an overflow must hold before the host has learnt of it.
        self._held = torch.zeros(1, dtype=torch.float32, device=self.device)
        self._input_grad_sum = torch.zeros((), dtype=torch.float32, device=self.device)
        # A non-finite value made anywhere in the backward pass reaches the gradient of the
        # embedding's output. The embedding is in no graph of a layer, so its hooks see every
        # micro-batch.
        model.embedding.register_forward_hook(
            lambda _module, _inputs, output: self._watch_gradient(output)
        )

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        lr: float,
        *,
        stop_requested: bool = False,
        checks: StepChecks = UNCHECKED,
    ) -> Tensor:
        """Queue one step. Reads: [Note: parts of a step].

        Args:
            micro_batches: this rank's, on the device or pinned on the host (copied here, one copy
            each).
            lr: learning rate of this step.
            stop_requested: this rank was asked to stop; all ranks learn of it from the returned
            vector.
            checks: made in this step, on all ranks. Sums of gradients that are checked overlap with
                nothing, and the end of the step is not replayed.
        Returns:
            The metrics vector ``(layout.size,)`` float32 on the device; the same memory
            every step.
        Raises:
            GraphFallbackError: ``--cuda-graph-strict``, and a micro-batch would run eagerly.
        """
        self._begin(
            lr, stop_requested, sum(micro_batch.num_target_tokens for micro_batch in micro_batches)
        )
        # Only the last backward pass completes gradients, so only its sums may overlap with it.
        for number, micro_batch in enumerate(micro_batches, start=1):
            sums = (
                self.overlapped is not None
                and checks.gradients is None
                and number == len(micro_batches)
            )
            self._run(LAST_MICRO_BATCH if sums else MICRO_BATCH, micro_batch)
        # Before the update: the cast from the masters would hide a weight that has changed.
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
        stop_requested: bool = False,
        checks: StepChecks = UNCHECKED,
    ) -> Tensor:
        """The first step that was held, again with room for all rows of experts; all ranks call it
        together.

        Arguments and result as of a step. The steps that were held behind it come next, as usual.
        Reads: [Note: steps that are done again].
        """
        self._held.zero_()
        with self.room_for_experts():
            return self(micro_batches, lr, stop_requested=stop_requested, checks=checks)

    @contextmanager
    def room_for_experts(self) -> Iterator[None]:
        """Inside, no buffer for experts overflows: all have their worst size, which graphs were not
        captured with.
        """
        with ExitStack() as stack:
            stack.enter_context(self.model.full_expert_buffers())
            if self.graphs is not None and self.model.bounds_expert_buffers:
                reason = "it needs room for all rows of experts, and its graphs have less"
                stack.enter_context(self.graphs.bypassed(reason))
            yield

    def validate(self, micro_batch: MicroBatch) -> None:
        """Add the loss of one micro-batch, summed over its target tokens, to ``validation_loss``."""
        # The part makes room for all rows itself, and is captured with it; graphs of layers alone
        # are captured without.
        makes_room = self.graphs is not None and self.graphs.captures_parts
        with nullcontext() if makes_room else self.room_for_experts():
            self._run(VALIDATION, micro_batch)

    @property
    def parts(self) -> Mapping[str, Callable[[MicroBatch], object]]:
        """Functions of a micro-batch on the device, by name; each leaves its results in persistent
        memory.
        """
        return {
            MICRO_BATCH: self.micro_batch,
            LAST_MICRO_BATCH: self.last_micro_batch,
            VALIDATION: self.validation_micro_batch,
        }

    def forward_backward(self, micro_batch: MicroBatch) -> HybridOutput:
        """One micro-batch on the device; its gradients are added to the flat buffer, and nothing
        else is touched.
        """
        with nullcontext() if self.model.offload is None else self.model.offload.whole_pass():
            return self.model.forward_backward(micro_batch)

    def micro_batch(self, micro_batch: MicroBatch) -> None:
        """One micro-batch on the device: its gradients, losses and counts are added to those of the
        step.
        """
        output = self.forward_backward(micro_batch)
        extras = self.buffers.extras
        with torch.no_grad():
            # Scales are device tensors of the micro-batch: a graph would freeze a number of the host.
            extras["loss"].add_(output.loss_sum * micro_batch.scales[0])
            if self.model.num_moe_layers:
                extras["aux_loss"].add_(output.aux_loss * micro_batch.scales[1])
                extras["overflow"].add_(output.expert_overflow)
                self._count(output)
            # The first bad one of this rank stays: a later one finds the slot taken.
            number = extras["micro_batches"].add_(1)[0]
            slot = extras["bad_micro_batches"][self.groups.rank]
            bad = ~torch.isfinite(output.loss) | ~torch.isfinite(self._input_grad_sum)
            slot.copy_(torch.where(bad & (slot == 0), number, slot))

    def _count(self, output: HybridOutput) -> None:
        """Add what the E layers of a micro-batch counted to the counters of the step."""
        counters = self.buffers.counters
        counters["expert_counts"].add_(output.tokens_per_expert)
        if "dropped_assignments" in counters:
            counters["dropped_assignments"].add_(output.dropped_assignments)

    def last_micro_batch(self, micro_batch: MicroBatch) -> None:
        """As `micro_batch`, for the last of a step with overlap: sums begin in its backward pass,
        and are there.
        """
        assert self.overlapped is not None
        # Hooks of the backward pass start a bucket's sum as soon as its gradients are complete.
        self.overlapped.begin()
        try:
            self.micro_batch(micro_batch)
        except BaseException:
            # A capture has failed: the passes that follow it are not the last ones of a step.
            self.overlapped.abandon()
            raise
        self.overlapped.join()

    def validation_micro_batch(self, micro_batch: MicroBatch) -> None:
        """The loss of one micro-batch on the device is added to ``validation_loss``."""
        # Dropout is off, and experts have room for all rows: a validation must drop nothing.
        self.model.eval()
        try:
            with torch.no_grad(), self.model.full_expert_buffers():
                self.validation_loss.add_(self.model(micro_batch).loss_sum)
        finally:  # after a capture that fails, training goes on
            self.model.train()

    def finish(self, check: Callable[[Callable[[], None]], None] | None = None) -> None:
        """After the last micro-batch: sums over ranks, the update, and the metrics.

        Args:
            check: called with the sum over replicas, which no micro-batch has begun then, and runs
                it.
        """
        if check is None:
            self._reduce()
        else:
            if self.overlapped is not None:
                self.overlapped.begin()
                self.overlapped.join()
            self._reduce_over_tp()
            check(self._reduce_over_replicas)
        extras = self.buffers.extras
        # After the sums over ranks: one that overflowed anywhere holds the step on all of them.
        self._held.add_(extras["overflow"])
        with record_function("optim::step"):
            # Decided on the device, in a replay too. See [Note: steps without targets].
            no_targets = (extras["targets"][0] == 0).to(torch.float32)
            stats = self.optimizer.step(loss=extras["loss"], hold=self._held[0] + no_targets)
        if self.model.num_moe_layers:
            counts = {name: counter.value() for name, counter in self.buffers.counters.items()}
            self.numbers[self.metrics.numel() :].copy_(torch.cat(list(counts.values())))
            # Skipped with the update: a step that is done again would move the biases twice.
            self.model.update_expert_bias(counts["expert_counts"], skip=stats.skipped.bool())
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
        """Inside, parts of a step may run on anything, all ranks alike, and nothing of it stays:
        steps are held.

        Gradients are zero afterwards.
        """
        # A capture and its warm-up run the real step: held, it changes neither weights nor moments,
        # and what it adds to elsewhere is put back.
        with values_restored(
            [self._held, self.numbers, self.validation_loss, *self.model.buffers()]
        ):
            self._held.fill_(1.0)
            yield
        self.buffers.zero_grad()

    def places(self) -> list[tuple[Mapping[str, Any], str]]:
        """Return the places of tensors that parts of a step read or write, other than local
        variables.
        """
        optimizer, buffers, spikes = vars(self.optimizer), vars(self.buffers), self.optimizer.spikes
        parameters = self.buffers.parameters.values()
        modules = (
            place for part in self.model.modules() for place in (part._parameters, part._buffers)
        )
        return [
            *((place, name) for place in modules for name in place),
            *((vars(parameter), "main_grad") for parameter in parameters),
            *((optimizer, name) for name in ("exp_avg", "exp_avg_sq", "lr", "steps")),
            *((vars(spikes), name) for name in ("recent", "medians") if spikes is not None),
            (buffers, "storage"),
        ]

    def _begin(self, lr: float, stop_requested: bool, targets: int) -> None:
        self.buffers.zero_grad()
        self.optimizer.set_lr(lr)
        # The number is a kernel argument: no host memory to wait for.
        self.buffers.extras["targets"].fill_(targets)
        # The last step's copy may be under way: a sign stays until all have seen it, so an early
        # one does no harm.
        self._own_signs[0] = stop_requested
        self._own_signs[1] = self.graphs is not None and self.graphs.addresses_changed
        self._signs[:2].copy_(self._own_signs, non_blocking=True)

    def _run(self, part: str, micro_batch: MicroBatch) -> None:
        """One of ``parts``, by replay where it can be."""
        # Before the micro-batch is queued: a host that blocks in the driver has given its sign.
        self.beat()
        if self.graphs is not None:
            self.graphs.run(part, self.parts[part], micro_batch)
        else:
            self.parts[part](micro_batch.to(self.device, non_blocking=True))

    def _reduce(self) -> None:
        """Sums over ranks. See [Note: which ranks a sum goes over]."""
        self._reduce_over_tp()
        self._reduce_over_replicas()

    def _reduce_over_tp(self) -> None:
        with record_function("tp::reduce"):
            self._shared.sum()
            all_reduce_sum(self._signs, self.groups.tp_group)

    def _reduce_over_replicas(self) -> None:
        with record_function("dp::reduce"):
            if self.overlapped is not None:
                self.overlapped.finish()
            else:
                self.buffers.reduce(self.groups)

    def _watch_gradient(self, embedded_TD: Tensor) -> None:
        if embedded_TD.requires_grad:
            embedded_TD.register_hook(self._keep_sum)

    def _keep_sum(self, grad_TD: Tensor) -> None:
        self._input_grad_sum.copy_(grad_TD.sum(dtype=torch.float32))
