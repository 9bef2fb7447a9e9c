"""Audits: does a replay equal what would be computed? Checked on one micro-batch, between steps.

With graphs of layers (`audit_module`) every captured module gets made-up hidden states and
gradients, and runs

1. eagerly, on metadata that came from the host in a buffer of its own, not through the slot;
2. by replay, through the slot, whose unused bytes and whose outputs were filled with NaN and
  nonsense before;
3. by replay twice more, the second time with large finite values in every row but those of one
  document.

Run 2 must give run 1's bits: outputs, input gradients, parameter gradients. Kernels that add in a
changing order may differ, in gradients, by as much as a second eager run shows. Runs 3 must agree
in the rows of that one document: a leak from a neighbour is then a thousand times larger than
rounding.

With graphs of whole steps (`audit_part`) every part runs on the micro-batch itself, eagerly and by
replay, while the gradient buffer is free.

Nothing of the training changes: gradients are put back, and random numbers come from a generator of
the audit's own. The generators of the process are put back too, since cuDNN's attention moves them
even without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron_packed.config import flag_names as flags
from megatron_packed.cuda_graphs.module_graphs import ModuleGraphs, TorchModuleGraphs
from megatron_packed.cuda_graphs.replaced_forward import GraphedForward
from megatron_packed.cuda_graphs.slots import values_restored
from megatron_packed.packed.params import PackedSeqParams

T = TypeVar("T")

LARGE = 1e3
"""Size of the other documents' hidden states."""
NOISE_FACTOR = 4
"""Factor by which a difference may exceed the one observed between two eager runs."""
ULPS_OF_UNORDERED_SUMS = 2
"""One pair of runs may show no difference where sums in a changing order round to a neighbour in
the next.
"""
ULPS_OF_OTHER_ROWS = 8
"""A document's own rows, when others change: bitwise but for grouped products, which split their
sums by row counts.
"""

FLOOR_OF_WHOLE = 1e-3
"""Allowed difference of gradients of a whole model without deterministic kernels, when two eager runs
happen to agree. Metadata of another pack changes them by 1e-1 and more.
"""


class AuditMismatchError(RuntimeError):
    """A replay gave something else than the module itself."""


@dataclass(frozen=True)
class _Results:
    outputs: list[Tensor]
    input_gradient: Tensor
    parameter_gradients: dict[str, Tensor]


class _Immediate:
    """Captures nothing: runs at once."""

    class _Nothing:
        def replay(self) -> None: ...
        def reset(self) -> None: ...

    def capture(self, function: Callable[[], T]) -> tuple[_Nothing, T]:
        return self._Nothing(), function()

    def side_stream(self) -> nullcontext[None]:
        return nullcontext()

    def lent(self) -> nullcontext[None]:
        return nullcontext()

    def take_stream(self) -> None: ...

    def borrowed(self, tensor: Tensor) -> Tensor:
        return tensor

    def random_state(self, device: torch.device) -> Tensor:
        return torch.empty(0)

    def memory_mib(self) -> float:
        return 0.0

    def reset(self) -> None: ...

    def another(self) -> _Immediate:
        return self


def audit_part(
    name: str,
    eagerly: Callable[[], object],
    by_replay: Callable[[], object],
    results: Mapping[str, Tensor],
    reset: Callable[[], object],
    *,
    dtype: torch.dtype,
    deterministic: bool,
) -> float:
    """Compare a part of a step by replay with the same part eagerly; return the largest difference.

    Waits for the device, and holds copies of ``results``.

    Args:
        name: of the part.
        eagerly, by_replay: run it on one micro-batch.
        results: what the part adds to, by name.
        reset: sets them to zero.
        dtype: of the computation.
        deterministic: kernels were asked to be; then all must be equal to the bit.
    Raises:
        AuditMismatchError: names what differs most.
    """

    def computed() -> dict[str, Tensor]:
        reset()
        eagerly()
        return {key: tensor.detach().clone() for key, tensor in results.items()}

    with _generators_kept(next(iter(results.values())).device):
        wanted = computed()
        other = wanted if deterministic else computed()
        reset()
        by_replay()
    differences = {key: _relative(found, wanted[key]) for key, found in results.items()}
    floor = (
        0.0
        if deterministic
        else max(FLOOR_OF_WHOLE, ULPS_OF_UNORDERED_SUMS * torch.finfo(dtype).eps)
    )
    allowed = {
        key: max(NOISE_FACTOR * _relative(other[key], wanted[key]), floor) for key in results
    }
    wrong = [key for key in results if not differences[key] <= allowed[key]]
    if wrong:
        worst = max(wrong, key=differences.__getitem__)
        raise AuditMismatchError(
            f"the replay of a {name} is not what it computes: {worst} differ by {differences[worst]:.1e} of their "
            f"largest value, and {allowed[worst]:.1e} is allowed ({len(wrong)} of {len(results)} results differ by too "
            f"much). Train with {flags.CUDA_GRAPH_IMPL} none and report this with the options of the run."
        )
    return max(differences.values())


