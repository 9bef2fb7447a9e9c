"""Greedy generation of text. Letters: T tokens, V entries of the vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.params import PackedSeqParams


@torch.no_grad()
def generate(
    model: HybridModel,
    prompt_tokens: Sequence[int],
    max_new_tokens: int,
    ends: Collection[int] = (),
) -> list[int]:
    """Generate tokens greedily: repeatedly append the most likely next token.

    Every new token takes one training forward pass over the complete text. There is no cached state
    and no second implementation that could differ, but the cost grows with the square of the
    length. This suits demonstrations.

    Args:
        prompt_tokens: at least one token.
        max_new_tokens: largest number of new tokens.
        ends: tokens that end the answer; generation stops after the first of them.
    Returns:
        The new tokens, including the token of ``ends`` that stopped the generation.
    Raises:
        ValueError: the prompt is empty, or the text becomes longer than the rotary tables.
    """
    if not prompt_tokens:
        raise ValueError(
            "The prompt is empty; give at least one token, for example the tokenizer's first."
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
            if tokens[-1] in ends:
                break
    finally:
        model.train(was_training)
    return tokens[len(prompt_tokens) :]
