"""Every reason why something runs eagerly, the counters of fallbacks, and the error of ``--cuda-graph-strict``.

A reason is a text: it is counted, logged with the step, and shown in the report. ``docs/cuda_graphs.md``
lists the reasons with their cures. Three groups follow: reasons of a whole micro-batch, reasons of
one call of a module within a replayed micro-batch, and reasons why a module was never captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_packed.config import flag_names as flags
from megatron_packed.packed.capture_sizes import CaptureSize

ALL = ""
"""Name that stands for everything that is captured, where modules or parts are named."""

# -- a whole micro-batch runs eagerly ------------------------------------------------------------------

ADDRESSES_CHANGED = "weights have moved to other memory"
"""Also of a buffer, a ``main_grad`` or an optimizer state: the commonest case names it."""
NO_CAPTURE_SIZE = "padded to a size for which no graph was captured"
NO_GRAPHS = "no graphs"
"""Nothing was captured, or everything was given up."""
NO_GRAPHS_OF_SIZE = "no graphs for its capacity"
"""The micro-batch has a capture size, and nothing could be captured for that."""


def other_tokens(total_tokens: int) -> str:
    """Return the reason of a micro-batch with another number of tokens than the slot."""
    return f"another size than {total_tokens} tokens"


def more_documents(largest: int) -> str:
    """Return the reason of a micro-batch beyond the largest capacity."""
    return f"more than {largest} documents"


def more_documents_elsewhere(largest: int) -> str:
    """Return the reason where another rank's micro-batch is beyond the largest capacity.

    The plan gives this rank room for the other rank's documents, so that both run eagerly.
    """
    return f"{more_documents(largest)} on another rank, whose graphs share collectives"


# -- one module runs eagerly within a replayed micro-batch ---------------------------------------------

NOT_IN_WARM_UP = "the warm-up did not run it"
OTHER_ARGUMENTS = "called with other arguments than in the warm-up"
UNDER_AUTOCAST = "it runs under autocast, and its graphs would not"
IN_EVALUATION_MODE = (
    "it is in evaluation mode and asked for gradients, and its graphs are those of training"
)
WITHOUT_INPUT_GRADIENT = "its input asks for no gradient, and its graphs compute one"
OUT_OF_ORDER = "it runs again in this micro-batch, or in another order than in the warm-up"
INPUT_OVERWRITTEN = "its input is no longer what the module before it returned"


def other_hidden_states(shape: Sequence[int], dtype: object) -> str:
    """Return the reason of hidden states of another shape or dtype than the static ones."""
    return f"hidden states {tuple(shape)} {dtype} are not those it was captured with"


# -- a module is never captured: these, and three of above (autocast, evaluation mode, no gradient) ----

RUNS_TWICE = "it runs more than once in a micro-batch, and its graphs have room for one"
RANDOM_NUMBERS = "it draws random numbers (dropout), and a graph would repeat them"
DERIVED_METADATA = "it is given metadata made from the slot's (by with_tables?), and its graphs read the slot's alone"
MORE_ARGUMENTS = (
    "it is called with more than hidden states and the pack's metadata, or with keywords"
)
NO_MAIN_GRAD = "it has parameters without main_grad (see FlatBuffers)"
FOREIGN_MEMORY = (
    "it returns memory that is not its own: its input, a parameter, a buffer, or the metadata"
)
INDEPENDENT_OUTPUT = "the first tensor that a captured module returns must depend on its input"
NOT_CONTIGUOUS = "it returns a tensor that is not contiguous, and TransformerEngine forgets strides"


def returns_no_tensors(types: set[str]) -> str:
    """Return the reason of a module that returns nothing, or values of other types than tensors."""
    return f"it returns {' and '.join(sorted(types)) or 'nothing'}, and a graph can refresh tensors only"


def returns_another_type(name: str) -> str:
    """Return the reason of a module that returns something else than tensors while it is captured."""
    return f"a captured module returns tensors only, and this one returns a {name}"


def without_hooks(count: int) -> str:
    """Return the reason of a module whose parameters would get gradients from TransformerEngine's graphs."""
    return (
        f"{count} of its parameters have no hook that adds their gradient to main_grad (see "
        "attach_accumulation), and would get it from a replay in grad"
    )


def no_memory_in_warm_up(error: Exception) -> str:
    """Return the reason of a capture size whose eager warm-up was out of memory."""
    return f"warm-up found no memory: {error}".splitlines()[0]


def error_in_capture(error: Exception) -> str:
    """Return type and first line of an error: the reason of what failed while it was captured."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


class GraphFallbackError(RuntimeError):
    """Something ran, or would run, eagerly where that was forbidden."""


class Refusal(NamedTuple):
    """A module or a part of a step that has no graph of one capture size."""

    capture_size: CaptureSize
    name: str
    reason: str


@dataclass
class GraphCounters:
    """Counts since the start, on this rank; all known on the host."""

    replays: int = 0
    """Micro-batches that were replayed."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Micro-batches that ran eagerly, by reason."""
    module_fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls of single modules that ran eagerly within a replayed micro-batch, by reason."""
    captures: int = 0
    """Graphs captured since the start: tables, forward and backward of each module, or parts of a step."""
    capture_seconds: float = 0.0
    memory_mib: float = 0.0
    """Memory that graphs hold now."""

    @property
    def hit_rate(self) -> float:
        """Share of the micro-batches that were replayed; 0 before the first."""
        total = self.replays + self.fallbacks.total()
        return self.replays / total if total else 0.0

    def fall_back(self, reason: str, *, strict: bool, too_many: bool) -> None:
        """Count a micro-batch that runs eagerly.

        Args:
            strict: it must not.
            too_many: it, or that of another rank, has more documents than the largest capacity.
        Raises:
            GraphFallbackError: ``strict``.
        """
        if strict:
            cure = f"; raise {flags.CUDA_GRAPH_MAX_PACKED_SEQS} or cap the packer by {flags.MAX_DOCUMENTS_PER_PACK}"
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
