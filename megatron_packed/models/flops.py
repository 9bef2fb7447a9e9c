"""Floating-point operations of a packed micro-batch, from the real lengths of its documents.

A product of an ``(a, b)`` with a ``(b, c)`` matrix is ``2 a b c`` operations. The count includes
matrix products, attention, the state-space scan and its convolution. It excludes norms, activations
and other elementwise work, the tail of a pack, and values that a kernel computes again or masks
out.

The model on the meta device has the weights of these products, and asks the ops, which state their own
work (`ops.backend_dispatch.OpWork`). A weight takes part in 2 operations for each token that uses it.

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
* Adapters of rank r: ``2 (P I + O) r`` for a projection with I inputs, O outputs and P matrices that
  have one. In experts, K of them count.
* Output: ``2 h V`` with V the padded vocabulary.
* Each depth of multi-token prediction: its layers, a projection of ``4 h^2``, and the output.
  Slots that do not reach their token are counted too.

The backward pass has two products for each product of the forward pass, so twice its operations.
A frozen matrix of a linear layer has one, because it needs no gradient of its own.
Recomputation (``--recompute-granularity``) does not count: these are the operations of the model,
as Megatron counts them.

``six_n_t`` is the usual estimate ``6 N T`` for comparison, with N active parameters that take part
in products, and T tokens; a frozen parameter counts 4 in place of 6. It ignores attention scores, the
scan, and further uses of weights by multi-token prediction.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.estimate.parameter_count import active_elements, count_parameters
from megatron_packed.models.trace import calls_of_ops, complete_model, uses_in_layers

PEAK_BF16_FLOPS = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989.5e12,
    "H200 NVL": 835.5e12,
    "H200": 989.5e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.5e12,
    "H800 PCIe": 756e12,
    "H800": 989.5e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}
"""Dense bf16 peak of GPUs in FLOP/s, by which the share of a step in it (MFU) is computed.

The numbers are from the vendor's datasheets, which is half of the figure with sparsity.

