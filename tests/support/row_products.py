"""Products of experts whose rows keep their bits at every place, for comparisons of bits on any CPU.

The rows of experts are sorted by expert. If one document changes, rows of other documents move. The
matrix products of some CPUs round a row by its place. The AVX2 kernels of MKL 2024.2 round rows 174,
175, 254 and 255 of 256 differently from the others. The result is then correct, and a comparison of
bits fails. Here each element is a sum of its own, in the same order at every place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from megatron_packed.ops.grouped_mlp import reference


def linear_row_by_row(x_BI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return ``x W^T``; a row of the result and of the gradient of ``x`` depends only on its row."""
    return (x_BI[:, None, :] * weight_OI).sum(-1)


@contextmanager
def experts_row_by_row() -> Iterator[None]:
    """Compute the experts' products by `linear_row_by_row` in a ``with`` block or a decorated function."""
    with mock.patch.object(reference, "linear", linear_row_by_row):
        yield
