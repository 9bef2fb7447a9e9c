"""Reasons for eager fallbacks, their counters, and the error of ``--cuda-graph-strict``.

A reason is a text. It is counted, logged with the step, and shown in the report.
``docs/cuda_graphs.md`` lists the reasons with their cures. This module has three groups of reasons:

- A complete micro-batch runs eagerly.
- One call of a module runs eagerly within a replayed micro-batch.
- A module is never captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_packed.config import flag_names as flags
from megatron_packed.packed.capture_sizes import CaptureSize

ALL = ""
"""Key that means "everything that is captured", in mappings from module or part names to reasons."""

# -- a complete micro-batch runs eagerly ---------------------------------------------------------------

ADDRESSES_CHANGED = "weights have moved to other memory"
"""Reason that is counted when a weight, a buffer, a ``main_grad`` or an optimizer state was
reallocated. The text names weights because they are the most frequent case.
"""
NO_CAPTURE_SIZE = "padded to a size for which no graph was captured"
NO_GRAPHS = "no graphs"
"""Nothing has been captured yet, or all graphs were freed."""
NO_GRAPHS_OF_SIZE = "no graphs for this capacity"
"""The micro-batch was built for a capture size, but the capture of this size failed."""


def no_gpu(device: object) -> str:
    """Return the reason for all micro-batches on a device that is not a GPU."""
    return f"CUDA graphs need a GPU, and the device is {device}"


def other_tokens(total_tokens: int) -> str:
    """Return the reason for a micro-batch whose number of tokens differs from the slot's."""
    return f"the micro-batch does not have the {total_tokens} tokens for which the graphs were captured"


def more_documents(largest: int) -> str:
    """Return the reason for a micro-batch with more documents than the largest capacity."""
    return f"more than {largest} documents"


def more_documents_elsewhere(largest: int) -> str:
    """Return the reason for a micro-batch that runs eagerly because a micro-batch of another rank
    has too many documents.

    The pack plan pads this rank's micro-batch to the other rank's document count. So both ranks
    see the same capacity, and both run eagerly.
    """
    return f"{more_documents(largest)} on another rank that runs the same captured collectives"


# -- one module runs eagerly within a replayed micro-batch ---------------------------------------------

NOT_IN_WARM_UP = "it did not run in the warm-up"
OTHER_ARGUMENTS = "called with other arguments than in the warm-up"
UNDER_AUTOCAST = "it runs under autocast, and its graphs are captured without autocast"
IN_EVALUATION_MODE = (
    "it is in evaluation mode and computes gradients, and its graphs are captured in training mode"
)
WITHOUT_INPUT_GRADIENT = "its input does not require a gradient, and its graphs compute one"
OUT_OF_ORDER = "it runs again in this micro-batch, or in another order than in the warm-up"
INPUT_OVERWRITTEN = "its input is not the tensor that the module before it returned"


def other_hidden_states(shape: Sequence[int], dtype: object) -> str:
    """Return the reason for hidden states whose shape or dtype differs from the static input's."""
    return (
        f"hidden states {tuple(shape)} {dtype} differ in shape or dtype from those in the capture"
    )


# -- a module is never captured ------------------------------------------------------------------------
# Three reasons above also apply: autocast, evaluation mode, an input that requires no gradient.

RUNS_TWICE = (
    "it runs more than once in a micro-batch, and its graphs store the activations of one run"
)
RANDOM_NUMBERS = "it draws random numbers (dropout), and a graph would repeat them"
DERIVED_METADATA = (
    "its metadata is a modified copy of the slot's (by with_tables?), and its graphs read only the "
    "slot's own metadata"
)
MORE_ARGUMENTS = (
    "it is called with keywords, or with more arguments than hidden states and the pack's metadata"
)
NO_MAIN_GRAD = "it has parameters without main_grad (see FlatBuffers)"
FOREIGN_MEMORY = (
    "it returns its input, a parameter, a buffer or the metadata (or a view of one of them), and a "
    "captured module must return new tensors"
)
INDEPENDENT_OUTPUT = "the first tensor that a captured module returns must depend on its input"
NOT_CONTIGUOUS = (
    "it returns a tensor that is not contiguous, and TransformerEngine does not preserve strides"
)


