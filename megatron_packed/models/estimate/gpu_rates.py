"""Measured rates of a GPU, from which `step_time` computes the time of a step.

``gpu_rates.json`` has a table for each GPU whose rates were measured. ``benchmarks/plan_rates.py``
writes it from results of benchmarks, and each rate comes from one measurement. No rate is fitted to
the time of a step.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("gpu_rates.json")
MOST_MEASURED_RANKS = 4
"""Largest group whose exchanges were measured, on one host."""
MOST_RANKS_OF_HOST = 8
"""Most processes for which a time is computed. No exchange between hosts was measured."""


@dataclass(frozen=True, kw_only=True)
class ExchangeRates:
    """Rates of exchanges of a group over NVLink, in bytes per second that a rank sends."""

    all_gather: float
    """Rate of all-gathers and reduce-scatters."""
    all_reduce: float
    """Rate of all-reduces, which send every byte twice."""
    all_to_all: float
    """Rate of all-to-alls, and of messages to one rank."""
    all_to_all_copies: float
    """Rate of all-to-alls through symmetric memory."""


@dataclass(frozen=True, kw_only=True)
class GpuRates:
    """Measured rates of a GPU in bf16. Times are in seconds, sizes in bytes.

    A pair of times is that of the forward pass, and of forward and backward together.
    """

    product_flops: float
    """FLOP/s of matrix products of linear layers."""
    grouped_flops: float
    """FLOP/s of grouped products of experts, apart from the transfer of their weights."""
    attention_flops: float
    """FLOP/s of attention, forward and backward, of visible pairs alone."""
    attention_element: float
    """Time per token and channel of the queries, forward and backward."""
    attention_call: float
    """Time of a call of any size, forward and backward."""
    attention_forward: float
    """Share of the forward pass in the time of forward and backward."""
    scan_element: Mapping[int, Sequence[float]]
    """Size of a state -> pair of times of the Mamba-2 scan per token and channel."""
    scan_call: Sequence[float]
    """Pair of times of a scan of any size."""
    state_entry: Mapping[str, Sequence[float]]
    """Op with a state ``(K, V)`` for each head -> pair of times per token and entry of a state."""
    op_byte: Mapping[str, Sequence[float]]
    """Op, or kind of an activation -> pair of times per byte of the result."""
    copy_bytes: float
    """Bytes per second of a copy on the device, which reads and writes."""
    kernel: float
    """Time of a kernel without work, with the gap after it in a replayed graph."""
    update_element: float
    """Time of the optimizer per owned parameter: AdamW with bf16 weights, and the norm."""
    zero_element: float
    """Time to set a gradient to zero, per parameter."""
    host_bytes: float
    """Bytes per second of a copy to or from pinned memory of the host."""
    exchange_call: float
    """Time of an exchange of no bytes."""
    exchanges: Mapping[int, ExchangeRates]
    """Ranks of a group -> its rates."""
    overlapped_share: float
    """Share of an overlapped exchange during which no other kernel runs."""
    kernels: Mapping[str, str]
    """Op whose kernel an option may choose -> kernel with which its rates were measured."""

    def exchange_rates(self, ranks: int) -> ExchangeRates:
        """Return the rates of a group: of the next larger measured group, or of the largest."""
        measured = sorted(self.exchanges)
        size = next((each for each in measured if each >= ranks), measured[-1])
        return self.exchanges[size]


@cache
def measured_rates() -> Mapping[str, GpuRates]:
    """Return name of a GPU in capitals -> its rates, of each GPU whose rates were measured."""
    return {name: _rates(values) for name, values in json.loads(TABLE.read_text()).items()}


def _rates(values: Mapping[str, Mapping[str, Any]]) -> GpuRates:
    """Return rates from the table of one GPU, whose values stand beside their sources."""
    plain = {name: entry["value"] for name, entry in values.items()}
    plain["kernels"] = dict(ChainMap(*(entry.get("kernels", {}) for entry in values.values())))
    plain["scan_element"] = {int(size): pair for size, pair in plain["scan_element"].items()}
    plain["exchanges"] = {
        int(ranks): ExchangeRates(**rates) for ranks, rates in plain["exchanges"].items()
    }
    return GpuRates(**plain)
