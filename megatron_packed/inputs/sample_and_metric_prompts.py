"""Prompts that the model answers during training: those of a file, and those of the task metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from megatron_packed.config.run import RunConfig
from megatron_packed.data.documents import Documents
from megatron_packed.data.errors import DataError
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.distributed.collectives import all_gather_json
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.prompts import encode_prompts, read_prompts


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Prompts as tokens, the same on all ranks."""

    prompts: list[list[int]]
    ends: list[int]
    """Tokens that end an answer."""
    max_new_tokens: int
    shown: list[str]
    """Text of each prompt for a reader; empty for the task metric."""
    expected: list[str | None]
    """Answer of the data to each prompt; None without one."""


def sample_questions(
    config: RunConfig, tokenizer: Tokenizer, groups: ParallelGroups
) -> Questions | None:
    """Return the prompts of ``--sample-prompts``, or None; a collective.

    Only rank 0 reads the file, because it may differ between machines.

    Raises:
        DataError: on rank 0; the file has no prompt, or a prompt that cannot be used.
    """
    path = config.logging.sample_prompts
    if path is None:
        return None
    read = asdict(_read(config, tokenizer, path)) if groups.rank == 0 else None
    return Questions(**all_gather_json(read, groups)[0])


def _read(config: RunConfig, tokenizer: Tokenizer, path: str) -> Questions:
    prompts, most = read_prompts(path, config.data.fields), config.logging.sample_max_new_tokens
    encoded = encode_prompts(config, tokenizer, prompts)
    longest = _longest_prompt(config)
    for prompt, tokens in zip(prompts, encoded.tokens, strict=True):
        if longest is not None and len(tokens) > longest:
            raise DataError(
                f"{prompt.name} has {len(tokens)} tokens, which with --sample-max-new-tokens {most} exceed the "
                f"{config.max_positions} positions of the rotary tables; shorten one of them."
            )
    return Questions(
        prompts=encoded.tokens,
        ends=sorted(encoded.ends),
        max_new_tokens=most,
        shown=[prompt.shown for prompt in prompts],
        expected=[prompt.expected for prompt in prompts],
    )


def metric_questions(
    config: RunConfig, tokenizer: Tokenizer, documents: Documents | None
) -> Questions | None:
    """Return the last turns of the first validation conversations for ``--valid-metric``, or None.

    A conversation is left out if its last answer is longer than ``--sample-max-new-tokens``, or if
    its prompt is too long for the rotary tables.

    Raises:
        DataError: no conversation is left.
    """
    if config.training.valid_metric is None or documents is None:
        return None
    most, longest = config.logging.sample_max_new_tokens, _longest_prompt(config)
    prompts: list[list[int]] = []
    expected: list[str | None] = []
    for number in range(len(documents)):
        prompt, answer = _last_turn(documents, number)
        if not prompt or len(answer) > most or (longest is not None and len(prompt) > longest):
            continue
        prompts.append(prompt)
        expected.append(tokenizer.decode(answer, skip_special=True).strip())
        if len(prompts) == config.training.valid_metric_samples:
            break
    if not prompts:
        raise DataError(
            f"no validation conversation ends with an answer of at most {most} tokens, so --valid-metric "
            f"{config.training.valid_metric} has nothing to compare; raise --sample-max-new-tokens."
        )
    return Questions(
        prompts=prompts,
        ends=sorted(encode_prompts(config, tokenizer, []).ends),
        max_new_tokens=most,
        shown=[],
        expected=expected,
    )


def _last_turn(documents: Documents, number: int) -> tuple[list[int], Sequence[int]]:
    """Return the tokens of a document before its last answer, and the tokens of that answer."""
    tokens, targets = documents.document(number)
    trained = np.flatnonzero(targets)
    if not trained.size:
        return [], []
    stop = int(trained[-1]) + 1
    untrained = np.flatnonzero(targets[:stop] == 0)
    start = int(untrained[-1]) + 1 if untrained.size else 0
    return tokens[:start].tolist(), tokens[start:stop].tolist()


def _longest_prompt(config: RunConfig) -> int | None:
    """Return the largest number of tokens of a prompt; None without rotary tables."""
    if config.model.position_embedding_type != "rope":
        return None
    # The last new token is not processed, so it needs no position.
    return config.max_positions - config.logging.sample_max_new_tokens + 1
