"""Replay or eager: which modules are captured for which cells, and where each micro-batch runs.

A captured module keeps its place in the model. Its ``forward`` is replaced by a `GraphedModule`, which replays when the
micro-batch lies in the slot and calls the module's own forward otherwise. So a model runs as it is written, a
micro-batch beyond the largest cell runs eagerly with identical results, and a module whose capture fails is eager among
captured ones.

[Note: order of memory]
All graphs of a slot share one memory pool. Within a cell they are captured in the order in which they are replayed:
tables, forward of every module, backward of every module in reverse. What was free at a point of the capture is free at
that point of every replay. Different cells use the same memory over again, as one micro-batch replays one of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_packed.cuda_graphs.capture import CapturedModule
from megatron_packed.cuda_graphs.counters import GraphCounters
from megatron_packed.cuda_graphs.engine import CudaEngine, Engine, Graph
from megatron_packed.cuda_graphs.slots import Slot
from megatron_packed.packed.capacity import Cell, Ladder
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.packed.params import PackedSeqParams


class GraphFallbackError(RuntimeError):
    """Something ran, or would run, eagerly where that was forbidden."""


class Observation(NamedTuple):
    """One call of a module in a warm-up: what it was given and what it gave."""

    hidden: Tensor
    output: Tensor
    """The first tensor of what it returned."""
    takes_packed: bool


class Planned(NamedTuple):
    """How a module will be captured."""

    module: GraphedModule
    follows: bool
    """Its input is the output of the module before it, so both are the same memory."""
    shape: torch.Size
    """Of its hidden states."""
    dtype: torch.dtype
    takes_packed: bool


class GraphedModule:
    """Stands where a module's forward stood.

    Args:
        name: for messages.
        module: its forward takes hidden states ``(T, D)``, and either the metadata of the pack or nothing else.
        strict: running eagerly where a graph was wanted is an error.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        slot: Slot,
        engine: Engine,
        counters: GraphCounters,
        *,
        strict: bool = False,
    ) -> None:
        self.name, self.module, self.slot = name, module, slot
        self.forward = module.forward
        self.captured: dict[Cell, CapturedModule] = {}
        self.refusals: dict[Cell, str] = {}
        """Why it is not captured for a cell."""
        self.mode = "replay"
        """Or ``observe`` and ``bypass``, in warm-ups."""
        self.observed: Observation | None = None
        self.problem: str | None = None
        """What an observed call did that a graph cannot."""
        self._engine, self._counters, self._strict = engine, counters, strict
        module.forward = self

    def remove(self) -> None:
        """Give the module its own forward back, and give up all graphs."""
        del self.module.forward
        self.forget()

    def forget(self, cell: Cell | None = None) -> None:
        """Give up the graphs of one cell, or of all."""
        for one in [cell] if cell is not None else list(self.captured):
            captured = self.captured.pop(one, None)
            if captured is not None:
                captured.reset()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def __call__(self, hidden: Tensor, *rest: Any, **options: Any) -> Any:
        if self.mode == "observe":
            return self._observe(hidden, *rest, **options)
        current = self.slot.current
        if current is None or self.mode == "bypass":  # a micro-batch that runs eagerly was counted when it was placed
            return self.forward(hidden, *rest, **options)
        captured = self.captured.get(current.cell)
        reason = self._not_replayable(captured, hidden, rest, options)
        if captured is None or reason is not None:
            why = f"{self.name}: {reason or self.refusals.get(current.cell)}"
            if self._strict:
                raise GraphFallbackError(f"a module would run eagerly, which --cuda-graph-strict forbids: {why}.")
            self._counters.module_fallbacks[why] += 1
            return self.forward(hidden, *rest, **options)
        return captured.replay(hidden)

    def _not_replayable(
        self, captured: CapturedModule | None, hidden: Tensor, rest: tuple[Any, ...], options: dict[str, Any]
    ) -> str | None:
        if captured is None:
            return None
        if options or len(rest) > 1 or (rest and not self.slot.holds(rest[0])):
            return "called with other arguments than hidden states and the slot's metadata"
        if hidden.shape != captured.input.shape or hidden.dtype != captured.input.dtype:
            return f"hidden states {tuple(hidden.shape)} {hidden.dtype} are not those it was captured with"
        if torch.is_grad_enabled() and not hidden.requires_grad:
            return "its input asks for no gradient, and its graphs compute one"
        return None

    def _observe(self, hidden: Tensor, *rest: Any, **options: Any) -> Any:
        takes_packed = bool(rest) and self.slot.holds(rest[0])
        before = self._engine.random_state(hidden.device)
        result = self.forward(hidden, *rest, **options)
        if not torch.equal(before, self._engine.random_state(hidden.device)):
            self.problem = "it draws random numbers (dropout), and a graph would repeat them"
        elif self.observed is not None:
            self.problem = "it runs more than once in a micro-batch, and its graphs have room for one"
        elif options or len(rest) > int(takes_packed):
            self.problem = "it is called with more than hidden states and the pack's metadata"
        elif any(getattr(parameter, "main_grad", None) is None for parameter in self.parameters):
            self.problem = "it has parameters without main_grad (see FlatBuffers)"
        self.observed = Observation(hidden, tree_leaves(result)[0], takes_packed)
        return result


