"""Audits: comparison of replays with eager passes on one micro-batch, between steps.

With graphs of layers (`audit_module`) every captured module gets random hidden states and
gradients. The module runs

1. Eagerly, on metadata that was copied from the host to a separate buffer, not to the slot.
2. By replay, on the slot. Before the replay, unused bytes of the slot hold 0xFF and outputs NaN.
3. By replay twice more. In the second of these replays every row outside one document holds large
   finite values.

Runs 1 and 2 must have the same bits in outputs, input gradients and parameter gradients. Kernels
that sum in a varying order may differ in gradients, by about as much as two eager runs differ. The
two replays of 3 must agree in the rows of the one document. A leak from another document would make
a difference a thousand times larger than rounding.

With graphs of whole steps (`audit_part`) every part runs on the micro-batch itself, eagerly and by
replay, at a time when the gradient buffer is unused.

An audit changes nothing in the training. Gradients are restored afterwards, and the random values
come from a separate generator. The generators of the process are restored too, because cuDNN's
attention advances them even without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron_packed.config import flag_names as flags
from megatron_packed.cuda_graphs.capture_and_pool import NoGraphs
from megatron_packed.cuda_graphs.module_graphs import ModuleGraphs, TorchModuleGraphs
from megatron_packed.cuda_graphs.replaced_forward import GraphedForward
from megatron_packed.cuda_graphs.slots import values_restored
from megatron_packed.distributed.rng import generators_kept
from megatron_packed.packed.params import PackedSeqParams

T = TypeVar("T")

LARGE = 1e3
"""Scale of the hidden states of all other documents in the isolation check."""
_NOISE_FACTOR = 4
"""Allowed difference between replay and eager run, as a multiple of the difference between two
eager runs."""
_ULPS_OF_UNORDERED_SUMS = 2
"""Difference in ulps that is always allowed where kernels sum in a varying order.

Two eager runs may happen to agree, and the next run may still round to the adjacent number.
"""
ULPS_OF_OTHER_ROWS = 8
"""Difference in ulps allowed in one document's rows when all other documents change.

Only grouped matrix products need it: they split their sums by the number of rows. All other kernels
are bitwise equal.
"""

FLOOR_OF_WHOLE = 1e-3
"""Relative difference that is always allowed in gradients of a complete model without deterministic
kernels, because two eager runs may happen to agree.

