"""Rows of gated delta nets in Hugging Face tensors."""

from __future__ import annotations

from itertools import accumulate

from megatron_packed.config.kinds.gated_delta_net import GatedDeltaNetOptions
from megatron_packed.models.convert.row_maps import Block, Move, Part, interleaved


def _delta_widths(config: GatedDeltaNetOptions) -> tuple[int, ...]:
    """Return the rows of the sections q, k, v, z, b and a of a gated delta net's projection."""
    keys, values, heads = (
        config.linear_key_dim,
        config.linear_value_dim,
        config.linear_num_value_heads,
    )
    return keys, keys, values, values, heads, heads


def delta_sections(config: GatedDeltaNetOptions) -> tuple[Part, ...]:
    """Return the parts q, k, v, z, b and a of a gated delta net's projection."""
    return interleaved(1, _delta_widths(config))


def delta_qkv_together(config: GatedDeltaNetOptions) -> tuple[Part, ...]:
    """Return the parts qkv, z, b and a of a gated delta net's projection."""
    widths = _delta_widths(config)
    return interleaved(1, (sum(widths[:3]), *widths[3:]))


def delta_by_key_head(config: GatedDeltaNetOptions) -> tuple[Part, ...]:
    """Return the parts qkvz and ba, which hold the sections of one key head after another."""
    groups = config.linear_num_key_heads
    widths = _delta_widths(config)
    begins = tuple(accumulate(widths, initial=0))

    def part(first: int, last: int) -> Part:
        """Return the part with the sections from ``first`` to before ``last``."""
        counts = [width // groups for width in widths[first:last]]
        places = accumulate(counts, initial=0)
        moves = tuple(
            Move(Block(begin, count, groups, count), Block(place, count, groups, sum(counts)))
            for begin, count, place in zip(begins[first:last], counts, places)
        )
        return Part(sum(widths[first:last]), moves)

    return part(0, 4), part(4, 6)


def delta_convolution(config: GatedDeltaNetOptions) -> tuple[Part, ...]:
    """Return the parts q, k and v of a gated delta net's convolution."""
    return interleaved(1, _delta_widths(config)[:3])


def convolution_in_thirds(config: GatedDeltaNetOptions) -> tuple[Part, ...]:
    """Return three equal parts of a gated delta net's convolution, as transformers saves them."""
    return interleaved(1, [sum(_delta_widths(config)[:3]) // 3] * 3)
