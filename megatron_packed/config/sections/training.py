"""Options of the training loop: length, precision, determinism, device and kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_packed.config.conditions import (
    REPLICAS,
    TRAINS,
    Condition,
    has_replicas,
    option_given,
    option_is_not,
)
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.config.options import Related, option
from megatron_packed.config.section import KERNELS, Section, Sound
from megatron_packed.config.sections.data import VALIDATION_STEPS
from megatron_packed.config.sections.kind_options import KindKernels

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

MOST_EPOCHS = 10_000
"""Largest value of --train-epochs. All epochs are packed before the first step, to count them."""


def _fills_spike_window(run: RunConfig, processes: int) -> bool:
    """Return whether half of the window of running medians is filled before the run ends."""
    iters, half = run.training.train_iters, -(-run.training.loss_spike_window // 2)
    return iters is None or iters > half


FILLED_SPIKE_WINDOW = Condition(
    "the run ends before half of --loss-spike-window is filled", _fills_spike_window
)
SPIKES = TRAINS, option_is_not("training.loss_spike_policy", "off"), FILLED_SPIKE_WINDOW
REPLICAS_OR_MASTERS = Condition(
    "no two ranks have the same weights, and fp32 weights have no masters",
    lambda run, processes: run.training.bf16 or has_replicas(run, processes),
)
VALIDATION_SHARE = Condition(
    "--split leaves no data for validation",
    lambda run, processes: run.data.split is None or run.data.has_validation,
)
EVALUATIONS = Condition(
    "the run has neither validations nor a test",
    lambda run, processes: run.validates or run.tests,
)
PARTIAL_EVALUATIONS = Condition(
    "--full-validation reads all validation data, and the run has no test",
    lambda run, processes: run.tests or not run.training.full_validation,
)
VALIDATIONS = Condition("the run has no validations", lambda run, processes: run.validates)


class LoopOptions(Section, group="loop"):
    """Options of the length of a run, its validations and its end."""

    train_iters: int | None = option(
        None,
        "Optimizer steps of the run, resumes included; or --train-epochs.",
        unit="iterations",
        minimum=1,
    )
    train_epochs: float | None = option(
        None,
        "Length of the run in epochs, also 0.5.",
        above=0,
        maximum=MOST_EPOCHS,
        only_if=TRAINS,
    )
    train_samples: int | None = option(
        None,
        "Length of the run in samples; one step takes --global-batch-size samples.",
        unit="samples",
        minimum=1,
        maximum=1 << 62,
        only_if=TRAINS,
    )
    eval_interval: int | None = option(
        None,
        "Interval between validations, in iterations; no validation when not given.",
        unit="iterations",
        minimum=1,
        only_if=(VALIDATION_STEPS, VALIDATION_SHARE),
    )
    eval_iters: int = option(
        100,
        "Maximum number of steps of one validation or test; fewer if the data ends. 0 disables "
        "both.",
        unit="iterations",
        minimum=0,
        only_if=(EVALUATIONS, PARTIAL_EVALUATIONS),
        zero_is_off=True,
    )
    full_validation: bool = option(
        False,
        "Validate on all validation data, each document once, however many steps that takes. "
        "--eval-iters and the weights of a blend do not count then.",
        only_if=VALIDATIONS,
    )
    multiple_validation_sets: bool = option(
        False,
        "Validate on each path of the validation data separately. The loss of each path is "
        "reported by name, in addition to the loss over all of them; weights do not count.",
        only_if=VALIDATIONS,
    )
    validation_set_names: tuple[str, ...] = option(
        (),
        "Names of the paths for --multiple-validation-sets; the names of the files when not given.",
        only_if=VALIDATIONS,
        needs=Related("multiple_validation_sets"),
    )
    valid_metric: str | None = option(
        None,
        "Task metric of each validation, in addition to the loss. exact_match: share of greedy "
        "answers to validation conversations that equal the last answer of the data.",
        choices=("exact_match",),
    )
    valid_metric_samples: int = option(
        64,
        "Number of validation conversations that --valid-metric uses, from the first one on.",
        unit="conversations",
        minimum=1,
        only_if=option_given("training.valid_metric"),
    )
    early_stopping_patience: int | None = option(
        None,
        "End the run after this number of validations in a row without a lower loss.",
        unit="validations",
        minimum=1,
        only_if=TRAINS,
    )
    skip_train: bool = option(False, "Validate and test once without training, then exit.")
    exit_interval: int | None = option(
        None,
        "Save a checkpoint and stop at the next iteration that is a multiple of this number.",
        unit="iterations",
        minimum=1,
        only_if=TRAINS,
    )
    exit_duration_in_mins: int | None = option(
        None,
        "Save a checkpoint and stop after this time, in minutes.",
        unit="minutes",
        minimum=1,
        only_if=TRAINS,
    )

    manual_gc: bool = option(
        False,
        "Run Python's garbage collection on all ranks at the same step, at "
        "--manual-gc-interval, instead of whenever each process starts it.",
    )
    manual_gc_interval: int = option(
        0,
        "Interval between garbage collections, in iterations; 0 collects only at the start and "
        "around validations.",
        unit="iterations",
        minimum=0,
        only_if=option_given("training.manual_gc"),
        zero_is_off=True,
    )
    manual_gc_eval: bool = option(
        True,
        "Do not collect garbage before and after validations.",
        flag="no-manual-gc-eval",
        negated=True,
        aliases=("disable-manual-gc-eval",),
        only_if=(EVALUATIONS, option_given("training.manual_gc")),
    )


class ExactnessOptions(Section, group="precision and exactness"):
    """Options of precision, determinism and checks of numbers."""

    seed: int = option(
        1234,
        "Seed of initial weights, dropout and data order.",
        minimum=0,
        resume="packs",
    )
    bf16: bool = option(
        False,
        "Train with bfloat16 weights and activations and fp32 masters, instead of fp32.",
    )
    deterministic_mode: bool = option(
        False, "Use only kernels whose results are identical in every run; slower."
    )
    on_nonfinite: str = option(
        "stop",
        "Action after a step with a non-finite loss or gradient: stop the run, or skip the "
        "step. Such a step never changes the weights.",
        choices=("stop", "skip"),
        only_if=TRAINS,
    )
    loss_spike_policy: str = option(
        "warn",
        "Action after a step whose loss or gradient norm is far above its running median. With "
        "warn, a warning is printed; with skip, the update is skipped too; with off, nothing is "
        "compared.",
        choices=("off", "warn", "skip"),
        only_if=(TRAINS, FILLED_SPIKE_WINDOW),
    )
    loss_spike_window: int = option(
        128,
        "Number of steps in the running medians. No step is a spike until half of the window is "
        "filled.",
        unit="iterations",
        minimum=2,
        maximum=4096,
        only_if=SPIKES,
    )
    loss_spike_factor: float = option(
        3.0,
        "Multiple of the running median above which a loss is a spike.",
        above=1,
        only_if=SPIKES,
    )
    grad_norm_spike_factor: float = option(
        10.0,
        "Multiple of the running median above which a gradient norm, before clipping, is a spike.",
        above=1,
        only_if=SPIKES,
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None,
        "Interval of weight checks, in iterations. Before and after the update, the weights "
        "must be bit-identical on all data-parallel ranks and equal to the rounded fp32 masters.",
        unit="iterations",
        minimum=1,
        only_if=(REPLICAS_OR_MASTERS, TRAINS),
    )
    check_grad_hash_across_dp_replicas_interval: int | None = option(
        None,
        "Interval of gradient checks, in iterations. The gradients reduced over data-parallel "
        "ranks are compared with checksums taken before, and bit by bit between replicas.",
        unit="iterations",
        minimum=1,
        only_if=(REPLICAS, TRAINS),
    )
    isolation_self_test: bool = option(
        True,
        "Skip the test at the start of a run that documents of a pack cannot affect each other.",
        flag="no-isolation-self-test",
        negated=True,
    )


class TrainingConfig(  # dataclass fields follow the bases from right to left
    ExactnessOptions, LoopOptions, KindKernels, title="training", group=KERNELS
):
    """Options of the training loop, its precision and its kernels."""

    device: str = option(
        "auto",
        "Device to train on; auto uses the GPU if there is one.",
        choices=("auto", "cuda", "cpu"),
    )
    transformer_impl: str = option(
        "local",
        "Implementation of the parallel linear layers, norms and attention; both compute the "
        "same. local: this package, on any device. transformer_engine: TransformerEngine, in "
        "bf16 on GPUs.",
        choices=("local", "transformer_engine"),
        not_built={"inference_optimized": "give local or transformer_engine; both can train"},
        megatron=("transformer_engine", "needs no other package and runs on any device"),
    )
    require_fast_kernels: bool = option(
        False,
        "Refuse to start if an op would use its slow plain PyTorch reference.",
    )

    @property
    def length_flag(self) -> str:
        """Flag that gives the length of the run."""
        if self.train_epochs is not None:
            return "--train-epochs"
        return "--train-iters" if self.train_samples is None else "--train-samples"

    @property
    def validation_interval(self) -> int | None:
        """Iterations between validations; None for no validation."""
        return self.eval_interval if self.eval_iters or self.full_validation else None

    @property
    def backends(self) -> dict[str, str]:
        """Requested backend of each op, and the implementation of the layers."""
        requested = {op: getattr(self, name) for op, name in KINDS.backends.items()}
        return {"transformer_impl": self.transformer_impl, **requested}

    @property
    def precision(self) -> str:
        """Data types of weights and masters, in words."""
        return "bf16 with fp32 masters" if self.bf16 else "fp32"

    @property
    def uses_transformer_engine_attention(self) -> bool:
        """Return whether TransformerEngine computes attention because it also provides the other
        layers.
        """
        return self.transformer_impl == "transformer_engine" and self.attention_backend == "auto"

    def rules(self, sound: Sound) -> Problems:
        yield from super().rules(sound)
        if sound("train_iters", "train_epochs", "train_samples"):
            yield from self._length_rules()
        if not sound("transformer_impl") or self.transformer_impl != "transformer_engine":
            return
        if sound("device") and self.device == "cpu":
            yield self.problem(
                "transformer_impl",
                "TransformerEngine runs only on GPUs, and --device is cpu",
                "give local, which computes the same on any device",
            )
        elif sound("bf16") and not self.bf16:
            yield self.problem(
                "transformer_impl",
                "TransformerEngine's attention does not support fp32, and its fp32 products are "
                "rounded to TF32",
                "add --bf16, or give local",
            )

    def _length_rules(self) -> Problems:
        """Yield a problem if the run has no length, or two lengths in different units."""
        iters, samples = self.train_iters, self.train_samples
        if self.train_epochs is None:
            if iters is None:
                yield Problem(
                    "--train-iters",
                    "",
                    "is required: the run has no length",
                    "give --train-iters N, or --train-epochs X",
                )
        # After the data is packed, a run with --train-epochs has both other lengths.
        elif (iters is None) != (samples is None):
            flag, length = (
                ("--train-samples", samples) if iters is None else ("--train-iters", iters)
            )
            yield Problem(
                "--train-epochs",
                f"{self.train_epochs:g}",
                f"contradicts {flag} ({length}): both give the length of the run",
                "leave one of the two flags out",
            )
