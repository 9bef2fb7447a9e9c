"""Option of the kernel of the causal convolution, which several kinds of layers have."""

from __future__ import annotations

from megatron_packed.config.conditions import layers_where
from megatron_packed.config.options import option
from megatron_packed.config.section import KERNELS, Section

CONVOLUTIONS = layers_where(
    lambda kind: "conv_backend" in kind.backends.values(), "layer with a convolution"
)


class ConvolutionKernels(Section, group=KERNELS, only_if=CONVOLUTIONS):
    """Option of the kernel of the convolution."""

    conv_backend: str = option(
        "auto",
        "Kernel of the causal convolution.",
        choices=("auto", "reference", "triton", "causal_conv1d"),
    )
