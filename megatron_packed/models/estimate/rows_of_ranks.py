"""Work and padding of the two partitions of a pack over context-parallel ranks.

A zigzag gives all ranks equal work in attention, but pads documents. Contiguous rows need no padding,
but the later ranks of a long document have more work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_packed.config import flag_names as flags
from megatron_packed.config.kinds.attention import partitions_that_fit
from megatron_packed.config.run import RunConfig
from megatron_packed.models.flops import FlopCounter, visible_pairs

_PACKS_TO_COMPARE, _DOCUMENTS_TO_COMPARE = 32, 20_000
_ZIGZAG_BESIDE_PADDING = 0.047
"""Share of a step that a zigzag costs without any padding.

With `all_gather`, a step of `hybrid1b` on two H200 takes 196.8 ms in a zigzag and 188.0 ms over contiguous
rows (2026-11-30). The kernels differ, and a zigzag moves rows.
"""


@dataclass(frozen=True, kw_only=True)
class RowsOfRanks:
    """Costs of the partitions for the documents of a run.

    Pairs are those of the widest attention window of the model.
    """

    zigzag_padding: float
    """Slots of padding over tokens of documents, beyond that of contiguous rows."""
    slowest_contiguous: float
    """Visible pairs of the slowest rank over the mean; see `slowest_rank`."""
    contiguous_flops: float
    """FLOPs of this rank in attention beyond the mean, over the FLOPs of a step on one rank."""

    @classmethod
    def for_documents(
        cls,
        lengths: NDArray[np.int64],
        tokens: int,
        ranks: int,
        window: int | None,
        *,
        attention: float,
        padded: bool = False,
    ) -> RowsOfRanks:
        """Compare the partitions.

        Args:
            attention: share of attention scores in the FLOPs of a step.
            padded: documents are padded in both partitions, because the user gave an alignment.

        For the other arguments see `slowest_rank`.
        """
        padding = 0.0 if padded else float((-lengths % (2 * ranks)).sum() / lengths.sum())
        floats = lengths.astype(np.float64)
        slowest, mean = _pairs_of_ranks(floats, tokens, ranks, window)
        # The share of attention is that of packs without empty slots.
        in_full_pack = visible_pairs(floats, window) * tokens / ranks / floats.sum()
        return cls(
            zigzag_padding=padding,
            slowest_contiguous=slowest / mean,
            contiguous_flops=(slowest - mean) / in_full_pack * attention,
        )

    @property
    def cheaper(self) -> str:
        """Return the partition that costs less."""
        zigzag = self.zigzag_padding + _ZIGZAG_BESIDE_PADDING
        return "contiguous" if self.contiguous_flops <= zigzag else "zigzag"


def slowest_rank(
    lengths: NDArray[np.float64], tokens: int, ranks: int, window: int | None
) -> float:
    """Return the visible pairs of the slowest rank over the mean, if ranks have contiguous rows.

    Documents are drawn to fill some packs, always the same ones. The result is the work of the slowest
    ranks of these packs over the mean work.

    Args:
        lengths: tokens of the documents' pieces.
        tokens: slots of a pack.
        window: number of tokens that a token sees, or None.

    Example:
        A document that fills the pack of 4 ranks gives them 1, 3, 5 and 7 of 16 parts: 1.75.
    """
    slowest, mean = _pairs_of_ranks(lengths, tokens, ranks, window)
    return slowest / mean


def _pairs_of_ranks(
    lengths: NDArray[np.float64], tokens: int, ranks: int, window: int | None
) -> tuple[float, float]:
    """Return the mean over packs of the visible pairs of the slowest rank, and of a usual rank."""
    random = np.random.default_rng(0)
    per_pack = tokens / lengths.mean()
    count = int(min(max(_DOCUMENTS_TO_COMPARE / per_pack, 1), _PACKS_TO_COMPARE))
    drawn = lengths[random.integers(0, lengths.size, int((count + 1) * per_pack) + 1)]
    packs: list[NDArray[np.float64]] = []
    seen_T, filled = np.zeros(tokens), 0
    for length in drawn.astype(np.int64):
        if filled + length > tokens:
            packs.append(seen_T.reshape(ranks, -1).sum(axis=1))
            seen_T, filled = np.zeros(tokens), 0
        seen = np.arange(length) + 0.5
        seen_T[filled : filled + length] = seen if window is None else np.minimum(seen, window)
        filled += length
    # The last pack may not be full, so it counts only if it is the only one.
    pairs_PR = np.stack(packs[:count] or [seen_T.reshape(ranks, -1).sum(axis=1)])
    return float(pairs_PR.max(axis=1).mean()), float(pairs_PR.mean())


def rows_of_ranks(
    config: RunConfig, lengths: NDArray[np.int64], attention: float
) -> RowsOfRanks | None:
    """Return the costs of the partitions; None if attention exchanges no keys and values.

    Args:
        lengths: tokens of the documents' pieces.
        attention: share of attention scores in the FLOPs of a step.
    """
    windows = config.model.attention_windows
    if not config.parallel.exchanges_keys or not windows:
        return None
    widest = None if None in windows else max(window or 0 for window in windows)
    tokens, ranks = config.packing.tokens_per_pack, config.parallel.context_parallel_size
    padded = config.packing.pad_packed_seq_alignment is not None
    return RowsOfRanks.for_documents(
        lengths, tokens, ranks, widest, attention=attention, padded=padded
    )


def choose_partition(
    config: RunConfig, lengths: NDArray[np.int64], attention: Callable[[], float]
) -> tuple[RunConfig, str]:
    """Return the configuration with the partition that costs less, and a sentence that says why.

    The sentence is empty if there is nothing to choose.

    Args:
        lengths: tokens of the documents' pieces.
        attention: returns the share of attention scores in the FLOPs of a step (`attention_share`).
    """
    may_choose = config.parallel.chooses_partition and config.model.attention_windows
    if not may_choose or not lengths.size:
        return config, ""
    rows = rows_of_ranks(config, lengths, attention())
    assert rows is not None, "the layers of the model exchange keys and values"
    fitting = partitions_that_fit(config)
    chosen = rows.cheaper if rows.cheaper in fitting else fitting[0]
    parallel = replace(config.parallel, cp_partition_mode=chosen)
    return replace(config, parallel=parallel), (
        f"{flags.CP_PARTITION_MODE} {chosen}: a zigzag pads the documents by {100 * rows.zigzag_padding:.1f} % "
        "of their tokens, and "
        f"contiguous rows cost the slowest rank {100 * rows.contiguous_flops:.1f} % more FLOPs"
    )


def attention_share(config: RunConfig, vocab_size: int, lengths: NDArray[np.int64]) -> float:
    """Return the share of attention scores in the FLOPs of forward and backward.

    Args:
        lengths: tokens of the documents' pieces.
    """
    return FlopCounter(config.model, vocab_size).training(lengths).attention_share
