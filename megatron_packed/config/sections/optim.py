"""Options of the optimizer and of its learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_packed.config.conditions import TRAINS, Condition, option_is, option_is_not
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.options import Related, option, required_option
from megatron_packed.config.section import Section, Sound

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

RATE, DECAY = "learning rate", "weight decay"
SAMPLE_UNITS = {
    "lr_decay_iters": "lr_decay_samples",
    "lr_warmup_iters": "lr_warmup_samples",
    "lr_wsd_decay_iters": "lr_wsd_decay_samples",
    "weight_decay_incr_iters": "weight_decay_incr_samples",
}
"""Option of each schedule length in iterations, and the option of the same length in samples."""
SAME_LENGTH = "both give the same length, in samples and in iterations"
ENDS_WITH_RUN = ("lr_decay_iters", "weight_decay_incr_iters")
"""Lengths that are the length of the run when they are not given."""


def _uses_decay_length(run: RunConfig, processes: int) -> bool:
    """Return False without a decay, if the warm-up does not depend on its length either."""
    optim = run.optim
    return (
        optim.lr_decay_style != "constant"
        or optim.lr_warmup_fraction is not None
        or bool(optim.lr_warmup_samples)
    )


DECAY_LENGTH = Condition(
    "--lr-decay-style is constant, and the warm-up does not depend on the decay",
    _uses_decay_length,
)
WSD = option_is("optim.lr_decay_style", "WSD")
WARM_UP = Condition("the run has no warm-up", lambda run, processes: bool(run.warmup_iters))
RISING_WEIGHT_DECAY = option_is_not("optim.weight_decay_incr_style", "constant")
CONSTANT_WEIGHT_DECAY = Condition(
    "the weight decay rises from --start-weight-decay to --end-weight-decay",
    lambda run, processes: not run.optim.weight_decay_changes,
)


BF16_MOMENTS = Condition("all moments are fp32", lambda run, processes: run.optim.has_bf16_moments)
BF16_STATE = Condition(
    "weights and moments are fp32",
    lambda run, processes: run.training.bf16 or run.optim.has_bf16_moments,
)
_NOT_BUILT_MOMENTS = dict.fromkeys(
    ("fp16", "fp8"), "give bf16, which has the range of fp32 and needs no scale"
)


class ScheduleOptions(Section, group=RATE):
    """Options of the learning-rate schedule."""

    lr: float = required_option("Maximum learning rate.", minimum=0)
    min_lr: float = option(
        0.0,
        "Minimum learning rate, reached at the end of the decay.",
        minimum=0,
        only_if=(TRAINS, option_is_not("optim.lr_decay_style", "constant")),
        zero_is_off=True,
        at_most="lr",
    )
    lr_decay_style: str = option(
        "linear",
        "Shape of the learning-rate decay.",
        choices=("constant", "linear", "cosine", "WSD"),
        not_built={
            "inverse-square-root": "give cosine, or WSD with --lr-wsd-decay-style minus_sqrt"
        },
        only_if=TRAINS,
    )
    lr_decay_iters: int | None = option(
        None,
        "Iteration at which the decay ends; the end of the run when not given.",
        unit="iterations",
        minimum=1,
        only_if=(TRAINS, DECAY_LENGTH),
    )
    lr_decay_samples: int | None = option(
        None,
        "End of the decay in samples; one step takes --global-batch-size samples.",
        unit="samples",
        minimum=1,
        maximum=1 << 62,
        only_if=(TRAINS, DECAY_LENGTH),
        excludes=Related("lr_decay_iters", SAME_LENGTH),
    )
    lr_warmup_iters: int = option(
        0,
        "Length of the linear warm-up, in iterations.",
        unit="iterations",
        minimum=0,
        only_if=TRAINS,
        zero_is_off=True,
    )
    lr_warmup_samples: int = option(
        0,
        "Length of the linear warm-up, in samples.",
        unit="samples",
        minimum=0,
        maximum=1 << 62,
        only_if=TRAINS,
        zero_is_off=True,
        excludes=Related("lr_warmup_iters", SAME_LENGTH),
    )
    lr_warmup_fraction: float | None = option(
        None,
        "Length of the linear warm-up as a fraction of the decay iterations.",
        minimum=0,
        maximum=1,
        only_if=TRAINS,
        zero_is_off=True,
        excludes=(Related("lr_warmup_iters"), Related("lr_warmup_samples")),
    )
    lr_warmup_init: float = option(
        0.0,
        "Learning rate at the start of the warm-up.",
        minimum=0,
        only_if=(TRAINS, WARM_UP),
        zero_is_off=True,
        at_most="lr",
    )
    lr_wsd_decay_iters: int | None = option(
        None,
        "Length of the final decay of the WSD schedule, in iterations.",
        unit="iterations",
        minimum=1,
        only_if=(TRAINS, WSD),
    )
    lr_wsd_decay_samples: int | None = option(
        None,
        "Length of the final decay of the WSD schedule, in samples.",
        unit="samples",
        minimum=1,
        maximum=1 << 62,
        only_if=(TRAINS, WSD),
        excludes=Related("lr_wsd_decay_iters", SAME_LENGTH),
    )
    lr_wsd_decay_style: str = option(
        "exponential",
        "Shape of the final decay of the WSD schedule.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        only_if=(TRAINS, WSD),
    )


class WeightDecayOptions(Section, group=DECAY, only_if=TRAINS):
    """Options of the weight decay."""

    weight_decay: float = option(
        0.01,
        "Weight decay of matrices; norms, biases, A_log, D and dt_bias have none.",
        minimum=0,
        only_if=CONSTANT_WEIGHT_DECAY,
    )
    weight_decay_incr_style: str = option(
        "constant",
        "Shape of the rise from --start-weight-decay to --end-weight-decay; constant is always "
        "--weight-decay.",
        choices=("constant", "linear", "cosine"),
    )
    start_weight_decay: float | None = option(
        None, "Weight decay of the first step of a rise.", minimum=0
    )
    end_weight_decay: float | None = option(
        None,
        "Weight decay at the end of a rise and after it.",
        minimum=0,
    )
    weight_decay_incr_iters: int | None = option(
        None,
        "Iteration at which the weight decay is --end-weight-decay; the end of the run when not "
        "given.",
        unit="iterations",
        minimum=1,
        only_if=RISING_WEIGHT_DECAY,
    )
    weight_decay_incr_samples: int | None = option(
        None,
        "End of the rise of the weight decay in samples; one step takes --global-batch-size "
        "samples.",
        unit="samples",
        minimum=1,
        maximum=1 << 62,
        only_if=RISING_WEIGHT_DECAY,
        excludes=Related("weight_decay_incr_iters", SAME_LENGTH),
    )


class OptimizerConfig(  # dataclass fields follow the bases from right to left
    WeightDecayOptions, ScheduleOptions, title="optim", group="Adam"
):
    """Options of AdamW and of the learning-rate schedule. Rules that need the length of the run are
    in ``cross_rules.py``.
    """

    optimizer_backend: str = option(
        "auto",
        "Implementation of the optimizer step; auto uses the fastest that supports the run.",
        choices=("auto", "torch", "transformer_engine", "apex", "triton"),
    )
    use_precision_aware_optimizer: bool = option(
        False,
        "Store the master of a bf16 weight as the weight and a 16-bit remainder, and allow bf16 "
        "moments. The pair holds all 32 bits of the master.",
        only_if=(TRAINS, BF16_STATE),
    )
    main_params_dtype: str = option(
        "fp32",
        "Precision of master weights.",
        choices=("fp32",),
        not_built={"fp16": "give fp32; masters of bf16 weights take 2 bytes beside the weight"},
        only_if=TRAINS,
    )
    exp_avg_dtype: str = option(
        "fp32",
        "Data type of Adam's first moments; bf16 needs --use-precision-aware-optimizer.",
        choices=("fp32", "bf16"),
        not_built=_NOT_BUILT_MOMENTS,
        only_if=TRAINS,
        resume="optimizer state",
        needs=Related("use_precision_aware_optimizer"),
    )
    exp_avg_sq_dtype: str = option(
        "fp32",
        "Data type of Adam's second moments; bf16 needs --use-precision-aware-optimizer.",
        choices=("fp32", "bf16"),
        not_built=_NOT_BUILT_MOMENTS,
        only_if=TRAINS,
        resume="optimizer state",
        needs=Related("use_precision_aware_optimizer"),
    )
    moment_rounding: str = option(
        "stochastic",
        "Rounding of bf16 moments. Rounded to nearest, as TransformerEngine does, a moment no "
        "longer changes once its changes are below 1/512 of it.",
        choices=("stochastic", "nearest"),
        only_if=(TRAINS, BF16_MOMENTS),
    )
    clip_grad: float = option(
        1.0,
        "Global gradient norm above which the gradient is clipped; 0 disables clipping.",
        minimum=0,
        only_if=TRAINS,
    )
    adam_beta1: float = option(
        0.9,
        "Decay rate of Adam's first moment (beta1).",
        minimum=0,
        below=1,
        only_if=TRAINS,
    )
    adam_beta2: float = option(
        0.999,
        "Decay rate of Adam's second moment (beta2).",
        minimum=0,
        below=1,
        only_if=TRAINS,
    )
    adam_eps: float = option(
        1e-8,
        "Value added to the square root of Adam's second moment.",
        above=0,
        only_if=TRAINS,
    )

    @property
    def weight_decay_changes(self) -> bool:
        return self.weight_decay_incr_style != "constant"

    def state_words(self, bf16: bool) -> str:
        """Return words about a state of low precision, to follow those about the weights.

        Args:
            bf16: the weights are bf16.
        """
        pairs = (
            " in 2 bytes beside the weight" if self.use_precision_aware_optimizer and bf16 else ""
        )
        dtypes = {"first": self.exp_avg_dtype, "second": self.exp_avg_sq_dtype}
        low = [moment for moment, dtype in dtypes.items() if dtype == "bf16"]
        if not low:
            return pairs
        rounding = (
            "rounded to nearest" if self.moment_rounding == "nearest" else "rounded stochastically"
        )
        which = "" if len(low) == 2 else f"{low[0]} "
        return f"{pairs}, bf16 {which}moments ({rounding})"

    @property
    def has_bf16_moments(self) -> bool:
        return "bf16" in (self.exp_avg_dtype, self.exp_avg_sq_dtype)

    def rules(self, sound: Sound) -> Problems:
        yield from super().rules(sound)
        lengths_sound = sound("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        if (
            lengths_sound
            and self.lr_decay_style == "WSD"
            and not (self.lr_wsd_decay_iters or self.lr_wsd_decay_samples)
        ):
            yield Problem(
                "--lr-wsd-decay-iters",
                "",
                "is required with --lr-decay-style WSD",
                "give the number of iterations of the final decay",
            )
        yield from self._weight_decay_rules(sound)

    def _weight_decay_rules(self, sound: Sound) -> Problems:
        """Yield problems of a rising weight decay; the limits are Megatron's."""
        ends = ("start_weight_decay", "end_weight_decay")
        if not sound("weight_decay_incr_style", *ends):
            return
        start, end = self.start_weight_decay, self.end_weight_decay
        constant = not self.weight_decay_changes
        for name in ends:
            value = getattr(self, name)
            if constant and value is not None:
                yield self.problem(
                    name,
                    "contradicts --weight-decay-incr-style constant",
                    "give --weight-decay-incr-style linear or cosine, or --weight-decay alone",
                )
            if not constant and value is None:
                yield Problem(
                    self.flag(name),
                    "",
                    f"is required with --weight-decay-incr-style {self.weight_decay_incr_style}",
                    "give the weight decay of the first and of the last step",
                )
        if not constant and start is not None and end is not None and end < start:
            yield self.problem(
                "end_weight_decay",
                f"must be at least --start-weight-decay ({start})",
                "raise it: as in Megatron-LM, the weight decay can only rise",
            )