The first key that occurs in the device's name as whole words applies; so an RTX A1000 is no A100.
"""


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

    @property
    def attention_share(self) -> float:
        """Share of attention scores."""
        return self.attention / self.total

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
        model = complete_model(config, vocab_size)
        layers = [
            (2 * active_elements(weight, config), uses, weight.requires_grad)
            for weight, uses in uses_in_layers(model).items()
        ]
        outputs = 1 + config.mtp_depths
        of_output = (2 * model.output_weight.numel(), outputs, model.output_weight.requires_grad)
        self.projections_per_token = sum(work * uses for work, uses, _ in layers)
        self.output_per_token = of_output[0] * outputs
        self.frozen_projections_per_token = sum(
            work * uses for work, uses, trained in layers if not trained
        )
        """Part of ``projections_per_token`` that belongs to frozen weights."""
        self.frozen_output_per_token = 0 if of_output[2] else self.output_per_token
        repeated = [(work * (uses - 1), trained) for work, uses, trained in [*layers, of_output]]
        self.repeated_per_token = sum(work for work, _ in repeated)
        """Operations with weights that the token has used before: those of multi-token prediction."""
        self.frozen_repeated_per_token = sum(work for work, trained in repeated if not trained)
        self.parameters = count_parameters(config, vocab_size)
        self.per_pair: defaultdict[int, Counter[int | None]] = defaultdict(Counter)
        """Operations per visible pair of a layer -> window, or None -> number of layers."""
        self.scan_per_token = 0
        self.per_pair_in_chunk: Counter[int] = Counter()
        """Tokens of a chunk -> operations per pair of tokens in a chunk."""
        self.per_chunk: Counter[int] = Counter()
        """Tokens of a chunk -> operations per chunk."""
        for (op, _, inputs), calls in calls_of_ops(config, vocab_size).items():
            work = op.work(inputs)
            if work.per_visible_pair:
                self.per_pair[work.per_visible_pair][work.window] += calls
            self.scan_per_token += calls * work.per_token
            self.per_pair_in_chunk[work.chunk] += calls * work.per_pair_in_chunk
            self.per_chunk[work.chunk] += calls * work.per_chunk

    def forward(self, lengths: Sequence[int] | NDArray[np.integer]) -> Flops:
        """Return the operations of the forward pass over documents of ``lengths`` tokens."""
        length = np.asarray(lengths, dtype=np.float64)
        tokens = float(length.sum())
        attention = sum(
            per_pair * sum(layers * visible_pairs(length, seen) for seen, layers in windows.items())
            for per_pair, windows in self.per_pair.items()
        )
        scan = sum(
            per_pair * pairs_in_chunks(length, chunk)
            for chunk, per_pair in self.per_pair_in_chunk.items()
        )
        scan += self.scan_per_token * tokens
        scan += sum(
            per_chunk * float(np.ceil(length / chunk).sum())
            for chunk, per_chunk in self.per_chunk.items()
        )
        return Flops(
            projections=self.projections_per_token * tokens,
            attention=attention,
            scan=scan,
            output=self.output_per_token * tokens,
        )

    def linear_and_quadratic(self, longest: int | None = None) -> tuple[float, float]:
        """Return approximate forward operations per token, and per squared length of a document.

        Chunks of the scan are counted as full. A document shorter than a chunk costs less. A layer
        with a window is counted as linear, as if all documents were much longer than the window.

        Args:
            longest: tokens of the longest document; a window that covers it is ignored.
        """
        limited = unlimited = 0
        for per_pair, windows in self.per_pair.items():
            for window, layers in windows.items():
                if window is not None and (longest is None or window < longest):
                    limited += per_pair * layers * window
                else:
                    unlimited += per_pair * layers
        scan = (
            self.scan_per_token
            + sum(per_pair * chunk / 2 for chunk, per_pair in self.per_pair_in_chunk.items())
            + sum(per_chunk / chunk for chunk, per_chunk in self.per_chunk.items())
        )
        linear = self.projections_per_token + self.output_per_token + scan + limited
        return linear, unlimited / 2

    def training(self, lengths: Sequence[int] | NDArray[np.integer]) -> Flops:
        """Return the operations of forward and backward pass: three times the forward pass.

        The gradients of frozen weights are not computed, so they do not count.
        """
        full, tokens = self.forward(lengths).scaled(3.0), float(np.sum(lengths))
        return replace(
            full,
            projections=full.projections - self.frozen_projections_per_token * tokens,
            output=full.output - self.frozen_output_per_token * tokens,
        )

    def six_n_t(self, tokens: int) -> float:
        """Return ``6 N T``, the usual estimate of forward and backward pass, with 4 for frozen ones."""
        trained = self.parameters.multiplied - self.parameters.multiplied_frozen
        return (6.0 * trained + 4.0 * self.parameters.multiplied_frozen) * tokens

    def repeated_work(self, tokens: int) -> float:
        """Return the operations of forward and backward pass with weights that a token used before."""
        return (3.0 * self.repeated_per_token - self.frozen_repeated_per_token) * tokens


def visible_pairs(length: NDArray[np.float64], window: int | None) -> float:
    """Return the visible pairs of documents of ``length`` tokens, for one layer.

    These are ``L^2 / 2`` pairs without a window. With a window of w tokens the rows after the first
    w have w pairs each.
    """
    within = length if window is None else np.minimum(length, window)
    return float((within * length - np.square(within) / 2).sum())


def pairs_in_chunks(length: NDArray[np.float64], chunk: int) -> float:
    """Return the pairs of tokens in equal chunks: ``q^2 / 2`` for q tokens, of ``chunk`` or fewer."""
    full_chunks = np.floor(length / chunk)
    remainder = length - full_chunks * chunk
    return float((full_chunks * chunk**2 + np.square(remainder)).sum()) / 2


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of the device in FLOP/s.

    Returns None on a CPU, an unknown GPU or a slice of a GPU; no MFU is shown then.
    """
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(device_name: str) -> float | None:
    """Return the dense bf16 peak for the name of a device, e.g. ``NVIDIA H100 80GB HBM3``."""
    # A MIG slice has a part of the device's peak, and the name does not tell which part.
    if " MIG " in device_name:
        return None
    return next(
        (peak for key, peak in PEAK_BF16_FLOPS.items() if re.search(rf"\b{key}\b", device_name)),
        None,
    )
