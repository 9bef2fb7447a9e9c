"""Cross-entropy of the output projection, a chunk of tokens at a time.

Shapes: T token slots, D hidden features, V rows of the output weight (the vocabulary padded), C
tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, Op

OP = Op(
    "cross_entropy",
    (
        Backend("triton", "megatron_packed.ops.cross_entropy.triton_kernel"),
        Backend("reference", "megatron_packed.ops.cross_entropy.reference"),
    ),
)

_CHUNK_LOGITS = 2**26
"""Logits of one chunk that 'chunk_tokens=None' aims at: 128 MiB in bf16."""


@dataclass(frozen=True, kw_only=True)
class CrossEntropyInputs:
    """Shapes, types and options by which a backend is chosen."""

    vocab_rows: int
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Place of a weight's rows in the whole vocabulary, and collectives over the ranks with the rest.

    Every rank has the same hidden states, labels and mask. The losses are those of the whole
    vocabulary, equal on all ranks; the hidden gradient is this rank's term of a sum.
    """

    first_row: int
    total_rows: int
    sum_over_ranks: Callable[[Tensor], object]
    """In place."""
    max_over_ranks: Callable[[Tensor], object]
    """In place."""


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    loss_mask_T: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int | None = None,
    grad_scale: Tensor | None = None,
    shard: VocabShard | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return ``sum_t loss_mask[t] * -log softmax(hidden[t] @ weight[:vocab_size].T)[labels[t]]``.

    At most a chunk's logits exist at any moment. Forward has the losses; backward forms the logits
    a second time and the gradients from them, for any upstream gradient. The weight's gradient is
    summed in fp32. Matrix products in the inputs' dtype, softmax in fp32. Every token's loss and
    hidden gradient depend on that token alone, bit for bit. No host sync.

    Args:
        hidden_TD, weight_VD: one dtype.
        labels_T: int32 or int64; where the mask is 0, any value. A supervised label outside the
            vocabulary makes the loss NaN: the host cannot see it, and it must not train.
        loss_mask_T: fp32 weight of each token, 0 where there is no target. All 0 gives zeros.
        vocab_size: rows of the weight that are tokens; the rest is padding and gets gradient 0.
        chunk_tokens: C; None takes ``default_chunk_tokens``.
        grad_scale: 0-d device tensor of the loss's dtype, a promise that
            ``loss_sum.backward(grad_scale)`` follows exactly once, with this very tensor as
            upstream gradient. With it the gradients are formed in forward, where the logits exist
            already, and the weight's goes into ``weight.main_grad`` there. That saves a quarter of
            the products, and gives the same bits.
        shard: of a weight whose rows are a part of the vocabulary's; ``vocab_size`` is still that
        of the whole.
    Returns:
        ``loss_sum``, fp32 0-d, differentiable; ``per_token_loss_T``, fp32, detached, already
        weighted by the mask. If ``weight.main_grad`` (fp32) exists, backward adds the weight's
        gradient there and returns None for it.
    Raises:
        ValueError: shapes, dtypes or sizes that do not fit each other.
        RuntimeError: in backward, if ``grad_scale`` was given and another gradient or a second
            backward pass comes.
    """
    total_rows = weight_VD.shape[0] if shard is None else shard.total_rows
    _check(hidden_TD, weight_VD, labels_T, loss_mask_T, vocab_size, total_rows, chunk_tokens)
    if grad_scale is not None:
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
        grad_scale=grad_scale,
        shard=shard,
    )
    return outputs


def default_chunk_tokens(tokens: int, vocab_rows: int) -> int:
    """Return the tokens per chunk, in steps of 128, for about 2^26 logits.

    A chunk has at least 1,024 tokens and at most half of the pack.

    Each chunk reads and writes the fp32 gradient of the whole weight once, which costs as much as
    the products of 245 tokens on an H200; fewer than 1,024 would make that a quarter of the work.
    Example: T 4,096 and V 16,384 give 2,048; T 32,768 and V 131,072 give 1,024; T 100 gives 50.
    """
    half = -(-tokens // 2)
    chunk = max(1024, _CHUNK_LOGITS // vocab_rows // 128 * 128)
    return max(1, min(chunk, -(-half // 128) * 128 if half > 128 else half))


def _check(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    loss_mask_T: Tensor,
    vocab_size: int,
    total_rows: int,
    chunk_tokens: int | None,
) -> None:
    if hidden_TD.dim() != 2 or weight_VD.dim() != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"Expected hidden (T, D) and weight (V, D); got {tuple(hidden_TD.shape)}, {tuple(weight_VD.shape)}."
        )
    if hidden_TD.dtype != weight_VD.dtype:
        raise ValueError(
            f"hidden is {hidden_TD.dtype} and weight {weight_VD.dtype}; cast hidden to the weight's dtype."
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
            f"chunk_tokens ({chunk_tokens}) must be at least 1, or None for a measured choice."
        )


def _check_grad_scale(grad_scale: Tensor, dtype: torch.dtype) -> None:
    if grad_scale.shape != () or grad_scale.dtype != dtype:
        raise ValueError(
            f"grad_scale is {grad_scale.dtype} of shape {tuple(grad_scale.shape)}, but the loss {dtype} of shape (); "
            "autograd would convert it and pass on another tensor."
        )
