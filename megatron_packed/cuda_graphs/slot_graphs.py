"""Graphs of all modules for one slot: captures of every size, in one memory pool per slot.

[Note: order of memory]
Graphs of one capture size are captured in the order in which they are replayed: tables, forward of
every module, backward of every module in reverse. Memory that was free at a point of the captures is
also free at that point of every replay, so graphs can share it. A forward call out of this order
runs eagerly (`TorchModuleGraphs.positions`), and a backward pass out of this order is an error.
Different capture sizes use the same memory, because a micro-batch replays graphs of only one size.
Different slots share no memory, because graphs of two micro-batches in flight are replayed in any
order.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.cuda_graphs.capture_and_pool import Copies, Graph, GraphBackend
from megatron_packed.cuda_graphs.fallback_reasons import ALL, error_in_capture
from megatron_packed.cuda_graphs.module_graphs import TorchModuleGraphs
from megatron_packed.cuda_graphs.replaced_forward import GraphedForward
from megatron_packed.cuda_graphs.slots import Slot
from megatron_packed.cuda_graphs.step_graphs import Tables
from megatron_packed.cuda_graphs.transformer_engine import (
    CaptureProgress,
    Maker,
    TEModuleGraphs,
    capture_together,
)
from megatron_packed.packed.capture_sizes import CaptureSize
from megatron_packed.packed.params import NO_TABLES, PackedSeqParams


class Planned(NamedTuple):
    """Plan for the capture of one module."""

    module: GraphedForward
    source: GraphedForward | None
    """Module whose output is the input of this module, or None.

    If both are captured, output and input are the same memory.
    """
    hidden: Tensor
    """Meta tensor (without memory) with shape, dtype and strides of the module's hidden states."""
    takes_packed: bool


class _CaptureError(Exception):
    """Failed capture of a module, or of the tables that all modules share.

    Args:
        failed: name of the module, or `ALL` -> reason.
    """

    def __init__(self, failed: dict[str, str]) -> None:
        super().__init__(*failed.values())
        self.failed = failed


