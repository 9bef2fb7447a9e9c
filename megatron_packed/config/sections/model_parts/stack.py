"""Options of the stack of layers: pattern, width, MLPs and norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_packed.config.conditions import Condition, layers_where
from megatron_packed.config.kinds.layer_kind import KINDS, LayerKind
from megatron_packed.config.layer_pattern import DEPTH
from megatron_packed.config.options import Related, derived_option, option, required_option
from megatron_packed.config.section import Section

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

STACK = "stack"


def _uses_ffn_hidden_size(run: RunConfig, processes: int) -> bool:
    """Return False if experts are the only MLPs, and have another width."""
    model = run.model
    return model.has_mlp or model.moe_ffn_hidden_size == model.ffn_hidden_size


ACTIVATIONS = layers_where(lambda kind: kind.has_activation)
MLP_WIDTH = Condition(
    "the pattern has no - layer, and --moe-ffn-hidden-size sets the width of experts",
    _uses_ffn_hidden_size,
)


class StackOptions(Section, group=STACK):
    """Layers of the model, width of the residual stream, MLPs and norms."""

    hybrid_layer_pattern: str
    """`ModelConfig` declares this option, because its help lists all kinds."""
    hidden_size: int = required_option("Width of the residual stream.", unit="channels", minimum=1)
    ffn_hidden_size: int = derived_option(
        "Inner width of an MLP layer.",
        derived="4 x hidden size; with --swiglu 8/3 x hidden size, rounded down to a multiple "
        "of 64",
        derive=lambda model: model.usual_mlp_width,
        derived_from=("hidden_size", "swiglu"),
        unit="channels",
        minimum=1,
        only_if=(ACTIVATIONS, MLP_WIDTH),
    )
    squared_relu: bool = option(
        False,
        "Use max(x, 0)^2 instead of GELU in MLPs and experts.",
        only_if=ACTIVATIONS,
        excludes=Related("swiglu", "an MLP has one activation"),
    )
    swiglu: bool = option(
        False,
        "Use SiLU(gate) x up instead of GELU in MLPs and experts.",
        only_if=ACTIVATIONS,
    )
    add_bias_linear: bool = option(
        True,
        "Use linear layers without bias.",
        flag="disable-bias-linear",
        negated=True,
        only_if=layers_where(lambda kind: kind.may_have_bias, "layer that can have a bias"),
    )
    normalization: str = option(
        "LayerNorm",
        "Kind of norm before each layer and at the end.",
        choices=("LayerNorm", "RMSNorm"),
    )
    apply_layernorm_1p: bool = option(
        False,
        "Store the weights of norms minus one, so that weight decay and zeros mean a scale of one.",
    )
    norm_epsilon: float = option(1e-5, "Value added to the variance in norms.", above=0, maximum=1)
    hidden_dropout: float = option(
        0.0,
        "Dropout probability of the channels of each layer's output.",
        minimum=0,
        below=1,
        megatron=("0.1", "hybrid models are trained without dropout"),
        training_only=True,
    )
    init_method_std: float = option(
        0.02, "Standard deviation of the initial weights.", above=0, training_only=True
    )

    @property
    def layer_types(self) -> list[str]:
        """Layers in order, as symbols of the pattern: the main model, then each depth."""
        return list(self.hybrid_layer_pattern.replace(DEPTH, ""))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of the layers, each once, in the order of `KINDS`."""
        return tuple(kind for symbol, kind in KINDS.items() if symbol in self.hybrid_layer_pattern)

    def kind_of(self, layer_number: int) -> LayerKind:
        """Return the kind of a layer, counted from 0 in `layer_types`."""
        return KINDS[self.layer_types[layer_number]]

    @property
    def has_attention(self) -> bool:
        return any(kind.attends for kind in self.kinds)

    @property
    def has_mlp(self) -> bool:
        """Return whether the model has layers with an MLP of width ``ffn_hidden_size``."""
        return any(kind.has_mlp for kind in self.kinds)

    @property
    def has_experts(self) -> bool:
        return any(kind.has_experts for kind in self.kinds)

    @property
    def usual_mlp_width(self) -> int:
        """Width of an MLP if ``ffn_hidden_size`` is not given."""
        # A gated MLP has three matrices instead of two: as in Megatron, two thirds of the width
        # give the same number of parameters.
        gated = max(8 * self.hidden_size // 3 // 64 * 64, 64)
        return gated if self.swiglu else 4 * self.hidden_size

    @property
    def main_layers(self) -> str:
        """Layers of the main model, without those of multi-token prediction."""
        return self.hybrid_layer_pattern.partition(DEPTH)[0]

    @property
    def num_layers(self) -> int:
        """Number of layers of the main model."""
        return len(self.main_layers)

    @property
    def mtp_layers(self) -> str:
        """Layers of one depth of multi-token prediction; empty without it."""
        return self.hybrid_layer_pattern.rpartition(DEPTH)[2] if self.mtp_depths else ""

    @property
    def mtp_depths(self) -> int:
        """Number of depths of multi-token prediction; 0 without it."""
        return self.hybrid_layer_pattern.count(DEPTH)

    def layers_of_depth(self, depth: int) -> range:
        """Return the numbers of the layers of a depth; depth 0 is the main model."""
        main, length = self.num_layers, len(self.mtp_layers)
        return range(main + (depth - 1) * length, main + depth * length) if depth else range(main)

    def depth_of_layer(self, layer_number: int) -> int:
        """Return the depth of a layer, 0 for a layer of the main model."""
        beyond = layer_number - self.num_layers
        return 0 if beyond < 0 else 1 + beyond // len(self.mtp_layers)

    def number_in_part(self, layer_number: int) -> int:
        """Return the number of a layer in the main model or in its depth, from 0."""
        beyond = layer_number - self.num_layers
        return layer_number if beyond < 0 else beyond % len(self.mtp_layers)
