"""Options of the shape of a hybrid model."""

from __future__ import annotations

from typing import Literal

from megatron_packed.config.conditions import TRAINS, Condition, layers
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.kinds.layer_kind import KINDS, LayerKind
from megatron_packed.config.layer_pattern import DEPTH, pattern_problems
from megatron_packed.config.options import derived_option, option, required_option
from megatron_packed.config.section import Section, Sound, section_fields
from megatron_packed.config.sections.kind_options import KindModelOptions
from megatron_packed.config.sections.model_parts.lora import LoraOptions
from megatron_packed.config.sections.model_parts.stack import STACK

OUTPUT = "embedding and output"
MULTI_TOKEN = "multi-token prediction"  # noqa: S105
MOST_DEPTHS = 14
"""Largest number of depths; a micro-batch has a factor for the loss of each depth."""


DEPTHS = layers(DEPTH, f"{DEPTH} part")
SEVERAL_DEPTHS = Condition(
    f"the pattern has one {DEPTH} part", lambda run, processes: run.model.mtp_depths > 1
)


class MultiplierOptions(Section, group="multipliers"):
    """Constant factors of Granite 4.0-H."""

    embedding_multiplier: float | None = option(
        None, "Factor on the output of the embedding; 1 when not given.", above=0
    )
    residual_multiplier: float | None = option(
        None,
        "Factor on the output of each layer before it is added to the residual stream; 1 when not "
        "given.",
        above=0,
    )
    logits_scaling: float | None = option(
        None,
        "Number by which the logits are divided; 1 when not given.",
        above=0,
    )


class MultiTokenOptions(Section, group=MULTI_TOKEN):
    """Depths of multi-token prediction. Depth k predicts the token k + 1 tokens ahead."""

    mtp_num_layers: int = derived_option(
        "Number of depths of multi-token prediction.",
        derived="number of / parts of --hybrid-layer-pattern, which it must equal",
        derive=lambda model: model.mtp_depths,
        derived_from=("hybrid_layer_pattern",),
        unit="depths",
        minimum=0,
        only_if=DEPTHS,
    )
    mtp_use_repeated_layer: bool = option(
        False,
        "Use the same weights at every depth of multi-token prediction.",
        only_if=(DEPTHS, SEVERAL_DEPTHS),
    )
    mtp_loss_scaling_factor: float = option(
        0.1,
        "Weight of the mean loss of all depths of multi-token prediction, which is added to the "
        "loss of the next token.",
        minimum=0,
        training_only=True,
        only_if=DEPTHS,
    )


class ModelConfig(  # dataclass fields follow the bases from right to left
    LoraOptions,
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

    def rules(self, sound: Sound) -> Problems:
        yield from self.related(sound, STACK)
        pattern_sound = sound("hybrid_layer_pattern")
        if pattern_sound:
            yield from pattern_problems(self.hybrid_layer_pattern)
            if sound("mtp_num_layers"):
                yield from self._depth_rules(self.mtp_depths)
        yield from self.adapter_rules(self, sound)
        for kind in KINDS.values():
            if pattern_sound and kind not in self.kinds:
                yield from self._refused(kind)
            elif pattern_sound or self._gives(kind):
                yield from self._kind_rules(kind, sound)
        # The option is refused for models without attention layers too.
        if self.attention_dropout != 0 and sound("attention_dropout"):
            yield self.problem(
                "attention_dropout",
                "dropout of attention weights is not supported",
                "leave it out, or give --hidden-dropout",
            )

    def _depth_rules(self, depths: int) -> Problems:
        """Yield problems of the number of depths of multi-token prediction."""
        if self.mtp_num_layers != depths:
            yield self.problem(
                "mtp_num_layers",
                f"is not the number of parts after a {DEPTH} in --hybrid-layer-pattern ({depths})",
                f"give {depths}, or write the layers of each depth after a {DEPTH}, "
                "for example M*ME/*E/*E",
            )
        if depths > MOST_DEPTHS:
            yield Problem(
                "--hybrid-layer-pattern",
                "",
                f"has {depths} parts after a {DEPTH}; at most {MOST_DEPTHS} depths are supported",
                "leave parts out",
            )

    def _kind_rules(self, kind: LayerKind, sound: Sound) -> Problems:
        for name in kind.required:
            if sound(name, "hybrid_layer_pattern") and not getattr(self, name):
                rule = f"is required: the pattern has {kind.layer}s ({kind.symbol})"
                yield Problem(self.flag(name), "", rule, f"give {self.flag(name)} N")
        yield from self.related(sound, kind.name)
        if kind.rules is not None:
            yield from kind.rules(self, sound)

    def _refused(self, kind: LayerKind) -> Problems:
        """Yield problems of given options that need a layer of a kind that the pattern lacks."""
        for name in kind.refused_elsewhere:
            if getattr(self, name) is not None:
                rule = f"the pattern has no {kind.layer} ({kind.symbol})"
                cure = f"add an {kind.symbol} to --hybrid-layer-pattern, or leave {self.flag(name)} out"
                yield self.problem(name, rule, cure)

    def _gives(self, kind: LayerKind) -> bool:
        """Return whether an option of a kind has another value than its default."""
        return any(
            getattr(self, field.name) != field.default
            for field in section_fields(type(self))
            if field.option.group == kind.name and not field.option.derived
        )
