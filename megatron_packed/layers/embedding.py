"""Token embedding. Letters: T tokens, V rows of the (padded) vocabulary, D hidden size."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_packed.distributed.tensor_parallel_shards import Shard, SplitSegment, set_shard
from megatron_packed.layers.build import Build
from megatron_packed.layers.linear import main_grad_of
from megatron_packed.layers.tensor_parallel import TensorParallel

_GPU_MODULE = "megatron_packed.ops.token_rows"
"""Needs Triton, which a CPU does not."""


@torch.no_grad()
def accumulate_rows(main_grad_VD: Tensor, tokens_T: Tensor, grad_TD: Tensor) -> None:
    """Add each row of ``grad`` to the row of its token: ``main_grad[tokens[t]] += grad[t]``.

    The sum is in the dtype of ``main_grad`` (float32) and in the same order in every run: the GPU's
    kernel sorts the tokens. ``index_add_`` would use atomic additions there, whose order changes.
    """
    if main_grad_VD.is_meta:
        return
    if main_grad_VD.is_cuda:
        import_module(_GPU_MODULE).add_token_rows(main_grad_VD, tokens_T, grad_TD)
    else:
        main_grad_VD.index_add_(0, tokens_T, grad_TD.to(main_grad_VD.dtype))


class _EmbeddingIntoMainGrad(torch.autograd.Function):
    """Autograd function ``weight[tokens]``; backward adds gradients to rows of ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, tokens_T: Tensor, weight_VD: Tensor, main_grad_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.main_grad = main_grad_VD
        return F.embedding(tokens_T, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[None, None, None]:
        (tokens_T,) = ctx.saved_tensors
        accumulate_rows(ctx.main_grad, tokens_T, grad_TD)
        return None, None, None


def vocab_shard(num_rows: int, tp: TensorParallel, stored_rows: int | None = None) -> Shard:
    """Return this rank's rows of a table over the padded vocabulary.

    Args:
        num_rows: rows of the padded vocabulary.
        tp: tensor parallelism of this rank.
        stored_rows: number of rows that a checkpoint contains; the rows after them are padding.
            None means all rows.
    """
    shard = tp.shard(SplitSegment(noun="rows of the padded vocabulary", count=num_rows))
    return shard if stored_rows is None else replace(shard, padding=num_rows - stored_rows)


class Embedding(nn.Module):
    """Token embedding; each tensor-parallel rank holds a contiguous range of the vocabulary.

    Args:
        num_rows: V, size of the padded vocabulary.
        hidden_size: D.
        stored_rows: number of rows that a checkpoint contains, the same in every layout; by default
            all.
        multiplier: factor on the output; None leaves the output unchanged.
        build: arguments that all layers share.
    """

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        *,
        stored_rows: int | None = None,
        multiplier: float | None = None,
        build: Build,
    ) -> None:
        super().__init__()
        rows = vocab_shard(num_rows, build.tp, stored_rows)
        self.tp = build.tp
        self.multiplier = multiplier
        self.first_row = rows.pieces[0].start
        self.num_rows = rows.local_length
        self.weight = set_shard(build.new_parameter(self.num_rows, hidden_size), rows)

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Return the hidden state ``(T, D)`` of ``(T,)`` int32 or int64 token ids.

        With sequence parallelism the result has only this rank's ``T / tp_size`` rows.
        """
        hidden_TD = self._look_up(tokens_T)
        if self.multiplier is not None:
            hidden_TD = hidden_TD * self.multiplier
        if torch.is_grad_enabled() and not hidden_TD.requires_grad:
            # The table is frozen. Layers still need the gradient of their input: graphs, recomputation
            # and overlapped reductions rely on it, and weights of the first layers may be trained.
            hidden_TD.requires_grad_()
        return hidden_TD

    def _look_up(self, tokens_T: Tensor) -> Tensor:
        """Return the table's rows, of the complete vocabulary."""
        if self.tp.group is None:
            return self._rows(tokens_T)
        rows_T = tokens_T - self.first_row
        elsewhere_T = (rows_T < 0) | (rows_T >= self.num_rows)
        found_TD = self._rows(rows_T.masked_fill(elsewhere_T, 0))
        # The mask also zeroes gradients in backward, so tokens of other ranks add no gradient to
        # row 0.
        return self.tp.leave(found_TD.masked_fill(elsewhere_T.unsqueeze(-1), 0))

    def _rows(self, tokens_T: Tensor) -> Tensor:
        main_grad_VD = main_grad_of(self.weight)
        if main_grad_VD is not None and torch.is_grad_enabled():
            hidden_TD: Tensor = _EmbeddingIntoMainGrad.apply(  # type: ignore[no-untyped-call]
                tokens_T, self.weight, main_grad_VD
            )
            return hidden_TD
        return F.embedding(tokens_T, self.weight)
