"""Saving and resuming."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import option
from megatron_packed.config.section import Section, Sound
from megatron_packed.config.sections.packing import nearest_multiples


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, title="checkpoint"):
    """Where checkpoints go and which one a run starts from."""

    save: str | None = option(None, "Directory that receives checkpoints.", path="output_directory")
    save_interval: int | None = option(
        None,
        "Save every so many iterations, beside the end of the run.",
        unit="iterations",
        minimum=1,
        aliases=("persistent-save-interval",),
    )
    save_retain: int | None = option(
        None,
        "Keep this many of the newest checkpoints; all when not given.",
        unit="checkpoints",
        minimum=1,
    )
    save_retain_interval: int | None = option(
        None,
        "Keep checkpoints at multiples of this; of the others the newest, or as many as --save-retain says.",
        unit="iterations",
        minimum=1,
    )
    save_optim: bool = option(
        True,
        "Checkpoints hold weights alone: --no-load-optim resumes from them.",
        flag="no-save-optim",
        negated=True,
    )
    save_rng: bool = option(
        True, "Checkpoints hold no random states.", flag="no-save-rng", negated=True
    )
    async_save: bool = option(
        False,
        "Write checkpoints beside training, from a copy in host memory. One at a time; the end of the run waits.",
    )
    load: str | None = option(
        None,
        "Directory to resume from: its newest valid checkpoint. May still be missing when it is also --save.",
        path="input_directory",
    )
    ckpt_step: int | None = option(
        None, "Load the checkpoint of this iteration.", unit="iteration", minimum=0
    )
    exit_on_missing_checkpoint: bool = option(
        False,
        "A --load without a checkpoint is an error also when it is --save, where a run else begins.",
    )
    load_optim: bool = option(
        True,
        "Resume with new moments, and masters made from the weights.",
        flag="no-load-optim",
        negated=True,
    )
    load_rng: bool = option(
        True, "Resume with random states made from --seed.", flag="no-load-rng", negated=True
    )
    finetune: bool = option(False, "Load only the weights, and start at iteration 0.")
    pretrained_checkpoint: str | None = option(
        None,
        "Directory whose newest valid checkpoint gives the weights that the run begins with; the same command "
        "resumes from --load, once there is a checkpoint of the run itself.",
        path="input_directory",
    )
    dist_ckpt_strictness: str = option(
        "raise_all",
        "What follows when the checkpoint has other tensors than the run. Unexpected ones, which the run "
        "wants and the checkpoint lacks, keep their start values where they are not an error; missing ones, which only "
        "the checkpoint has, are left there.",
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
            "weights that are silently left out are worse than an error",
        ),
    )

    @property
    def keep_last(self) -> int | None:
        """Newest checkpoints to keep; None for all."""
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

    def rules(self, sound: Sound) -> Iterator[Problem]:
        if sound("save_interval", "save") and self.save_interval is not None and self.save is None:
            yield Problem(
                "--save-interval", str(self.save_interval), "needs --save", "give --save DIRECTORY"
            )
        every, retained = self.save_interval, self.save_retain_interval
        if (
            sound("save_interval", "save_retain_interval")
            and every
            and retained
            and retained % every
        ):
            yield Problem(
                "--save-retain-interval",
                str(retained),
                f"must be a multiple of --save-interval ({every})",
                nearest_multiples(retained, every),
            )
        if (
            sound("finetune", "pretrained_checkpoint")
            and self.finetune
            and self.pretrained_checkpoint is not None
        ):
            yield Problem(
                "--pretrained-checkpoint",
                self.pretrained_checkpoint,
                "contradicts --finetune, which takes the weights of --load",
                "give one of the two",
            )
        for name in ("ckpt_step", "finetune"):
            value = getattr(self, name)
            if sound(name, "load") and value not in (None, False) and self.load is None:
                shown = "" if value is True else str(value)
                yield Problem(self.flag(name), shown, "needs --load", "give --load DIRECTORY")
