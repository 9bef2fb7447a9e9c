"""Output projection and cross-entropy, computed one chunk of tokens at a time.

Shapes: T token slots, D hidden features, V rows of the output weight (the padded vocabulary), C
tokens of one chunk.

At most one chunk's logits exist at any time. Forward computes the losses. Backward recomputes the
logits and computes the gradients from them, for any upstream gradient. The weight's gradient is
summed in fp32. Matrix products use the inputs' dtype, the softmax uses fp32. The loss and hidden
gradient of each token depend only on this token, bit for bit. There is no host sync.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op

OP = Op(
    "cross_entropy",
    (
        GPUBackend("triton", "megatron_packed.ops.cross_entropy.triton_kernel"),
        Backend("reference", "megatron_packed.ops.cross_entropy.reference"),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.cross_entropy.on_meta"),
)

_CHUNK_LOGITS = 2**26
"""Approximate number of logits in a chunk of the default size: 128 MiB in bf16."""
_CHUNK_TOKENS = 4096
"""Smallest number of tokens in a chunk of the default size, if the pack has twice as many."""

Step = Callable[[Tensor, Tensor, Tensor, Tensor | None, int, Tensor, bool], None]
"""Signature ``step(logits_CV, labels_C, loss_mask_C, grad_scale, vocab_size, loss_C, with_gradient)``.

