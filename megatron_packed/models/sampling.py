"""Choice of the next token: the most likely one, or a draw with temperature and top-p.

Letters: B documents, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.data.keyed_random import KeyedRandom
from megatron_packed.ops.running_sum import running_sum


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Rule that chooses the next token.

    A draw depends only on the seed, the number of the prompt, the position of the token and the
    logits. It does not depend on other prompts, and it reads and moves no other random state.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 0.0
    """Divisor of the logits; 0 always takes the most likely token."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together have at least this probability; 1: from all."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}; give 0 for the most likely token, or a positive number."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p is {self.top_p}; give a probability above 0 and at most 1 (1 draws from all tokens)."
            )
        if self.top_p < 1 and not self.temperature:
            raise ValueError(
                f"top_p is {self.top_p}, but at temperature 0 no token is drawn; give a temperature, for example 1."
            )


GREEDY = Sampling()
"""Always the most likely token."""


def next_tokens(
    logits_BV: Tensor, sampling: Sampling, prompts: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """Choose the next token of each document.

    Args:
        logits_BV: ``(B, V)``.
        sampling: how to choose.
        prompts: number of the prompt of each document; it selects the draw.
        positions: position of the next token in each document; it selects the draw.
    Returns:
        ``(B,)`` int64.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    # The largest logit becomes 0, so that a division by a tiny temperature gives no NaN.
    below_BV = logits_BV.double() - logits_BV.amax(dim=-1, keepdim=True).double()
    chosen_BV = torch.softmax(below_BV / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        chosen_BV = chosen_BV.masked_fill(chosen_BV < _least(chosen_BV, sampling.top_p), 0)
    draws = [
        int(KeyedRandom(sampling.seed, "generate", prompt, position).words(1)[0] >> 11) / 2**53
        for prompt, position in zip(prompts, positions, strict=True)
    ]
    # Sum in the order of the vocabulary, not of the probabilities: if rounding swaps two tokens of
    # nearly equal probability, the sums at other tokens then stay the same.
    sums_BV = running_sum(chosen_BV)
    draws_B1 = torch.tensor(draws, dtype=torch.float64).to(sums_BV.device)[:, None]
    drawn_B1 = torch.searchsorted(sums_BV, draws_B1 * sums_BV[:, -1:], right=True)
    return drawn_B1[:, 0].clamp(max=logits_BV.shape[1] - 1)


def _least(chosen_BV: Tensor, top_p: float) -> Tensor:
    """Return ``(B, 1)``: the lowest probability among the tokens that top-p keeps."""
    sorted_BV = chosen_BV.sort(dim=-1, descending=True).values
    before_BV = running_sum(sorted_BV) - sorted_BV
    return sorted_BV.masked_fill(before_BV >= top_p, 1).amin(dim=-1, keepdim=True)
