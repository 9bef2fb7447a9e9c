"""Options of the dtype in which gradients are accumulated and reduced."""

from __future__ import annotations

from megatron_packed.config.conditions import REPLICAS, Condition
from megatron_packed.config.options import option
from megatron_packed.config.section import Section

FP32, BF16 = "fp32", "bf16"
BF16_WEIGHTS = Condition("the weights are fp32", lambda run, processes: run.training.bf16)
BF16_GRADIENTS = Condition(
    "gradients are accumulated in fp32",
    lambda run, processes: run.parallel.sums_gradients_in_bf16,
)


class GradientOptions(Section, group="gradients", only_if=BF16_WEIGHTS):
    """Dtype of the sums of gradients."""

    grad_reduce_in_bf16: bool = option(
        False,
        "Accumulate gradients of bf16 matrices in bf16 and reduce them over data-parallel ranks in "
        "bf16. They take half the memory and lose bits with every micro-batch of a step. Gradients "
        "of vectors, routers and convolutions stay fp32.",
    )
    main_grads_dtype: str = option(
        FP32,
        "Dtype of the gradients of bf16 matrices that the optimizer reads. bf16 means the same as "
        "--grad-reduce-in-bf16.",
        choices=(FP32, BF16),
    )
    ddp_param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = option(
        (),
        "Accumulate and reduce the gradients of parameters in fp32 whose name matches one of these "
        "patterns (*, ? and [...] as in a shell, or all), for example 'output.*'.",
        only_if=BF16_GRADIENTS,
    )
    ddp_reduce_scatter_with_fp32_accumulation: bool = option(
        True,
        "Add bf16 gradients of data-parallel ranks in fp32, and round each sum once. Otherwise the "
        "collective rounds after each addition.",
        megatron=("off", "one rounding is closer to the sum, and its bits do not depend on timing"),
        only_if=(BF16_GRADIENTS, REPLICAS),
    )

    @property
    def sums_gradients_in_bf16(self) -> bool:
        """Return whether gradients of bf16 matrices are accumulated and reduced in bf16."""
        return self.grad_reduce_in_bf16 or self.main_grads_dtype == BF16