def audit_module(
    module: GraphedForward,
    captured: ModuleGraphs,
    fresh: PackedSeqParams,
    own_rows: Tensor,
    generator: torch.Generator,
    deterministic: bool,
) -> float:
    """Compare a module by replay with the same module eagerly; return the largest difference.

    Waits for the device.

    Args:
        captured: its graphs, in whose slot the micro-batch lies.
        fresh: metadata of the same micro-batch, in memory of its own.
        own_rows: ``(rows of hidden states,)`` bool, those of one document in the middle; none where
            other ranks have them.
        generator: of the made-up hidden states and gradients.
        deterministic: kernels were asked to be; then gradients must be equal to the bit.
    Raises:
        AuditMismatchError: names the module and the quantity that differs.
    """
    with _generators_kept(generator.device):
        return _audit_module(module, captured, fresh, own_rows, generator, deterministic)


def _generators_kept(device: torch.device) -> AbstractContextManager[None]:
    """The process's generators are afterwards where they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _audit_module(
    module: GraphedForward,
    captured: ModuleGraphs,
    fresh: PackedSeqParams,
    own_rows: Tensor,
    generator: torch.Generator,
    deterministic: bool,
) -> float:
    normal = _like(generator)
    hidden = normal(captured.input)
    grads = [normal(gradient) for gradient in captured.grad_outputs]
    eager = _run_eagerly(module, captured, hidden, grads, fresh)
    replayed = _run_replayed(module, captured, hidden, grads)
    again = eager if deterministic else _run_eagerly(module, captured, hidden, grads, fresh)
    worst = 0.0
    for name, found, wanted, other, unordered in _pairs(replayed, eager, again, deterministic):
        difference, noise = _relative(found, wanted), _relative(other, wanted)
        ulps = ULPS_OF_UNORDERED_SUMS * torch.finfo(hidden.dtype).eps if unordered else 0.0
        allowed = max(NOISE_FACTOR * noise, ulps) if unordered else 0.0
        worst = max(worst, difference)
        if not difference <= allowed:
            raise AuditMismatchError(
                f"the replay of {module.name} is not what the module computes: {name} differ by {difference:.1e} of "
                f"their largest value, and {allowed:.1e} is allowed. Train with "
                f"{flags.CUDA_GRAPH_IMPL} none and report this with the options of the run."
            )
    _audit_isolation(
        module, captured, hidden, LARGE * normal(hidden), grads, own_rows, fresh.num_seqs // 2
    )
    return worst


def _audit_isolation(
    module: GraphedForward,
    captured: ModuleGraphs,
    hidden: Tensor,
    large: Tensor,
    grads: Sequence[Tensor],
    own_rows: Tensor,
    number: int,
) -> None:
    """Rows of one document, when all others are those of ``large``: other values, which norms
    cannot undo.

    Outputs after the hidden states get no gradient: auxiliary losses couple documents by design.

    Args:
        own_rows: ``(rows of hidden,)`` bool, those of document ``number``; none where other ranks
            have them.
    """
    grads = [grads[0], *map(torch.zeros_like, grads[1:])]
    before = _run_replayed(module, captured, hidden, grads)
    own = own_rows.view(
        -1, *[1] * (hidden.dim() - 1)
    )  # megatron-core's hidden states are (T, 1, D)
    after = _run_replayed(module, captured, torch.where(own, hidden, large), grads)
    for name, found, wanted in (
        ("outputs", after.outputs[0], before.outputs[0]),
        ("input gradients", after.input_gradient, before.input_gradient),
    ):
        difference = _relative(found[own_rows], wanted[own_rows])
        allowed = ULPS_OF_OTHER_ROWS * torch.finfo(hidden.dtype).eps
        if not difference <= allowed:
            raise AuditMismatchError(
                f"in the replay of {module.name} document {number} sees others: its {name} moved by {difference:.1e} "
                f"of their largest value when all other documents changed, and {allowed:.1e} is allowed. Train with "
                f"{flags.CUDA_GRAPH_IMPL} none and report this with the options of the run."
            )


def _run_eagerly(
    module: GraphedForward,
    captured: ModuleGraphs,
    hidden: Tensor,
    grads: Sequence[Tensor],
    packed: PackedSeqParams,
) -> _Results:
    function: Callable[[Tensor], object] = (
        (lambda x: module.original_forward(x, packed))
        if captured.takes_packed
        else module.original_forward
    )
    named = _named(module)
    originals = {name: parameter.main_grad for name, parameter in named.items()}  # type: ignore[attr-defined]
    # Gradients of the eager run must not be added to those of the training.
    temporary = {name: torch.zeros_like(main_grad) for name, main_grad in originals.items()}
    _set_main_grads(named, temporary)
    try:
        with values_restored(module.module.buffers()):
            once = TorchModuleGraphs(function, module.parameters, captured.slot, _Immediate())
            once.capture_forward(hidden.clone())
            once.capture_backward([gradient.clone() for gradient in grads])
    finally:
        _set_main_grads(named, originals)
    return _Results(once.outputs, once.grad_input, temporary)


def _run_replayed(
    module: GraphedForward, captured: ModuleGraphs, hidden: Tensor, grads: Sequence[Tensor]
) -> _Results:
    # NaN: a replay that does not write all of its results must not leave the right ones there.
    for tensor in (*captured.outputs, captured.grad_input):
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))
    gradients = {name: parameter.main_grad for name, parameter in _named(module).items()}  # type: ignore[attr-defined]
    with values_restored([*gradients.values(), *module.module.buffers()]):
        for gradient in gradients.values():
            gradient.zero_()
        with torch.no_grad():
            outputs = [tensor.clone() for tensor in captured.replay_forward(hidden)]
            input_gradient = captured.replay_backward(grads).clone()
        gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    return _Results(outputs, input_gradient, gradients)


def _named(module: GraphedForward) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.module.named_parameters() if p.requires_grad}


def _set_main_grads(
    parameters: Mapping[str, nn.Parameter], main_grads: Mapping[str, Tensor]
) -> None:
    for name, parameter in parameters.items():
        parameter.main_grad = main_grads[name]  # type: ignore[attr-defined]


def _pairs(
    replayed: _Results, eager: _Results, again: _Results, deterministic: bool
) -> Iterator[tuple[str, Tensor, Tensor, Tensor, bool]]:
    """Name, what was replayed, what is wanted, a second run of it, and whether sums may come in
    another order.
    """
    for found, wanted, other in zip(replayed.outputs, eager.outputs, again.outputs):
        yield "outputs", found, wanted, other, False
    yield (
        "input gradients",
        replayed.input_gradient,
        eager.input_gradient,
        again.input_gradient,
        not deterministic,
    )
    for name, found in replayed.parameter_gradients.items():
        wanted, other = eager.parameter_gradients[name], again.parameter_gradients[name]
        yield f"gradients of {name}", found, wanted, other, not deterministic


def _like(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    def normal(tensor: Tensor) -> Tensor:
        values = torch.randn(
            tensor.shape, generator=generator, device=tensor.device, dtype=torch.float32
        )
        return torch.empty_like(tensor).copy_(values)

    return normal


def _relative(found: Tensor, wanted: Tensor) -> float:
    """max |difference| / max |wanted|; infinite where one has a NaN."""
    if found.numel() == 0 or torch.equal(found, wanted):
        return 0.0
    found, wanted = found.double(), wanted.double()
    difference = ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()
    return difference if difference == difference else float("inf")
