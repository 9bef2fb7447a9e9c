"""Attention layers: their options, and the rules between them and with other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_packed.config.conditions import Condition, layers, option_given, option_is_not
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.kinds.layer_kind import (
    EVERYTHING,
    Exchanged,
    LayerKind,
    LayerPart,
    Projection,
    Shared,
)
from megatron_packed.config.options import derived_option, option
from megatron_packed.config.section import KERNELS, Section, Sound
from megatron_packed.config.sections.model_parts.stack import StackOptions
from megatron_packed.config.sections.model_parts.window import layers_with_window, window_sides

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig
    from megatron_packed.config.sections.model import ModelConfig
    from megatron_packed.config.sections.parallel import ParallelConfig

SYMBOL, ATTN = "*", "attention"
ATTENTION_LAYERS = layers(SYMBOL)
TRANSFORMER_ENGINE = "transformer_engine"
ZIGZAG_BACKENDS = (TRANSFORMER_ENGINE, "reference")
"""Attention kernels for rows that context-parallel ranks hold in zigzag order."""
CONTIGUOUS_BACKENDS = ("flash_attn_4", "flash_attn_2", "reference")
"""Attention kernels whose documents may have keys on earlier context-parallel ranks."""
TRANSFORMER_ENGINE_HEAD_LIMIT = 128
"""Widest attention head, in channels, of TransformerEngine's packed kernels."""
CORE_ATTENTION = "core_attn"


def _has_short_window(run: RunConfig, processes: int) -> bool:
    """Return False if the window covers the longest document."""
    window, longest = run.model.window_size, run.packing.max_document_length
    if window is None:
        return True
    return window_sides(window)[0] + 1 < longest


ROPE = option_is_not("model.position_embedding_type", "none")
_ROPE_SCALING = option_given("model.use_rope_scaling")
SHORT_WINDOW = Condition("the window covers the longest document", _has_short_window)


def _head_width(model: AttentionOptions) -> int | None:
    heads = model.num_attention_heads
    return model.hidden_size // heads if heads and model.hidden_size % heads == 0 else None


