"""Options of Mamba-2 layers, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron_packed.config.conditions import MAMBA_LAYERS
from megatron_packed.config.errors import Problem
from megatron_packed.config.options import derived_option, option
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.model_parts.divisors import divisors
from megatron_packed.config.sections.model_parts.stack import StackOptions

SSM = "Mamba-2"


@dataclass(frozen=True, kw_only=True)
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

    def mamba_rules(self, sound: Sound) -> Iterator[Problem]:
        hidden, width = self.hidden_size, self.mamba_head_dim
        if sound("hidden_size", "mamba_head_dim") and self.mamba_num_heads is None:
            yield Problem(
                "--mamba-head-dim",
                str(width),
                f"must divide 2 x --hidden-size ({2 * hidden})",
                f"choose from {divisors(2 * hidden)}, or give --mamba-num-heads",
            )
        yield from self.related(sound, SSM)
        if (
            sound("mamba_num_heads", "mamba_head_dim", "mamba_norm_groups")
            and self.mamba_norm_groups is not None
            and self.mamba_num_heads is not None
            and self.d_inner % self.mamba_norm_groups
        ):
            yield Problem(
                "--mamba-norm-groups",
                str(self.mamba_norm_groups),
                f"must divide the number of inner channels of a Mamba layer ({self.d_inner})",
                f"choose from {divisors(self.d_inner)}",
            )
        if sound("mamba_chunk_size") and self.mamba_chunk_size & (self.mamba_chunk_size - 1):
            yield Problem(
                "--mamba-chunk-size",
                str(self.mamba_chunk_size),
                "must be a power of two",
                f"give {1 << (self.mamba_chunk_size.bit_length() - 1)}",
            )
