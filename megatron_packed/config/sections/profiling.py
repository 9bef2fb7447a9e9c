"""Options of profiling: traces of a few steps, and the history of GPU memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_packed.config.conditions import TRAINS, option_given
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.options import option
from megatron_packed.config.section import Section, Sound

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

PROFILES = option_given("profiling.profile")


class WindowOptions(Section, group="a window of steps", only_if=TRAINS):
    """Options of the traces of a few steps."""

    profile: bool = option(
        False,
        "Profile a window of steps, with --use-pytorch-profiler or as the capture range of nsys.",
    )
    profile_step_start: int = option(
        10,
        "Step after which the profiled window begins.",
        unit="iterations",
        minimum=0,
        only_if=PROFILES,
    )
    profile_step_end: int = option(
        12,
        "Last step of the profiled window.",
        unit="iterations",
        minimum=1,
        only_if=PROFILES,
    )
    profile_ranks: tuple[int, ...] = option((0,), "Ranks to profile.", minimum=0, only_if=PROFILES)
    use_pytorch_profiler: bool = option(
        False,
        "Profile with torch.profiler: one Chrome trace per rank and a table of kernels.",
        only_if=PROFILES,
    )
    record_shapes: bool = option(
        False,
        "Record tensor shapes in the traces of torch.profiler.",
        only_if=(PROFILES, option_given("profiling.use_pytorch_profiler")),
    )


class ProfilingConfig(WindowOptions, title="profiling", group="memory"):
    """Options for traces of kernels and of the memory allocator. Steps outside the profiled window
    have no overhead.
    """

    record_memory_history: bool = option(
        False,
        "Record the history of the GPU memory allocator. It is written after an out-of-memory "
        "error and at the end of the run.",
    )
    memory_snapshot_path: str | None = option(
        None,
        "File for the memory history; snapshot.pickle when not given. With several ranks, the "
        "rank is added to the name.",
        path="output_file",
        only_if=option_given("profiling.record_memory_history"),
    )

    def rules(self, sound: Sound) -> Problems:
        if not sound("profile", "profile_step_start", "profile_step_end") or not self.profile:
            return
        if self.profile_step_end <= self.profile_step_start:
            yield self.problem(
                "profile_step_end",
                f"must be above --profile-step-start ({self.profile_step_start})",
                f"give {self.profile_step_start + 2} for two steps",
            )


def profiling_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems between the options of profiling and of training."""
    options, training = run.profiling, run.training
    window_sound = sound(
        "profiling.profile_step_start", "training.train_iters", "training.train_samples"
    )
    # With --train-samples, the last step of a resumed run depends on the steps before it.
    window_sound = window_sound and training.train_samples is None
    last = training.train_iters
    if window_sound and options.profile and last is not None and options.profile_step_start >= last:
        yield options.problem(
            "profile_step_start",
            f"is never reached: the run ends after step {last} (--train-iters)",
            f"give at most {last - 1}",
        )
    if not sound("training.device") or training.device != "cpu":
        return
    if options.profile and not options.use_pytorch_profiler:
        yield Problem(
            "--profile",
            "",
            "sets the capture range of nsys on a GPU, and --device is cpu",
            "add --use-pytorch-profiler",
        )
    if options.record_memory_history:
        yield Problem(
            "--record-memory-history",
            "",
            "records the GPU memory allocator, and --device is cpu",
            "leave it out",
        )
