# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Functions of the convolution's kernels: rows and documents of a step, the filter and its gradients.

A step has seven rows of one block of channels: three that earlier steps have loaded, and four new ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_packed.ops.triton_loads import load, load_fp32


@triton.jit
def is_one_document(documents):
    """Return whether the seven rows of a step are of one document."""
    d3, d2, d1, da, db, dc, dd = documents
    return (d3 == dd) & (d2 == dd) & (d1 == dd) & (da == dd) & (db == dd) & (dc == dd)


@triton.jit
def filtered(v, documents, w, start, WIDTH: tl.constexpr, BORDERS: tl.constexpr):
    """Return ``start`` plus the filter's output, for the last four of seven rows.

    Without BORDERS all rows are of one document.
    """
    a = start + w[0] * v[3]
    b = start + w[0] * v[4]
    c = start + w[0] * v[5]
    d = start + w[0] * v[6]
    for k in tl.static_range(1, WIDTH):
        a += w[k] * _seen(v, documents, 3, k, BORDERS)
        b += w[k] * _seen(v, documents, 4, k, BORDERS)
        c += w[k] * _seen(v, documents, 5, k, BORDERS)
        d += w[k] * _seen(v, documents, 6, k, BORDERS)
    return a, b, c, d


@triton.jit
def _seen(v, documents, row: tl.constexpr, k: tl.constexpr, BORDERS: tl.constexpr):
    """Return the row k rows before ``row``, or zeros if it is of another document."""
    if BORDERS:
        return tl.where(documents[row - k] == documents[row], v[row - k], 0.0)
    else:
        return v[row - k]


@triton.jit
def backward_step(
    x,
    documents,
    g,
    dw,
    w,
    bias,
    inside,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    BORDERS: tl.constexpr,
):
    """Return the gradients of u in the last three rows, dx of four rows, and the sums dw and dbias.

    Args:
        x: seven rows.
        documents: their documents.
        g: gradients of u in the first three rows, and of y in the last four.
        dw: sums over the rows before, for each tap and for the bias.
        inside: number of the last four rows that the sums include; with BORDERS.
    """
    g3, g2, g1, ga, gb, gc, gd = g
    if SILU:
        ua, ub, uc, ud = filtered(x, documents, w, bias, WIDTH, BORDERS)
        ga, gb, gc, gd = ga * _slope(ua), gb * _slope(ub), gc * _slope(uc), gd * _slope(ud)
    # Backward is the same filter along reversed rows.
    reversed_documents = (
        documents[6],
        documents[5],
        documents[4],
        documents[3],
        documents[2],
        documents[1],
        documents[0],
    )
    dxa, dx1, dx2, dx3 = filtered(
        (gd, gc, gb, ga, g1, g2, g3), reversed_documents, w, 0.0, WIDTH, BORDERS
    )
    last_g = (gb, gc, gd)
    if BORDERS:
        ga = tl.where(inside > 0, ga, 0.0)
        gb = tl.where(inside > 1, gb, 0.0)
        gc = tl.where(inside > 2, gc, 0.0)
        gd = tl.where(inside > 3, gd, 0.0)
    h = (ga, gb, gc, gd)
    dw0, dw1, dw2, dw3, dbias = dw
    dw0 = _plus_products(dw0, h, x, documents, 0, BORDERS)
    if WIDTH > 1:
        dw1 = _plus_products(dw1, h, x, documents, 1, BORDERS)
    if WIDTH > 2:
        dw2 = _plus_products(dw2, h, x, documents, 2, BORDERS)
    if WIDTH > 3:
        dw3 = _plus_products(dw3, h, x, documents, 3, BORDERS)
    return last_g, (dx3, dx2, dx1, dxa), (dw0, dw1, dw2, dw3, dbias + (ga + gb + gc + gd))


@triton.jit
def _plus_products(total, g, x, documents, k: tl.constexpr, BORDERS: tl.constexpr):
    """Return ``total`` plus the products of g with the rows k rows before."""
    for row in tl.static_range(4):
        total += g[row] * _seen(x, documents, row + 3, k, BORDERS)
    return total


@triton.jit
def _sigmoid(u):
    """Return 1 / (1 + exp(-u)).

    The square of the reciprocal root takes fewer instructions than a division, and so does the power
    of two, which flushes subnormal numbers.
    """
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * u))
    return root * root


@triton.jit
def silu(u):
    """Return u times its sigmoid."""
    return u * _sigmoid(u)


@triton.jit
def _slope(u):
    """Return the derivative of SiLU."""
    s = _sigmoid(u)
    return s + s * (u - u * s)


@triton.jit
def _row(ptr, t, tokens, stride, column, CHANNELS: tl.constexpr):
    """Return row t; zeros outside the pack."""
    channels = tl.where((t >= 0) & (t < tokens), CHANNELS, 0)
    return load(ptr + t.to(tl.int64) * stride + column, column < channels)