class _CaptureError(Exception):
    """Capturing one module failed, or what all of them share (None)."""

    def __init__(self, module: GraphedModule | None, reason: str) -> None:
        super().__init__(reason)
        self.module, self.reason = module, reason


class GraphRunner:
    """All graphs of one slot.

    Args:
        modules: name -> module, in the order in which the model runs them. Each takes hidden states, and either the
            pack's metadata or nothing else. Trainable parameters must have ``main_grad``. No module may draw random
            numbers (dropout): a graph would replay the same ones.
        total_tokens: token slots T of every micro-batch.
        ladder: the cells to capture.
        device: of the modules.
        tables: what all modules share and derive from a pack's metadata once; by name. Captured as a graph of its own.
        check: host checks of a micro-batch's metadata that ``tables`` cannot make inside a graph.
        engine: captures; by default torch's CUDA graphs.
        warmup_steps: eager passes before each cell's capture.
        strict: any fallback is an error.
        say: takes progress, a sentence at a time.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        *,
        total_tokens: int,
        ladder: Ladder,
        device: torch.device,
        tables: Callable[[PackedSeqParams], Mapping[str, object]] = lambda packed: {},
        check: Callable[[PackedSeqParams], None] = lambda packed: None,
        engine: Engine | None = None,
        warmup_steps: int = 3,
        strict: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        self.ladder, self.device, self.strict = ladder, device, strict
        self.engine: Engine = CudaEngine(device) if engine is None else engine
        self.slot = Slot(total_tokens, ladder.largest, device)
        self.counters = GraphCounters()
        self.modules = [
            GraphedModule(name, module, self.slot, self.engine, self.counters, strict=strict)
            for name, module in modules.items()
        ]
        self.tables, self._check, self._say = tables, check, say
        self._warmup_steps = max(warmup_steps, 1)
        self._table_graphs: dict[Cell, Graph] = {}
        self._outside: dict[tuple[object, ...], Tensor] = {}
        self._read_by_graphs: list[tuple[Mapping[str, Any], str]] = []
        self._addresses: list[int] = []

    def capture(self, driver: Callable[[MicroBatch], object], make_dummy: Callable[[Cell], MicroBatch]) -> None:
        """Capture every cell, the largest first. Call it between steps: gradients hold garbage afterwards.

        Args:
            driver: forward and backward of one micro-batch, as in training.
            make_dummy: a host micro-batch that fills a cell; for tuning kernels it should look like real ones.
        Raises:
            GraphFallbackError: ``strict``, and something could not be captured.
        """
        started = time.perf_counter()
        self.forget()
        for cell in reversed(self.ladder.cells):
            begun = time.perf_counter()
            while not self._try_cell(cell, driver, make_dummy):
                pass
            count = sum(cell in module.captured for module in self.modules)
            self.counters.memory_mib = self.engine.memory_mib()
            self._say(
                f"captured {count} of {len(self.modules)} modules for up to {cell.capacity} documents in "
                f"{time.perf_counter() - begun:.1f} s; graphs hold {self.counters.memory_mib:,.0f} MiB"
            )
        self.counters.capture_seconds += time.perf_counter() - started
        # Places, not tensors: ``module.to()`` puts another tensor into a buffer's place.
        self._read_by_graphs = [
            (place, name)
            for module in self.modules
            if module.captured
            for part in module.module.modules()
            for place in (part._parameters, part._buffers)
            for name, tensor in place.items()
            if tensor is not None
        ]
        self._addresses = _addresses(self._read_by_graphs)

    def place(self, micro_batch: MicroBatch) -> MicroBatch:
        """``micro_batch`` on the device, in one copy: in the slot where graphs can replay it, else beside it.

        Raises:
            GraphFallbackError: ``strict``, and it would run eagerly.
        """
        cell = Cell(micro_batch.layout.capacity, micro_batch.packed.max_seqlen)
        reason = self.why_eager(micro_batch, cell)
        if reason is None:
            self._check(micro_batch.packed)
            self.counters.replays += 1
            return self.fill(micro_batch, cell)
        if self.strict:
            raise GraphFallbackError(
                f"a micro-batch would run eagerly, which --cuda-graph-strict forbids: {reason}; raise "
                "--cuda-graph-max-packed-seqs or cap the packer by --max-documents-per-pack."
            )
        self.counters.fallbacks[reason] += 1
        self.slot.vacate()
        return micro_batch.to(self.device, non_blocking=True)

    def fill(self, micro_batch: MicroBatch, cell: Cell) -> MicroBatch:
        """``micro_batch`` in the slot, with its tables; it must be one that can be replayed."""
        placed = self.slot.fill(micro_batch, cell)
        self._table_graphs[cell].replay()
        return placed

    @property
    def moved(self) -> bool:
        """Whether a captured parameter or buffer has left the address that graphs read; then `capture` again."""
        return self._addresses != _addresses(self._read_by_graphs)

    def forget(self) -> None:
        """Give up all graphs and their memory; everything runs eagerly until the next capture."""
        self.slot.vacate()
        for module in self.modules:
            module.forget()
            module.refusals.clear()
        self._forget_tables()
        self.slot.forget_tables()
        self._outside.clear()
        self._read_by_graphs, self._addresses = [], []
        self.engine.reset()
        self.counters.memory_mib = 0.0

    def close(self) -> None:
        """Give up the graphs and give the modules back; before the process group is destroyed, or exit hangs."""
        self.forget()
        for module in self.modules:
            module.remove()
        self.modules = []

    def why_eager(self, micro_batch: MicroBatch, cell: Cell) -> str | None:
        """Why a micro-batch would not be replayed; None if it would."""
        if cell in self._table_graphs:
            if micro_batch.layout.total_tokens != self.slot.total_tokens:
                return f"another size than {self.slot.total_tokens} tokens"
            return "weights have moved to other memory" if self.moved else None
        if micro_batch.packed.num_seqs > self.ladder.largest:
            return f"more than {self.ladder.largest} documents"
        return "no graphs for its capacity" if self._table_graphs else "no graphs"

    def _try_cell(
        self, cell: Cell, driver: Callable[[MicroBatch], object], make_dummy: Callable[[Cell], MicroBatch]
    ) -> bool:
        """Capture all modules that are not yet refused; False if one more had to be refused."""
        modules = [module for module in self.modules if cell not in module.refusals]
        if not modules:
            return True
        failure: tuple[GraphedModule | None, str] | None = None
        planned: list[Planned] = []
        try:
            planned = self._warm_up(modules, driver, make_dummy(cell), cell)
            self._capture_tables(cell)
            self._capture_forward(planned, cell)
            self._capture_backward(planned, cell)
        except _CaptureError as error:
            failure = error.module, error.reason
        if failure is None and planned:
            for one in planned:
                one.module.captured[cell].release()
            self.counters.captures += 1 + 2 * len(planned)
            return True
        self._drop_cell(cell)  # behind the handler, whose traceback held what the failed capture had allocated
        if failure is not None:
            self._refuse(*failure, modules, cell)
        return failure is None

    def _refuse(
        self, module: GraphedModule | None, reason: str, modules: Sequence[GraphedModule], cell: Cell
    ) -> None:
        for refused in modules if module is None else [module]:
            refused.refusals[cell] = reason
        what = "no module" if module is None else f"{module.name} not"
        sentence = f"{what} captured for up to {cell.capacity} documents: {reason}"
        if self.strict:
            raise GraphFallbackError(f"{sentence}; --cuda-graph-strict forbids running it eagerly.")
        self._say(f"{sentence}; it runs eagerly")

    def _warm_up(
        self, modules: Sequence[GraphedModule], driver: Callable[[MicroBatch], object], dummy: MicroBatch, cell: Cell
    ) -> list[Planned]:
        """Eager passes on the stream of the captures: kernels are tuned, workspaces made, and calls are observed."""
        try:
            with self.engine.side_stream():
                for number in range(self._warmup_steps):
                    self.slot.set_tables(cell, {})  # what is derived must not come from what was derived before
                    packed = self.slot.fill(dummy, cell).packed
                    self.slot.set_tables(cell, self.tables(packed))
                    last = number == self._warmup_steps - 1
                    for module in self.modules:
                        module.mode = "observe" if last and module in modules else "bypass"
                    driver(self.slot.fill(dummy, cell))  # once more, with its tables
            return self._plan(modules)
        except torch.OutOfMemoryError as error:  # an eager step has more room: it reuses what steps before it freed
            raise _CaptureError(None, f"warm-up found no memory: {error}".splitlines()[0]) from error
        finally:
            for module in self.modules:
                module.mode, module.observed, module.problem = "replay", None, None

    @staticmethod
    def _plan(modules: Sequence[GraphedModule]) -> list[Planned]:
        planned: list[Planned] = []
        before: Observation | None = None
        for module in modules:
            if module.problem is not None:
                raise _CaptureError(module, module.problem)
            found = module.observed
            if found is None:  # the model did not run it
                continue
            follows = before is not None and found.hidden is before.output
            planned.append(Planned(module, follows, found.hidden.shape, found.hidden.dtype, found.takes_packed))
            before = found
        return planned

    def _capture_tables(self, cell: Cell) -> None:
        self.slot.set_tables(cell, {})
        static = self.slot.static(cell)
        with _capturing(None):
            self._table_graphs[cell], tables = self.engine.capture(lambda: self.tables(static))
        self.slot.set_tables(cell, tables)

    def _capture_forward(self, planned: Sequence[Planned], cell: Cell) -> None:
        static = self.slot.static(cell)
        hidden: Tensor | None = None
        for module, follows, shape, dtype, takes_packed in planned:
            if not follows or hidden is None:
                hidden = self._static_outside((module.name, "input"), shape, dtype)
            function = _with_packed(module.forward, static) if takes_packed else module.forward
            captured = CapturedModule(function, module.parameters, self.slot, self.engine, takes_packed=takes_packed)
            module.captured[cell] = captured
            with _capturing(module):
                hidden = captured.capture_forward(hidden)

    def _capture_backward(self, planned: Sequence[Planned], cell: Cell) -> None:
        grad_hidden: Tensor | None = None
        for one in reversed(planned):
            captured = one.module.captured[cell]
            wanted = [tensor for tensor, differs in zip(captured.outputs, captured.differentiable) if differs]
            grads = [
                grad_hidden
                if number == 0 and grad_hidden is not None
                else self._static_outside((one.module.name, "grad", number), tensor.shape, tensor.dtype)
                for number, tensor in enumerate(wanted)
            ]
            with _capturing(one.module):
                grad_input = captured.capture_backward(grads)
            grad_hidden = grad_input if one.follows else None

    def _static_outside(self, key: tuple[object, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory outside the graphs' pool, the same for all cells: where callers' tensors are brought."""
        key = (*key, shape, dtype)
        if key not in self._outside:
            self._outside[key] = torch.zeros(shape, dtype=dtype, device=self.device)
        return self._outside[key]

    def _drop_cell(self, cell: Cell) -> None:
        for module in self.modules:
            module.forget(cell)
        graph = self._table_graphs.pop(cell, None)
        if graph is not None:
            graph.reset()
        self.slot.vacate()
        gc.collect()

    def _forget_tables(self) -> None:
        for graph in self._table_graphs.values():
            graph.reset()
        self._table_graphs.clear()

def _addresses(places: Sequence[tuple[Mapping[str, Any], str]]) -> list[int]:
    return [place[name].data_ptr() for place, name in places]


def _with_packed(function: Callable[..., object], packed: PackedSeqParams) -> Callable[[Tensor], object]:
    return lambda hidden: function(hidden, packed)


@contextmanager
def _capturing(module: GraphedModule | None) -> Iterator[None]:
    """Whatever a module does wrong under capture, out of memory included, costs that module its graph."""
    try:
        yield
    except Exception as error:
        text = str(error).strip().splitlines()
        raise _CaptureError(module, f"{type(error).__name__}: {text[0] if text else ''}") from error
