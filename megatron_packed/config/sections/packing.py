"""Options of batch sizes and of packing documents into fixed-size token buffers."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from megatron_packed.config.conditions import option_given
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.options import Stored, derived_option, option, required_option
from megatron_packed.config.section import Section, Sound
from megatron_packed.config.value_checks import INT32_MAX


class BatchStage(NamedTuple):
    """Consecutive steps with the same number of packs, up to the next stage."""

    step: int
    """First step, counted from 0."""
    pack: int
    """Packs of all ranks before this step. In a stage without an earlier stage, the number may be
    negative: it then only gives the position of later steps.
    """
    packs: int
    """Packs of each step, over all ranks."""


def stage_of(stages: list[BatchStage], step: int) -> BatchStage:
    """Return the stage of a step; for a step before all stages, the first stage."""
    number = bisect_right(stages, step, key=lambda stage: stage.step)
    return stages[max(number - 1, 0)]


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Growth of the batch from ``start`` by ``increment`` samples to ``full``, in equal parts of
    ``samples``. As in Megatron, the samples before a step decide its size.
    """

    start: int
    increment: int
    samples: int
    full: int
    micro: int
    """Samples of a pack; divides all batch sizes."""

    def ahead(self, step: int = 0, samples: int = 0) -> int:
        """Return the samples before the full batch, minus those of as many full steps.

        ``step`` and ``samples`` are those so far.
        """
        last = self.stages(step, 0, samples)[-1]
        return samples + last.pack * self.micro - last.step * self.full

    def sentence(self) -> str:
        """Return the growth in words; empty if the batch is full from the first step.

        Example:
            ``The batch grows from 2 packs to 6 over the first 5 steps (14 samples).``
        """
        first, last = self.stages()[0], self.stages()[-1]
        if first == last:
            return ""
        return (
            f"The batch grows from {first.packs:,} pack{'s' if first.packs > 1 else ''} to "
            f"{last.packs:,} over the first {last.step:,} steps ({last.pack * self.micro:,} samples)."
        )

    def stages(self, step: int = 0, pack: int = 0, samples: int = 0) -> list[BatchStage]:
        """Return the stages of a run from ``step`` on, before which the run trained on ``pack``
        packs of its plan and on ``samples`` samples.

        Example:
            The batch grows from 2 by 2 to 6 samples over 12 samples, with one sample in a pack.
            Steps 0 to 2 take 2 packs, steps 3 and 4 take 4, and later steps take 6.
        """
        increments = (self.full - self.start) // self.increment
        stages = []
        while True:
            grown = (
                min(samples * increments // self.samples, increments)
                if self.samples
                else increments
            )
            packs = (self.start + grown * self.increment) // self.micro
            stages.append(BatchStage(step, pack, packs))
            if grown == increments:
                return stages
            # The stage ends with the first step that reaches the next increment.
            end = -(-(grown + 1) * self.samples // increments)
            steps = -(-(end - samples) // (packs * self.micro))
            step, pack = step + steps, pack + steps * packs
            samples += steps * packs * self.micro


def _tokens_of_pack(stored: Stored) -> int:
    """Return the maximum document length of a run that was limited only by its packs."""
    slots: int = stored["packing"]["micro_batch_size"] * stored["packing"]["seq_length"]
    return slots


class PackingConfig(Section, title="packing"):
    """Options of batch sizes and of the packer. One pack holds ``micro_batch_size * seq_length``
    token slots.
    """

    seq_length: int = required_option(
        "Token slots of one sample.", unit="tokens", minimum=2, resume="packs"
    )
    micro_batch_size: int = option(
        1,
        "Samples of one micro-batch; they form one pack of micro-batch size x --seq-length slots.",
        unit="samples",
        minimum=1,
        resume="packs",
    )
    global_batch_size: int = derived_option(
        "Samples of one optimizer step over all ranks.",
        derived="micro-batch size x data-parallel ranks",
        derive=lambda packing: packing.micro_batch_size,
        derived_from=("micro_batch_size",),
        unit="samples",
        minimum=1,
        multiple_of="micro_batch_size",
    )
    rampup_batch_size: tuple[int, ...] = option(
        (),
        "Growth of the global batch: its first size, the increment, and the number of samples over "
        "which it grows to --global-batch-size. Needs --train-samples.",
        unit="samples",
        minimum=0,
    )
    packing_method: str = option(
        "balanced",
        "Choice of the documents that share a pack. With balanced, all packs have about the "
        "same, small number of documents. With best_fit_decreasing, the fewest slots are "
        "wasted. With sequential, the order of documents is kept.",
        choices=("balanced", "best_fit_decreasing", "sequential"),
        resume="packs",
    )
    packing_window: int = option(
        4096,
        "Number of documents of the shuffled stream that are packed together.",
        unit="documents",
        minimum=1,
        resume="packs",
    )
    max_documents_per_pack: int | None = option(
        None,
        "Maximum number of documents in a pack; no limit when not given.",
        unit="documents",
        minimum=1,
        resume="packs",
    )
    pad_packed_seq_alignment: int | None = option(
        None,
        "Alignment of documents: each begins and ends at a multiple of this number, and the "
        "packer counts the padding. The default is 2 x --context-parallel-size if "
        "--cp-comm-type cuts documents into chunks, else 1.",
        unit="tokens",
        minimum=1,
        resume="packs",
    )
    max_document_length: int = derived_option(
        "Maximum length of a document, or of a piece of one, in a pack; at most --seq-length x "
        "--micro-batch-size.",
        derived="--seq-length",
        derive=lambda packing: packing.seq_length,
        derived_from=("seq_length",),
        unit="tokens",
        minimum=2,
        resume="packs",
        earlier=_tokens_of_pack,
    )
    overlong_policy: str = derived_option(
        "Handling of documents longer than --max-document-length; all cases are counted. With "
        "truncate_prompt, earlier turns and the middle of long messages are cut, and the question "
        "and the last answer are kept. With truncate, the end is cut. With split, the document becomes several "
        "pieces. With drop, it is skipped. With error, the run ends.",
        derived="split, which loses no token; with --sft truncate_prompt, which keeps the last "
        "answer",
        choices=("truncate_prompt", "truncate", "split", "drop", "error"),
        resume="packs",
        earlier=lambda stored: "truncate",
    )
    keep_pieces_without_targets: bool = option(
        False,
        "With --sft, also pack pieces of documents without any target token. Gives the same "
        "packs as older versions, which did not drop such pieces.",
        only_if=option_given("data.sft"),
        resume="packs",
        earlier=lambda stored: stored["data"].get("sft", False),
    )

    @property
    def tokens_per_pack(self) -> int:
        """Number of token slots of a micro-batch (T)."""
        return self.micro_batch_size * self.seq_length

    @property
    def batch_ramp(self) -> BatchRamp | None:
        """Growth of the batch with ``--rampup-batch-size``; None without it, and for values that
        `rules` refuses.
        """
        if len(self.rampup_batch_size) != 3:
            return None
        start, increment, samples = self.rampup_batch_size
        full, micro = self.global_batch_size, self.micro_batch_size
        if not 0 < start < full or increment < 1 or (full - start) % increment:
            return None
        if start % micro or increment % micro:
            return None
        return BatchRamp(start=start, increment=increment, samples=samples, full=full, micro=micro)

    def rules(self, sound: Sound) -> Problems:
        if sound("seq_length", "micro_batch_size") and self.tokens_per_pack > INT32_MAX:
            yield self.problem(
                "seq_length",
                f"times --micro-batch-size ({self.micro_batch_size}) is {self.tokens_per_pack} "
                f"token slots, but offsets in a pack are 32-bit integers (at most {INT32_MAX})",
                "reduce one of them",
            )
        sizes = ("seq_length", "micro_batch_size", "max_document_length")
        if sound(*sizes) and self.max_document_length > self.tokens_per_pack:
            yield self.problem(
                "max_document_length",
                f"is more than a pack of --seq-length x --micro-batch-size ({self.tokens_per_pack}) tokens",
                f"give at most {self.tokens_per_pack}, or raise --seq-length",
            )
        yield from super().rules(sound)

    def ramp_rules(self, unit: int) -> Problems:
        """Yield the problem of ``--rampup-batch-size``; ``unit`` is the number of samples of one
        micro-batch of every data-parallel rank.
        """
        flag, shown = "--rampup-batch-size", " ".join(map(str, self.rampup_batch_size))
        if len(self.rampup_batch_size) != 3:
            yield Problem(
                flag, shown, "needs three numbers", "give START INCREMENT SAMPLES, in samples"
            )
            return
        start, increment, _ = self.rampup_batch_size
        full = self.global_batch_size
        if not start or not increment:
            rule = "must begin with two numbers above 0"
            yield Problem(flag, shown, rule, "give START and INCREMENT in samples")
        elif start % unit or increment % unit:
            yield Problem(
                flag,
                shown,
                f"must begin with two multiples of {unit}, the samples of one micro-batch on every "
                "data-parallel rank",
                f"give multiples of {unit}",
            )
        elif start > full or (full - start) % increment:
            steps = f"from {start} in steps of {increment}"
            rule = f"does not reach --global-batch-size ({full}) {steps}"
            smaller = f"give a START of at most {full}"
            cure = smaller if start > full else "give an INCREMENT that divides the difference"
            yield Problem(flag, shown, rule, cure)


def default_overlong_policy(sft: bool) -> str:
    """Return the default --overlong-policy: text keeps every token, a conversation keeps its last
    answer.
    """
    return "truncate_prompt" if sft else "split"
