"""Step costs for ``megatron-packed tune``: read from a table, or measured on this machine and
saved.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from megatron_packed.cli.command import EXIT_DATA, UsageError, show_aside
from megatron_packed.config.run import RunConfig

if TYPE_CHECKING:
    from megatron_packed.data.packing.sizing import Packing
    from megatron_packed.data.packing.step_cost import StepCosts


def costs_of(
    arguments: argparse.Namespace, config: RunConfig, packings: Sequence[Packing], has_model: bool
) -> StepCosts | None:
    """Return the cost table of this run; None if none is requested.

    Args:
        has_model: True if flags describe the model of ``config``.
    """
    if arguments.costs is not None:
        return _read_costs(arguments.costs, config, has_model)
    if arguments.measure is None:
        return None
    _check_place(arguments.measure)
    import torch

    from megatron_packed.cli.measure_capacities import measure
    from megatron_packed.cuda_graphs.fallback_reasons import GraphFallbackError
    from megatron_packed.data.packing.sizing import capacities_to_measure
    from megatron_packed.data.tokenizers.base import vocabulary
    from megatron_packed.inputs.stored_files import with_tokenizer

    vocab_size = config.model.vocab_size
    if arguments.lengths is None:
        vocab_size = vocabulary(with_tokenizer(config)[1], vocab_size)
    if vocab_size is None:
        raise UsageError(
            "--vocab-size is required: without data there is no tokenizer that gives it."
        )
    capacities = capacities_to_measure(packings, arguments.capacities)
    try:
        costs = measure(config, vocab_size, capacities, show_aside)
    except (ValueError, GraphFallbackError) as error:
        raise UsageError(f"--measure: {error}") from None
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"--measure: the model does not fit on this GPU ({str(error).splitlines()[0]}); "
            "megatron-packed plan with these flags lists options that help."
        ) from None
    try:
        costs.save(arguments.measure)
    except OSError as error:
        raise UsageError(
            f"--measure {arguments.measure}: {error.strerror}; correct the path."
        ) from None
    return costs


def _check_place(file: str) -> None:
    """Check that a cost table can be written to ``file`` without overwriting another kind of file."""
    from megatron_packed.data.packing.step_cost import StepCosts

    try:
        if Path(file).exists():
            StepCosts.load(file)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=Path(file).parent).close()
    except OSError as error:
        raise UsageError(f"--measure {file}: {error.strerror}; correct the path.") from None
    except ValueError:
        raise UsageError(
            f"--measure {file} is not a table of step costs and would be overwritten; give a new "
            "name."
        ) from None


def _read_costs(file: str, config: RunConfig, has_model: bool) -> StepCosts:
    from megatron_packed.cli.measure_capacities import EARLIER, signature
    from megatron_packed.data.packing.step_cost import StepCosts

    try:
        costs = StepCosts.load(file)
    except OSError as error:
        raise UsageError(f"--costs {file}: {error.strerror}; correct the path.") from None
    except ValueError as error:
        raise UsageError(f"--costs: {error}", EXIT_DATA) from None
    if costs.tokens != config.packing.tokens_per_pack:
        raise UsageError(
            f"--costs {file} was measured with packs of {costs.tokens} tokens, but this run's "
            f"have {config.packing.tokens_per_pack}; measure again, or change --seq-length."
        )
    of_run = signature(config) if has_model else {}
    measured = {**EARLIER, **costs.model}
    other = sorted(name for name, value in of_run.items() if measured.get(name, value) != value)
    if other:
        name = other[0]
        raise UsageError(
            f"--costs {file} was measured with another {name} ({measured[name]}, this run: "
            f"{of_run[name]}); measure again, or leave the model's flags out."
        )
    return costs
