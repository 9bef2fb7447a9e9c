"""Gated short convolutions: their options, and their record without torch."""

from __future__ import annotations

from megatron_packed.config.conditions import layers
from megatron_packed.config.kinds.convolution import ConvolutionKernels
from megatron_packed.config.kinds.layer_kind import EVERYTHING, LayerKind, LayerPart, Shared
from megatron_packed.config.options import option
from megatron_packed.config.sections.model_parts.stack import StackOptions

SYMBOL, NAME = "S", "gated short convolution"


class ShortConvolutionOptions(StackOptions, group=NAME, only_if=layers(SYMBOL)):
    """Sizes of ``S`` layers."""

    short_conv_channels: int = option(
        64, "Number of channels of a short-convolution layer.", unit="channels", minimum=1
    )
    short_conv_width: int = option(
        4,
        "Width of the convolution of a short-convolution layer.",
        unit="tokens",
        minimum=2,
        maximum=4,
    )


KIND = LayerKind(
    symbol=SYMBOL,
    name=NAME,
    noun="short-convolution",
    options={"model": ShortConvolutionOptions, "training": ConvolutionKernels},
    backends={"causal_conv1d": "conv_backend"},
    carries_order=True,
    shared=(Shared("short_conv_channels"),),
    exchanges=lambda parallel: "heads",
    heads=("short_conv_channels",),
    graph_modules=("short_conv",),
    mixer_module="short_conv",
    inside_norm=("short_conv_norm", "short_conv_in_proj"),
    parts=(
        LayerPart("short_conv_norm", "norm"),
        LayerPart("short_conv_in_proj", "mixer.in_proj"),
        LayerPart("short_conv_scan", "mixer.scan", EVERYTHING),
        LayerPart("short_conv_out_proj", "mixer.out_proj"),
    ),
    example="--short-conv-channels 64",
)