@dataclass(eq=False)
class SlotGraphs:
    """Graphs of one slot. See [Note: order of memory]."""

    slot: Slot
    """Slot that holds the metadata that the graphs read."""
    backend: GraphBackend
    """Captures the graphs; no other slot uses its pool."""
    made_by: Maker | None
    """This and the following as for `LayerGraphs`."""
    passes_wait: bool
    copies: Copies | None

    def __post_init__(self) -> None:
        self.tables: dict[CaptureSize, Graph] = {}
        """Capture size -> graph that computes the shared tables."""
        self.outside: dict[tuple[object, ...], Tensor] = {}
        """Static tensors outside the pool, to which tensors of callers are copied."""
        self._captured: list[GraphedForward] = []

    def capture_stages(
        self, size: CaptureSize, planned: Sequence[Planned], tables: Tables
    ) -> Iterator[dict[str, str]]:
        """Capture all graphs of one capture size in stages.

        If a stage fails on any rank, the caller must drop the capture size.

        Yields:
            The failures of each stage: name of a module, or `ALL` -> reason. Empty if none failed.
        Raises:
            torch.OutOfMemoryError: an eager pass, in whose collectives other ranks wait, ran out of
                memory.
        """
        self._captured += [plan.module for plan in planned if plan.module not in self._captured]
        for capture in (
            partial(self._capture_tables, tables, size),
            partial(self._capture_modules, planned, size),
        ):
            failed: dict[str, str] = {}
            try:
                capture()
            except _CaptureError as error:
                failed = error.failed
                if self.copies is not None:
                    self.copies.abandon()
            yield failed
        yield self._adopt(planned, size)

    def drop_size(self, size: CaptureSize) -> None:
        for module in self._captured:
            module.forget(self.slot, size)
        graph = self.tables.pop(size, None)
        if graph is not None:
            graph.reset()
        self.slot.vacate()
        gc.collect()  # reference cycles of a failed capture may hold tensors of the pool
        if not self.tables:  # the pool is freed with its last graph, so it must not be used again
            self.backend.reset()

    def forget(self) -> None:
        """Free all graphs and static tensors."""
        self.slot.vacate()
        for module in self._captured:
            module.forget(self.slot)
        for graph in self.tables.values():
            graph.reset()
        self.tables.clear()
        # Tables are in the pool that is being freed, so the slot must drop its references.
        self.slot.forget_tables()
        self.outside.clear()
        self._captured.clear()
        self.backend.reset()

    def addresses(self) -> Iterator[int]:
        """Yield the addresses of the hidden states that captured modules return."""
        for module in self._captured:
            for captured in module.in_slot(self.slot).values():
                yield captured.outputs[0].data_ptr()

    def _capture_modules(self, planned: Sequence[Planned], size: CaptureSize) -> None:
        if self.made_by is not None:
            self._capture_callables(planned, size, self.made_by)
        else:
            self._capture_backward(planned, self._capture_forward(planned, size))

    def _adopt(self, planned: Sequence[Planned], size: CaptureSize) -> dict[str, str]:
        """Prepare all captured modules for replays; return the modules that must not be replayed.

        Returns:
            Name of the module -> reason.
        """
        together = {plan.module.name: plan.module.in_slot(self.slot)[size] for plan in planned}
        for captured in together.values():
            captured.adopt_forward()
        for captured in reversed(together.values()):
            captured.adopt_backward()
        return {name: captured.unfit for name, captured in together.items() if captured.unfit}

    def _capture_tables(self, derive: Tables, size: CaptureSize) -> None:
        # Remove the tables of the warm-up, so that the capture derives tables only from metadata.
        self.slot.set_tables(size, NO_TABLES)
        static = self.slot.static(size)
        with _capturing(None):
            self.tables[size], tables = self.backend.capture(lambda: derive(static))
        self.slot.set_tables(size, tables)

    def _capture_callables(
        self, planned: Sequence[Planned], size: CaptureSize, made_by: Maker
    ) -> None:
        """Capture all modules with TransformerEngine. See [Note: TransformerEngine's capture]."""
        # TransformerEngine runs an eager warm-up that reads the tables. Capturing the tables' graph
        # did not compute the tables, so replay that graph first.
        self.tables[size].replay()
        static = self.slot.static(size)
        sources = {plan.source for plan in planned}
        captured: dict[GraphedForward, TEModuleGraphs] = {}
        for number, (module, source, hidden, takes_packed) in enumerate(planned):
            captured[module] = module.in_slot(self.slot)[size] = TEModuleGraphs(
                _of_hidden(module, static if takes_packed else None),
                module.module,
                self._static_outside((module.name, "input"), hidden),
                self.slot,
                passed_on=module in sources,
                previous=None if source is None else captured.get(source),
                positions=(number, 2 * len(planned) - 1 - number),
                takes_packed=takes_packed,
            )
        progress = CaptureProgress()
        try:
            capture_together(list(captured.values()), made_by, self.backend, progress)
        except Exception as error:
            # The error occurred in an eager pass, in whose collectives other ranks wait. So it must
            # end the run; a refusal of one capture would leave the other ranks waiting.
            if progress.in_pass and self.passes_wait and isinstance(error, torch.OutOfMemoryError):
                raise
            failed = None if progress.number is None else planned[progress.number].module
            raise _capture_error(failed, _first_of(error)) from error

    def _capture_forward(
        self, planned: Sequence[Planned], size: CaptureSize
    ) -> list[TorchModuleGraphs]:
        static = self.slot.static(size)
        previous: TorchModuleGraphs | None = None
        together: list[TorchModuleGraphs] = []
        for number, (module, source, hidden, takes_packed) in enumerate(planned):
            # This module can read its input in place only if the input is the static output of a
            # captured module.
            if source is None or size not in source.in_slot(self.slot):
                previous = None
            captured = module.in_slot(self.slot)[size] = TorchModuleGraphs(
                _of_hidden(module, static if takes_packed else None),
                module.parameters,
                self.slot,
                self.backend,
                copies=self.copies,
                previous=previous,
                positions=(number, 2 * len(planned) - 1 - number),
                takes_packed=takes_packed,
            )
            with _capturing(module):
                captured.capture_forward(
                    self._static_outside((module.name, "input"), hidden)
                    if previous is None
                    else previous.outputs[0]
                )
            together.append(captured)
            previous = captured
        return together

    def _capture_backward(
        self, planned: Sequence[Planned], together: Sequence[TorchModuleGraphs]
    ) -> None:
        following: TorchModuleGraphs | None = None
        for plan, captured in zip(reversed(planned), reversed(together)):
            with _capturing(plan.module):
                wanted = [
                    tensor
                    for tensor, differs in zip(captured.outputs, captured.differentiable)
                    if differs
                ]
                passed_on = following is not None and following.previous is captured
                # The gradient of the hidden states is the result of the next module's backward graph
                # and is read in place. Gradients of other outputs come from callers and are copied.
                grads = [following.grad_input] if following is not None and passed_on else []
                for number in range(len(grads), len(wanted)):
                    grads.append(
                        self._static_outside((plan.module.name, "grad", number), wanted[number])
                    )
                captured.capture_backward(grads, passed_on=passed_on, following=following)
            # Both graphs that use the gradient are captured. Drop the references, so that backward
            # graphs of earlier modules can use its memory.
            del wanted, grads
            if following is not None:
                following.release_gradient()
            following = captured

    def _static_outside(self, key: tuple[object, ...], like: Tensor) -> Tensor:
        """Return a static tensor outside the pool, shared by all capture sizes.

        Tensors of callers are copied to the static tensor. If the static tensor were in the pool,
        another graph could overwrite it.
        """
        key = (*key, like.shape, like.stride(), like.dtype)
        if key not in self.outside:
            self.outside[key] = torch.zeros_like(like, device=self.slot.buffer.device)
        return self.outside[key]


def _of_hidden(
    module: GraphedForward, packed: PackedSeqParams | None
) -> Callable[[Tensor], object]:
    """Return the original forward as a function of hidden states, with ``packed`` if it is given."""
    forward = module.original_forward
    return forward if packed is None else lambda hidden: forward(hidden, packed)


@contextmanager
def _capturing(module: GraphedForward | None) -> Iterator[None]:
    """Convert any error of a capture, also out of memory, into an error that names the module."""
    try:
        yield
    except Exception as error:
        raise _capture_error(module, error) from error


def _first_of(error: Exception) -> Exception:
    """Return the first error of a chain of errors.

    After an error in a capture the end of the capture fails too, with a message without the reason.
    """
    while isinstance(error.__context__, Exception) and not error.__suppress_context__:
        error = error.__context__
    return error


def _capture_error(module: GraphedForward | None, error: Exception) -> _CaptureError:
    return _CaptureError({ALL if module is None else module.name: error_in_capture(error)})
