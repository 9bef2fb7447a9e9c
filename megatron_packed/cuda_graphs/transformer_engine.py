"""Capture by TransformerEngine's ``make_graphed_callables`` in the place of our own.

[Note: TransformerEngine's capture]
It takes all modules of a capture size at once and captures their forwards in order and their
backwards in reverse, into the pool that it is given. What differs from `TorchModuleGraphs`:

* It knows tensors alone as arguments, so it gets modules that are closed over the static metadata.
* Every module reads hidden states, and its backward gradients, in a static place of its own, to
  where each replay copies them: neighbours share no memory.
* A backward is captured as it runs, hooks of parameters included: what they add to ``main_grad`` is
  added by every replay. A parameter whose ``grad`` such a hook has taken away is no input of what
  it returns, so autograd gives it nothing more. See [Note: main_grad protocol] in
  distributed/data_parallel_reduce.py. What would be given
  to a parameter beside that is refused here.
* What no graph needs any more it gives back to the pool, outputs too, and remembers it by address
  and shape alone. So outputs must be contiguous. Where autograd keeps a gradient in a leaf, as it
  does there, it is laid out like the leaf.
* Gradients of parameters come by nodes that run on the stream on which they were made. So none may
  be alive from before: a loss that was kept without ``detach()`` fails the capture. See [Note:
  nodes of parameters] in whole_step_graphs.py.
* Before it captures, it runs an eager pass of its own, here on the stream of the captures. Ranks
  whose modules hold collectives begin it together. See [Note: captures that ranks agree
  on] in step_graphs.py.
* It leaves marks where it fails: on classes of modules, in the garbage collection, in a switch of
  its own.
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
    "num_warmup_iters": 1,  # ours came before; in this one it finds out which parameters have hooks
    "_order": [1, -1],  # one chunk, forward and backward: given, modules keep their own forward
    "_reuse_graph_input_output_buffers": True,  # give back what no later graph reads
}
"""Options of ``make_graphed_callables``, beside ``pool`` and hooks. Products stay in the precision of
their weights (``enabled`` is left at False).
"""


class Graphed(Protocol):
    """Result of ``make_graphed_callables`` for one module."""

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]: ...

    def reset(self) -> None:
        """Give up the graphs."""


class Maker(NamedTuple):
    """TransformerEngine's capture."""

    make_graphed_callables: Callable[..., tuple[Graphed, ...]]
    abandon: Callable[[], None]
    """Reports to TransformerEngine that a capture is over which it did not end itself."""


def maker() -> Maker:
    """The installed TransformerEngine's.

    Raises:
        ValueError: there is none, or it cannot do what is asked of it.
    """
    try:
        import transformer_engine
        from transformer_engine.pytorch import graph
    except Exception as error:  # a broken optional package may raise anything at import
        said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ValueError(
            f"{flags.CUDA_GRAPH_IMPL} transformer_engine: TransformerEngine does not import ({said}); pip install "
            "'megatron-packed[gpu]', or give local."
        ) from error
    known = [*inspect.signature(graph.make_graphed_callables).parameters, *vars(graph)]
    asked = (
        *OPTIONS,
        "pool",
        "pre_warmup_hook",
        "post_warmup_hook",
        "capture_time_hooks",
        "set_capture_end",
    )
    lacking = [name for name in asked if name not in known]
    if lacking:
        raise ValueError(
            f"{flags.CUDA_GRAPH_IMPL} transformer_engine: make_graphed_callables of TransformerEngine "
            f"{transformer_engine.__version__} has no {' and no '.join(lacking)}; install a newer one, or give local."
        )
    return Maker(graph.make_graphed_callables, graph.set_capture_end)


class TEModuleGraphs(ModuleGraphs):
    """One module that TransformerEngine captured.

    Args:
        function: hidden states ``(T, D)`` -> what the module returns for the metadata in the slot.
        module: whose function it is.
        static: ``(T, D)``, where the graphs read hidden states; kept by the caller.
        passed_on: another captured module takes the hidden states. Otherwise they are copied for
            the caller, since backward graphs of modules before may write over them.
        slot, previous, positions, takes_packed: as for `ModuleGraphs`.
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
        """Replay forward once, to learn the addresses and whether parameters would get gradients."""
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
        """Replay backward once, in the order of the captures."""
        self.grad_input = self.replay_backward(self.grad_outputs)

    def replay_forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        assert self.graphed is not None
        with torch.enable_grad():  # what the replay returns leads to its backward
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
        """Return the number of leaves that a replay's backward gives a gradient, hidden states included."""
        node = self._live[0].grad_fn
        assert node is not None
        return sum(hasattr(edge, "variable") for edge, _ in node.next_functions)


class _Closed(nn.Module):
    """A module as ``make_graphed_callables`` takes it, always in training mode."""

    def __init__(self, module: nn.Module, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.module = module
        self._function = function
        self.spec: TreeSpec | None = None
        self.differentiable: list[bool] = []

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """
        Raises:
            TypeError: TransformerEngine could not replay what the module returns.
        """
        found = Outputs.of(self._function(hidden))
        self.spec = found.spec
        self.differentiable = [tensor.requires_grad for tensor in found.tensors]
        if not self.differentiable[0]:
            raise TypeError(reasons.INDEPENDENT_OUTPUT)
        if not all(tensor.is_contiguous() for tensor in found.tensors):
            raise TypeError(reasons.NOT_CONTIGUOUS)
        return tuple(found.tensors)


class CaptureProgress:
    """Progress of TransformerEngine with the modules of a capture size, to name one that fails."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the module that was begun last."""
        self.in_pass = True
        """True until its own eager pass, which comes before all captures, has ended."""

    def hooks(self, number: int) -> dict[str, dict[int, Callable[[nn.Module], None]]]:
        """Return the hooks that ``make_graphed_callables`` calls before it works on a module."""

        def begin(module: nn.Module) -> None:
            self.number = number

        return {"forward_pre_hooks": {0: begin}, "backward_pre_hooks": {0: begin}}

    def end_pass(self) -> None:
        """Note the end of its pass, and free parameters' nodes that only a cycle of references keeps.

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
    """Capture all modules of a capture size, in order. Gradients hold garbage afterwards."""
    callables = tuple(one.callable for one in captured)
    options: dict[str, Any] = {
        **OPTIONS,
        # It takes a new stream for each pass, and cuBLAS would keep 64 MiB for every one.
        "pre_warmup_hook": backend.take_stream,
        "post_warmup_hook": progress.end_pass,
        "capture_time_hooks": [progress.hooks(number) for number in range(len(callables))],
    }
    samples = tuple((one.input.detach().requires_grad_(),) for one in captured)
    collecting = gc.isenabled()
    try:
        with backend.lent() as pool:
            made = made_by.make_graphed_callables(callables, samples, pool=pool, **options)
    except BaseException:
        # Its switch "a capture is under way" would stay on for eager passes.
        made_by.abandon()
        # Gradients of its warm-up would be added to by the next eager step.
        for parameter in (parameter for one in callables for parameter in one.parameters()):
            parameter.grad = None
        raise
    finally:
        if collecting:
            gc.enable()
        # It wraps ``__call__`` of the class and may leave its wrapper there.
        with suppress(AttributeError):
            del _Closed.__call__
    for one, graphed in zip(captured, made, strict=True):
        one.graphed = graphed
