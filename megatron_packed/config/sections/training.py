"""The training loop: how long, how exact, on what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import option, required_option
from megatron_packed.config.section import Section, Sound

LOOP, EXACT, KERNELS = "loop", "precision and exactness", "kernels"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section, title="training"):
    """The loop, its precision and the choice of kernels."""

    train_iters: int = required_option(
        "Optimizer steps of the whole run, resumed ones included; or give --train-samples.",
        unit="iterations",
        group=LOOP,
        minimum=1,
    )
    train_samples: int | None = option(
        None,
        "Length of the run in samples, of which a step takes --global-batch-size.",
        unit="samples",
        group=LOOP,
        minimum=1,
        maximum=1 << 62,
    )
    eval_interval: int | None = option(
        None,
        "Validate every so many iterations; never when not given.",
        unit="iterations",
        group=LOOP,
        minimum=1,
    )
    eval_iters: int = option(
        100,
        "Steps of one validation or test, at most; fewer when the data is used up. 0 for none.",
        unit="iterations",
        group=LOOP,
        minimum=0,
    )
    skip_train: bool = option(
        False, "Validate and test once and stop, without a training step.", group=LOOP
    )
    exit_interval: int | None = option(
        None,
        "Save and stop at the next multiple of this.",
        unit="iterations",
        group=LOOP,
        minimum=1,
    )
    exit_duration_in_mins: int | None = option(
        None, "Save and stop after this time.", unit="minutes", group=LOOP, minimum=1
    )

    manual_gc: bool = option(
        False,
        "Python collects garbage when --manual-gc-interval says so, on all ranks at the same step, and not when "
        "each finds it due.",
        group=LOOP,
    )
    manual_gc_interval: int = option(
        0,
        "Collect after every so many iterations; 0: at the start and around validations only.",
        unit="iterations",
        group=LOOP,
        minimum=0,
    )
    manual_gc_eval: bool = option(
        True,
        "Do not collect around validations.",
        group=LOOP,
        flag="no-manual-gc-eval",
        negated=True,
        aliases=("disable-manual-gc-eval",),
    )
    seed: int = option(1234, "Seed of weights, dropout and data order.", group=EXACT, minimum=0)
    bf16: bool = option(
        False,
        "Weights and activations in bfloat16, with fp32 masters; fp32 otherwise.",
        group=EXACT,
    )
    deterministic_mode: bool = option(
        False, "Only kernels whose result is the same in every run; slower.", group=EXACT
    )
    on_nonfinite: str = option(
        "stop",
        "After a step with a non-finite loss or gradient, which never changes a weight: stop, or skip it.",
        group=EXACT,
        choices=("stop", "skip"),
    )
    loss_spike_policy: str = option(
        "warn",
        "After a step whose loss or gradient norm is far above its running median: warn, or skip its update; "
        "off does not compare.",
        group=EXACT,
        choices=("off", "warn", "skip"),
    )
    loss_spike_window: int = option(
        128,
        "Steps that the running medians are taken over; nothing is a spike before half of them are there.",
        unit="iterations",
        group=EXACT,
        minimum=2,
        maximum=4096,
    )
    loss_spike_factor: float = option(
        3.0, "A loss above its running median times this is a spike.", group=EXACT, above=1
    )
    grad_norm_spike_factor: float = option(
        10.0,
        "A gradient norm, before clipping, above its running median times this is a spike.",
        group=EXACT,
        above=1,
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None,
        "Compare the bits of the weights between data-parallel ranks, and with the rounded fp32 masters, every "
        "so many iterations: before the update and after it.",
        unit="iterations",
        group=EXACT,
        minimum=1,
    )
    check_grad_hash_across_dp_replicas_interval: int | None = option(
        None,
        "Every so many iterations compare the gradients summed over data-parallel ranks with checksums taken "
        "before, and their bits between replicas.",
        unit="iterations",
        group=EXACT,
        minimum=1,
    )
    isolation_self_test: bool = option(
        True,
        "Do not check at the start that documents of a pack cannot see each other.",
        group=EXACT,
        flag="no-isolation-self-test",
        negated=True,
    )

    device: str = option(
        "auto",
        "Where to train; auto takes the GPU when there is one.",
        group=KERNELS,
        choices=("auto", "cuda", "cpu"),
    )
    transformer_impl: str = option(
        "local",
        "Whose parallel linear layers, norms and attention: this package's own (plain PyTorch and the fastest "
        "kernels that fit, on any device), or TransformerEngine's (bf16 on GPUs); the numbers are the same.",
        group=KERNELS,
        choices=("local", "transformer_engine"),
        not_built={"inference_optimized": "give local or transformer_engine, both of which train"},
        megatron=("transformer_engine", "it needs no further package and runs on any device"),
    )
    attention_backend: str = option(
        "auto",
        "Attention kernel; auto takes the fastest measured one that fits.",
        group=KERNELS,
        choices=(
            "auto",
            "reference",
            "flash_attn_4",
            "transformer_engine",
            "flash_attn_2",
            "torch_varlen",
            "flex",
            "sdpa",
        ),
        value_aliases={"flash": "flash_attn_2", "fused": "transformer_engine", "unfused": "sdpa"},
        not_built={"local": "give reference, which is plain PyTorch"},
    )
    ssd_backend: str = option(
        "auto", "Mamba-2 scan kernel.", group=KERNELS, choices=("auto", "reference", "mamba_ssm")
    )
    conv_backend: str = option(
        "auto",
        "Causal convolution kernel.",
        group=KERNELS,
        choices=("auto", "reference", "causal_conv1d"),
    )
    require_fast_kernels: bool = option(
        False,
        "End the run before its first step if an op would run a plain PyTorch reference.",
        group=KERNELS,
    )

    @property
    def validation_interval(self) -> int | None:
        """Iterations between validations; None for no validation."""
        return self.eval_interval if self.eval_iters else None

    @property
    def backends(self) -> dict[str, str]:
        """The backend asked for, by op, and whose linear layers and norms."""
        return {
            "transformer_impl": self.transformer_impl,
            "varlen_attention": self.attention_backend,
            "ssd": self.ssd_backend,
            "causal_conv1d": self.conv_backend,
        }

    @property
    def uses_transformer_engine_attention(self) -> bool:
        """Return whether attention is TransformerEngine's because the other layers are."""
        return self.transformer_impl == "transformer_engine" and self.attention_backend == "auto"

    def rules(self, sound: Sound) -> Iterator[Problem]:
        if not sound("transformer_impl") or self.transformer_impl != "transformer_engine":
            return
        if sound("device") and self.device == "cpu":
            yield Problem(
                "--transformer-impl",
                self.transformer_impl,
                "TransformerEngine runs on GPUs only, and --device is cpu",
                "give local, which computes the same on any device",
            )
        elif sound("bf16") and not self.bf16:
            yield Problem(
                "--transformer-impl",
                self.transformer_impl,
                "TransformerEngine's attention takes no fp32, and its fp32 products are rounded to TF32",
                "add --bf16, or give local",
            )