The function writes ``mask * nll`` into ``loss_C``. With ``with_gradient`` it also overwrites the
logits by ``(softmax - onehot) * mask * grad_scale``, with 0 in padding columns and in rows of mask 0.
"""


@dataclass(frozen=True, kw_only=True)
class CrossEntropyInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    vocab_rows: int
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Position of a rank's weight rows in the vocabulary, and collectives over the ranks.

    All ranks have the same hidden states, labels and mask. The losses are those of the complete
    vocabulary and are equal on all ranks. The hidden gradient is this rank's term of a sum over
    ranks.
    """

    first_row: int
    """Vocabulary index of the first row of this rank."""
    total_rows: int
    """Rows of the weight on all ranks together."""
    sum_over_ranks: Callable[[Tensor], object]
    """Function that sums a tensor over the ranks in place."""
    max_over_ranks: Callable[[Tensor], object]
    """Function that takes the maximum of a tensor over the ranks in place."""


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    loss_mask_T: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int | None = None,
    logits_scaling: float | None = None,
    grad_scale: Tensor | None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return ``sum_t loss_mask[t] * -log softmax(hidden[t] @ weight[:vocab_size].T)[labels[t]]``.

    Args:
        hidden_TD, weight_VD: tensors of the same dtype.
        labels_T: int32 or int64; any value where the mask is 0. A label outside the vocabulary with
            a mask other than 0 makes the loss NaN: the host cannot check labels on the device, and
            a wrong label must not be trained on.
        loss_mask_T: fp32 weight of each token, 0 for tokens without a target. If all are 0, losses
            and gradients are zeros.
        vocab_size: number of rows that are tokens. Other rows are padding and get gradient 0.
        chunk_tokens: C; None uses ``default_chunk_tokens``.
        logits_scaling: number by which the logits are divided; None means 1. The matrix products
            apply it before they round.
        grad_scale: 0-d device tensor of the loss's dtype, or None. If it is given, the caller must
            call ``loss_sum.backward(grad_scale)`` exactly once, with the same tensor object. The
            gradients are then computed in forward, while the logits exist, and the weight's
            gradient is added to ``weight.main_grad`` in forward. This saves a quarter of the
            products and gives the same bits.
        shard: position of ``weight_VD`` if it has only a part of the vocabulary's rows;
            ``vocab_size`` is then still that of the complete vocabulary.
    Returns:
        ``loss_sum``, fp32 0-d, differentiable, and ``per_token_loss_T``, fp32, detached and
        multiplied by the mask. If ``weight.main_grad`` (fp32) exists, the weight's gradient is
        added to it, and autograd gets None for the weight.
    Raises:
        ValueError: shapes, dtypes or sizes do not fit together.
        RuntimeError: in backward, if ``grad_scale`` was given and the upstream gradient is another
            tensor, or a second backward pass runs.
    """
    _check(hidden_TD, weight_VD, labels_T, loss_mask_T, vocab_size, shard, chunk_tokens)
    _check_grad_scale(grad_scale, torch.promote_types(hidden_TD.dtype, torch.float32))
    tokens, rows = hidden_TD.shape[0], weight_VD.shape[0]
    device = hidden_TD.device.type
    inputs = CrossEntropyInputs(vocab_rows=rows, dtype=hidden_TD.dtype, device_type=device)
    outputs: tuple[Tensor, Tensor] = OP.chosen[backend, inputs].loaded.run(
        hidden_TD,
        weight_VD,
        labels_T,
        loss_mask_T,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens or default_chunk_tokens(tokens, rows),
        logits_scaling=logits_scaling,
        grad_scale=grad_scale,
        shard=shard,
    )
    return outputs


def default_chunk_tokens(tokens: int, vocab_rows: int) -> int:
    """Return the tokens per chunk, so that a chunk has about 2^26 logits.

    A chunk has at least 4,096 tokens and at most half of the pack. The number is rounded to a
    multiple of 128, except in packs of at most 256 tokens.

    Each chunk reads and writes the fp32 gradient of the complete weight once. On an H200 this costs
    as much as the products of 245 tokens: 6 % of the products of 4,096 tokens, and 24 % of 1,024.

    Example: T 4,096 and V 16,384 give 2,048; T 32,768 and V 131,072 give 4,096; T 100 gives 50.
    """
    half = -(-tokens // 2)
    chunk = max(_CHUNK_TOKENS, _CHUNK_LOGITS // vocab_rows // 128 * 128)
    return max(1, min(chunk, -(-half // 128) * 128 if half > 128 else half))


def _check(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    loss_mask_T: Tensor,
    vocab_size: int,
    shard: VocabShard | None,
    chunk_tokens: int | None,
) -> None:
    total_rows = weight_VD.shape[0] if shard is None else shard.total_rows
    if hidden_TD.dim() != 2 or weight_VD.dim() != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"Expected hidden (T, D) and weight (V, D); got {tuple(hidden_TD.shape)}, {tuple(weight_VD.shape)}."
        )
    if hidden_TD.dtype != weight_VD.dtype:
        raise ValueError(
            f"hidden is {hidden_TD.dtype} and weight is {weight_VD.dtype}; cast hidden to the weight's dtype."
        )
    if not 1 <= vocab_size <= total_rows:
        raise ValueError(
            f"vocab_size ({vocab_size}) must be between 1 and the weight's {total_rows} rows."
        )
    expected = hidden_TD.shape[:1]
    if labels_T.shape != expected or loss_mask_T.shape != expected:
        raise ValueError(
            f"labels {tuple(labels_T.shape)} and loss_mask {tuple(loss_mask_T.shape)} must both be {tuple(expected)}."
        )
    if labels_T.dtype not in (torch.int32, torch.int64) or not loss_mask_T.is_floating_point():
        raise ValueError(
            f"labels must be int32 or int64 and loss_mask float; got {labels_T.dtype} and {loss_mask_T.dtype}."
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(
            f"chunk_tokens ({chunk_tokens}) must be at least 1, or None for the default."
        )


def _check_grad_scale(grad_scale: Tensor | None, dtype: torch.dtype) -> None:
    if grad_scale is None:
        return
    if grad_scale.shape != () or grad_scale.dtype != dtype:
        raise ValueError(
            f"grad_scale is {grad_scale.dtype} of shape {tuple(grad_scale.shape)}, but must be {dtype} of shape () "
            "like the loss; autograd would convert it to another tensor."
        )
