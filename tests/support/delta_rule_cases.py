"""Inputs and packs for tests of the gated delta rule's kernels, on CPUs and GPUs."""

import torch

from megatron_packed.ops.gated_delta_rule.api import gated_delta_rule
from support.op_packs import boundaries, norm_error

ALL = ("q", "k", "v", "a", "b", "A_log", "dt_bias")
PER_TOKEN = ALL[:5]
STRENGTHS = {
    "ordinary": {},
    "weak decay, beta near 2": {"decay": 0.001, "beta": 8.0},
    "strong decay, beta near 0": {"decay": 50.0, "beta": -8.0},
    "strong and weak decay by turns": {"decay": 300.0, "spread": 12.0},
}
"""Arguments of `inputs`."""


def inputs(tokens, sizes, *, decay=1.0, beta=0.0, spread=1.0, common=0.0, device="cpu"):
    """Return random float64 inputs.

    Args:
        sizes: G, N, K and V.
        decay: factor of A; 0.001 keeps the state for long, 50 forgets it within a token.
        beta: added to b; 8 gives a beta near 1 (2 if doubled), -8 near 0.
        spread: factor of a; with 12 the decays of neighbours differ by powers of ten.
        common: cosine between each q or k and one direction; 0 for independent vectors.
    """
    key_heads, value_heads, key_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = {
        "q": normal(tokens, key_heads, key_dim),
        "k": normal(tokens, key_heads, key_dim),
        "v": normal(tokens, value_heads, value_dim),
        "a": normal(tokens, value_heads) * spread,
        "b": normal(tokens, value_heads) + beta,
        "A_log": (decay * torch.linspace(0.5, 2, value_heads, dtype=torch.float64)).log(),
        "dt_bias": normal(value_heads),
    }
    if common:
        values |= {name: near(values["k"][:1], values[name], common) for name in ("q", "k")}
    return {name: value.to(device) for name, value in values.items()}


def near(first, x, cosine):
    """Return unit vectors that have this cosine with the vector ``first`` of their head."""
    first = torch.nn.functional.normalize(first, dim=-1)
    across = torch.nn.functional.normalize(x - (x * first).sum(-1, keepdim=True) * first, dim=-1)
    return cosine * first + (1 - cosine**2) ** 0.5 * across


def repeated_keys(tokens, sizes, *, device="cpu"):
    """Return `inputs` of one key without decay, with a beta near 1 (2 if doubled).

    A token then writes the state of the token before it with the other sign, so roundings add up.
    """
    values = inputs(tokens, sizes, beta=12.0, device=device)
    same = {"k": values["k"][:1].expand_as(values["k"]).contiguous()}
    same |= {name: torch.full_like(values[name], -20.0) for name in ("A_log", "dt_bias")}
    return {**values, **same}


def cast(values, dtype):
    """Return the inputs with the tensors of tokens in ``dtype`` and the parameters in float32."""
    return {k: v.to(dtype if k in PER_TOKEN else torch.float32) for k, v in values.items()}


def forward_backward(values, lengths, **options):
    """Return the output of the op and the gradient of each input, by name."""
    return with_gradients(
        gated_delta_rule, values, *boundaries(lengths, values["v"].device), **options
    )


def gradient_errors_near_one_direction(sizes, lengths, device="cpu"):
    """Return errors of dq and dk in bf16 by name: for independent vectors, and for vectors near one direction."""
    errors = []
    for common in (0.0, 0.99):
        values = inputs(sum(lengths), sizes, common=common, device=device)
        low = cast(values, torch.bfloat16)
        exact = {name: value.double() for name, value in low.items()}
        want = forward_backward(exact, lengths, backend="reference")
        got = forward_backward(low, lengths, backend="triton")
        errors.append({name: norm_error(got[name], want[name]) for name in ("dq", "dk")})
    return {name: tuple(error[name] for error in errors) for name in ("dq", "dk")}


def low_precision(q, k, v, a, b, A_log, dt_bias, lengths, *, doubled=False):
    """Run the rule in chunks of 64 as plain PyTorch does in the dtype of q, k and v.

    Products, states and normalised keys have this dtype. Gates and the triangular solution are fp32.
    """
    dtype, repeats = v.dtype, v.shape[1] // k.shape[1]
    q, k = (
        (x * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt())
        .to(dtype)
        .repeat_interleave(repeats, 1)
        for x in (q, k)
    )
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    beta = (b.float().sigmoid() * (2 if doubled else 1)).to(dtype)
    rows = []
    real = [length for length in lengths if length]
    for document in zip(*(x.split(real) for x in (q * q.shape[2] ** -0.5, k, v, g, beta))):
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        for chunk in zip(*(x.split(64) for x in document)):
            # (L, N, ...) -> (N, L, ...)
            q_, k_, v_, g_, beta_ = (x.transpose(0, 1) for x in chunk)
            total = g_.cumsum(1)
            decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
            lower = ((k_ @ k_.mT) * beta_[:, :, None] * decay).tril(-1)
            ones = torch.eye(lower.shape[1], device=v.device).expand_as(lower)
            inverse = torch.linalg.solve_triangular(lower.float() + ones, ones, upper=False)
            read = (k_ * total.exp()[:, :, None]).to(dtype) @ state
            u = inverse.to(dtype) @ ((v_ - read) * beta_[:, :, None])
            o = (q_ * total.exp()[:, :, None]).to(dtype) @ state
            rows.append((o + ((q_ @ k_.mT) * decay).to(dtype) @ u).transpose(0, 1))
            rest = (total[:, -1:] - total).exp()[:, :, None]
            state = state * total[:, -1].exp()[:, None, None] + (k_ * rest).to(dtype).mT @ u
            state = state.to(dtype)
    return torch.cat(rows)


def with_gradients(run, values, *arguments, **options):
    """Return the output of ``run`` and the gradient of each input, by name.

    The upstream gradient has a different value for each element.
    """
    values = {name: value.detach().requires_grad_() for name, value in values.items()}
    o = run(*(values[name] for name in ALL), *arguments, **options)
    weight = torch.linspace(-1, 1, o.numel(), dtype=torch.float64, device=o.device).sin()
    weight = (7 * weight).sin().view(o.shape).to(o.dtype)
    gradients = torch.autograd.grad(o, tuple(values.values()), weight)
    return {"o": o.detach(), **dict(zip((f"d{name}" for name in ALL), gradients))}
