# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Equations of README.md for one chunk of a walk, in Triton kernels.

`triton_states` and `triton_joints` walk with these functions. The state S and its gradient dS are
transposed, (V, K), as are the tiles of v, u, do and dv, (V, tokens).

`triton_states` loads a factor after the product that it multiplies. Before the product, the load would
cost 72 bytes of local memory instead of 40 in the kernel of the states.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_packed.ops.triton_loads import load


@triton.jit
def chunk_factors(ptr, gates, token, real):
    """Return the factors of q, of k as it reads and of k as it writes, for the tokens of a chunk.

    They are loaded as one tile of 256 numbers. Each warp would load its own copy of a vector of 64
    numbers, with an address for each number.
    """
    tile = load(ptr + token[:, None] + (1 + tl.arange(0, 4))[None, :] * gates, real[:, None])
    first, second = tl.split(tl.reshape(tile, (token.shape[0], 2, 2)))
    _, of_read_k = tl.split(first)
    of_q, of_written_k = tl.split(second)
    return of_q, of_read_k, of_written_k


@triton.jit
def token_writes(read, v, solve, of_read_k, PRECISION: tl.constexpr):
    """Return U = M R with R = V - (exp(s) K) S; ``read`` is K S."""
    read = v.to(tl.float32) - read * of_read_k[None, :]
    return tl.dot(read.to(solve.dtype), tl.trans(solve), input_precision=PRECISION)


@triton.jit
def value_gradients(du, do, scores, solve, of_written_k, PRECISION: tl.constexpr):
    """Return dV = M^T dU with dU = P^T dO + (exp(s_L - s) K) dS'; ``du`` is K dS'."""
    du = tl.dot(do, scores, du * of_written_k[None, :], input_precision=PRECISION)
    return tl.dot(du.to(solve.dtype), solve, input_precision=PRECISION)


@triton.jit
def add_rows(state, x, factor, rows, PRECISION: tl.constexpr):
    """Return S + (factor rows)^T x; ``rows`` are q or k, and each token has a factor."""
    x = x.to(tl.float32) * factor[None, :]
    return tl.dot(x.to(rows.dtype), rows, state, input_precision=PRECISION)
