"""Gated delta nets: their options, and the rules between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_packed.config.conditions import CONTEXT_PARALLEL, layers
from megatron_packed.config.errors import Problems
from megatron_packed.config.kinds.convolution import ConvolutionKernels
from megatron_packed.config.kinds.layer_kind import (
    EVERYTHING,
    LayerKind,
    LayerPart,
    Projection,
    Shared,
    heads_or_states,
)
from megatron_packed.config.options import option
from megatron_packed.config.section import KERNELS, Section, Sound
from megatron_packed.config.sections.model_parts.stack import StackOptions

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

SYMBOL, GDN = "G", "gated delta net"
GATED_DELTA_NET_LAYERS = layers(SYMBOL)


class GatedDeltaNetOptions(StackOptions, group=GDN, only_if=GATED_DELTA_NET_LAYERS):
    """Heads and convolution of ``G`` layers."""

    linear_num_key_heads: int = option(
        16,
        "Number of query and key heads of a gated-delta-net layer.",
        unit="heads",
        minimum=1,
        divides="linear_num_value_heads",
    )
    linear_num_value_heads: int = option(
        32,
        "Number of value and gate heads of a gated-delta-net layer; each key head serves an equal "
        "number of them.",
        unit="heads",
        minimum=1,
    )
    linear_key_head_dim: int = option(
        128,
        "Width of one query or key head of a gated-delta-net layer.",
        unit="channels",
        minimum=1,
        maximum=256,
    )
    linear_value_head_dim: int = option(
        128,
        "Width of one value or gate head of a gated-delta-net layer.",
        unit="channels",
        minimum=1,
        maximum=512,
    )
    linear_conv_kernel_dim: int = option(
        4,
        "Width of the causal convolution of a gated-delta-net layer.",
        unit="tokens",
        minimum=2,
        maximum=4,
    )
    linear_norm_epsilon: float | None = option(
        None,
        "Value added to the mean square in the gated norm of a gated-delta-net layer; "
        "--norm-epsilon when not given.",
        above=0,
        maximum=1,
    )
    linear_allow_neg_eigval: bool = option(
        False,
        "Double the write strength beta, so that it is between 0 and 2 (OLMo Hybrid).",
    )

    @property
    def linear_key_dim(self) -> int:
        """Number of query channels, and of key channels, of a gated-delta-net layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Number of value channels of a gated-delta-net layer."""
        return self.linear_num_value_heads * self.linear_value_head_dim


class GatedDeltaNetKernels(ConvolutionKernels, group=KERNELS, only_if=GATED_DELTA_NET_LAYERS):
    """Option of the kernel of the recurrence."""

    gated_delta_rule_backend: str = option(
        "auto",
        "Kernel of the gated delta rule in gated delta nets. fla is the package fla-core, which is "
        "used only by name.",
        choices=("auto", "reference", "triton", "fla"),
    )


class GatedDeltaNetCommunication(Section, only_if=(GATED_DELTA_NET_LAYERS, CONTEXT_PARALLEL)):
    """Option of the communication of context-parallel ranks."""

    linear_cp_mode: str = option(
        "chunkwise",
        "Communication of context-parallel gated delta nets. chunkwise passes states from rank to "
        "rank, so the ranks need not divide the key heads. headwise exchanges heads for tokens.",
        choices=("headwise", "chunkwise"),
        earlier=lambda stored: "headwise",
    )


PASSES_STATES = ("linear_cp_mode", "chunkwise")
"""Option of the parallel layout and its value with which ranks pass the states of these layers."""


def _left_out(model: GatedDeltaNetOptions) -> dict[str, Any]:
    same = model.linear_norm_epsilon == model.norm_epsilon
    return {"linear_norm_epsilon": None} if same else {}


def _kernel_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield the problem of a kernel that passes no states between ranks."""
    kernel, (mode, passed) = "gated_delta_rule_backend", PASSES_STATES
    if not sound("parallel.context_parallel_size", f"parallel.{mode}", f"training.{kernel}"):
        return
    passes = run.parallel.context_parallel_size > 1 and getattr(run.parallel, mode) == passed
    if passes and getattr(run.training, kernel) == "fla":
        yield run.training.problem(
            kernel,
            "context-parallel ranks pass states, which these kernels cannot",
            "give --linear-cp-mode headwise, or another kernel",
        )


KIND = LayerKind(
    symbol=SYMBOL,
    name=GDN,
    place=3,
    options={
        "model": GatedDeltaNetOptions,
        "training": GatedDeltaNetKernels,
        "parallel": GatedDeltaNetCommunication,
    },
    left_out=_left_out,
    cross_rules=_kernel_rules,
    backends={"gated_delta_rule": "gated_delta_rule_backend", "causal_conv1d": "conv_backend"},
    carries_order=True,
    # The number of value heads is a multiple of this number.
    shared=(Shared("linear_num_key_heads"),),
    exchanges=heads_or_states(*PASSES_STATES),
    heads=("linear_num_value_heads", "linear_num_key_heads"),
    without_heads=PASSES_STATES,
    graph_modules=("gdn",),
    mixer_module="gdn",
    inside_norm=("gdn_norm", "gdn_in_proj"),
    parts=(
        LayerPart("gdn_norm", "norm"),
        LayerPart("gdn_in_proj", "mixer.in_proj"),
        LayerPart("gdn_scan", "mixer.scan", EVERYTHING),
        LayerPart("gdn_out_proj", "mixer.out_proj"),
    ),
    projections=(Projection("in_proj", "gdn"), Projection("out_proj", "gdn")),
    example="--linear-num-key-heads 1 --linear-num-value-heads 2",
)
