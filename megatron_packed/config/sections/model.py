"""Options of the shape of a hybrid Mamba-Transformer-MoE model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_packed.config.errors import Problem
from megatron_packed.config.layer_pattern import ATTENTION, MAMBA, MOE, pattern_problems
from megatron_packed.config.options import derived_option, option, required_option
from megatron_packed.config.section import Section, Sound

STACK, ATTN, SSM, EXPERTS, OUTPUT = (
    "stack",
    "attention",
    "Mamba-2",
    "mixture of experts",
    "embedding and output",
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, title="model"):
    """Options that decide which function the weights compute and how the weights are initialised.

    Derived fields (``ffn_hidden_size``, ``num_query_groups``, ``kv_channels``, ``mamba_num_heads``,
    ``moe_ffn_hidden_size``) hold numbers once the config is made, if the pattern has a layer that
    uses them. ``dataclasses.replace`` keeps those numbers.

    Raises:
        ConfigError: lists every problem.
    Example:
        ``ModelConfig(hybrid_layer_pattern="M*-", hidden_size=256, num_attention_heads=4)`` has 3
        layers: 8 Mamba heads of 64 channels in 8 groups, 4 attention heads of 64 channels, and an
        MLP of width 1024.
    """

    hybrid_layer_pattern: str = required_option(
        "Layers of the model, one character per layer: M Mamba-2, * attention, - MLP, E mixture "
        "of experts.",
        group=STACK,
        deprecated=("hybrid-override-pattern",),
    )
    hidden_size: int = required_option(
        "Width of the residual stream.", unit="channels", group=STACK, minimum=1
    )
    ffn_hidden_size: int = derived_option(
        "Inner width of an MLP layer.",
        derived="4 x hidden size; with --swiglu 8/3 x hidden size, rounded down to a multiple "
        "of 64",
        unit="channels",
        group=STACK,
        minimum=1,
    )
    squared_relu: bool = option(
        False, "Use max(x, 0)^2 instead of GELU in MLPs and experts.", group=STACK
    )
    swiglu: bool = option(
        False, "Use SiLU(gate) x up instead of GELU in MLPs and experts.", group=STACK
    )
    add_bias_linear: bool = option(
        True,
        "Use linear layers without bias.",
        group=STACK,
        flag="disable-bias-linear",
        negated=True,
    )
    normalization: str = option(
        "LayerNorm",
        "Kind of norm before each layer and at the end.",
        group=STACK,
        choices=("LayerNorm", "RMSNorm"),
    )
    norm_epsilon: float = option(
        1e-5, "Value added to the variance in norms.", group=STACK, above=0, maximum=1
    )
    hidden_dropout: float = option(
        0.0,
        "Dropout probability of the channels of each layer's output.",
        group=STACK,
        minimum=0,
        below=1,
        megatron=("0.1", "hybrid models are trained without dropout"),
        training_only=True,
    )
    init_method_std: float = option(
        0.02, "Standard deviation of the initial weights.", group=STACK, above=0, training_only=True
    )

    num_attention_heads: int = option(
        0, "Number of query heads of an attention layer.", unit="heads", group=ATTN, minimum=0
    )
    num_query_groups: int = derived_option(
        "Number of key-value heads; each serves an equal number of query heads.",
        derived="one per query head",
        unit="heads",
        group=ATTN,
        minimum=1,
    )
    kv_channels: int = derived_option(
        "Width of one attention head.",
        derived="hidden size / heads",
        unit="channels",
        group=ATTN,
        minimum=1,
    )
    add_qkv_bias: bool = option(
        False, "Add a bias to the query, key and value projections.", group=ATTN
    )
    attention_dropout: float = option(
        0.0,
        "Dropout probability of attention weights; only 0 is supported.",
        group=ATTN,
        megatron=("0.1", "the packed attention kernels have no dropout"),
        training_only=True,
    )
    position_embedding_type: str = option(
        "none",
        "Position embedding of attention; positions restart at 0 in every document.",
        group=ATTN,
        choices=("none", "rope"),
        shorthands={"use-rotary-position-embeddings": "rope"},
        megatron=("learned_absolute", "Mamba layers carry the order of tokens"),
        not_built={
            "learned_absolute": "give none (Mamba layers carry the order of tokens) or rope",
            "relative": "give rope",
            "yarn": "give rope",
            "mrope": "give rope",
        },
    )
    rotary_base: float = option(10000.0, "Base of the rotary frequencies.", group=ATTN, above=1)
    rotary_percent: float = option(
        1.0,
        "Fraction of the channels of each head that is rotated.",
        group=ATTN,
        above=0,
        maximum=1,
    )
    max_position_embeddings: int | None = option(
        None,
        "Length of the rotary tables, which must cover the longest document; "
        "--max-document-length when not given.",
        unit="tokens",
        group=ATTN,
        minimum=2,
        training_only=True,
    )

    mamba_state_dim: int = option(
        128,
        "Size of the Mamba state of each channel.",
        unit="numbers",
        group=SSM,
        minimum=1,
        maximum=256,
    )
    mamba_head_dim: int = option(
        64, "Width of one Mamba head.", unit="channels", group=SSM, minimum=1
    )
    mamba_num_groups: int = option(
        8,
        "Number of groups of Mamba heads; the heads of a group share B and C.",
        unit="groups",
        group=SSM,
        minimum=1,
    )
    mamba_num_heads: int = derived_option(
        "Number of Mamba heads.",
        derived="2 x hidden size / head width",
        unit="heads",
        group=SSM,
        minimum=1,
    )
    mamba_chunk_size: int = option(
        128,
        "Number of tokens that the scan processes as one matrix; must be a power of two.",
        unit="tokens",
        group=SSM,
        minimum=1,
        maximum=1024,
        training_only=True,
    )
    mamba_d_conv: ClassVar[int] = 4
    """Width of the causal convolution in tokens, the same as in every published hybrid model."""

    num_experts: int | None = option(
        None,
        "Number of experts of an E layer.",
        unit="experts",
        group=EXPERTS,
        minimum=1,
        maximum=65536,
    )
    moe_router_topk: int = option(
        2,
        "Number of experts for each token.",
        unit="experts",
        group=EXPERTS,
        minimum=1,
    )
    moe_ffn_hidden_size: int = derived_option(
        "Inner width of one expert.",
        derived="that of an MLP layer",
        unit="channels",
        group=EXPERTS,
        minimum=1,
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None,
        "Inner width of the shared expert that processes every token; no shared expert when not "
        "given.",
        unit="channels",
        group=EXPERTS,
        minimum=1,
    )
    moe_router_score_function: str = option(
        "softmax",
        "Function that turns router logits into scores.",
        group=EXPERTS,
        choices=("softmax", "sigmoid"),
        not_built={"sqrtsoftplus": "give sigmoid"},
    )
    moe_router_pre_softmax: bool = option(
        False,
        "Apply the softmax over all experts before the top k are chosen, instead of over "
        "the chosen ones.",
        group=EXPERTS,
    )
    moe_router_topk_scaling_factor: float | None = option(
        None,
        "Factor applied to the scores of the chosen experts; 1 when not given.",
        group=EXPERTS,
        above=0,
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        "Balance the load of experts with a bias per expert. The bias is added to the scores "
        "only to choose experts.",
        group=EXPERTS,
    )
    moe_router_bias_update_rate: float = option(
        1e-3,
        "Change of the expert bias per iteration (see --moe-router-enable-expert-bias).",
        group=EXPERTS,
        minimum=0,
        training_only=True,
    )
    moe_router_load_balancing_type: str = option(
        "aux_loss",
        "Auxiliary loss that balances the load of experts. aux_loss is computed per pack over "
        "its real tokens. seq_aux_loss is per sample, which is the same with --micro-batch-size "
        "1.",
        group=EXPERTS,
        choices=("aux_loss", "seq_aux_loss", "none"),
        training_only=True,
        not_built={
            "global_aux_loss": "give aux_loss, or none with --moe-router-enable-expert-bias",
            "sinkhorn": "give aux_loss, or none with --moe-router-enable-expert-bias",
            "quantile_balancing": "give aux_loss, or none with --moe-router-enable-expert-bias",
        },
    )
    moe_aux_loss_coeff: float = option(
        0.0,
        "Weight of the auxiliary load-balancing loss.",
        group=EXPERTS,
        minimum=0,
        training_only=True,
    )
    moe_z_loss_coeff: float | None = option(
        None,
        "Weight of the z-loss, which keeps router logits small; no z-loss when not given.",
        group=EXPERTS,
        minimum=0,
        training_only=True,
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "Limit of the tokens per expert, as a multiple of an even share of a rank's pack; no "
        "limit when not given.",
        group=EXPERTS,
        above=0,
        training_only=True,
    )
    moe_token_drop_policy: str = option(
        "probs",
        "Tokens that an expert keeps when it reaches its capacity: those with the highest "
        "scores (probs) or the first (position).",
        group=EXPERTS,
        choices=("probs", "position"),
        training_only=True,
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False,
        "Pad the rows that the alltoall dispatcher sends to the expert capacity, so that the "
        "row counts need not be read from the device.",
        group=EXPERTS,
        training_only=True,
    )
    moe_token_dispatcher_type: str = option(
        "allgather",
        "Method that moves tokens to experts on other ranks. allgather sends all tokens to all "
        "ranks; alltoall sends each token to the ranks of its experts.",
        group=EXPERTS,
        choices=("allgather", "alltoall"),
        training_only=True,
        not_built={"flex": "give allgather (no host sync) or alltoall (less traffic)"},
    )
    moe_expert_rank_capacity_factor: float | None = option(
        None,
        "Size of the row buffer for a rank's experts with allgather, as a multiple of an even "
        "share. A step that needs more rows is skipped and repeated with the full buffer. The "
        "buffer fits the worst case when not given.",
        group=EXPERTS,
        above=0,
        training_only=True,
    )

    untie_embeddings_and_output_weights: bool = option(
        False, "Use separate weights for the embedding and the output projection.", group=OUTPUT
    )
    vocab_size: int | None = option(
        None,
        "Vocabulary size before padding; the size of the tokenizer when not given.",
        unit="tokens",
        group=OUTPUT,
        minimum=2,
    )
    make_vocab_size_divisible_by: int = option(
        128,
        "The vocabulary is padded to a multiple of this number times the tensor-parallel size.",
        unit="tokens",
        group=OUTPUT,
        minimum=1,
    )

    @property
    def layer_types(self) -> list[str]:
        """Layers in order, as symbols of the pattern."""
        return list(self.hybrid_layer_pattern)

    @property
    def num_layers(self) -> int:
        return len(self.hybrid_layer_pattern)

    @property
    def head_dim(self) -> int:
        """Number of channels of one attention head."""
        return self.kv_channels

    @property
    def d_inner(self) -> int:
        """Number of channels inside a Mamba layer: heads x head width."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels of each attention head."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def activation(self) -> str:
        """Name of the activation function: ``gelu``, ``squared_relu`` or ``swiglu``."""
        if self.squared_relu:
            return "squared_relu"
        return "swiglu" if self.swiglu else "gelu"

    @property
    def dispatch_asks_the_device(self) -> bool:
        """Return whether the token dispatcher reads row counts from the device. Such a read (a host
        sync) cannot be part of a CUDA graph.
        """
        return (
            self.moe_token_dispatcher_type == "alltoall"  # noqa: S105
            and not self.moe_pad_expert_input_to_capacity
        )

    def padded_vocab_size(self, vocab_size: int, tp_size: int = 1) -> int:
        """Return the vocabulary size rounded up for the layout.

        For example, 50,257 becomes 50,304 with a multiple of 128, and 50,432 with 128 on 2
        tensor-parallel ranks.
        """
        multiple = self.make_vocab_size_divisible_by * tp_size
        return -(-vocab_size // multiple) * multiple

    def derive(self, sound: Sound) -> dict[str, Any]:
        values: dict[str, Any] = {}
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
        if sound("hybrid_layer_pattern"):
            yield from pattern_problems(self.hybrid_layer_pattern)
        known = sound("hybrid_layer_pattern")
        symbols = set(self.hybrid_layer_pattern) if known else set()
        if ATTENTION in symbols or (not known and self.num_attention_heads):
            yield from self._attention_rules(sound)
        if MAMBA in symbols:
            yield from self._mamba_rules(sound)
        yield from self._expert_rules(sound, known=known, has_experts=MOE in symbols)
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
        if self.squared_relu and self.swiglu:
            yield Problem(
                "--squared-relu",
                "",
                "contradicts --swiglu: an MLP has one activation",
                "leave one of the two flags out",
            )

    def _attention_rules(self, sound: Sound) -> Iterator[Problem]:
        heads, groups, hidden = self.num_attention_heads, self.num_query_groups, self.hidden_size
        if sound("num_attention_heads", "hybrid_layer_pattern") and heads == 0:
            yield Problem(
                "--num-attention-heads",
                "",
                "is required: the pattern has attention layers (*)",
                "give --num-attention-heads N",
            )
            return
        if sound("num_attention_heads", "num_query_groups") and heads and heads % groups:
            yield Problem(
                "--num-query-groups",
                str(groups),
                f"must divide --num-attention-heads ({heads})",
                f"choose from {divisors(heads)}",
            )
        if sound("num_attention_heads", "hidden_size") and heads and self.kv_channels is None:
            yield Problem(
                "--hidden-size",
                str(hidden),
                f"is not divisible by --num-attention-heads ({heads})",
                "change one of them, or give the head width with --kv-channels",
            )
        rope = self.position_embedding_type == "rope" and sound("kv_channels", "rotary_percent")
        if rope and (self.rotary_dim < 2 or self.rotary_dim % 2):
            yield Problem(
                "--rotary-percent",
                str(self.rotary_percent),
                f"rotates {self.rotary_dim} of {self.kv_channels} channels, but the number must "
                "be even and at least 2",
                "choose a --rotary-percent or --kv-channels that rotates an even number of "
                "channels, at least 2",
            )

    def _mamba_rules(self, sound: Sound) -> Iterator[Problem]:
        hidden, width = self.hidden_size, self.mamba_head_dim
        if sound("hidden_size", "mamba_head_dim") and self.mamba_num_heads is None:
            yield Problem(
                "--mamba-head-dim",
                str(width),
                f"must divide 2 x --hidden-size ({2 * hidden})",
                f"choose from {divisors(2 * hidden)}, or give --mamba-num-heads",
            )
        if (
            sound("mamba_num_heads", "mamba_num_groups")
            and self.mamba_num_heads % self.mamba_num_groups
        ):
            yield Problem(
                "--mamba-num-groups",
                str(self.mamba_num_groups),
                f"must divide the number of Mamba heads ({self.mamba_num_heads})",
                f"choose from {divisors(self.mamba_num_heads)}",
            )
        if sound("mamba_chunk_size") and self.mamba_chunk_size & (self.mamba_chunk_size - 1):
            yield Problem(
                "--mamba-chunk-size",
                str(self.mamba_chunk_size),
                "must be a power of two",
                f"give {1 << (self.mamba_chunk_size.bit_length() - 1)}",
            )

    def _expert_rules(self, sound: Sound, known: bool, has_experts: bool) -> Iterator[Problem]:
        if known and has_experts and self.num_experts is None and sound("num_experts"):
            yield Problem(
                "--num-experts",
                "",
                "is required: the pattern has expert layers (E)",
                "give --num-experts N",
            )
        if known and not has_experts:
            for name in ("num_experts", "moe_shared_expert_intermediate_size"):
                if getattr(self, name) is not None:
                    yield Problem(
                        self.flag(name),
                        str(getattr(self, name)),
                        "the pattern has no expert layer (E)",
                        f"add an E to --hybrid-layer-pattern, or leave {self.flag(name)} out",
                    )
            return
        yield from self._router_rules(sound)
        if self.moe_pad_expert_input_to_capacity and self.moe_expert_capacity_factor is None:
            yield Problem(
                "--moe-pad-expert-input-to-capacity",
                "",
                "needs --moe-expert-capacity-factor, which sets the capacity to pad to",
                "add --moe-expert-capacity-factor, or leave it out",
            )
        dispatcher = self.moe_token_dispatcher_type
        if self.moe_expert_rank_capacity_factor is not None and dispatcher != "allgather":
            yield Problem(
                "--moe-expert-rank-capacity-factor",
                str(self.moe_expert_rank_capacity_factor),
                "sets the buffer size of the allgather dispatcher only",
                "give --moe-token-dispatcher-type allgather, or leave it out",
            )

    def _router_rules(self, sound: Sound) -> Iterator[Problem]:
        experts, topk = self.num_experts, self.moe_router_topk
        if experts is not None and sound("num_experts", "moe_router_topk"):
            if topk > experts:
                yield Problem(
                    "--moe-router-topk",
                    str(topk),
                    f"must be at most --num-experts ({experts})",
                    f"give 1 to {experts}",
                )
            if (
                topk == 1
                and self.moe_router_score_function == "softmax"
                and not self.moe_router_pre_softmax
            ):
                yield Problem(
                    "--moe-router-topk",
                    "1",
                    "the softmax over a single chosen expert is always 1, so the router would "
                    "not learn",
                    "add --moe-router-pre-softmax, or choose at least two experts",
                )
        if self.moe_router_enable_expert_bias and self.moe_router_score_function == "softmax":
            yield Problem(
                "--moe-router-enable-expert-bias",
                "",
                "needs the sigmoid score function",
                "add --moe-router-score-function sigmoid",
            )


def divisors(number: int) -> str:
    """Return the divisors of a number as text, at most twelve of them."""
    return in_words(every_divisor(number))


def every_divisor(number: int) -> list[int]:
    """Return all divisors of a number in ascending order."""
    small = [d for d in range(1, min(int(number**0.5), 1 << 16) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def in_words(numbers: list[int]) -> str:
    """Return numbers as text, at most the first twelve."""
    return ", ".join(str(number) for number in numbers[:12]) + (
        ", ..." if len(numbers) > 12 else ""
    )
