"""Inputs for tests of our kernels of the Mamba-2 scan, on CPUs and GPUs."""

import torch

from megatron_packed.ops.ssd.api import ssd
from support.op_packs import boundaries

NAMES = ("x", "dt", "A_log", "B", "C", "D", "dt_bias")
PER_TOKEN = ("x", "dt", "B", "C")
RESULTS = ("y", *(f"d_{name}" for name in NAMES))
LOCAL = ("y", *(f"d_{name}" for name in PER_TOKEN))
"""Results with one row per token."""


def make(tokens, sizes, *, decay=1.0, bias=-2.0, device="cpu", seed=0):
    """Return random float64 inputs.

    Args:
        sizes: N, P, G and S.
        decay: factor of A; 0.001 keeps the state for long, 200 forgets it within a token.
        bias: added to dt_bias; -6 makes short steps, 4 long ones.
    """
    heads, head_dim, groups, state_dim = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = {
        "x": normal(tokens, heads, head_dim),
        "dt": normal(tokens, heads),
        "A_log": (decay * torch.linspace(0.5, 8, heads, dtype=torch.float64)).log(),
        "B": normal(tokens, groups, state_dim),
        "C": normal(tokens, groups, state_dim),
        "D": normal(heads),
        "dt_bias": normal(heads) + bias,
    }
    return {name: value.to(device) for name, value in values.items()}


def cast(values, dtype):
    """Return the inputs with the tensors of tokens in ``dtype`` and the parameters in float32."""
    return {k: v.to(dtype if k in PER_TOKEN else torch.float32) for k, v in values.items()}


def upstream(y):
    """Return a gradient of y with a different value for each element."""
    ramp = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device)
    return (7 * ramp).sin().view(y.shape).to(y)


def results(values, lengths, backend="triton", chunk_size=64, upstream_dtype=None):
    """Return the output of the op and the gradient of each input, by name.

    Args:
        upstream_dtype: dtype to which the gradient of y is rounded; by default that of y.
    """
    leaf = {name: values[name].detach().requires_grad_() for name in NAMES}
    boundary = boundaries(lengths, values["x"].device)
    y = ssd(*leaf.values(), *boundary, chunk_size=chunk_size, backend=backend)
    upstream_y = upstream(y).to(upstream_dtype or y.dtype).to(y.dtype)
    gradients = torch.autograd.grad(y, leaf.values(), upstream_y)
    return dict(zip(RESULTS, (y.detach(), *gradients)))
