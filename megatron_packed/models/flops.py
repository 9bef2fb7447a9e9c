"""Floating-point operations of a packed micro-batch, from the real lengths of its documents.

A product of an ``(a, b)`` with a ``(b, c)`` matrix is ``2 a b c`` operations. The count includes
matrix products, attention, the state-space scan and its convolution. It excludes norms, activations
and other elementwise work, the tail of a pack, and values that a kernel computes again or masks
out.

Operations per token in the forward pass, with hidden size h:

* ``*``: projections ``2 h (N + 2 K) H + 2 N H h``, and ``2 h N H`` more for an output gate; scores
  and weighted sum ``4 N H`` per visible pair. A document of L tokens has ``L^2 / 2`` visible pairs
  (the causal half). 8 documents of 1,024 tokens therefore have an eighth of the pairs of one
  document of 8,192 tokens. Counting a pack as one document would report too high an MFU. With a
  window of w tokens a longer document has ``w L - w^2 / 2`` visible pairs.
* ``-``: ``2 h F1 + 2 F h`` (F1 = 2 F for SwiGLU).
* ``E``: router ``2 h E``, K experts like ``-``, and the shared expert with its gate
  ``2 h``. With a latent size L, the K experts have L in place of h, and the projections are
  ``4 h L``.
* ``M``: projections ``2 h (2 I + 2 G S + N) + 2 I h``; convolution ``2 W (I + 2 G S)``; and the
  scan.
* Scan in chunks of Q tokens: ``2 G S + 2 I`` per pair of tokens within a chunk, with ``q^2 / 2``
  pairs for q tokens. ``4 I S`` per token into and out of the chunk states. ``2 I S`` per chunk to
  carry a state on. ``2 I`` per token for the skip connection.
* ``G``: projections ``2 h (2 G K + 2 N V + 2 N) + 2 N V h``; convolution ``2 W (2 G K + N V)``; rule
  ``8 N K V`` per token, as Megatron counts it.
* Output: ``2 h V`` with V the padded vocabulary.
* Each depth of multi-token prediction: its layers, a projection of ``4 h^2``, and the output.
  Slots that do not reach their token are counted too.

The backward pass has two products for each product of the forward pass, so twice its operations.
Recomputation (``--recompute-granularity``) does not count: these are the operations of the model,
as Megatron counts them.

``six_n_t`` is the usual estimate ``6 N T`` for comparison, with N active parameters that take part
in products, and T tokens. It ignores attention scores, the scan, and further uses of weights by
multi-token prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from megatron_packed.config.layer_pattern import (
    ATTENTION,
    GATED_DELTA_NET,
    LAYER_NAMES,
    MAMBA,
    MLP,
    MOE,
)
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.estimate.parameter_count import (
    conv_channels,
    count_parameters,
    depth_projection,
    feed_forward,
    gated_delta_net_rows,
    latent_projections,
    qkv_rows,
    routed_expert,
    shared_expert,
)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations by kind of work."""

    projections: float
    """Linear layers including experts and routers, without the output layer."""
    attention: float
    scan: float
    """State-space scan and its convolution."""
    output: float
    """Product of the output layer with the vocabulary."""

    @property
    def total(self) -> float:
        amounts: list[float] = [getattr(self, field.name) for field in fields(self)]
        return sum(amounts)

    def scaled(self, factor: float) -> Flops:
        return Flops(**{field.name: factor * getattr(self, field.name) for field in fields(self)})


