"""Checks that every GPU op must pass.

Errors are like those of plain bf16, documents are isolated, results are deterministic, graphs can
be replayed over other packings, and the host never waits. An op is a function of leaves (tensors
that get gradients) and of static metadata; it returns one or several tensors.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import NoBackendError, Op
from megatron_packed.packed.params import PackedSeqParams
from support.gpu_capture import capture

Function = Callable[..., Tensor | tuple[Tensor, ...]]

T, CAPACITY = 1024, 48
PACKINGS = [
    [1, 2, 3, 127, 128, 129, 300, 1, 200, 100],  # with a tail
    [T],
    [9] * 40 + [600],
]


def pack(lengths: Sequence[int]) -> PackedSeqParams:
    """Return a pack padded to the capacity, with max_seqlen = T, as a captured graph uses it."""
    return PackedSeqParams.from_lengths(lengths, T, CAPACITY, max_seqlen=T, device="cuda")


def supported(op: Op, inputs: object, backend: str) -> None:
    """Skip the test, with the reasons, if the backend cannot run on this machine."""
    try:
        op.select(inputs, backend)
    except NoBackendError as error:
        pytest.skip(str(error))


def step(function: Function, leaves: Sequence[Tensor], seed: int = 5) -> list[Tensor]:
    """Return the outputs, then the gradient of each leaf for a fixed upstream gradient."""
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator("cuda").manual_seed(seed)
    upstream = [
        torch.randn(y.shape, generator=generator, device="cuda").to(y.dtype) for y in outputs
    ]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


def leaves_like(values: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [value.detach().to(dtype).requires_grad_() for value in values]


def check_errors(
    kernel: Function, exact: Function, plain: Function, values: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Check that errors are at most twice those of plain PyTorch in the same precision.

    Both are compared with ``exact`` in float32 (or wider).
    """
    want = step(exact, leaves_like(values, torch.float32))
    found, other = (step(function, leaves_like(values, dtype)) for function in (kernel, plain))
    for i, (reference, got, ordinary) in enumerate(zip(want, found, other)):
        scale = reference.abs().max().clamp(min=1e-30)
        error, allowed = ((x.float() - reference).abs().max() / scale for x in (got, ordinary))
        assert got.dtype == ordinary.dtype and got.shape == reference.shape
        assert error <= 2 * allowed + 2e-4, (
            f"result {i}: error {error:.2e}, plain {dtype} {allowed:.2e}"
        )


def check_isolation(
    kernel: Function, values: Sequence[Tensor], rows: slice, dtype: torch.dtype, *, atol: float = 0
) -> None:
    """Change one token of the document that owns ``rows``; no other row of a result may change.

    ``atol`` is allowed for gradients of kernels whose order of summation changes from run to run.
    """
    token = (rows.start + rows.stop) // 2
    changed = [value.clone() for value in values]
    for value in changed:
        value[token] += 2.0
    before, after = (step(kernel, leaves_like(x, dtype)) for x in (values, changed))
    others = torch.ones(T, dtype=torch.bool, device="cuda")
    others[rows] = False
    outputs = len(before) - len(values)
    for i, (x, y) in enumerate(zip(before, after)):
        assert not torch.equal(x[~others], y[~others])
        if i < outputs or atol == 0:
            assert torch.equal(x[others], y[others]), f"result {i} of other documents changed"
        else:
            assert (
                x[others].float() - y[others].float()
            ).abs().max() <= atol * x.float().abs().max()


def check_determinism(
    kernel: Function, values: Sequence[Tensor], dtype: torch.dtype, runs: int = 6
) -> None:
    leaves = leaves_like(values, dtype)
    first = step(kernel, leaves)
    for _ in range(runs - 1):
        for i, (x, y) in enumerate(zip(first, step(kernel, leaves))):
            assert torch.equal(x, y), f"result {i} differs from run to run"


def check_no_sync(kernel: Function, values: Sequence[Tensor], dtype: torch.dtype) -> None:
    leaves = leaves_like(values, dtype)
    upstream = [torch.ones_like(y) for y in _tuple(kernel(*leaves))]
    torch.autograd.grad(_tuple(kernel(*leaves)), leaves, upstream)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(_tuple(kernel(*leaves)), leaves, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_replay(
    kernel: Function,
    values: Sequence[Tensor],
    dtype: torch.dtype,
    updates: Sequence[Callable[[], None]],
    *,
    atol: float = 0,
) -> None:
    """Capture forward and backward once, and compare replays with eager runs.

    Each of ``updates`` refills the static metadata in place before a replay. Results must be equal
    bit for bit, or within ``atol`` of the largest value.
    """
    leaves = leaves_like(values, dtype)
    upstream = [torch.randn_like(y) for y in _tuple(kernel(*leaves))]

    def both() -> list[Tensor]:
        outputs = _tuple(kernel(*leaves))
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, upstream)]

    graph, static = capture(both)
    for number, update in enumerate(updates):
        update()
        for leaf in leaves:
            leaf.data.copy_(torch.randn_like(leaf))
        eager = both()
        graph.replay()
        for i, (x, y) in enumerate(zip(static, eager)):
            limit = atol * y.float().abs().max()
            assert y.isfinite().all()
            assert (x.float() - y.float()).abs().max() <= limit, f"result {i} of replay {number}"


def _tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