def returns_no_tensors(types: set[str]) -> str:
    """Return the reason for a module that returns nothing, or values that are not tensors."""
    return f"it returns {' and '.join(sorted(types)) or 'nothing'}, and a graph can update only tensors"


def reads_on_host(module: str, reads: Sequence[str]) -> str:
    """Return the warning about a module that reads values on the host.

    Args:
        module: name of the module.
        reads: at least one read, with its place in source code; three are shown.
    """
    omitted = f" and {len(reads) - 3} more" if len(reads) > 3 else ""
    return (
        f"{module} reads values on the host: {'; '.join(reads[:3])}{omitted}. A CUDA graph cannot repeat that, so on a "
        "GPU this module would run eagerly. Keep the values in tensors."
    )


def returns_another_type(name: str) -> str:
    """Return the reason for a module that returns a value of another type during its capture."""
    return f"a captured module must return only tensors, and this module returns a {name}"


def without_hooks(count: int) -> str:
    """Return the reason for a module to whose ``grad`` TransformerEngine's graphs would write."""
    return (
        f"{count} of its parameters have no hook that adds their gradient to main_grad (see "
        "attach_accumulation), so a replay would write their gradient to grad"
    )


def no_memory_in_warm_up(error: Exception) -> str:
    """Return the reason for a capture size whose eager warm-up ran out of memory."""
    return f"the warm-up ran out of memory: {error}".splitlines()[0]


def error_in_capture(error: Exception) -> str:
    """Return the type and first line of an error: the reason for a failed capture."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


class GraphFallbackError(RuntimeError):
    """Eager execution of a micro-batch or module although ``--cuda-graph-strict`` forbids it."""


class Refusal(NamedTuple):
    """Module or part of a step that could not be captured for one capture size."""

    capture_size: CaptureSize
    name: str
    reason: str


@dataclass
class GraphCounters:
    """Counters of this rank since the start; the host counts them without reading the device."""

    replays: int = 0
    """Micro-batches that were replayed."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Micro-batches that ran eagerly, by reason."""
    module_fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls of single modules that ran eagerly within a replayed micro-batch, by reason."""
    captures: int = 0
    """Graphs captured since the start.

    For graphs of layers: shared tables, forward and backward of each module. For whole steps: each
    part, and the end of the step.
    """
    capture_seconds: float = 0.0
    memory_mib: float = 0.0
    """MiB of device memory that graphs hold now."""

    @property
    def hit_rate(self) -> float:
        """Share of the micro-batches that were replayed; 0 before the first."""
        total = self.replays + self.fallbacks.total()
        return self.replays / total if total else 0.0

    def fall_back(self, reason: str, *, strict: bool, too_many: bool) -> None:
        """Count a micro-batch that runs eagerly.

        Args:
            strict: raise an error instead of counting.
            too_many: this rank's or another rank's micro-batch has more documents than the largest
                capacity; the error then names the options that help.
        Raises:
            GraphFallbackError: ``strict`` is set.
        """
        if strict:
            cure = f"; raise {flags.CUDA_GRAPH_MAX_PACKED_SEQS} or limit packs with {flags.MAX_DOCUMENTS_PER_PACK}"
            why = reason + cure * too_many
            raise GraphFallbackError(
                f"a micro-batch would run eagerly, which {flags.CUDA_GRAPH_STRICT} forbids: {why}."
            )
        self.fallbacks[reason] += 1

    def sentences(self) -> list[str]:
        """Return the counts in words, for the console and the report."""
        lines = [
            f"CUDA graphs: {self.replays:,} micro-batches replayed, {self.fallbacks.total():,} run eagerly "
            f"(hit rate {100 * self.hit_rate:.1f} %); {self.captures} graphs captured in {self.capture_seconds:.1f} s, "
            f"{self.memory_mib:,.0f} MiB held now"
        ]
        lines += [
            f"  {count:,} x eager: {reason}" for reason, count in self.fallbacks.most_common()
        ]
        lines += [
            f"  {count:,} x one module eager: {reason}"
            for reason, count in self.module_fallbacks.most_common()
        ]
        return lines


def not_a_micro_batch(value: object) -> str:
    """Return a sentence for a value that is given in place of a micro-batch."""
    return (
        f"micro_batch is of type {type(value).__name__}; pass a MicroBatch, for example "
        "MicroBatch.build(documents, total_tokens)."
    )
