"""How documents share fixed-size token buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import derived_option, option, required_option
from megatron_packed.config.section import Section, Sound
from megatron_packed.config.value_checks import INT32_MAX


@dataclass(frozen=True, kw_only=True)
class PackingConfig(Section, title="packing"):
    """Batch sizes and the packer. One pack holds ``micro_batch_size * seq_length`` token slots."""

    seq_length: int = required_option("Token slots of one sample.", unit="tokens", minimum=2)
    micro_batch_size: int = option(
        1, "Samples that one forward pass takes as one pack.", unit="samples", minimum=1
    )
    global_batch_size: int = derived_option(
        "Samples of one optimizer step, over all ranks.",
        derived="micro-batch size x data-parallel ranks",
        unit="samples",
        minimum=1,
    )
    packing_method: str = option(
        "balanced",
        "Which documents share a pack: balanced keeps their number even and small, best_fit_decreasing fills packs "
        "most, sequential takes documents as they come.",
        choices=("balanced", "best_fit_decreasing", "sequential"),
    )
    packing_window: int = option(
        4096,
        "Documents of the shuffled stream that are packed together.",
        unit="documents",
        minimum=1,
    )
    max_documents_per_pack: int | None = option(
        None,
        "The packer puts no more documents into a pack; without it there is no limit.",
        unit="documents",
        minimum=1,
    )
    pad_packed_seq_alignment: int | None = option(
        None,
        "Documents begin and end at multiples of it in their pack; the packer counts the padding after them. By "
        "default 2 x --context-parallel-size where --cp-comm-type cuts documents into so many chunks, else 1.",
        unit="tokens",
        minimum=1,
    )
    max_document_length: int = derived_option(
        "Longest document, or piece of one, that a pack takes; at most --seq-length x --micro-batch-size.",
        derived="--seq-length",
        unit="tokens",
        minimum=2,
    )
    overlong_policy: str = derived_option(
        "What happens to a document of more than --max-document-length tokens: truncate_prompt cuts earlier "
        "turns or the front of the prompt and keeps the last answer, truncate cuts the end, split makes several of it, "
        "drop leaves it out, error ends the run; all are counted.",
        derived="split, which loses no token; with --sft truncate_prompt, which loses no last answer",
        choices=("truncate_prompt", "truncate", "split", "drop", "error"),
    )
    keep_pieces_without_targets: bool = option(
        False,
        "With --sft, also pack pieces of documents in which nothing is learned: the packs of runs begun before "
        "such pieces were dropped.",
    )

    @property
    def tokens_per_pack(self) -> int:
        """Token slots T of a micro-batch."""
        return self.micro_batch_size * self.seq_length

    def derive(self, sound: Sound) -> dict[str, Any]:
        values = {"global_batch_size": self.micro_batch_size} if sound("micro_batch_size") else {}
        return {**values, "max_document_length": self.seq_length} if sound("seq_length") else values

    def rules(self, sound: Sound) -> Iterator[Problem]:
        if sound("seq_length", "micro_batch_size") and self.tokens_per_pack > INT32_MAX:
            yield Problem(
                "--seq-length",
                str(self.seq_length),
                f"times --micro-batch-size ({self.micro_batch_size}) is {self.tokens_per_pack} token slots, "
                f"and offsets in a pack are 32-bit (at most {INT32_MAX})",
                "make one of them smaller",
            )
        sizes = ("seq_length", "micro_batch_size", "max_document_length")
        if sound(*sizes) and self.max_document_length > self.tokens_per_pack:
            yield Problem(
                "--max-document-length",
                str(self.max_document_length),
                f"is more than a pack of --seq-length x --micro-batch-size ({self.tokens_per_pack}) tokens",
                f"give at most {self.tokens_per_pack}, or raise --seq-length",
            )
        if (
            sound("global_batch_size", "micro_batch_size")
            and self.global_batch_size % self.micro_batch_size
        ):
            yield Problem(
                "--global-batch-size",
                str(self.global_batch_size),
                f"must be a multiple of --micro-batch-size ({self.micro_batch_size})",
                nearest_multiples(self.global_batch_size, self.micro_batch_size),
            )


def default_overlong_policy(sft: bool) -> str:
    """Return what happens to over-long documents by default: text keeps every token, a conversation
    its last answer.
    """
    return "truncate_prompt" if sft else "split"


def nearest_multiples(number: int, of: int) -> str:
    """A cure: the multiples around a number."""
    lower = number // of * of
    return f"give {lower} or {lower + of}" if lower else f"give {of}"
