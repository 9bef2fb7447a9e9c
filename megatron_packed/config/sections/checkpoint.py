"""Options of checkpoints: saving, loading and resuming."""

from __future__ import annotations

import os
import re
from typing import Literal

from megatron_packed.config.conditions import TRAINS, Condition, option_given
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.options import Related, option
from megatron_packed.config.section import Section, Sound
from megatron_packed.config.sections.logging import LoggingConfig

PHASE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


SAVES, LOADS = option_given("checkpoint.save"), option_given("checkpoint.load")
LOADS_WEIGHTS = Condition(
    "no checkpoint is loaded", lambda run, processes: any(run.checkpoint.starts)
)
RESUMES = Condition(
    "--finetune loads only the weights", lambda run, processes: not run.checkpoint.finetune
)
LOADS_SCHEDULE = Condition(
    "--no-load-optim leaves out the schedule, too",
    lambda run, processes: run.checkpoint.load_optim,
)


class CheckpointConfig(Section, title="checkpoint"):
    """Options that decide where checkpoints are written and from which checkpoint a run starts."""

    save: str | None = option(None, "Directory to write checkpoints to.", path="output_directory")
    save_interval: int | None = option(
        None,
        "Interval between checkpoints, in iterations; a run also saves one at its end.",
        unit="iterations",
        minimum=1,
        aliases=("persistent-save-interval",),
        only_if=TRAINS,
    )
    save_retain: int | None = option(
        None,
        "Number of the newest checkpoints to keep; all are kept when not given.",
        unit="checkpoints",
        minimum=1,
        only_if=(TRAINS, SAVES),
    )
    save_retain_interval: int | None = option(
        None,
        "Keep every checkpoint whose iteration is a multiple of this number, and the newest "
        "--save-retain of the others (1 when not given).",
        unit="iterations",
        minimum=1,
        only_if=(TRAINS, SAVES),
        multiple_of="save_interval",
    )
    save_best: bool = option(
        False,
        "Also save a checkpoint when a validation has the lowest loss so far, and keep the best "
        "one in addition to --save-retain. --ckpt-step best loads it.",
        only_if=TRAINS,
    )
    save_optim: bool = option(
        True,
        "Save only the weights, without optimizer state. To resume from such a checkpoint, give "
        "--no-load-optim.",
        flag="no-save-optim",
        negated=True,
        only_if=(TRAINS, SAVES),
    )
    save_rng: bool = option(
        True,
        "Save checkpoints without random states.",
        flag="no-save-rng",
        negated=True,
        only_if=(TRAINS, SAVES),
    )
    async_save: bool = option(
        False,
        "Write checkpoints in the background from a copy in host memory. One checkpoint is "
        "written at a time, and the run ends after the last one is written.",
        only_if=(TRAINS, SAVES),
    )
    load: str | None = option(
        None,
        "Directory to resume from; its newest valid checkpoint is loaded. It may be missing if "
        "it is also the --save directory.",
        path="input_directory",
    )
    ckpt_step: int | Literal["best"] | None = option(
        None,
        "Iteration of the checkpoint to load, or best for the lowest validation loss; the newest "
        "valid checkpoint when not given.",
        unit="iteration",
        minimum=0,
        word="best",
        needs=Related("load"),
    )
    exit_on_missing_checkpoint: bool = option(
        False,
        "Fail if --load has no checkpoint, even if the directory is also --save. By default "
        "such a run starts at iteration 0.",
        only_if=LOADS,
    )
    load_optim: bool = option(
        True,
        "Resume without the saved optimizer state: the Adam moments are new, and the fp32 "
        "masters are made from the weights.",
        flag="no-load-optim",
        negated=True,
        only_if=(LOADS, RESUMES),
    )
    load_rng: bool = option(
        True,
        "Resume without the saved random states; new ones are made from --seed.",
        flag="no-load-rng",
        negated=True,
        only_if=(LOADS, RESUMES),
    )
    use_checkpoint_args: bool = option(
        False,
        "Take the options of the model from the checkpoint in --load or --pretrained-checkpoint. "
        "They override flags, except those that only affect training. --seq-length, the "
        "tokenizer, and with --sft the chat template and its settings come from it if they are "
        "not given. --bf16 is not taken.",
        only_if=LOADS_WEIGHTS,
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "Continue the learning-rate schedule and the weight decay of the checkpoint in --load; "
        "they override the flags of this run.",
        flag="use-checkpoint-opt_param-scheduler",
        only_if=(TRAINS, LOADS, RESUMES, LOADS_SCHEDULE),
    )
    finetune: bool = option(
        False, "Load only the weights from --load, and start at iteration 0.", needs=Related("load")
    )
    begin_phase: str | None = option(
        None,
        "Name of a new phase of the run in --load: weights, moments, counters and random states "
        "continue, and the data, packing and router options may be others. The same command "
        "resumes the phase after it has begun.",
        needs=Related("load"),
        excludes=Related(
            "finetune",
            "it starts a new run",
            cure="leave out --finetune to keep the moments and counters",
        ),
    )
    pretrained_checkpoint: str | None = option(
        None,
        "Directory whose newest valid checkpoint provides the initial weights. The same command "
        "resumes from --load as soon as the run itself has a checkpoint there. For adapters in "
        "--load, it is the directory of their base.",
        path="input_directory",
        excludes=Related("finetune", "it loads the weights of --load"),
    )
    load_adapter: str | None = option(
        None,
        "Directory whose newest valid checkpoint provides the initial adapters (LoRA). Their base "
        "is in --load or --pretrained-checkpoint, or where they found it. LoRA options that are "
        "not given come from it.",
        path="input_directory",
    )
    dist_ckpt_strictness: str = option(
        "raise_all",
        "Check that the checkpoint and the run have the same tensors. An unexpected tensor is "
        "in the run but not in the checkpoint; if allowed, it keeps its initial value. A "
        "missing tensor is only in the checkpoint; if allowed, it is not loaded.",
        choices=(
            "raise_all",
            "raise_unexpected",
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "ignore_all",
        ),
        not_built={"return_unexpected": "give log_unexpected", "return_all": "give log_all"},
        megatron=(
            "assume_ok_unexpected",
            "an error is better than weights that are silently not loaded",
        ),
        only_if=LOADS_WEIGHTS,
    )

    @property
    def answers_with(self) -> tuple[str | None, int | Literal["best"] | None]:
        """Folder and step of the checkpoint whose options and files text generation uses."""
        return (self.load_adapter, None) if self.load_adapter else (self.load, self.ckpt_step)

    @property
    def starts(self) -> tuple[str | None, ...]:
        """Return the folders that may provide initial weights or adapters."""
        return (self.load, self.pretrained_checkpoint, self.load_adapter)

    @property
    def resumes(self) -> bool:
        """Return whether the run continues the newest checkpoint in ``--load``, if there is one."""
        return self.load is not None and not self.finetune

    @property
    def saves_where_it_loads(self) -> bool:
        """Return whether ``--load`` and ``--save`` name the same folder, also through links."""
        if self.load is None or self.save is None:
            return False
        return os.path.realpath(self.load) == os.path.realpath(self.save)

    @property
    def keep_last(self) -> int | None:
        """Number of newest checkpoints to keep; None keeps all."""
        return (
            1
            if self.save_retain is None and self.save_retain_interval is not None
            else self.save_retain
        )

    @property
    def allows_unexpected(self) -> bool:
        """Return whether the checkpoint may lack tensors of the run."""
        return self.dist_ckpt_strictness in ("log_unexpected", "log_all", "ignore_all")

    @property
    def allows_missing(self) -> bool:
        """Return whether the run may lack tensors of the checkpoint."""
        return self.dist_ckpt_strictness != "raise_all"

    def rules(self, sound: Sound) -> Problems:
        yield from super().rules(sound)
        name = self.begin_phase if sound("begin_phase") else None
        if name is not None and PHASE_NAME.fullmatch(name) is None:
            rule = "must be 1 to 64 of the characters a-z, A-Z, 0-9, '.', '_' and '-'"
            yield Problem("--begin-phase", name, rule, "give a name such as long-context")


def saving_rules(checkpoint: CheckpointConfig, logging: LoggingConfig, sound: Sound) -> Problems:
    """Yield a problem for each option that writes beside checkpoints, in a run without --save.

    Programs that only inspect a run write nothing there, so they do not need --save.
    """
    if not sound("checkpoint.save") or checkpoint.save is not None:
        return
    for section, name in (
        (checkpoint, "save_interval"),
        (checkpoint, "save_best"),
        (logging, "log_progress"),
    ):
        if sound(f"{section.title}.{name}") and getattr(section, name):
            yield section.problem(name, "needs --save", "give --save DIRECTORY")
