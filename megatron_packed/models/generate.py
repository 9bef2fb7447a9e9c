"""Greedy decoding. Letters: T tokens, V entries of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.params import PackedSeqParams


@torch.no_grad()
def generate(
    model: HybridModel, prompt_tokens: Sequence[int], max_new_tokens: int, eod: int | None = None
) -> list[int]:
    """The most likely next token, again and again, each time over the whole prefix.

    Simple and exact: it runs the training forward pass, with no state to carry and no second
    implementation to trust. The cost grows with the square of the length, which a demonstration can
    afford.

    Args:
        prompt_tokens: at least one token.
        max_new_tokens: stop after so many.
        eod: end-of-document token: stop after it.
    Returns:
        The new tokens, ``eod`` included where it came.
    Raises:
        ValueError: an empty prompt, or a prefix that grows longer than the rotary tables.
    """
    if not prompt_tokens:
        raise ValueError(
            "The prompt is empty; give at least one token, for instance the tokenizer's first."
        )
    device = model.embedding.weight.device
    tokens = list(prompt_tokens)
    was_training = model.training
    model.eval()
    try:
        while len(tokens) < len(prompt_tokens) + max_new_tokens:
            packed = PackedSeqParams.from_lengths([len(tokens)], len(tokens), device=device)
            logits_TV = model.logits(torch.tensor(tokens, dtype=torch.int32, device=device), packed)
            tokens.append(int(logits_TV[-1].argmax()))
            if tokens[-1] == eod:
                break
    finally:
        model.train(was_training)
    return tokens[len(prompt_tokens) :]