Metadata of another pack changes the gradients by 1e-1 and more.
"""


class AuditMismatchError(RuntimeError):
    """Difference between a replay and an eager pass that is larger than allowed."""


@dataclass(frozen=True)
class _Results:
    outputs: list[Tensor]
    input_gradient: Tensor
    parameter_gradients: dict[str, Tensor]


class _Immediate(NoGraphs):
    """Backend that runs a function immediately instead of capturing the function."""

    class _Nothing:
        def replay(self) -> None: ...
        def reset(self) -> None: ...

    def capture(self, function: Callable[[], T]) -> tuple[_Nothing, T]:
        return self._Nothing(), function()


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
    """Run a part of a step by replay and eagerly, compare, and return the largest difference.

    Synchronizes with the device, and holds copies of ``results``.

    Args:
        name: name of the part.
        eagerly: runs the part eagerly on one micro-batch.
        by_replay: replays the part on the same micro-batch.
        results: name -> tensor to which the part adds its results.
        reset: sets ``results`` to zero.
        dtype: dtype of the computation.
        deterministic: kernels are deterministic; all results must then be bitwise equal.
    Raises:
        AuditMismatchError: a difference is larger than allowed; names the largest.
    """

    def computed() -> dict[str, Tensor]:
        reset()
        eagerly()
        return {key: tensor.detach().clone() for key, tensor in results.items()}

    with generators_kept(next(iter(results.values())).device):
        wanted = computed()
        other = wanted if deterministic else computed()
        reset()
        by_replay()
    differences = {key: _relative(replayed, wanted[key]) for key, replayed in results.items()}
    floor = (
        0.0
        if deterministic
        else max(FLOOR_OF_WHOLE, _ULPS_OF_UNORDERED_SUMS * torch.finfo(dtype).eps)
    )
    allowed = {
        key: max(_NOISE_FACTOR * _relative(other[key], wanted[key]), floor) for key in results
    }
    too_different = [key for key in results if not differences[key] <= allowed[key]]
    if too_different:
        worst = max(too_different, key=differences.__getitem__)
        raise AuditMismatchError(
            f"the replay of the {name} differs from its eager pass: {worst} differ by {differences[worst]:.1e} of "
            f"their largest value, and {allowed[worst]:.1e} is allowed. {len(too_different)} of {len(results)} results "
            f"differ by more than allowed. Train with {flags.CUDA_GRAPH_IMPL} none and report this error with the "
            "options of the run."
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
    """Run a module by replay and eagerly, compare, and return the largest difference.

    Synchronizes with the device.

    Args:
        module: the module.
        captured: graphs of the module; the micro-batch is in their slot.
        fresh: metadata of the same micro-batch, in memory outside the slot.
        own_rows: ``(rows of hidden states,)`` bool; true for the rows of one document in the middle
            of the pack. All false if these rows are on other ranks.
        generator: generator of the random hidden states and gradients.
        deterministic: kernels are deterministic; gradients must then be bitwise equal.
    Raises:
        AuditMismatchError: a difference is larger than allowed; names the module and the quantity.
    """
    with generators_kept(generator.device):
        normal = _like(generator)
        hidden = normal(captured.input)
        grads = [normal(gradient) for gradient in captured.grad_outputs]
        eager = _run_eagerly(module, captured, hidden, grads, fresh)
        replayed = _run_replayed(module, captured, hidden, grads)
        again = eager if deterministic else _run_eagerly(module, captured, hidden, grads, fresh)
        worst = 0.0
        for name, actual, expected, other, unordered in _pairs(
            replayed, eager, again, deterministic
        ):
            difference, noise = _relative(actual, expected), _relative(other, expected)
            ulps = _ULPS_OF_UNORDERED_SUMS * torch.finfo(hidden.dtype).eps if unordered else 0.0
            allowed = max(_NOISE_FACTOR * noise, ulps) if unordered else 0.0
            worst = max(worst, difference)
            if not difference <= allowed:
                raise AuditMismatchError(
                    f"the replay of {module.name} differs from its eager pass: {name} differ by {difference:.1e} of "
                    f"their largest value, and {allowed:.1e} is allowed. Train with {flags.CUDA_GRAPH_IMPL} none and "
                    "report this error with the options of the run."
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
    """Check that rows of a document change only by rounding when all other rows come from ``large``.

    The values of ``large`` are random, so a norm does not cancel the change. Outputs after the
    hidden states get zero gradients, because auxiliary losses couple documents by design.

    Args:
        own_rows: ``(rows of hidden,)`` bool; true for the rows of document ``number``. All false if
            these rows are on other ranks.
    """
    grads = [grads[0], *map(torch.zeros_like, grads[1:])]
    original = _run_replayed(module, captured, hidden, grads)
    own_mask = own_rows.view(
        -1, *[1] * (hidden.dim() - 1)
    )  # hidden states of megatron-core are (T, 1, D)
    changed = _run_replayed(module, captured, torch.where(own_mask, hidden, large), grads)
    for name, actual, expected in (
        ("outputs", changed.outputs[0], original.outputs[0]),
        ("input gradients", changed.input_gradient, original.input_gradient),
    ):
        difference = _relative(actual[own_rows], expected[own_rows])
        allowed = ULPS_OF_OTHER_ROWS * torch.finfo(hidden.dtype).eps
        if not difference <= allowed:
            raise AuditMismatchError(
                f"in the replay of {module.name}, document {number} depends on other documents: its {name} changed by "
                f"{difference:.1e} of their largest value when all other documents changed, and {allowed:.1e} is "
                f"allowed. Train with {flags.CUDA_GRAPH_IMPL} none and report this error with the options of the run."
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
    # The eager run adds to main_grad; temporary tensors keep the gradients of the training unchanged.
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
    # Fill results with NaN. If the replay does not write a result, a correct value of an earlier
    # replay must not hide that fault.
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
    """Yield ``(name, replayed tensor, eager tensor, tensor of the second eager run, unordered)``.

    ``unordered`` is True if kernels may sum this quantity in a varying order.
    """
    for actual, expected, other in zip(replayed.outputs, eager.outputs, again.outputs):
        yield "outputs", actual, expected, other, False
    yield (
        "input gradients",
        replayed.input_gradient,
        eager.input_gradient,
        again.input_gradient,
        not deterministic,
    )
    for name, actual in replayed.parameter_gradients.items():
        expected, other = eager.parameter_gradients[name], again.parameter_gradients[name]
        yield f"gradients of {name}", actual, expected, other, not deterministic


def _like(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    def normal(tensor: Tensor) -> Tensor:
        values = torch.randn(
            tensor.shape, generator=generator, device=tensor.device, dtype=torch.float32
        )
        return torch.empty_like(tensor).copy_(values)

    return normal


def _relative(actual: Tensor, expected: Tensor) -> float:
    """Return max |actual - expected| / max |expected|; infinity if either tensor has a NaN."""
    if actual.numel() == 0 or torch.equal(actual, expected):
        return 0.0
    actual, expected = actual.double(), expected.double()
    difference = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    return difference if difference == difference else float("inf")
