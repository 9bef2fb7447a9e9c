"""A look into a few steps, and into the GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import option
from megatron_packed.config.section import Section, Sound
from megatron_packed.config.sections.training import TrainingConfig

WINDOW, MEMORY = "a window of steps", "memory"


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig(Section, title="profiling"):
    """Traces of kernels and of the allocator; steps outside the window pay nothing."""

    profile: bool = option(
        False,
        "Profile some steps: with --use-pytorch-profiler, or as the capture range of nsys.",
        group=WINDOW,
    )
    profile_step_start: int = option(
        10, "The window begins after this step.", unit="iterations", group=WINDOW, minimum=0
    )
    profile_step_end: int = option(
        12, "The window's last step.", unit="iterations", group=WINDOW, minimum=1
    )
    profile_ranks: tuple[int, ...] = option((0,), "Ranks to profile.", group=WINDOW, minimum=0)
    use_pytorch_profiler: bool = option(
        False,
        "Profile with torch.profiler: a Chrome trace of each rank, and a table of kernels.",
        group=WINDOW,
    )
    record_shapes: bool = option(
        False, "Traces of torch.profiler hold the shapes of tensors.", group=WINDOW
    )

    record_memory_history: bool = option(
        False,
        "Record what the GPU's allocator does; written when memory runs out, and at the end.",
        group=MEMORY,
    )
    memory_snapshot_path: str | None = option(
        None,
        "File for the record, with the rank in its name where there are several; by default snapshot.pickle.",
        group=MEMORY,
        path="output_file",
    )

    def rules(self, sound: Sound) -> Iterator[Problem]:
        if not sound("profile", "profile_step_start", "profile_step_end") or not self.profile:
            return
        if self.profile_step_end <= self.profile_step_start:
            yield Problem(
                "--profile-step-end",
                str(self.profile_step_end),
                f"must be above --profile-step-start ({self.profile_step_start})",
                f"give {self.profile_step_start + 2} for two steps",
            )


def profiling_rules(
    options: ProfilingConfig, training: TrainingConfig, sound: Callable[..., bool]
) -> Iterator[Problem]:
    """Problems between these options and those of training."""
    known = sound("profiling.profile_step_start", "training.train_iters", "training.train_samples")
    known = (
        known and training.train_samples is None
    )  # else a resumed run's last step depends on the steps before it
    if known and options.profile and options.profile_step_start >= training.train_iters:
        yield Problem(
            "--profile-step-start",
            str(options.profile_step_start),
            f"is not reached: the run ends after step {training.train_iters} (--train-iters)",
            f"give at most {training.train_iters - 1}",
        )
    if not sound("training.device") or training.device != "cpu":
        return
    if options.profile and not options.use_pytorch_profiler:
        yield Problem(
            "--profile",
            "",
            "is the capture range of nsys for a GPU, and --device is cpu",
            "add --use-pytorch-profiler",
        )
    if options.record_memory_history:
        yield Problem(
            "--record-memory-history",
            "",
            "is of the GPU's allocator, and --device is cpu",
            "leave it out",
        )
