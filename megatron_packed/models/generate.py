"""Generation of text: several prompts in a batch, with cached states, greedily or by sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch.distributed as dist

from megatron_packed.config import flag_names as flags
from megatron_packed.distributed.collectives import broadcast_from_first
from megatron_packed.models.decoder import Decoder
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.sampling import GREEDY, Sampling, next_tokens

OnToken = Callable[[int, int], object]
"""Function called with the number of a prompt and its next token."""
BATCH_DOCUMENTS = 64
"""Largest number of documents that are generated together."""
BATCH_TOKENS = 16384
"""Largest number of prompt tokens in one pack, divided by the expert-parallel size.

One prompt may be longer. Ranks of an expert-parallel group process the tokens of all of them.
"""


def generate(
    model: HybridModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    ends: Collection[int] = (),
    sampling: Sampling = GREEDY,
    on_token: OnToken | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """Generate the tokens that follow each prompt.

    All prompts of a batch run in one pack. Then each step adds one token to each document, with the
    states that the layers keep, so the time is linear in the number of tokens. An answer depends
    only on its prompt, not on other prompts, except for rounding.

    Model, optimizer and random states do not change. In a training job all ranks call this function
    together with the same arguments, in any parallel layout. Experts drop no token.

    Args:
        model: the model, in any mode. See `Decoder`.
        prompts: tokens of each prompt, at least one.
        max_new_tokens: largest number of new tokens of each answer.
        ends: tokens that end an answer; generation stops after the first of them.
        sampling: how tokens are chosen; by default always the most likely one.
        on_token: called on every rank for each new token, in the order of generation.
        group: process group of all ranks that call this function; its first rank chooses the
            tokens. None for one process.
    Returns:
        The new tokens of each prompt, including the token of ``ends`` that stopped the generation.
    Raises:
        ValueError: a prompt is empty or too long for the rotary tables, or ``group`` is missing.
    """
    _check(model, prompts, max_new_tokens, group)
    answers: list[list[int]] = [[] for _ in prompts]
    if max_new_tokens == 0:
        return answers
    decoder = Decoder(model)
    for numbers in _batches([len(prompt) for prompt in prompts], BATCH_TOKENS // model.ep.size):
        logits_BV = decoder.prefill([prompts[number] for number in numbers])
        while numbers:
            chosen_B = next_tokens(logits_BV, sampling, numbers, decoder.lengths)
            # Rounding may differ between ranks, and a different token or a different number of
            # steps would make their collectives disagree.
            tokens: list[int] = broadcast_from_first(chosen_B, group).tolist()
            for number, token in zip(numbers, tokens, strict=True):
                answers[number].append(token)
                if on_token is not None:
                    on_token(number, token)
            rows = [
                row
                for row, number in enumerate(numbers)
                if tokens[row] not in ends and len(answers[number]) < max_new_tokens
            ]
            if 0 < len(rows) < len(numbers):
                decoder.keep(rows)
            if rows:
                logits_BV = decoder.step([tokens[row] for row in rows])
            numbers = [numbers[row] for row in rows]
    return answers


def _batches(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Yield the numbers of consecutive prompts that are generated together."""
    batch: list[int] = []
    tokens = 0
    for number, length in enumerate(lengths):
        if batch and (len(batch) == BATCH_DOCUMENTS or tokens + length > most_tokens):
            yield batch
            batch, tokens = [], 0
        batch.append(number)
        tokens += length
    if batch:
        yield batch


def _check(
    model: HybridModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    group: dist.ProcessGroup | None,
) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; give at least 0.")
    if group is None and (model.tp.group is not None or model.ep.group is not None):
        raise ValueError(
            "the model is split over several ranks, which must choose the same tokens; pass group=, "
            "for example groups.world_group, on all of them."
        )
    for number, prompt in enumerate(prompts):
        name = "the prompt" if len(prompts) == 1 else f"prompts[{number}]"
        if not prompt:
            raise ValueError(
                f"{name} is empty; give at least one token, for example the tokenizer's first."
            )
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise ValueError(
                f"{name} has token numbers from {min(prompt)} to {max(prompt)}, but the vocabulary has "
                f"{model.vocab_size} tokens; use the tokenizer of the model."
            )
        # The last new token is not processed, so it needs no position.
        needed = len(prompt) + max_new_tokens - 1
        if model.rotary is not None and needed > model.max_positions:
            raise ValueError(
                f"{name} has {len(prompt)} tokens, and {max_new_tokens} new tokens exceed the "
                f"{model.max_positions} positions of the rotary tables; shorten one of them, or raise "
                f"{flags.MAX_POSITION_EMBEDDINGS}."
            )
