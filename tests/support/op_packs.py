"""Packs of difficult documents, and two checks that every op must pass.

* ``leaks`` lists the results that change in other documents when one document changes.
* ``relative_error`` returns max |a - b| / max |b|.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.gpu_capture import capture

PACKS = {
    "shorter than the convolution": [1, 2, 3, 1, 1, 2],
    "around a chunk of 16": [15, 16, 17, 1, 31, 33],
    "over 100 documents": [1, 2, 1, 3] * 30,
    "one document fills the pack": [64],
    "one document and a ragged end": [67],
    "starts and ends inside chunks": [5, 40, 7, 30, 2, 12],
    "tail": [20, 9, 35],
}


def boundaries(lengths, device="cpu"):
    """Return ``seq_idx (1, T)`` and ``cu_seqlens (documents + 1,)``, int32."""
    sizes = torch.tensor(lengths)
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), sizes)[None].int()
    cu_seqlens = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    return seq_idx.to(device), cu_seqlens.to(device)


def with_gradients(run, values, weight=None, output="y"):
    """Return the output of ``run``, which takes the dict of values, and the gradient of each value.

    Without ``weight`` the upstream gradient has a different value for each element.
    """
    values = {name: value.clone().requires_grad_() for name, value in values.items()}
    y = run(values)
    if weight is None:
        weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    gradients = torch.autograd.grad((y * weight.to(y.dtype)).sum(), values.values())
    return {output: y.detach(), **dict(zip((f"d{name}" for name in values), gradients))}


def relative_error(got, want):
    return (
        (got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30)
    ).item()


def norm_error(got, want, least=0.0):
    """Return the norm of the difference, relative to the norm of ``want``, or to ``least``."""
    want = want.double()
    return ((got.double() - want).norm() / want.norm().clamp_min(least)).item()


def different(first, second):
    """Return the names of results that are not equal bit for bit."""
    return {name for name in first if not torch.equal(first[name], second[name])}


def assert_repeats(run, times=5):
    """Check that repeated runs have the same bits, and return the results of the first."""
    first = run()
    for _ in range(times):
        assert different(first, run()) == set()
    return first


def leaks(run, inputs, lengths, victims=None):
    """Return the names of results that change outside a document when the document changes.

    Args:
        run: takes the inputs (dict of tensors with T first), returns a dict of results with T
            first.
        inputs: tensors of which one token of a document is changed, in all of them together.
        lengths: lengths of the documents.
        victims: numbers of the documents to change; all by default.
    """
    base = run(inputs)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    found = set()
    for victim in range(len(lengths)) if victims is None else victims:
        start, end = starts[victim], starts[victim] + lengths[victim]
        changed = {name: value.clone() for name, value in inputs.items()}
        for value in changed.values():
            value[(start + end) // 2] += 1.5
        result = run(changed)
        for name, value in result.items():
            same = torch.equal(value[:start], base[name][:start]) and torch.equal(
                value[end:], base[name][end:]
            )
            if not same:
                found.add(name)
            assert not torch.equal(value[start:end], base[name][start:end]), (
                f"{name}: the change had no effect"
            )
    return found


def leaks_of_tokens(results, values, per_token, lengths, victims=None):
    """Return the `leaks` of an op whose parameters stay the same.

    Args:
        results: takes all inputs by name and returns the output and all gradients by name.
        per_token: names of the inputs with one row per token; only they change, and only their
            gradients and the output are compared.
    """

    def run(inputs):
        found = results({**values, **inputs})
        return {name: x for name, x in found.items() if is_per_token(name, per_token)}

    return leaks(run, {name: values[name] for name in per_token}, lengths, victims)


def is_per_token(name, per_token):
    """Return True for the output (y or o) and for gradients (dx or d_x) of the inputs ``per_token``."""
    return len(name) == 1 or name[1:].removeprefix("_") in per_token


def assert_sums_in_float32(forward_backward, values, per_token, lengths, weight):
    """Check that an op with bfloat16 inputs of tokens rounds only its results of tokens."""
    low = {k: v.bfloat16() if k in per_token else v.float() for k, v in values.items()}
    got = forward_backward(low, lengths, weight=weight.bfloat16(), backend="reference")
    wide = {name: value.double() for name, value in low.items()}
    want = forward_backward(wide, lengths, weight=weight.bfloat16(), backend="recurrence")
    for name in want:
        rounded = got[name].dtype == torch.bfloat16
        assert rounded == is_per_token(name, per_token)
        assert relative_error(got[name], want[name]) < (2**-8 if rounded else 1e-5), name


def assert_errs_at_most_twice(got, plain, want):
    """Check errors against those of plain PyTorch; one rounding to bf16 is always allowed.

    With few tokens the maxima of errors scatter.
    """
    for name in want:
        error, of_plain = (relative_error(x[name], want[name]) for x in (got, plain))
        assert error < max(2 * of_plain, 2**-7), (name, error, of_plain)


def run_without_values(function, *tensors):
    """Run forward and backward on fake tensors.

    An operation that reads a value on the host, or derives a shape from a value, raises.
    """
    mode = FakeTensorMode()
    fake = [mode.from_tensor(t).requires_grad_(t.is_floating_point()) for t in tensors]
    with mode:
        function(*fake).sum().backward()


def assert_replays(run, static, changes):
    """Capture ``run(static)`` once; for each change, a replay must equal an eager run bit for bit.

    Args:
        run: takes the dict of static tensors and returns a dict of results. It runs forward and
            backward without a host sync.
        static: tensors whose addresses the graph reads.
        changes: dicts of new contents, copied into the tensors of the same names before a replay.
    Returns:
        For each change the results.
    """
    graph, captured = capture(lambda: run(static))
    results = []
    for change in changes:
        for name, value in change.items():
            static[name].copy_(value)
        for value in captured.values():
            value.fill_(7)  # remains in a result that the replay does not write
        graph.replay()
        again = {name: value.clone() for name, value in captured.items()}
        results.append(run(static))
        assert different(results[-1], again) == set()
    return results


def no_sync(run, *args):
    """Run ``run(*args)`` and raise on every host sync that PyTorch detects."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return run(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
