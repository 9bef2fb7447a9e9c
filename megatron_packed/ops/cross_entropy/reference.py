"""Loop over chunks of tokens that computes losses and gradients, with its step in plain PyTorch.

The backends differ only in ``step``: softmax, loss and logit gradient of one chunk. With gradients,
the loop computes for each chunk:

    logits_CV = hidden_CD @ weight^T ;  loss_C, dlogits_CV = step(logits_CV, upstream)      (in place)
    dhidden_CD = dlogits_CV @ weight ;  dweight_VD += dlogits_CV^T @ hidden_CD              (fp32)

With ``logits_scaling`` s, every product is also divided by s.

The upstream gradient is a scalar on the device. If the caller passes it as ``grad_scale``, the loop
runs once, in forward. Otherwise forward computes only the losses, and backward runs the loop again
with the upstream gradient. See README, 'Derivation'.

The arithmetic of the step here is fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_packed.ops.cross_entropy.api import Step, VocabShard


def run(*tensors: Tensor, shard: VocabShard | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Run the op; see ``api.linear_cross_entropy``."""
    step: Step = softmax_step
    if shard is not None:
        from megatron_packed.ops.cross_entropy.split import split_step

        step = split_step(statistics, gradient, shard)
    return run_chunked(step, *tensors, **options)


def softmax_step(
    logits_CV: Tensor,
    labels_C: Tensor,
    loss_mask_C: Tensor,
    grad_scale: Tensor | None,
    vocab_size: int,
    loss_C: Tensor,
    with_gradient: bool,
) -> None:
    """Compute losses and logit gradients of a chunk; see `api.Step`."""
    real_CV = logits_CV[:, :vocab_size]
    log_p_CV = real_CV.to(_precise(real_CV.dtype)).log_softmax(-1)
    label_C1 = labels_C.long().clamp(0, vocab_size - 1)[:, None]
    known_C = (labels_C >= 0) & (labels_C < vocab_size)
    nll_C = torch.where(known_C, -log_p_CV.gather(1, label_C1)[:, 0], float("nan"))
    # Use torch.where, not a product: a NaN in a row without a target must not reach the sum.
    loss_C.copy_(torch.where(loss_mask_C == 0, 0.0, nll_C * loss_mask_C))
    if not with_gradient:
        return
    scale_C1 = (loss_mask_C if grad_scale is None else loss_mask_C * grad_scale)[:, None]
    gradient_CV = log_p_CV.exp_()
    gradient_CV.scatter_(1, label_C1, gradient_CV.gather(1, label_C1) - 1)
    real_CV.copy_(torch.where(loss_mask_C[:, None] == 0, 0.0, gradient_CV * scale_C1))
    logits_CV[:, vocab_size:].zero_()


