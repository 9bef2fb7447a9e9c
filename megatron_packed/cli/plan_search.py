"""Search of ``megatron-packed plan --search``: the fastest layouts that fit, with their flags."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from megatron_packed.cli.command import show
from megatron_packed.cli.plan_time import assumption_about_exchanges, in_usual_unit
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.idle_options import without_effect
from megatron_packed.config.kinds.attention import zigzag_kernel_problem
from megatron_packed.config.parser.parse import Parsed, parse_with_sources
from megatron_packed.config.run import RunConfig, every_field
from megatron_packed.config.section import value_when_not_given
from megatron_packed.resume.stored_options import stored_options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron_packed.models.estimate.layout_search import FittingLayout, SearchResult
    from megatron_packed.models.estimate.run_estimate import StepWork

_GIB = 2**30
_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class RunToPlan:
    """Run of a command line, with the data that decides its work."""

    config: RunConfig
    world_size: int
    vocab_size: int
    documents: int
    """Capacity of a pack in documents."""
    lengths: NDArray[np.int64]
    """Tokens of the documents."""
    source: str
    """Source of the lengths in words."""
    work: StepWork
    limit: int
    """Memory of a GPU in bytes."""


class OtherOptions:
    """Configurations of a run with other options than those of its command line.

    Args:
        run_flags: flags of the run.
        world_size: number of processes.
        as_resumed: takes the options with which a configuration would continue its checkpoint.
    """

    def __init__(
        self,
        run_flags: Sequence[str],
        world_size: int,
        as_resumed: Callable[[RunConfig], RunConfig],
    ) -> None:
        self._run_flags = run_flags
        self._as_resumed = as_resumed
        self._world_size = world_size
        self._parsed: dict[str, Parsed | None] = {}

    def configure(self, options: Mapping[str, Any]) -> RunConfig | None:
        """Return the configuration with these options; None if it is refused."""
        parsed = self._parse(options)
        return None if parsed is None else parsed.config

    def flags(self, options: Mapping[str, Any]) -> str:
        """Return the flags of the options that have an effect, and that the run does not have."""
        before, after = self._parse({}), self._parse(options)
        assert after is not None, "a refused configuration is no result"
        words: list[str] = []
        for field in every_field():
            value = options.get(field.name)
            if value is None or field.key in after.idle:
                continue
            if before is None or (field.option.derived and not before.config.is_given(field.key)):
                # The value may follow from the other options of the layout.
                unset = value_when_not_given(getattr(after.config, field.section), field)
            else:
                unset = before.config.value_of(field)
            if value == unset:
                continue
            words.append(field.flag_for(value))
            if not isinstance(value, bool):
                words.append(str(value))
        return shlex.join(words)

    def _parse(self, options: Mapping[str, Any]) -> Parsed | None:
        key = repr(sorted(options.items()))
        if key not in self._parsed:
            try:
                parsed = parse_with_sources(
                    self._run_flags,
                    self._world_size,
                    on_this_machine=False,
                    read_stored=stored_options,
                    keywords=options,
                )
                config = self._as_resumed(parsed.config)
                if config is not parsed.config:
                    idle = without_effect(config, self._world_size)
                    parsed = replace(parsed, config=config, idle=idle)
                self._parsed[key] = parsed
            except ConfigError:
                self._parsed[key] = None
        return self._parsed[key]


def search_command(
    run: RunToPlan,
    run_flags: Sequence[str],
    gpu: tuple[str, float],
    as_json: bool,
    as_resumed: Callable[[RunConfig], RunConfig],
) -> int:
    """Search the layouts of a run, and print those that fit, fastest first.

    Args:
        as_resumed: takes the options with which a configuration would continue its checkpoint.
    """
    from megatron_packed.models.estimate.gpu_rates import measured_rates
    from megatron_packed.models.estimate.layout_search import (
        LEAST_MEMORY_LAST,
        LayoutSearch,
        layouts_to_search,
    )
    from megatron_packed.models.estimate.rows_of_ranks import choose_partition
    from megatron_packed.models.estimate.run_estimate import pieces_of_documents

    begun = perf_counter()
    pieces = pieces_of_documents(run.config, run.lengths)
    other = OtherOptions(run_flags, run.world_size, as_resumed)
    memory = run.config.memory
    chosen = memory.recompute_granularity is not None or memory.offloads

    def configure(options: Mapping[str, Any]) -> RunConfig | None:
        config = other.configure(options)
        if config is None:
            return None
        config, _ = choose_partition(config, pieces, lambda: run.work.flops.attention_share)
        return config if zigzag_kernel_problem(config) is None else None

    search = LayoutSearch(
        configure,
        world_size=run.world_size,
        vocab_size=run.vocab_size,
        documents=run.documents,
        lengths=pieces,
        rates=measured_rates()[gpu[0].upper()],
        limit=run.limit,
        memory_options=LEAST_MEMORY_LAST[:1] if chosen else LEAST_MEMORY_LAST,
    )
    result = search.fastest(list(layouts_to_search(run.config, run.world_size)), _LISTED)
    rows = [_row(run, layout, gpu, other.flags(layout.options)) for layout in result.fitting]
    if as_json:
        print(json.dumps({"allowed": result.allowed, "layouts": rows}))
    else:
        show("\n".join(_lines(run, result, rows, gpu[0], perf_counter() - begun)))
    return 0


def _row(
    run: RunToPlan, layout: FittingLayout, gpu: tuple[str, float], flags: str
) -> dict[str, Any]:
    """Return the numbers of a layout, and its flags."""
    seconds = layout.time.seconds
    return {
        "step_seconds": seconds,
        "parts": dict(layout.time.parts),
        "tokens_per_second_per_gpu": run.work.tokens / seconds / run.world_size,
        "mfu": 100 * run.work.flops.total / run.world_size / gpu[1] / seconds,
        "bytes": layout.total,
        "flags": flags,
    }


def _lines(
    run: RunToPlan,
    result: SearchResult,
    rows: Sequence[Mapping[str, Any]],
    gpu: str,
    seconds: float,
) -> list[str]:
    head = (
        f"{result.allowed:,} layouts of {run.world_size:,} GPUs are allowed; searched in "
        f"{in_usual_unit(seconds)}."
    )
    if not rows:
        return [
            f"{head} None fits in {run.limit / _GIB:g} GiB, even with recomputation and offload; use "
            "more GPUs, or a smaller model or pack."
        ]
    lines = [
        f"{head} The {len(rows)} fastest that fit in {run.limit / _GIB:g} GiB:",
        "",
        " step ms  tokens/s/GPU    MFU    GiB  flags",
    ]
    lines += [
        f"{_milliseconds(row['step_seconds']):>8}  {row['tokens_per_second_per_gpu']:>12,.0f}  "
        f"{row['mfu']:>4.1f} %  {row['bytes'] / _GIB:>5.1f}  {row['flags'] or '(as given)'}"
        for row in rows
    ]
    return [
        *lines,
        "",
        f"Times are those of the rates measured on {gpu}, for full packs in CUDA graphs, with the default "
        f"kernels and balanced experts.{assumption_about_exchanges(run.world_size)}",
        "Give the flags of a line in place of those with the same names.",
    ]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.2f}"
