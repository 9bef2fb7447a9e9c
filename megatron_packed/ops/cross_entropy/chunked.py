"""The chunk loop and its gradients. Backends differ in one step: a chunk's softmax, loss and logit gradient.

Forward does everything, because the gradient of the logits is cheapest while they exist:

    logits_CV = hidden_CD @ weight^T ;  loss_C, dlogits_CV = step(logits_CV)      (in place)
    dhidden_CD = dlogits_CV @ weight ;  dweight_VD += dlogits_CV^T @ hidden_CD    (fp32)

The upstream gradient, a scalar, is known on the device only in backward, which multiplies. See README, 'Derivation'.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """The public function for one backend's ``step``."""
    gradients = torch.is_grad_enabled()
    outputs: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_TD, weight_VD, labels_T, loss_mask_T.float(), grad_scale, vocab_size, chunk_tokens, step, gradients
    )
    return outputs


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward: loss sum, per-token loss, and the gradients up to a scalar. Backward: times that scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        loss_mask_T: Tensor,
        grad_scale: Tensor | None,
        vocab_size: int,
        chunk_tokens: int,
        step: Step,
        gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens, vocab_rows = hidden_TD.shape[0], weight_VD.shape[0]
        main_grad = getattr(weight_VD, "main_grad", None)
        for_hidden, for_weight = (gradients and needed for needed in ctx.needs_input_grad[:2])
        in_forward = for_weight and main_grad is not None and grad_scale is not None
        dhidden_TD = torch.empty_like(hidden_TD, memory_format=torch.contiguous_format) if for_hidden else None
        dweight_VD = _weight_gradient_buffer(weight_VD, main_grad if in_forward else None) if for_weight else None
        precise = torch.promote_types(hidden_TD.dtype, torch.float32)
        loss_T = torch.empty(tokens, dtype=precise, device=hidden_TD.device)
        buffer_CV = hidden_TD.new_empty(min(chunk_tokens, tokens), vocab_rows)
        for start in range(0, tokens, chunk_tokens):
            chunk = slice(start, min(start + chunk_tokens, tokens))
            hidden_CD = hidden_TD[chunk]
            logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=buffer_CV[: hidden_CD.shape[0]])
            step(
                logits_CV,
                labels_T[chunk],
                loss_mask_T[chunk],
                grad_scale,
                vocab_size,
                loss_T[chunk],
                for_hidden or for_weight,
            )
            if dhidden_TD is not None:
                torch.mm(logits_CV, weight_VD, out=dhidden_TD[chunk])
            if dweight_VD is not None:
                _accumulate(dweight_VD, logits_CV, hidden_CD)
        ctx.save_for_backward(dhidden_TD, None if in_forward else dweight_VD, grad_scale)
        ctx.main_grad, ctx.weight_dtype = main_grad, weight_VD.dtype
        ctx.mark_non_differentiable(loss_T)
        return loss_T.sum(), loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_TD, dweight_VD, grad_scale = ctx.saved_tensors
        if grad_scale is None:
            factor = grad_loss.to(torch.promote_types(grad_loss.dtype, torch.float32))
        else:  # already inside; 1 if the caller kept the promise, NaN if not
            factor = torch.where(grad_loss == grad_scale, 1.0, float("nan"))
        if dhidden_TD is not None:
            # In fp32: a 0-d factor would be rounded to the gradient's dtype first, one common error for all of it.
            dtype = dhidden_TD.dtype
            precise_TD = (
                dhidden_TD if grad_scale is not None else dhidden_TD.to(torch.promote_types(dtype, torch.float32))
            )
            dhidden_TD = (precise_TD * factor).to(dtype)
        if dweight_VD is not None:
            if ctx.main_grad is not None:
                ctx.main_grad.addcmul_(dweight_VD, factor)
                dweight_VD = None
            else:
                dweight_VD = (dweight_VD * factor).to(ctx.weight_dtype)
        return dhidden_TD, dweight_VD, None, None, None, None, None, None, None


def _weight_gradient_buffer(weight_VD: Tensor, main_grad: Tensor | None) -> Tensor:
    """Where dweight is summed: the flat gradient buffer itself, or zeros in fp32 (fp64 for fp64)."""
    if main_grad is not None:
        return main_grad
    return torch.zeros(
        weight_VD.shape, dtype=torch.promote_types(weight_VD.dtype, torch.float32), device=weight_VD.device
    )


def _accumulate(dweight_VD: Tensor, dlogits_CV: Tensor, hidden_CD: Tensor) -> None:
    """``dweight += dlogits^T @ hidden``: on a GPU one product that reads bf16 and accumulates into fp32."""
    if dweight_VD.dtype == hidden_CD.dtype:
        dweight_VD.addmm_(dlogits_CV.t(), hidden_CD)
    elif dweight_VD.is_cuda:
        torch.ops.aten.addmm.dtype_out(dweight_VD, dlogits_CV.t(), hidden_CD, dweight_VD.dtype, out=dweight_VD)
    else:
        dweight_VD.addmm_(dlogits_CV.t().to(dweight_VD.dtype), hidden_CD.to(dweight_VD.dtype))
