"""The chunk loop and its gradients. Backends differ in one step: a chunk's softmax, loss and logit
gradient.

One pass of the loop, where gradients are wanted:

    logits_CV = hidden_CD @ weight^T ;  loss_C, dlogits_CV = step(logits_CV, upstream)      (in place)
    dhidden_CD = dlogits_CV @ weight ;  dweight_VD += dlogits_CV^T @ hidden_CD              (fp32)

The upstream gradient is a scalar on the device. A caller that knows it beforehand gets all of this
in forward; for others forward has the losses alone, and backward runs the loop again with what it
was given. See README, 'Derivation'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Step = Callable[[Tensor, Tensor, Tensor, Tensor | None, int, Tensor, bool], None]
"""``step(logits_CV, labels_C, loss_mask_C, grad_scale, vocab_size, loss_C, with_gradient)``.

Writes ``mask * nll`` into ``loss_C``; with_gradient: overwrites the logits by
``(softmax - onehot) * mask * grad_scale``, 0 in padding columns and in rows whose mask is 0.
"""


def run_chunked(
    step: Step,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    loss_mask_T: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    grad_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the public function with one backend's ``step``."""
    loop = _ChunkLoop(step, vocab_size, chunk_tokens)
    inputs = (hidden_TD, weight_VD, labels_T, loss_mask_T.to(_precise(hidden_TD.dtype)))
    if not torch.is_grad_enabled():
        loss_T = loop(*inputs)
        return loss_T.sum(), loss_T
    outputs: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(*inputs, grad_scale, loop)  # type: ignore[no-untyped-call]
    return outputs


@dataclass(frozen=True)
class _ChunkLoop:
    """All chunks of a pack, by one backend's step."""

    step: Step
    vocab_size: int
    chunk_tokens: int

    def __call__(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        loss_mask_T: Tensor,
        grad_scale: Tensor | None = None,
        dhidden_TD: Tensor | None = None,
        dweight_VD: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each token; fill ``dhidden_TD`` and add to ``dweight_VD`` where they
        are given.
        """
        tokens = hidden_TD.shape[0]
        with_gradient = dhidden_TD is not None or dweight_VD is not None
        loss_T = torch.empty(tokens, dtype=_precise(hidden_TD.dtype), device=hidden_TD.device)
        buffer_CV = hidden_TD.new_empty(min(self.chunk_tokens, tokens), weight_VD.shape[0])
        for start in range(0, tokens, self.chunk_tokens):
            chunk = slice(start, min(start + self.chunk_tokens, tokens))
            hidden_CD = hidden_TD[chunk]
            logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=buffer_CV[: hidden_CD.shape[0]])
            self.step(
                logits_CV,
                labels_T[chunk],
                loss_mask_T[chunk],
                grad_scale,
                self.vocab_size,
                loss_T[chunk],
                with_gradient,
            )
            if dhidden_TD is not None:
                torch.mm(logits_CV, weight_VD, out=dhidden_TD[chunk])
            if dweight_VD is not None:
                _accumulate(dweight_VD, logits_CV, hidden_CD)
        return loss_T


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward: loss sum and per-token loss. Backward: both gradients, formed in forward if
    ``grad_scale`` is given.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        loss_mask_T: Tensor,
        grad_scale: Tensor | None,
        loop: _ChunkLoop,
    ) -> tuple[Tensor, Tensor]:
        ctx.loop = loop
        ctx.grad_scale = grad_scale
        # The gradient buffer is no saved tensor: autograd would take writing to it for a modified
        # input.
        ctx.main_grad = getattr(weight_VD, "main_grad", None)
        inputs = (hidden_TD, weight_VD, labels_T, loss_mask_T)
        if grad_scale is None:
            ctx.save_for_backward(*inputs)
            loss_T = loop(*inputs)
        else:
            loss_T, ctx.gradients = _with_gradients(ctx, inputs, grad_scale)
        ctx.mark_non_differentiable(loss_T)
        return loss_T.sum(), loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grad_scale is None:
            _, gradients = _with_gradients(ctx, ctx.saved_tensors, grad_loss)
        else:
            gradients = ctx.gradients
            ctx.gradients = None
            # The same memory, not the same value: a comparison of values would wait for the device.
            if gradients is None or grad_loss.data_ptr() != ctx.grad_scale.data_ptr():
                raise RuntimeError(
                    "linear_cross_entropy got grad_scale, and so has formed its gradients for one "
                    "loss_sum.backward(grad_scale) with that very tensor; another gradient or a second backward pass "
                    "came. Leave grad_scale out where the loss is scaled, added to or differentiated twice."
                )
        return *gradients, None, None, None, None


def _with_gradients(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], grad_scale: Tensor
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Return the loss of each token, and the gradients for autograd.

    A weight with ``main_grad`` has its gradient added there, and gets None.
    """
    hidden_TD, weight_VD, *_ = inputs
    for_hidden, for_weight = ctx.needs_input_grad[:2]
    dhidden_TD = (
        torch.empty_like(hidden_TD, memory_format=torch.contiguous_format) if for_hidden else None
    )
    dweight_VD = ctx.main_grad if for_weight else None
    if for_weight and dweight_VD is None:
        dweight_VD = torch.zeros(
            weight_VD.shape, dtype=_precise(weight_VD.dtype), device=weight_VD.device
        )
    loss_T = ctx.loop(*inputs, grad_scale, dhidden_TD, dweight_VD)
    returned_VD = (
        None
        if dweight_VD is None or dweight_VD is ctx.main_grad
        else dweight_VD.to(weight_VD.dtype)
    )
    return loss_T, (dhidden_TD, returned_VD)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of losses and of the weight's gradient: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _accumulate(dweight_VD: Tensor, dlogits_CV: Tensor, hidden_CD: Tensor) -> None:
    """``dweight += dlogits^T @ hidden``: on a GPU one product that reads bf16 and accumulates into
    fp32.
    """
    if dweight_VD.dtype == hidden_CD.dtype:
        dweight_VD.addmm_(dlogits_CV.t(), hidden_CD)
    elif dweight_VD.is_cuda:
        torch.ops.aten.addmm.dtype_out(
            dweight_VD, dlogits_CV.t(), hidden_CD, dweight_VD.dtype, out=dweight_VD
        )
    else:
        dweight_VD.addmm_(dlogits_CV.t().to(dweight_VD.dtype), hidden_CD.to(dweight_VD.dtype))
