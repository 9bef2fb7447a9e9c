"""Options of gated-delta-net layers, and the rules between them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_packed.config.conditions import GATED_DELTA_NET_LAYERS
from megatron_packed.config.options import option
from megatron_packed.config.sections.model_parts.stack import StackOptions

GDN = "gated delta net"


@dataclass(frozen=True, kw_only=True)
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
