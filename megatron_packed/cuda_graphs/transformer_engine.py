"""Capture of modules with TransformerEngine's ``make_graphed_callables``.

[Note: TransformerEngine's capture]
One call of ``make_graphed_callables`` captures all modules of a capture size into a given pool:
forwards in order, backwards in reverse. The differences from `TorchModuleGraphs` are:

* Its modules take only tensors as arguments. So a wrapper binds the static metadata to each module.
* Every module has a separate static input and separate static gradients of its outputs. Each replay
  copies hidden states and gradients to them. Neighbouring modules share no memory.
* The capture of a backward includes the hooks of parameters. If a hook adds a gradient to
  ``main_grad``, every replay does the same. If the hook also removes the parameter's ``grad``,
  TransformerEngine does not return a gradient for this parameter, and autograd writes no ``grad``.
  See [Note: main_grad protocol] in distributed/data_parallel_reduce.py. This module refuses modules
  with a parameter that would still get a ``grad``.
* TransformerEngine frees memory that no later graph needs, also the memory of outputs. It stores
  only address and shape, so outputs must be contiguous. A gradient that autograd stores in a leaf
  has the strides of the leaf, so gradients of contiguous leaves are contiguous too.
* A part that recomputation runs again belongs to the capture of the backward, as with
  `TorchModuleGraphs`. Until then its saved inputs own their memory: tensors of the pool, or the
  module's static input, which no other module shares.
* Autograd nodes of parameters run on the stream on which they were created. So no such node of an
  earlier pass may be alive: a loss that was stored without ``detach()`` makes the capture fail. See
  [Note: nodes of parameters] in whole_step_graphs.py.
* Before the capture, TransformerEngine runs an eager pass, in this module on the capture stream.
  Ranks whose modules contain collectives start this pass together. See [Note: captures that ranks
  agree on] in step_graphs.py.
* A failed capture leaves state to clean up: a wrapped ``__call__`` of module classes, disabled
  garbage collection, and TransformerEngine's global flag for a capture in progress.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron_packed.config import flag_names as flags
from megatron_packed.cuda_graphs import fallback_reasons as reasons
from megatron_packed.cuda_graphs.capture_and_pool import GraphBackend
from megatron_packed.cuda_graphs.module_graphs import ModuleGraphs, Outputs
from megatron_packed.cuda_graphs.slots import Slot
from megatron_packed.torch_private import TreeSpec

OPTIONS: dict[str, object] = {
    # One warm-up pass is enough, because kernels have already been tuned. In this pass
    # TransformerEngine detects parameters with hooks.
    "num_warmup_iters": 1,
    # Capture one chunk: its forward (1), then its backward (-1). If `_order` is given,
    # TransformerEngine does not replace the forward of modules.
    "_order": [1, -1],
    # Let TransformerEngine reuse memory that no later graph reads.
    "_reuse_graph_input_output_buffers": True,
}
"""Options of ``make_graphed_callables``, in addition to ``pool`` and hooks.

The option ``enabled`` keeps its default False, so matrix products keep the precision of their weights.
"""


class Graphed(Protocol):
    """Result of ``make_graphed_callables`` for one module."""

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]: ...

    def reset(self) -> None:
        """Free the graphs."""


class Maker(NamedTuple):
    """Functions of TransformerEngine for captures."""

    make_graphed_callables: Callable[..., tuple[Graphed, ...]]
    abandon: Callable[[], None]
    """Function that clears TransformerEngine's flag for a capture in progress, after a failed
    capture."""


def maker() -> Maker:
    """Return the capture functions of the installed TransformerEngine.

    Raises:
        ValueError: TransformerEngine does not import, or its ``make_graphed_callables`` lacks an
            option of `OPTIONS`.
    """
    try:
        import transformer_engine
        from transformer_engine.pytorch import graph
    except Exception as error:  # a broken optional package may raise anything at import
        said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ValueError(
            f"{flags.CUDA_GRAPH_IMPL} transformer_engine: TransformerEngine does not import ({said}); pip install "
            "'megatron-packed[gpu]', or use local."
        ) from error
    names = [*inspect.signature(graph.make_graphed_callables).parameters, *vars(graph)]
    required = (
        *OPTIONS,
        "pool",
        "pre_warmup_hook",
        "post_warmup_hook",
        "capture_time_hooks",
        "set_capture_end",
    )
    lacking = [name for name in required if name not in names]
    if lacking:
        raise ValueError(
            f"{flags.CUDA_GRAPH_IMPL} transformer_engine: make_graphed_callables of TransformerEngine "
            f"{transformer_engine.__version__} has no {' and no '.join(lacking)}; install a newer version, or use "
            "local."
        )
    return Maker(graph.make_graphed_callables, graph.set_capture_end)


class TEModuleGraphs(ModuleGraphs):
    """Forward graph and backward graph of one module, captured by TransformerEngine.

    Args:
        function: hidden states ``(T, D)`` -> result of the module for the metadata in the slot.
        module: module that ``function`` calls.
        static: ``(T, D)`` static input of the graphs; the caller keeps it allocated.
        slot: as for `ModuleGraphs`.
        passed_on: the output hidden states are the input of another captured module. Otherwise
            `replay_forward` returns a copy of them, because backward graphs of earlier modules may
            overwrite their memory.
        previous: as for `ModuleGraphs`.
        positions: as for `ModuleGraphs`.
        takes_packed: as for `ModuleGraphs`.
    """

    def __init__(
        self,
        function: Callable[[Tensor], object],
        module: nn.Module,
        static: Tensor,
        slot: Slot,
        *,
        passed_on: bool,
        previous: ModuleGraphs | None,
        positions: tuple[int, int],
        takes_packed: bool,
    ) -> None:
        super().__init__(slot, previous=previous, positions=positions, takes_packed=takes_packed)
        self.callable = _Closed(module, function)
        self.input = static
        self._passed_on = passed_on
        self.graphed: Graphed | None = None

    def adopt_forward(self) -> None:
        """Replay forward once, to read the addresses of outputs and to check for unwanted gradients.

        The method sets `unfit` if a replay would write gradients to the ``grad`` of parameters.
        """
        assert self.callable.spec is not None
        self.spec = self.callable.spec
        self.differentiable = self.callable.differentiable
        self.replay_forward(self.input)
        self.outputs = [tensor.detach() for tensor in self._live]
        self.grad_outputs = self._wanted(self.outputs)
        of_parameters = self._gets_gradients() - 1
        if of_parameters:
            self.unfit = reasons.without_hooks(of_parameters)

    def adopt_backward(self) -> None:
        """Replay backward once, to read the address of the input's gradient."""
        self.grad_input = self.replay_backward(self.grad_outputs)

    def replay_forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        assert self.graphed is not None
        with torch.enable_grad():  # the replay's outputs need a grad_fn for `replay_backward`
            self._leaf = hidden.detach().requires_grad_()
            self._live = self.graphed(self._leaf)
        first, *others = (tensor.detach() for tensor in self._live)
        return (first if self._passed_on else first.clone(), *(tensor.clone() for tensor in others))

    def replay_backward(self, grads: Sequence[Tensor]) -> Tensor:
        (grad_hidden,) = torch.autograd.grad(self._wanted(self._live), self._leaf, list(grads))
        return grad_hidden

    def reset(self) -> None:
        if self.graphed is not None:
            self.graphed.reset()
        self.graphed = None
        self._live = ()

    def _wanted(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for tensor, differs in zip(tensors, self.differentiable) if differs]

    def _gets_gradients(self) -> int:
        """Return the number of leaves to which a replay's backward would write ``grad``.

        The hidden states are one of these leaves.
        """
        node = self._live[0].grad_fn
        assert node is not None
        return sum(hasattr(edge, "variable") for edge, _ in node.next_functions)