def statistics(logits_CV: Tensor, row_C: Tensor, real: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the softmax statistics of a rank's logits; see ``split.Statistics``."""
    precise_CV = _masked(logits_CV, real)
    largest_C = precise_CV.amax(-1).clamp(min=torch.finfo(precise_CV.dtype).min)
    label_C = precise_CV.gather(1, row_C.clamp(min=0)[:, None])[:, 0]
    return largest_C, (precise_CV - largest_C[:, None]).exp_().sum(-1), label_C


def gradient(
    logits_CV: Tensor,
    row_C: Tensor,
    real: int,
    largest_C: Tensor,
    total_C: Tensor,
    scale_C: Tensor,
    loss_mask_C: Tensor,
) -> None:
    """Overwrite a rank's logits by their gradient; see ``split.Gradient``."""
    p_CV = (_masked(logits_CV, real) - largest_C[:, None]).exp_() / total_C[:, None]
    p_CV.scatter_add_(1, row_C.clamp(min=0)[:, None], -(row_C >= 0)[:, None].to(p_CV.dtype))
    logits_CV.copy_(torch.where(loss_mask_C[:, None] == 0, 0.0, p_CV * scale_C[:, None]))
    logits_CV[:, real:].zero_()


def _masked(logits_CV: Tensor, real: int) -> Tensor:
    """Return a copy in fp32 (fp64 for fp64 inputs) with -inf in columns from ``real`` on."""
    precise_CV = logits_CV.to(_precise(logits_CV.dtype), copy=True)
    precise_CV[:, real:] = float("-inf")
    return precise_CV


def run_chunked(
    step: Step,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    loss_mask_T: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    logits_scaling: float | None = None,
    grad_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run ``api.linear_cross_entropy`` with the ``step`` of one backend."""
    loop = _ChunkLoop(step, vocab_size, chunk_tokens, 1 / (logits_scaling or 1))
    inputs = (hidden_TD, weight_VD, labels_T, loss_mask_T.to(_precise(hidden_TD.dtype)))
    if not torch.is_grad_enabled():
        loss_T = loop(*inputs)
        return loss_T.sum(), loss_T
    outputs: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(*inputs, grad_scale, loop)  # type: ignore[no-untyped-call]
    return outputs


@dataclass(frozen=True)
class _ChunkLoop:
    """Loop over all chunks of a pack with the step of one backend."""

    step: Step
    vocab_size: int
    chunk_tokens: int
    alpha: float
    """Factor on the logits."""

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
        """Return the loss of each token; fill ``dhidden_TD`` and add to ``dweight_VD`` if given."""
        tokens = hidden_TD.shape[0]
        with_gradient = dhidden_TD is not None or dweight_VD is not None
        loss_T = torch.empty(tokens, dtype=_precise(hidden_TD.dtype), device=hidden_TD.device)
        buffer_CV = hidden_TD.new_empty(min(self.chunk_tokens, tokens), weight_VD.shape[0])
        for start in range(0, tokens, self.chunk_tokens):
            chunk = slice(start, min(start + self.chunk_tokens, tokens))
            hidden_CD = hidden_TD[chunk]
            logits_CV = buffer_CV[: hidden_CD.shape[0]]
            _product(hidden_CD, weight_VD.t(), logits_CV, self.alpha)
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
                _product(logits_CV, weight_VD, dhidden_TD[chunk], self.alpha)
            if dweight_VD is not None:
                _accumulate(dweight_VD, logits_CV, hidden_CD, self.alpha)
        return loss_T


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss sum and loss of each token; backward returns the gradients of hidden state and weight.

    If ``grad_scale`` is given, forward computes the gradients.
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
        # Do not pass the gradient buffer to save_for_backward: backward writes to it, and autograd
        # would report a modified saved tensor.
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
            # Compare addresses, not values: a comparison of values would wait for the device.
            if gradients is None or grad_loss.data_ptr() != ctx.grad_scale.data_ptr():
                raise RuntimeError(
                    "linear_cross_entropy was called with grad_scale, so its gradients are valid only for one "
                    "loss_sum.backward(grad_scale) with the same tensor. This backward pass has another gradient or is "
                    "the second one. Leave grad_scale out if the loss is scaled, combined or differentiated twice."
                )
        return *gradients, None, None, None, None


def _with_gradients(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], grad_scale: Tensor
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Return the loss of each token, and the gradients for autograd.

    If the weight has ``main_grad``, its gradient is added there, and autograd gets None.
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


def _product(left: Tensor, right: Tensor, out: Tensor, alpha: float) -> None:
    """Compute ``out = alpha * left @ right``; the product applies alpha before it rounds."""
    if alpha == 1:
        torch.mm(left, right, out=out)
    else:
        # With beta 0 the old values of ``out`` are not read.
        torch.addmm(out, left, right, beta=0, alpha=alpha, out=out)


def _accumulate(dweight_VD: Tensor, dlogits_CV: Tensor, hidden_CD: Tensor, alpha: float) -> None:
    """Compute ``dweight += alpha * dlogits^T @ hidden``.

    On a GPU this is one matrix product that reads bf16 and accumulates into fp32.
    """
    if dweight_VD.is_meta:
        return
    if dweight_VD.dtype == hidden_CD.dtype:
        dweight_VD.addmm_(dlogits_CV.t(), hidden_CD, alpha=alpha)
    elif dweight_VD.is_cuda:
        torch.ops.aten.addmm.dtype_out(
            dweight_VD, dlogits_CV.t(), hidden_CD, dweight_VD.dtype, alpha=alpha, out=dweight_VD
        )
    else:
        wide_VC, wide_CD = dlogits_CV.t().to(dweight_VD.dtype), hidden_CD.to(dweight_VD.dtype)
        dweight_VD.addmm_(wide_VC, wide_CD, alpha=alpha)
