"""Options of the shape of a hybrid model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_packed.config.conditions import TRAINS
from megatron_packed.config.errors import Problem
from megatron_packed.config.kinds import KINDS, LayerKind
from megatron_packed.config.layer_pattern import pattern_problems
from megatron_packed.config.options import option, required_option
from megatron_packed.config.section import Sound, section_fields
from megatron_packed.config.sections.kind_options import KindModelOptions
from megatron_packed.config.sections.model_parts.multi_token_prediction import MultiTokenOptions
from megatron_packed.config.sections.model_parts.multipliers import MultiplierOptions
from megatron_packed.config.sections.model_parts.stack import STACK

OUTPUT = "embedding and output"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(  # dataclass fields follow the bases from right to left
    MultiTokenOptions,
    MultiplierOptions,
    KindModelOptions,
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

    hybrid_layer_pattern: str = required_option(
        f"Layers of the model, one character per layer: {KINDS.in_words()}. "
        "After each / are the layers of one depth of multi-token prediction.",
        group=STACK,
        deprecated=("hybrid-override-pattern",),
    )
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
    freeze_params: tuple[str, ...] = option(
        (),
        "Do not train the parameters whose name matches one of these patterns (*, ? and [...] as "
        "in a shell), for example 'embedding.*' 'layers.0.*'. They have no gradient and no "
        "optimizer state. Tied tables have one name, so embedding.* also freezes the output.",
        group="frozen parameters",
        training_only=True,
        resume="trained parameters",
        only_if=TRAINS,
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

    def rules(self, sound: Sound) -> Iterator[Problem]:
        yield from self.related(sound, STACK)
        known = sound("hybrid_layer_pattern")
        if known:
            yield from pattern_problems(self.hybrid_layer_pattern)
            yield from self.multi_token_rules(sound, self.mtp_depths)
        for kind in KINDS.values():
            if known and kind not in self.kinds:
                yield from self._refused(kind)
            elif known or self._gives(kind):
                yield from self._kind_rules(kind, sound)
        # The option is refused for models without attention layers too.
        if self.attention_dropout != 0 and sound("attention_dropout"):
            yield self.problem(
                "attention_dropout",
                "dropout of attention weights is not supported",
                "leave it out, or give --hidden-dropout",
            )

    def _kind_rules(self, kind: LayerKind, sound: Sound) -> Iterator[Problem]:
        for name in kind.required:
            if sound(name, "hybrid_layer_pattern") and not getattr(self, name):
                rule = f"is required: the pattern has {kind.layer}s ({kind.symbol})"
                yield Problem(self.flag(name), "", rule, f"give {self.flag(name)} N")
        yield from self.related(sound, kind.name)
        if kind.rules is not None:
            yield from kind.rules(self, sound)

    def _refused(self, kind: LayerKind) -> Iterator[Problem]:
        """Yield problems of given options that need a layer of a kind that the pattern lacks."""
        for name in kind.refused_elsewhere:
            if getattr(self, name) is not None:
                rule = f"the pattern has no {kind.layer} ({kind.symbol})"
                cure = f"add an {kind.symbol} to --hybrid-layer-pattern, or leave {self.flag(name)} out"
                yield self.problem(name, rule, cure)

    def _gives(self, kind: LayerKind) -> bool:
        """Return whether an option of a kind has another value than its default."""
        return any(
            getattr(self, about.name) != about.default
            for about in section_fields(type(self))
            if about.option.group == kind.name and not about.option.derived
        )