class _Closed(nn.Module):
    """Wrapper around a module for ``make_graphed_callables``; always in training mode."""

    def __init__(self, module: nn.Module, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.module = module
        self._function = function
        self.spec: TreeSpec | None = None
        self.differentiable: list[bool] = []

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Call the module and return its tensors.

        Raises:
            TypeError: the module returns a value that TransformerEngine could not replay.
        """
        outputs = Outputs.flatten(self._function(hidden))
        self.spec = outputs.spec
        self.differentiable = [tensor.requires_grad for tensor in outputs.tensors]
        if not self.differentiable[0]:
            raise TypeError(reasons.INDEPENDENT_OUTPUT)
        if not all(tensor.is_contiguous() for tensor in outputs.tensors):
            raise TypeError(reasons.NOT_CONTIGUOUS)
        return tuple(outputs.tensors)


class CaptureProgress:
    """Record of the module that TransformerEngine works on, for the error message of a failure."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the module that was started last."""
        self.in_pass = True
        """True until TransformerEngine's eager pass, which precedes all captures, has ended."""

    def hooks(self, number: int) -> dict[str, dict[int, Callable[[nn.Module], None]]]:
        """Return the hooks that ``make_graphed_callables`` calls before the captures of a module."""

        def begin(module: nn.Module) -> None:
            self.number = number

        return {"forward_pre_hooks": {0: begin}, "backward_pre_hooks": {0: begin}}

    def end_pass(self) -> None:
        """Note the end of the eager pass, and free autograd nodes that reference cycles keep alive.

        See [Note: nodes of parameters] in whole_step_graphs.py.
        """
        gc.collect()
        self.in_pass = False


def capture_together(
    captured: Sequence[TEModuleGraphs],
    made_by: Maker,
    backend: GraphBackend,
    progress: CaptureProgress,
) -> None:
    """Capture all modules of a capture size with TransformerEngine, in the given order.

    Gradients hold garbage afterwards.
    """
    callables = tuple(graphs.callable for graphs in captured)
    options: dict[str, Any] = {
        **OPTIONS,
        # Without these hooks TransformerEngine would run each pass on a new stream, and cuBLAS
        # would allocate a workspace of 64 MiB for every stream.
        "pre_warmup_hook": backend.take_stream,
        "post_warmup_hook": progress.end_pass,
        "capture_time_hooks": [progress.hooks(number) for number in range(len(callables))],
    }
    samples = tuple((graphs.input.detach().requires_grad_(),) for graphs in captured)
    collecting = gc.isenabled()
    try:
        with backend.library_capture() as pool:
            made = made_by.make_graphed_callables(callables, samples, pool=pool, **options)
    except BaseException:
        # Clear TransformerEngine's flag for a capture in progress. Otherwise the flag would stay
        # set in eager passes.
        made_by.abandon()
        # Drop the gradients of TransformerEngine's warm-up. Otherwise the next eager step would add
        # its gradients to them.
        for parameter in (p for module in callables for p in module.parameters()):
            parameter.grad = None
        raise
    finally:
        if collecting:
            gc.enable()
        # TransformerEngine wraps `__call__` of the class, and after an error its wrapper may remain.
        with suppress(AttributeError):
            del _Closed.__call__
    for graphs, graphed in zip(captured, made, strict=True):
        graphs.graphed = graphed