class FlopCounter:
    """Counter of one model's operations for any document lengths.

    It runs on the host only and takes a few microseconds a call.

    Args:
        config: the model.
        vocab_size: entries of the tokenizer.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        self.chunk = config.mamba_chunk_size
        symbols = config.layer_types
        count = {symbol: symbols.count(symbol) for symbol in LAYER_NAMES}
        hidden, inner = config.hidden_size, config.d_inner if MAMBA in symbols else 0
        self.projections_per_token = sum(
            2 * projection_weights(config, symbol) for symbol in symbols
        )
        self.projections_per_token += config.mtp_depths * 2 * depth_projection(config)
        outputs = 1 + config.mtp_depths
        self.output_per_token = outputs * 2 * hidden * config.padded_vocab_size(vocab_size)
        repeated = config.mtp_depths * hidden * config.padded_vocab_size(vocab_size)
        if config.mtp_use_repeated_layer and config.mtp_depths:
            layers = sum(projection_weights(config, symbol) for symbol in config.mtp_layers)
            repeated += (config.mtp_depths - 1) * (depth_projection(config) + layers)
        self.repeated_per_token = 2 * repeated
        """Operations with weights that the token has used before: those of multi-token prediction."""
        attention_width = (
            config.num_attention_heads * config.head_dim if ATTENTION in symbols else 0
        )
        self.attention_per_pair = 4 * attention_width
        """Operations of one attention layer."""
        self.windows = Counter(
            config.window_of(number) for number, symbol in enumerate(symbols) if symbol == ATTENTION
        )
        """Window size, or None -> number of attention layers."""
        states = config.mamba_num_groups * config.mamba_state_dim
        self.scan_per_pair = count[MAMBA] * (2 * states + 2 * inner)
        per_token = (
            4 * inner * config.mamba_state_dim
            + 2 * inner
            + 2 * config.mamba_d_conv * (inner + 2 * states)
        )
        self.scan_per_token = count[MAMBA] * per_token
        self.scan_per_token += count[GATED_DELTA_NET] * delta_rule_per_token(config)
        self.scan_per_chunk = count[MAMBA] * 2 * inner * config.mamba_state_dim
        self.multiplied_parameters = count_parameters(config, vocab_size).multiplied

    def forward(self, lengths: Sequence[int] | NDArray[np.integer]) -> Flops:
        """Return the operations of the forward pass over documents of ``lengths`` tokens."""
        length = np.asarray(lengths, dtype=np.float64)
        tokens = float(length.sum())
        pairs = sum(
            layers * visible_pairs(length, window) for window, layers in self.windows.items()
        )
        whole_chunks = np.floor(length / self.chunk)
        rest = length - whole_chunks * self.chunk
        chunk_pairs = float((whole_chunks * self.chunk**2 + np.square(rest)).sum()) / 2
        chunks = float(np.ceil(length / self.chunk).sum())
        return Flops(
            projections=self.projections_per_token * tokens,
            attention=self.attention_per_pair * pairs,
            scan=self.scan_per_pair * chunk_pairs
            + self.scan_per_token * tokens
            + self.scan_per_chunk * chunks,
            output=self.output_per_token * tokens,
        )

    def linear_and_quadratic(self, longest: int | None = None) -> tuple[float, float]:
        """Return approximate forward operations per token, and per squared length of a document.

        Chunks of the scan are counted as full. A document shorter than a chunk costs less. A layer
        with a window is counted as linear, as if all documents were much longer than the window.

        Args:
            longest: tokens of the longest document; a window that covers it is ignored.
        """
        limited = [
            window
            for window in self.windows.elements()
            if window is not None and (longest is None or window < longest)
        ]
        scan = (
            self.scan_per_token
            + self.scan_per_pair * self.chunk / 2
            + self.scan_per_chunk / self.chunk
        )
        return (
            self.projections_per_token
            + self.output_per_token
            + scan
            + self.attention_per_pair * sum(limited),
            self.attention_per_pair * (self.windows.total() - len(limited)) / 2,
        )

    def training(self, lengths: Sequence[int] | NDArray[np.integer]) -> Flops:
        """Return the operations of forward and backward pass: three times the forward pass."""
        return self.forward(lengths).scaled(3.0)

    def six_n_t(self, tokens: int) -> float:
        """Return ``6 N T``, the usual estimate of forward and backward pass."""
        return 6.0 * self.multiplied_parameters * tokens


def visible_pairs(length: NDArray[np.float64], window: int | None) -> float:
    """Return the visible pairs of documents of ``length`` tokens, for one layer.

    These are ``L^2 / 2`` pairs without a window. With a window of w tokens the rows after the first
    w have w pairs each.
    """
    within = length if window is None else np.minimum(length, window)
    return float((within * length - np.square(within) / 2).sum())


def model_flops(
    config: ModelConfig, vocab_size: int, lengths: Sequence[int] | NDArray[np.integer]
) -> float:
    """Return the operations of forward and backward pass over documents of ``lengths`` tokens."""
    return FlopCounter(config, vocab_size).training(lengths).total


def delta_rule_per_token(config: ModelConfig) -> int:
    """Return the operations of convolution and gated delta rule per token of a gated delta net.

    As in Megatron, these are 8 operations for each entry of the states. Kernels run the rule in
    chunks, with other numbers of operations.
    """
    channels = 2 * config.linear_key_dim + config.linear_value_dim
    state = config.linear_value_dim * config.linear_key_head_dim
    return 2 * config.linear_conv_kernel_dim * channels + 8 * state


def projection_weights(config: ModelConfig, symbol: str) -> int:
    """Return the number of weights of one layer that every token is multiplied with.

    Only the K routed experts that a token visits are counted.
    """
    hidden = config.hidden_size
    if symbol == ATTENTION:
        return hidden * (qkv_rows(config) + config.num_attention_heads * config.head_dim)
    if symbol == MLP:
        return feed_forward(config, config.ffn_hidden_size)
    if symbol == MAMBA:
        return hidden * (2 * config.d_inner + conv_channels(config) + config.mamba_num_heads)
    if symbol == GATED_DELTA_NET:
        return hidden * (gated_delta_net_rows(config) + config.linear_value_dim)
    assert symbol == MOE and config.num_experts is not None, symbol
    experts = config.moe_router_topk * routed_expert(config)
    others = shared_expert(config) + latent_projections(config)
    return hidden * config.num_experts + experts + others