class AttentionOptions(StackOptions, group=ATTN, only_if=ATTENTION_LAYERS):
    """Heads, position embedding and norms of ``*`` layers."""

    num_attention_heads: int = option(
        0,
        "Number of query heads of an attention layer.",
        unit="heads",
        minimum=0,
    )
    num_query_groups: int = derived_option(
        "Number of key-value heads; each serves an equal number of query heads.",
        derived="one per query head",
        derive=lambda model: model.num_attention_heads or None,
        derived_from=("num_attention_heads",),
        unit="heads",
        minimum=1,
        divides="num_attention_heads",
    )
    kv_channels: int = derived_option(
        "Width of one attention head.",
        derived="hidden size / heads",
        derive=_head_width,
        derived_from=("num_attention_heads", "hidden_size"),
        unit="channels",
        minimum=1,
    )
    add_qkv_bias: bool = option(
        False,
        "Add a bias to the query, key and value projections.",
    )
    attention_output_gate: bool = option(
        False,
        "Multiply the output of attention by the sigmoid of a gate, which the fused projection "
        "computes for each channel.",
    )
    qk_layernorm: bool = option(
        False,
        "Normalise queries and keys before the position embedding, with --normalization.",
    )
    qk_layernorm_scope: str = option(
        "head",
        "Channels that the norm of queries and keys normalises together: those of one head, or "
        "those of all heads.",
        choices=("head", "all_heads"),
        only_if=option_given("model.qk_layernorm"),
    )
    attention_norm_placement: str = option(
        "input",
        "Place of the norm of * layers and of the - or E layer after each: before the layer "
        "(input), or on its output before the residual addition (output, as in OLMo).",
        choices=("input", "output"),
    )
    softmax_scale: float | None = option(
        None,
        "Factor on the products of queries and keys; 1 / sqrt(head width) when not given.",
        above=0,
    )
    window_size: str | None = option(
        None,
        "Tokens before and after a token that it can attend to, as left,right with right 0; its "
        "whole document when not given.",
        unit="tokens",
        only_if=SHORT_WINDOW,
    )
    window_attn_skip_freq: str | None = option(
        None,
        "Layers without the window. N: every N-th layer of the pattern. A list such as "
        "[1]*3+[0] with one number for each layer of the pattern: those with 0. None when not "
        "given.",
        only_if=(option_given("model.window_size"), SHORT_WINDOW),
    )
    attention_dropout: float = option(
        0.0,
        "Dropout probability of attention weights; only 0 is supported.",
        megatron=("0.1", "the packed attention kernels have no dropout"),
        training_only=True,
        zero_is_off=True,
    )
    position_embedding_type: str = option(
        "none",
        "Position embedding of attention; positions restart at 0 in every document.",
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
    rotary_base: float = option(
        10000.0,
        "Base of the rotary frequencies.",
        above=1,
        only_if=ROPE,
        phase=True,
    )
    rotary_percent: float = option(
        1.0,
        "Fraction of the channels of each head that is rotated.",
        above=0,
        maximum=1,
        only_if=ROPE,
    )
    use_rope_scaling: bool = option(
        False,
        "Stretch the low rotary frequencies, as Llama 3.1 and later do.",
        only_if=ROPE,
        phase=True,
    )
    rope_scaling_factor: float = option(
        8.0,
        "Factor by which --use-rope-scaling stretches.",
        minimum=1,
        only_if=(ROPE, _ROPE_SCALING),
        phase=True,
    )
    rope_scaling_low_freq_factor: float = option(
        1.0,
        "With --use-rope-scaling: frequencies with at most this number of turns within "
        "--rope-scaling-original-max-positions are stretched.",
        above=0,
        only_if=(ROPE, _ROPE_SCALING),
        phase=True,
    )
    rope_scaling_high_freq_factor: float = option(
        4.0,
        "With --use-rope-scaling: frequencies with at least this number of turns within "
        "--rope-scaling-original-max-positions stay unchanged.",
        above=0,
        only_if=(ROPE, _ROPE_SCALING),
        phase=True,
    )
    rope_scaling_original_max_positions: int = option(
        8192,
        "Longest document of the training before --use-rope-scaling.",
        unit="tokens",
        minimum=1,
        only_if=(ROPE, _ROPE_SCALING),
        phase=True,
    )
    max_position_embeddings: int | None = option(
        None,
        "Length of the rotary tables, which must cover the longest document; "
        "--max-document-length when not given.",
        unit="tokens",
        minimum=2,
        training_only=True,
        only_if=ROPE,
    )

    @property
    def head_dim(self) -> int:
        """Number of channels of one attention head."""
        return self.kv_channels

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels of each attention head."""
        return int(self.kv_channels * self.rotary_percent)

    def window_of(self, layer_number: int) -> int | None:
        """Return the number of tokens that a token of a ``*`` layer sees, itself included.

        Args:
            layer_number: number of the layer in the pattern, from 0.
        Returns:
            None without a window: a token then sees its document up to itself.
        """
        if self.window_size is None or self.layer_types[layer_number] != SYMBOL:
            return None
        layers = layers_with_window(self.window_attn_skip_freq, self.num_layers)
        # As in Megatron, the layers of a depth are numbered from 0 again.
        windowed = layers[self.number_in_part(layer_number) % len(layers)]
        return window_sides(self.window_size)[0] + 1 if windowed else None

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """Windows of the ``*`` layers in the order of the layers, each once."""
        windows = (
            self.window_of(number)
            for number, symbol in enumerate(self.layer_types)
            if symbol == SYMBOL
        )
        return tuple(dict.fromkeys(windows))

    def norms_output(self, layer_number: int) -> bool:
        """Return True if a layer normalises the output of its mixer instead of the input.

        Args:
            layer_number: number of the layer in the pattern, from 0.
        """
        if self.attention_norm_placement == "input":
            return False
        kind = self.kind_of(layer_number)
        follows = kind.has_activation and self.layer_types[:layer_number][-1:] == [SYMBOL]
        return kind.attends or follows

    def attention_rules(self, sound: Sound) -> Problems:
        heads = self.num_attention_heads
        if sound("num_attention_heads", "hidden_size") and heads and self.kv_channels is None:
            yield self.problem(
                "hidden_size",
                f"is not divisible by --num-attention-heads ({heads})",
                "change one of them, or give the head width with --kv-channels",
            )
        scope = ("qk_layernorm", "qk_layernorm_scope", "normalization")
        all_heads = self.qk_layernorm_scope == "all_heads"
        if sound(*scope) and self.qk_layernorm and all_heads and self.normalization != "RMSNorm":
            yield self.problem(
                "qk_layernorm_scope",
                f"is supported with RMSNorm only, not with --normalization {self.normalization}",
                "give --normalization RMSNorm, or --qk-layernorm-scope head",
            )
        yield from self._window_rules(sound)
        low, high = self.rope_scaling_low_freq_factor, self.rope_scaling_high_freq_factor
        bounds = ("rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor")
        if self.use_rope_scaling and sound(*bounds) and low >= high:
            yield Problem(
                "--rope-scaling-low-freq-factor",
                f"{low:g}",
                f"is not below --rope-scaling-high-freq-factor ({high:g})",
                "give a smaller number",
            )
        rope = self.position_embedding_type == "rope" and sound("kv_channels", "rotary_percent")
        if rope and (self.rotary_dim < 2 or self.rotary_dim % 2):
            yield self.problem(
                "rotary_percent",
                f"rotates {self.rotary_dim} of {self.kv_channels} channels, but the number must "
                "be even and at least 2",
                "choose a --rotary-percent or --kv-channels that rotates an even number of "
                "channels, at least 2",
            )

    def _window_rules(self, sound: Sound) -> Problems:
        if self.window_size is None or not sound("window_size"):
            return
        try:
            left, right = window_sides(self.window_size)
        except ValueError as error:
            cure = "give two numbers, for example 4095,0"
            yield self.problem("window_size", str(error), cure)
            return
        if right != 0:
            rule = f"lets a token see {right} tokens after it, but attention is causal"
            yield self.problem("window_size", rule, f"give {max(left, 0)},0")
        elif left < 0:
            rule = "has a negative number of tokens before a token"
            yield self.problem("window_size", rule, "leave it out for no window")
        if not sound("window_attn_skip_freq", "hybrid_layer_pattern"):
            return
        try:
            layers = layers_with_window(self.window_attn_skip_freq, self.num_layers)
        except ValueError as error:
            cure = "give a number, or a list such as [1]*3+[0] with an entry for each layer"
            yield self.problem("window_attn_skip_freq", str(error), cure)
            return
        attention = [symbol == SYMBOL for symbol in self.main_layers]
        if not any(both == (True, True) for both in zip(layers, attention, strict=True)):
            rule = "leaves no * layer with the window"
            cure = "change it, or leave out --window-size"
            yield self.problem("window_attn_skip_freq", rule, cure)


class AttentionKernels(Section, group=KERNELS, only_if=ATTENTION_LAYERS):
    """Option of the attention kernel."""

    attention_backend: str = option(
        "auto",
        "Attention kernel; auto uses the fastest kernel that supports the run.",
        choices=(
            "auto",
            "reference",
            "flash_attn_4",
            "transformer_engine",
            "flash_attn_2",
            "torch_varlen",
            "flex",
            "sdpa",
        ),
        value_aliases={"flash": "flash_attn_2", "fused": "transformer_engine", "unfused": "sdpa"},
        not_built={"local": "give reference, the plain PyTorch kernel"},
    )


def has_zigzag_kernel(model: ModelConfig) -> bool:
    """Return whether GPUs have a kernel for a zigzag of this model: TransformerEngine's attention."""
    width = model.kv_channels
    fits = width is not None and width % 8 == 0 and width <= TRANSFORMER_ENGINE_HEAD_LIMIT
    return fits and model.attention_windows == (None,)


def zigzag_kernel_problem(run: RunConfig) -> Problem | None:
    """Return the problem of a zigzag for which GPUs have no kernel; None if they have one.

    A run finds the problem when its kernels are chosen, because CPUs compute every zigzag. A plan of
    GPUs needs this function.
    """
    attends = bool(run.model.attention_windows)
    on_gpus = run.training.device != "cpu" and run.training.attention_backend != "reference"
    if not (run.parallel.uses_zigzag and attends and on_gpus):
        return None
    rule, cure = "has one kernel on GPUs, that of TransformerEngine, ", "give contiguous"
    if not has_zigzag_kernel(run.model):
        windows = "" if run.model.attention_windows == (None,) else " and attention windows"
        rule += (
            f"for heads of a multiple of 8 up to {TRANSFORMER_ENGINE_HEAD_LIMIT} channels without attention "
            f"windows, and these layers have heads of {run.model.kv_channels} channels{windows}"
        )
    elif not run.training.bf16:
        rule += "for bf16, and this run computes in fp32"
        cure = f"add --bf16, {cure}"
    else:
        return None
    return run.parallel.problem("cp_partition_mode", rule, f"{cure}, or --cp-comm-type a2a")


_OF_PARTITIONS = (
    *(f"model.{name}" for name in ("hybrid_layer_pattern", "hidden_size", "num_attention_heads")),
    *(f"model.{name}" for name in ("kv_channels", "window_size", "window_attn_skip_freq")),
    *(f"packing.{name}" for name in ("seq_length", "micro_batch_size", "pad_packed_seq_alignment")),
    "training.transformer_impl",
)
"""Options that decide which partitions of attention fit."""


def partitions_that_fit(run: RunConfig) -> tuple[str, ...]:
    """Return the values of ``--cp-partition-mode`` for which the run has kernels and fitting sizes."""
    backend, fitting = run.training.attention_backend, []
    if backend in ("auto", *CONTIGUOUS_BACKENDS):
        # TransformerEngine's layers bring their own attention, unless a kernel is named.
        own = backend == "auto" and run.training.transformer_impl == TRANSFORMER_ENGINE
        fitting += ["contiguous"] * (not own)
    if backend in ("auto", *ZIGZAG_BACKENDS) and not _zigzag_misfit(run):
        fitting.append("zigzag")
    return tuple(fitting)


def _zigzag_misfit(run: RunConfig) -> str:
    """Return why a zigzag does not fit the run, as a clause; empty if it fits."""
    packing, chunks = run.packing, 2 * run.parallel.context_parallel_size
    tokens, alignment = packing.tokens_per_pack, packing.pad_packed_seq_alignment or chunks
    if not has_zigzag_kernel(run.model):
        windows = any(run.model.attention_windows)
        layers = "attention windows" if windows else f"heads of {run.model.kv_channels} channels"
        return f"GPUs have no kernel for a zigzag of {layers}"
    if tokens % chunks:
        return f"the {chunks} chunks of a zigzag do not divide the {tokens} token slots of a pack"
    if alignment % chunks:
        return f"--pad-packed-seq-alignment {alignment} is no multiple of the {chunks} chunks of a zigzag"
    return ""


def attention_kernel_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems of the attention kernel with the size of heads and with rows of a rank."""
    if not sound("training.attention_backend"):
        return
    training, parallel, width = run.training, run.parallel, run.model.kv_channels
    uses_transformer_engine = (
        sound("training.transformer_impl", "model.kv_channels")
        and training.uses_transformer_engine_attention
    )
    if (
        uses_transformer_engine
        and width is not None
        and (width % 8 or width > TRANSFORMER_ENGINE_HEAD_LIMIT)
    ):
        yield training.problem(
            "transformer_impl",
            "TransformerEngine's packed attention supports heads of a multiple of 8 up to "
            f"{TRANSFORMER_ENGINE_HEAD_LIMIT} channels, not of {width}",
            "add another --attention-backend, or give local",
        )
    options = ("context_parallel_size", "cp_comm_type", "cp_partition_mode")
    if not sound(*(f"parallel.{name}" for name in options)) or not parallel.exchanges_keys:
        return
    misfit = ""
    if sound(*_OF_PARTITIONS):
        try:
            misfit = _zigzag_misfit(run)
            if parallel.chooses_partition and partitions_that_fit(run):
                return
        except ValueError:
            return  # the rules of the window name its fault
    elif parallel.chooses_partition:
        return
    yield from _partition_rules(run, uses_transformer_engine, misfit)


def _partition_rules(run: RunConfig, uses_transformer_engine: bool, misfit: str) -> Problems:
    """Yield problems of the attention kernel with the partition of the rows.

    Args:
        uses_transformer_engine: ``--transformer-impl`` chooses the kernel.
        misfit: why a zigzag does not fit; empty if it does.
    """
    training, parallel = run.training, run.parallel
    backend, mode = training.attention_backend, parallel.cp_partition_mode
    fitting = ZIGZAG_BACKENDS if parallel.uses_zigzag else CONTIGUOUS_BACKENDS
    # With TransformerEngine's layers, auto is its attention, which computes only a zigzag.
    in_order_only = mode == "contiguous" or (parallel.chooses_partition and bool(misfit))
    automatic: tuple[str, ...] = ("auto",)
    if training.transformer_impl == TRANSFORMER_ENGINE and in_order_only:
        automatic = ()
    if backend not in ("auto", *fitting):
        cure = f"give {_alternatives(*automatic, *fitting)}"
        if backend not in ZIGZAG_BACKENDS:
            cure += ", or --cp-comm-type a2a"
        elif not misfit:
            cure += ", or --cp-partition-mode zigzag"
        but = f" in contiguous rows, and {misfit}" * (backend in ZIGZAG_BACKENDS and bool(misfit))
        yield training.problem(
            "attention_backend",
            "does not attend to keys of other ranks, as --cp-comm-type "
            f"{parallel.cp_comm_type} --cp-partition-mode {mode} requires{but}",
            cure,
        )
    elif uses_transformer_engine and not parallel.uses_zigzag:
        yield parallel.problem(
            "cp_partition_mode",
            "finds no partition that fits: contiguous rows need " * parallel.chooses_partition
            + "needs " * (not parallel.chooses_partition)
            + "keys before a document's first query, which TransformerEngine's attention of "
            "--transformer-impl transformer_engine is not built for"
            + f", and {misfit}"
            * bool(misfit),
            f"add --attention-backend {' or '.join(CONTIGUOUS_BACKENDS)}"
            + ", or give zigzag" * (not misfit),
        )


def _alternatives(*values: str) -> str:
    """Return values as ``auto, reference or flex``."""
    *others, last = values
    return f"{', '.join(others)} or {last}"


def _exchanged(parallel: ParallelConfig) -> Exchanged:
    return "heads" if parallel.cp_comm_type == "a2a" else "keys and values"


KIND = LayerKind(
    symbol=SYMBOL,
    name=ATTN,
    place=1,
    options={"model": AttentionOptions, "training": AttentionKernels},
    rules=AttentionOptions.attention_rules,
    cross_rules=attention_kernel_rules,
    required=("num_attention_heads",),
    backends={
        "varlen_attention": "attention_backend",
        "context_parallel_attention": "attention_backend",
    },
    attends=True,
    may_have_bias=True,
    shared=(Shared("num_attention_heads"), Shared("num_query_groups", may_be_fewer=True)),
    exchanges=_exchanged,
    heads=("num_attention_heads", "num_query_groups"),
    without_heads=("cp_comm_type", "p2p"),
    graph_modules=("attn",),
    recomputed={CORE_ATTENTION: (CORE_ATTENTION,)},
    inside_norm=("attn_norm", "qkv_linear"),
    parts=(
        LayerPart("attn_norm", "norm"),
        LayerPart("qkv_linear", "mixer.qkv"),
        LayerPart(CORE_ATTENTION, "mixer.core_attn", EVERYTHING),
        LayerPart("attn_proj", "mixer.proj"),
    ),
    projections=(
        Projection(
            "qkv",
            "attention",
            ("q_proj", "k_proj", "v_proj"),
            ("linear_q", "linear_k", "linear_v"),
        ),
        Projection("proj", "attention", ("o_proj",)),
    ),
    example="--num-attention-heads 2 --kv-channels 128 --num-query-groups 1 "
    "--position-embedding-type rope",
)
