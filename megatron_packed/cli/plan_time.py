"""Time of a step and of a run for ``megatron-packed plan``: by measured rates, or by an assumed MFU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_packed.cli.command import UsageError
from megatron_packed.config.kernel_options import named_kernels
from megatron_packed.config.parser.precedence import gather
from megatron_packed.config.run import RunConfig
from megatron_packed.models.estimate.gpu_rates import (
    MOST_MEASURED_RANKS,
    MOST_RANKS_OF_HOST,
    measured_rates,
)

if TYPE_CHECKING:
    from megatron_packed.models.estimate.run_estimate import StepWork
    from megatron_packed.models.estimate.step_time import StepTime

MEMORY_GIB = {"H100": 79.0, "H200": 139.0}
"""GPU -> memory in GiB that a process can allocate."""
_UNITS = (
    ("days", 86400.0, 2 * 86400.0),
    ("hours", 3600.0, 2 * 3600.0),
    ("minutes", 60.0, 120.0),
    ("s", 1.0, 1.0),
    ("ms", 1e-3, 0.0),
)
"""Units of time: name, seconds, and the shortest time in seconds that is printed in the unit."""


class RunTime(NamedTuple):
    """Time of a run."""

    gpu: str
    peak_flops: float
    """Dense bf16 peak of a GPU in FLOP/s."""
    mfu: float
    """Share of the peak that the step reaches, in percent: assumed, or by measured rates."""
    step_seconds: float
    """Time of a step with the full batch."""
    steps: int | None
    """Steps of the run; None if its flags do not name its length."""
    seconds: float | None
    """Time of the whole run, if its length is known."""
    parts: Mapping[str, float] | None = None
    """Part of a step -> seconds, by measured rates; None if the MFU is assumed."""


def memory_gib_of(gpu: str) -> float:
    """Return the memory of a GPU in GiB.

    Raises:
        UsageError: the GPU is unknown, or its memory.
    """
    if gpu.upper() not in MEMORY_GIB:
        name, _ = peak_of_named(gpu)
        known = " and ".join(MEMORY_GIB)
        raise UsageError(
            f"--gpu {name}: give --gpu-memory-gib; only the memory of {known} is known."
        )
    return MEMORY_GIB[gpu.upper()]


def peak_of_named(gpu: str) -> tuple[str, float]:
    """Return the usual spelling of a GPU's name, and its dense bf16 peak in FLOP/s.

    Raises:
        UsageError: the peak is not known.
    """
    from megatron_packed.models.flops import PEAK_BF16_FLOPS

    peaks = {name.lower(): (name, peak) for name, peak in PEAK_BF16_FLOPS.items()}
    if gpu.lower() not in peaks:
        names = ", ".join(PEAK_BF16_FLOPS)
        raise UsageError(f"--gpu {gpu}: has no known peak FLOP/s; choose one of {names}.")
    return peaks[gpu.lower()]


def reason_without_rates(config: RunConfig, world_size: int, gpu: str) -> str:
    """Return why no time follows from measured rates, in one sentence; empty if it does."""
    if not config.training.bf16:
        return "Without --bf16 no time is estimated."
    measured = measured_rates()
    if gpu.upper() not in measured:
        names = " and ".join(measured)
        return f"No time is given: rates were measured on {names}, and not on {gpu.upper()}."
    if world_size > MOST_RANKS_OF_HOST:
        return (
            f"No time is given: {world_size:,} GPUs are more than the {MOST_RANKS_OF_HOST} of a host, "
            "and no exchange between hosts was measured."
        )
    for kernel in named_kernels(config):
        if measured[gpu.upper()].kernels.get(kernel.op) != kernel.value:
            return (
                "No time is given: rates were measured with the default kernels, and not with "
                f"{kernel.option} {kernel.value}."
            )
    return ""


def time_of_run(
    config: RunConfig,
    run_flags: Sequence[str],
    *,
    gpu: tuple[str, float],
    flops: float,
    mfu: float | None,
    measured: StepTime | None,
) -> RunTime | None:
    """Return the time of a run; None without an assumed MFU and without measured rates.

    Args:
        config: configuration of the run.
        run_flags: its flags.
        gpu: name and peak of the GPU.
        flops: FLOPs of a rank in a step.
        mfu: assumed MFU in percent, or None.
        measured: time of a step by measured rates, or None.
    """
    name, peak = gpu
    if mfu is not None:
        seconds, parts = flops / (peak * mfu / 100), None
    elif measured is not None:
        seconds, parts = measured.seconds, dict(measured.parts)
    else:
        return None
    # The parser fills in a length that the run needs and the command does not.
    named = {"training.train_iters", "training.train_samples"} & set(gather(run_flags).values)
    steps = config.last_iteration() if named else None
    samples = config.training.train_samples
    # Smaller steps of a growing batch take a part of the time.
    full_steps: float | None = steps
    if samples is not None:
        full_steps = samples / config.packing.global_batch_size
    return RunTime(
        gpu=name,
        peak_flops=peak,
        mfu=100 * flops / (peak * seconds) if mfu is None else mfu,
        step_seconds=seconds,
        steps=steps,
        seconds=None if steps is None or full_steps is None else seconds * full_steps,
        parts=parts,
    )


def time_lines(time: RunTime | None, reason: str, work: StepWork, world_size: int) -> list[str]:
    """Return the lines about the time of a step and of the run.

    Args:
        time: the time, or None.
        reason: why there is none.
        work: work of a step.
        world_size: number of processes.
    """
    if time is None:
        cure = " --mfu P computes a time from an assumed share of the peak."
        return [reason + (cure if reason.startswith("No") else "")]
    of_run = ""
    if time.steps is not None and time.seconds is not None:
        noun = "step" if time.steps == 1 else "steps"
        of_run = f", and the run of {time.steps:,} {noun} {in_usual_unit(time.seconds)}"
    if time.parts is None:
        return [
            f"At {time.mfu:g} % MFU, of {time.peak_flops / 1e12:g} TFLOP/s in bf16 of each {time.gpu}, a step takes "
            f"{in_usual_unit(time.step_seconds)}{of_run} (--mfu and --gpu change this assumption)."
        ]
    parts = ", ".join(
        f"{name} {in_usual_unit(seconds)}" for name, seconds in time.parts.items() if seconds
    )
    speed = work.tokens / time.step_seconds / world_size
    return [
        f"By the rates measured on {time.gpu}, a step takes {in_usual_unit(time.step_seconds)} ({parts}){of_run}: "
        f"{speed:,.0f} tokens/s of each GPU, {time.mfu:.1f} % MFU.",
        "This is the time of full packs in CUDA graphs, with the default kernels and balanced experts."
        + assumption_about_exchanges(world_size),
    ]


def assumption_about_exchanges(world_size: int) -> str:
    """Return a sentence about exchanges of a size that was not measured; empty if there is none."""
    if world_size <= MOST_MEASURED_RANKS:
        return ""
    return (
        f" Exchanges among more than {MOST_MEASURED_RANKS} GPUs were not measured, and count with the rates "
        f"of {MOST_MEASURED_RANKS}."
    )


def in_usual_unit(seconds: float) -> str:
    """Return a time in its usual unit, such as ``27 s`` or ``25 days``."""
    name, unit, _ = next(row for row in _UNITS if seconds >= row[2])
    amount = seconds / unit
    return f"{amount:,.0f} {name}" if amount >= 10 else f"{amount:.2g} {name}"
