"""Options of the shape of a hybrid model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron_packed.config.errors import Problem
from megatron_packed.config.layer_pattern import (
    ATTENTION,
    GATED_DELTA_NET,
    MAMBA,
    MOE,
    pattern_problems,
)
from megatron_packed.config.options import option
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.model_parts.attention import AttentionOptions
from megatron_packed.config.sections.model_parts.experts import ExpertOptions
from megatron_packed.config.sections.model_parts.gated_delta_net import GDN, GatedDeltaNetOptions
from megatron_packed.config.sections.model_parts.mamba import MambaOptions
from megatron_packed.config.sections.model_parts.multi_token_prediction import MultiTokenOptions
from megatron_packed.config.sections.model_parts.multipliers import MultiplierOptions
from megatron_packed.config.sections.model_parts.stack import STACK

OUTPUT = "embedding and output"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(  # dataclass fields follow the bases from right to left
    MultiTokenOptions,
    MultiplierOptions,
    ExpertOptions,
    GatedDeltaNetOptions,
    MambaOptions,
    AttentionOptions,
    title="model",
    group=OUTPUT,
):
    """Options that decide which function the weights compute and how the weights are initialised.

    Derived fields (``ffn_hidden_size``, ``num_query_groups``, ``kv_channels``, ``mamba_num_heads``,
    ``moe_ffn_hidden_size``, ``mtp_num_layers``) hold numbers once the config is made, if the pattern has a layer that
    uses them. ``dataclasses.replace`` keeps those numbers.

    Raises:
        ConfigError: lists every problem.
    Example:
        ``ModelConfig(hybrid_layer_pattern="M*-", hidden_size=256, num_attention_heads=4)`` has 3
        layers: 8 Mamba heads of 64 channels in 8 groups, 4 attention heads of 64 channels, and an
        MLP of width 1024.
    """

    untie_embeddings_and_output_weights: bool = option(
        False, "Use separate weights for the embedding and the output projection."
    )
    vocab_size: int | None = option(
        None,
        "Vocabulary size before padding; the size of the tokenizer when not given.",
        unit="tokens",
        minimum=2,
        resume="tokenizer",
    )
    make_vocab_size_divisible_by: int = option(
        128,
        "The vocabulary is padded to a multiple of this number times the tensor-parallel size.",
        unit="tokens",
        minimum=1,
    )

    @property
    def activation(self) -> Literal["gelu", "squared_relu", "swiglu"]:
        """Name of the activation function: ``gelu``, ``squared_relu`` or ``swiglu``."""
        if self.squared_relu:
            return "squared_relu"
        return "swiglu" if self.swiglu else "gelu"

    def padded_vocab_size(self, vocab_size: int, tp_size: int = 1) -> int:
        """Return the vocabulary size rounded up for the layout.

        For example, 50,257 becomes 50,304 with a multiple of 128, and 50,432 with 128 on 2
        tensor-parallel ranks.
        """
        multiple = self.make_vocab_size_divisible_by * tp_size
        return -(-vocab_size // multiple) * multiple

    def derive(self, sound: Sound) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if sound("hybrid_layer_pattern"):
            values["mtp_num_layers"] = self.mtp_depths
        if sound("hidden_size", "swiglu"):
            # A gated MLP has three matrices instead of two: as in Megatron, two thirds of the width
            # give the same number of parameters.
            gated = max(8 * self.hidden_size // 3 // 64 * 64, 64)
            values["ffn_hidden_size"] = gated if self.swiglu else 4 * self.hidden_size
        if (
            sound("hidden_size", "mamba_head_dim")
            and 2 * self.hidden_size % self.mamba_head_dim == 0
        ):
            values["mamba_num_heads"] = 2 * self.hidden_size // self.mamba_head_dim
        if sound("num_attention_heads") and self.num_attention_heads:
            values["num_query_groups"] = self.num_attention_heads
            if sound("hidden_size") and self.hidden_size % self.num_attention_heads == 0:
                values["kv_channels"] = self.hidden_size // self.num_attention_heads
        if sound("moe_ffn_hidden_size"):
            ffn = (
                self.ffn_hidden_size
                if self.ffn_hidden_size is not None
                else values.get("ffn_hidden_size")
            )
            values["moe_ffn_hidden_size"] = ffn
        return values

    def rules(self, sound: Sound) -> Iterator[Problem]:
        yield from self.related(sound, STACK)
        if sound("hybrid_layer_pattern"):
            yield from pattern_problems(self.hybrid_layer_pattern)
            yield from self.multi_token_rules(sound, self.mtp_depths)
        known = sound("hybrid_layer_pattern")
        symbols = set(self.hybrid_layer_pattern) if known else set()
        if ATTENTION in symbols or (not known and self.num_attention_heads):
            yield from self.attention_rules(sound)
        if MAMBA in symbols:
            yield from self.mamba_rules(sound)
        yield from self.expert_rules(sound, known=known, has_experts=MOE in symbols)
        if GATED_DELTA_NET in symbols:
            yield from self.related(sound, GDN)
        # The option is refused for models without attention layers too.
        if self.attention_dropout != 0 and sound("attention_dropout"):
            yield Problem(
                "--attention-dropout",
                str(self.attention_dropout),
                "dropout of attention weights is not supported",
                "leave it out, or give --hidden-dropout",
            )
        if MOE in symbols and self.add_bias_linear:
            yield Problem(
                "--hybrid-layer-pattern",
                self.hybrid_layer_pattern,
                "has E layers, but experts with biases are not supported",
                "add --disable-bias-linear",
            )
