"""Mamba-2 layers: their options, and the rules between them."""

from __future__ import annotations

from typing import Any, ClassVar

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
from megatron_packed.config.options import derived_option, option
from megatron_packed.config.section import KERNELS, Section, Sound
from megatron_packed.config.sections.model_parts.divisors import divisors
from megatron_packed.config.sections.model_parts.stack import StackOptions

SYMBOL, SSM = "M", "Mamba-2"
MAMBA_LAYERS = layers(SYMBOL)


def _number_of_heads(model: MambaOptions) -> int | None:
    heads, remainder = divmod(2 * model.hidden_size, model.mamba_head_dim)
    return None if remainder else heads


class MambaOptions(StackOptions, group=SSM, only_if=MAMBA_LAYERS):
    """Heads, groups, state and scan of ``M`` layers."""

    mamba_state_dim: int = option(
        128,
        "Size of the Mamba state of each channel.",
        unit="numbers",
        minimum=1,
        maximum=256,
    )
    mamba_head_dim: int = option(
        64,
        "Width of one Mamba head.",
        unit="channels",
        minimum=1,
    )
    mamba_num_groups: int = option(
        8,
        "Number of groups of Mamba heads; the heads of a group share B and C.",
        unit="groups",
        minimum=1,
        divides="mamba_num_heads",
    )
    mamba_num_heads: int = derived_option(
        "Number of Mamba heads.",
        derived="2 x hidden size / head width",
        derive=_number_of_heads,
        derived_from=("hidden_size", "mamba_head_dim"),
        unit="heads",
        minimum=1,
    )
    mamba_chunk_size: int = option(
        128,
        "Number of tokens that the scan processes as one matrix; must be a power of two.",
        unit="tokens",
        minimum=1,
        maximum=1024,
        training_only=True,
    )
    mamba_norm_groups: int | None = option(
        None,
        "Number of groups of channels that the gated norm of a Mamba layer normalises separately; "
        "--mamba-num-groups when not given.",
        unit="groups",
        minimum=1,
    )
    mamba_norm_epsilon: float = option(
        1e-5,
        "Value added to the mean square in the gated norm of a Mamba layer.",
        above=0,
        maximum=1,
    )
    mamba_conv_bias: bool = option(
        True,
        "Use a Mamba convolution without bias.",
        flag="disable-mamba-conv-bias",
        negated=True,
    )
    mamba_d_conv: ClassVar[int] = 4
    """Width of the causal convolution in tokens, the same as in every published hybrid model."""

    @property
    def d_inner(self) -> int:
        """Number of channels inside a Mamba layer: heads x head width."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def gated_norm_groups(self) -> int:
        """Number of groups of inner channels that the gated norm normalises separately."""
        return self.mamba_norm_groups or self.mamba_num_groups

    def mamba_rules(self, sound: Sound) -> Problems:
        hidden = self.hidden_size
        if sound("hidden_size", "mamba_head_dim") and self.mamba_num_heads is None:
            yield self.problem(
                "mamba_head_dim",
                f"must divide 2 x --hidden-size ({2 * hidden})",
                f"choose from {divisors(2 * hidden)}, or give --mamba-num-heads",
            )
        if (
            sound("mamba_num_heads", "mamba_head_dim", "mamba_norm_groups")
            and self.mamba_norm_groups is not None
            and self.mamba_num_heads is not None
            and self.d_inner % self.mamba_norm_groups
        ):
            yield self.problem(
                "mamba_norm_groups",
                f"must divide the number of inner channels of a Mamba layer ({self.d_inner})",
                f"choose from {divisors(self.d_inner)}",
            )
        if sound("mamba_chunk_size") and self.mamba_chunk_size & (self.mamba_chunk_size - 1):
            yield self.problem(
                "mamba_chunk_size",
                "must be a power of two",
                f"give {1 << (self.mamba_chunk_size.bit_length() - 1)}",
            )


class MambaKernels(ConvolutionKernels, group=KERNELS, only_if=MAMBA_LAYERS):
    """Option of the kernel of the scan."""

    ssd_backend: str = option(
        "auto",
        "Kernel of the Mamba-2 scan.",
        choices=("auto", "reference", "triton", "mamba_ssm"),
    )


class MambaCommunication(Section, only_if=(MAMBA_LAYERS, CONTEXT_PARALLEL)):
    """Option of the communication of context-parallel ranks."""

    mamba_cp_comm_type: str = option(
        "state",
        "Communication of context-parallel Mamba layers. state passes the states of the scan from "
        "rank to rank, so the ranks need not divide the heads. heads exchanges heads for tokens.",
        choices=("heads", "state"),
        earlier=lambda stored: "heads",
    )


PASSES_STATES = ("mamba_cp_comm_type", "state")
"""Option of the parallel layout and its value with which ranks pass the states of these layers."""


def _left_out(model: MambaOptions) -> dict[str, Any]:
    same = model.mamba_norm_groups == model.mamba_num_groups
    return {"mamba_norm_groups": None} if same else {}


KIND = LayerKind(
    symbol=SYMBOL,
    name=SSM,
    place=2,
    noun="Mamba",
    options={"model": MambaOptions, "training": MambaKernels, "parallel": MambaCommunication},
    rules=MambaOptions.mamba_rules,
    left_out=_left_out,
    backends={"ssd": "ssd_backend", "causal_conv1d": "conv_backend"},
    carries_order=True,
    shared=(
        Shared("mamba_norm_groups", may_be_fewer=True, exchanged=False),
        Shared("mamba_num_heads"),
        Shared("mamba_num_groups", may_be_fewer=True),
    ),
    exchanges=heads_or_states(*PASSES_STATES),
    heads=("mamba_num_heads", "mamba_num_groups"),
    without_heads=PASSES_STATES,
    graph_modules=("mamba",),
    mixer_module="mamba",
    inside_norm=("mamba_norm", "mamba_in_proj"),
    parts=(
        LayerPart("mamba_norm", "norm"),
        LayerPart("mamba_in_proj", "mixer.in_proj"),
        LayerPart("mamba_scan", "mixer.scan", EVERYTHING),
        LayerPart("mamba_out_proj", "mixer.out_proj"),
    ),
    projections=(Projection("in_proj", "mamba"), Projection("out_proj", "mamba")),
    example="--mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 1",
)
