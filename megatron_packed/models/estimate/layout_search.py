"""Search for the fastest parallel layouts whose ranks fit on their GPUs.

Times are those of `step_time`. A layout that does not fit is tried again with options that need less
memory and more time. So layouts are estimated in the order of their times, and the search ends with
the first ones that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.model_parts.divisors import every_divisor
from megatron_packed.models.estimate.gpu_rates import GpuRates
from megatron_packed.models.estimate.rank_memory import optimizer_bytes, parameter_bytes
from megatron_packed.models.estimate.run_estimate import estimates_of, no_collection, usual
from megatron_packed.models.estimate.step_memory import KnownUnits
from megatron_packed.models.estimate.step_time import StepTime, owned_layout, step_time
from megatron_packed.models.trace import Imagined
from megatron_packed.optim.state_precision import StatePrecision
from megatron_packed.torch_private import compiler_not_imported

Options = Mapping[str, Any]
"""Name of an option -> value."""
Configure = Callable[[Options], RunConfig | None]
"""Returns the configuration of the run with other options; None if it is refused."""

LEAST_MEMORY_LAST: tuple[Options, ...] = (
    {},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "offload_layer_inputs": True,
    },
)
"""Options of recomputation and offload, in the order in which a layout is tried with them."""


@dataclass(frozen=True, kw_only=True)
class FittingLayout:
    """Layout whose ranks fit on their GPUs."""

    options: Options
    time: StepTime
    total: int
    """Bytes of a rank."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Layouts that fit, fastest first, and the number of layouts that the configuration allows."""

    fitting: Sequence[FittingLayout]
    allowed: int


@dataclass
class LayoutSearch:
    """Search over the layouts of a run."""

    configure: Configure
    """Returns the configuration with other options."""
    world_size: int
    """Number of processes."""
    vocab_size: int
    """Entries of the vocabulary."""
    documents: int
    """Capacity of a pack in documents."""
    lengths: NDArray[np.int64]
    """Tokens of the documents' pieces."""
    rates: GpuRates
    """Rates of the GPUs."""
    limit: int
    """Memory of a GPU in bytes."""
    memory_options: Sequence[Options] = LEAST_MEMORY_LAST
    """Options of recomputation and offload to try."""
    _traced: KnownUnits = field(default_factory=dict)
    _measured: KnownUnits = field(default_factory=dict)

    def fastest(self, layouts: Sequence[Options], number: int) -> SearchResult:
        """Return at most ``number`` layouts that fit."""
        with no_collection(), compiler_not_imported():
            return self._fastest(layouts, number)

    def _fastest(self, layouts: Sequence[Options], number: int) -> SearchResult:
        order = count()
        allowed = 0
        waiting: list[tuple[float, int, StepTime, Options, int]] = []
        for layout in layouts:
            planned = self._planned(layout)
            if planned is None:
                continue
            allowed += 1
            if self._least_bytes(*planned) <= self.limit:
                time = self._time(*planned)
                waiting.append((time.seconds, next(order), time, layout, 0))
        heapify(waiting)
        fitting: list[FittingLayout] = []
        while waiting and len(fitting) < number:
            _, _, time, layout, level = heappop(waiting)
            options = {**layout, **self.memory_options[level]}
            total = self._total(options)
            if total <= self.limit:
                fitting.append(FittingLayout(options=options, time=time, total=total))
                continue
            for next_level in range(level + 1, len(self.memory_options)):
                planned = self._planned({**layout, **self.memory_options[next_level]})
                if planned is not None and self._may_fit(planned.config, total):
                    later = self._time(*planned)
                    heappush(waiting, (later.seconds, next(order), later, layout, next_level))
                    break
        return SearchResult(fitting=fitting, allowed=allowed)

    def _planned(self, options: Options) -> _Planned | None:
        """Return the configuration and the model of a rank; None if the options are refused."""
        config = self.configure(options)
        if config is None:
            return None
        return _Planned(config, Imagined.from_config(config, self.world_size, self.vocab_size))

    def _time(self, config: RunConfig, imagined: Imagined) -> StepTime:
        return step_time(config, imagined, self.documents, self.lengths, self.rates, self._traced)

    def _total(self, options: Options) -> int:
        planned = self._planned(options)
        assert planned is not None, "its time was computed"
        return usual(estimates_of(*planned, self.documents, self._measured)).total

    def _least_bytes(self, config: RunConfig, imagined: Imagined) -> int:
        """Return the bytes of parameters, optimizer state and gradients, of at least bf16. A rank
        needs them with any recomputation."""
        layout = owned_layout(config, imagined)
        gradients = layout.numel * torch.bfloat16.itemsize
        state = optimizer_bytes(layout, StatePrecision.from_config(config))
        return parameter_bytes(layout) + state + gradients

    def _may_fit(self, config: RunConfig, total: int) -> bool:
        """Return whether a layout may fit that needs ``total`` bytes without its last option.

        Offload of inputs saves at most the inputs of all layers. Its trace takes longest.
        """
        if not config.memory.offloads:
            return True
        rows = config.packing.tokens_per_pack // config.parallel.ranks_per_row
        inputs = len(config.model.layer_types) * rows * config.model.hidden_size
        return total - inputs * torch.bfloat16.itemsize <= self.limit


class _Planned(NamedTuple):
    config: RunConfig
    imagined: Imagined


def layouts_to_search(config: RunConfig, world_size: int) -> Iterator[Options]:
    """Yield options of all layouts of ``world_size`` processes; not all of them may be allowed.

    Options that the user gave and that are no sizes stay as they are.
    """
    sizes = every_divisor(world_size)
    of_experts = sizes if config.model.has_experts else [1]
    for tp, cp, ep in product(sizes, sizes, of_experts):
        if world_size % (tp * cp):
            continue
        options: dict[str, Any] = {
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "use_distributed_optimizer": True,
        }
        if tp > 1:
            options["sequence_parallel"] = True
        if not config.model.has_experts:
            yield options
            continue
        options["expert_model_parallel_size"] = ep
        for expert_tp in sorted({1, tp}):
            if world_size % (ep * expert_tp) == 0:
                yield {**options, "expert_tensor_parallel_size": expert_tp}