@triton.jit
def four_rows(ptr, t, tokens, stride, column, CHANNELS: tl.constexpr):
    """Return the rows t to t + 3 in their own dtype, so that a load which is not used yet does not wait."""
    return (
        _row(ptr, t, tokens, stride, column, CHANNELS),
        _row(ptr, t + 1, tokens, stride, column, CHANNELS),
        _row(ptr, t + 2, tokens, stride, column, CHANNELS),
        _row(ptr, t + 3, tokens, stride, column, CHANNELS),
    )


@triton.jit
def in_fp32(a, b, c, d):
    """Return four rows in fp32."""
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def _three_rows(ptr, t, tokens, stride, column, CHANNELS: tl.constexpr):
    """Return the rows t, t + 1 and t + 2 in fp32."""
    return (
        _row(ptr, t, tokens, stride, column, CHANNELS).to(tl.float32),
        _row(ptr, t + 1, tokens, stride, column, CHANNELS).to(tl.float32),
        _row(ptr, t + 2, tokens, stride, column, CHANNELS).to(tl.float32),
    )


@triton.jit
def _document(seq_idx_ptr, t, tokens):
    """Return the document of row t; -1 outside the pack."""
    return tl.load(seq_idx_ptr + t, mask=(t >= 0) & (t < tokens), other=-1)


@triton.jit
def _three_documents(seq_idx_ptr, t, tokens):
    """Return the documents of the rows t, t + 1 and t + 2."""
    return (
        _document(seq_idx_ptr, t, tokens),
        _document(seq_idx_ptr, t + 1, tokens),
        _document(seq_idx_ptr, t + 2, tokens),
    )


@triton.jit
def four_documents(seq_idx_ptr, t, tokens):
    """Return the documents of the rows t to t + 3."""
    return (
        _document(seq_idx_ptr, t, tokens),
        _document(seq_idx_ptr, t + 1, tokens),
        _document(seq_idx_ptr, t + 2, tokens),
        _document(seq_idx_ptr, t + 3, tokens),
    )


@triton.jit
def rows_before(
    x_ptr,
    halo_ptr,
    seq_idx_ptr,
    first,
    tokens,
    stride,
    column,
    CHANNELS: tl.constexpr,
    HALO: tl.constexpr,
):
    """Return the three rows before row ``first``, which may be in the halo, and their documents."""
    x3, x2, x1 = _three_rows(x_ptr, first - 3, tokens, stride, column, CHANNELS)
    d3, d2, d1 = _three_documents(seq_idx_ptr + HALO, first - 3, tokens)
    if HALO > 0:
        # Each row is either outside the part or outside the halo, where it is zero.
        before = first + HALO - 3
        h3, h2, h1 = _three_rows(halo_ptr, before, HALO, CHANNELS, column, CHANNELS)
        e3, e2, e1 = _three_documents(seq_idx_ptr, before, HALO)
        x3, x2, x1 = x3 + h3, x2 + h2, x1 + h1
        d3, d2, d1 = tl.maximum(d3, e3), tl.maximum(d2, e2), tl.maximum(d1, e1)
    return x3, x2, x1, d3, d2, d1


@triton.jit
def _store(ptr, t, value, first, end, stride, column, CHANNELS: tl.constexpr):
    """Store row t if it is one of the rows from ``first`` to before ``end``."""
    channels = tl.where((t >= first) & (t < end), CHANNELS, 0)
    row = ptr + t.to(tl.int64) * stride + column
    tl.store(row, value, mask=column < channels)


@triton.jit
def store_four(ptr, t, rows, first, end, stride, column, CHANNELS: tl.constexpr):
    """Store the rows t to t + 3 that are among those from ``first`` to before ``end``."""
    for i in tl.static_range(4):
        _store(ptr, t + i, rows[i], first, end, stride, column, CHANNELS)


@triton.jit
def taps(weight_ptr, bias_ptr, column, real, WIDTH: tl.constexpr):
    """Return the weights of the rows t, t - 1, t - 2, t - 3 and the bias, in fp32."""
    last = weight_ptr + column * WIDTH + WIDTH - 1
    w0 = load_fp32(last, real)
    zero = tl.zeros_like(w0)
    w1, w2, w3, bias = zero, zero, zero, zero
    if WIDTH > 1:
        w1 = load_fp32(last - 1, real)
    if WIDTH > 2:
        w2 = load_fp32(last - 2, real)
    if WIDTH > 3:
        w3 = load_fp32(last - 3, real)
    if bias_ptr is not None:
        bias = load_fp32(bias_ptr + column, real)
    return (w0, w1, w2, w3), bias
