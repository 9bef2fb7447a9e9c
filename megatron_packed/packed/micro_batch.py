"""`MicroBatch`: one pack of tokens with all that a training step needs, in one byte buffer and one
copy to the device.

A document of L tokens gives at most L - 1 targets: ``labels[t]`` is the token after ``t`` in the
same document, and counts (``loss_mask[t]`` is 1) where that token is marked as a target. The last
token of a document predicts nothing, so no label ever crosses a boundary; the tail predicts
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_packed.packed.cu_seqlens import (
    Int32Array,
    aligned,
    as_lengths,
    cu_seqlens_from_lengths,
)
from megatron_packed.packed.host_to_device_buffer import BufferLayout
from megatron_packed.packed.params import (
    PackedSeqParams,
    bounded_max_seqlen,
    packed_fields,
    write_packed,
)

NO_LABEL = 0
"""Label of a slot that predicts nothing: a real token number, so that no kernel indexes out of
range.
"""

IGNORED_BY_HUGGING_FACE = -100
"""Label of a token that is no target, in Hugging Face's models and in torch's cross-entropy."""

_FIT_INT32 = frozenset(map(np.dtype, (np.int8, np.uint8, np.int16, np.uint16, np.int32)))


class Document(NamedTuple):
    """One document (or piece of one) as it goes into a pack."""

    tokens: NDArray[np.integer]
    """``(L,)`` token numbers, L >= 1."""
    target_mask: NDArray[np.integer] | None = None
    """``(L,)``, nonzero where a token is to be predicted; None for every token. Nothing predicts
    token 0.
    """


@dataclass(frozen=True)
class MicroBatchLayout:
    """Places of a micro-batch's tensors in its buffer; equal for equal T and N."""

    total_tokens: int
    """Token slots T."""
    capacity: int
    """Real documents there is room for, N."""

    @property
    def buffer(self) -> BufferLayout:
        return _buffer_layout(self.total_tokens, self.capacity)


@lru_cache(maxsize=64)
def _buffer_layout(total_tokens: int, capacity: int) -> BufferLayout:
    return BufferLayout.of(
        [
            ("tokens", torch.int32, (total_tokens,)),
            ("labels", torch.int32, (total_tokens,)),
            ("loss_mask", torch.float32, (total_tokens,)),
            ("scales", torch.float32, (2,)),
            *packed_fields(total_tokens, capacity),
        ]
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MicroBatch:
    """One pack: views into ``buffer``, and what the host knows about it without asking the device."""

    buffer: Tensor
    """``(num_bytes,)`` uint8 that holds every tensor below except host twins."""
    layout: MicroBatchLayout
    tokens: Tensor
    """``(T,)`` int32, 0 on the tail and on padding."""
    labels: Tensor
    """``(T,)`` int32, the token to predict at each slot, already shifted; `NO_LABEL` where there is
    none.
    """
    loss_mask: Tensor
    """``(T,)`` float32, 1 where the label counts, else 0."""
    packed: PackedSeqParams
    scales: Tensor
    """``(2,)`` float32: 1 / target tokens and 1 / non-empty packs of what is summed, for training
    the whole step.
    """
    num_real_tokens: int
    """Tokens of real documents, host integer."""
    num_target_tokens: int
    """Slots whose label counts, host integer."""

    @classmethod
    def build(
        cls,
        documents: Sequence[Document | tuple[NDArray[np.integer], NDArray[np.integer] | None]],
        total_tokens: int,
        capacity: int | None = None,
        scales: tuple[float, float] | None = None,
        max_seqlen: int | None = None,
        alignment: int = 1,
        vocab_size: int | None = None,
    ) -> MicroBatch:
        """Lay ``documents`` out in order in ``total_tokens`` slots, on the host; no documents give
        an all-tail pack.

        Args:
            capacity: real documents to leave room for; None for exactly as many as there are.
            scales: see the field; None for those of this pack alone, so that its loss is a mean
            over its targets.
            max_seqlen: upper bound to report instead of the exact longest row.
            alignment: documents begin and end at multiples of it; what a document does not fill is
            padding.
            vocab_size: the model's; with it, a token number that the model does not have is
                refused. Without it such a token gives a NaN loss, since the device cannot raise an
                error.
        Raises:
            ValueError: the documents do not fit, one is empty, a mask has another length than its
                tokens or other entries than 0 and 1, or a token is no integer from 0 to
                ``vocab_size``, or to 2^31, exclusive.
        """
        lengths = [len(tokens) for tokens, _ in documents]
        cu_seqlens = cu_seqlens_from_lengths(aligned(lengths, alignment), total_tokens, capacity)
        layout = MicroBatchLayout(total_tokens, cu_seqlens.size - 2)
        buffer = layout.buffer.allocate()
        views = layout.buffer.views(buffer)
        write_packed(views, cu_seqlens, as_lengths(lengths))
        _write_documents(views, documents, cu_seqlens, vocab_size)
        num_target_tokens = int(np.count_nonzero(views["loss_mask"].numpy()))
        views["scales"].numpy()[:] = (
            (1 / max(num_target_tokens, 1), 1.0) if scales is None else scales
        )
        return cls._from_buffer(
            buffer,
            layout,
            num_seqs=len(documents),
            max_seqlen=bounded_max_seqlen(cu_seqlens, max_seqlen),
            cu_seqlens_cpu=torch.from_numpy(cu_seqlens),
            num_real_tokens=sum(lengths),
            num_target_tokens=num_target_tokens,
        )

    @classmethod
    def _from_buffer(
        cls,
        buffer: Tensor,
        layout: MicroBatchLayout,
        *,
        num_seqs: int,
        max_seqlen: int,
        cu_seqlens_cpu: Tensor,
        num_real_tokens: int,
        num_target_tokens: int,
    ) -> MicroBatch:
        views = layout.buffer.views(buffer)
        return cls(
            buffer=buffer,
            layout=layout,
            tokens=views["tokens"],
            labels=views["labels"],
            loss_mask=views["loss_mask"],
            scales=views["scales"],
            packed=PackedSeqParams.from_views(
                views, num_seqs=num_seqs, max_seqlen=max_seqlen, cu_seqlens_cpu=cu_seqlens_cpu
            ),
            num_real_tokens=num_real_tokens,
            num_target_tokens=num_target_tokens,
        )

    def __repr__(self) -> str:
        facts = vars(self)
        return (
            f"{type(self).__name__}({facts['num_real_tokens']} tokens, {facts['num_target_tokens']} targets, "
            f"{facts['packed']!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader's worker sends one tensor to the main process in place of one for each view.
        facts = ("num_seqs", "max_seqlen", "cu_seqlens_cpu")
        host = {name: getattr(self.packed, name) for name in facts}
        counts = {name: getattr(self, name) for name in ("num_real_tokens", "num_target_tokens")}
        return partial(MicroBatch._from_buffer, **host, **counts), (self.buffer, self.layout)

    def with_buffer(self, buffer: Tensor) -> MicroBatch:
        """The same micro-batch through another buffer that holds (or will hold) the same bytes;
        without kernel tables.

        Raises:
            ValueError: ``buffer`` has another size or dtype.
        """
        return self._from_buffer(
            buffer,
            self.layout,
            num_seqs=self.packed.num_seqs,
            max_seqlen=self.packed.max_seqlen,
            cu_seqlens_cpu=self.packed.cu_seqlens_cpu,
            num_real_tokens=self.num_real_tokens,
            num_target_tokens=self.num_target_tokens,
        )

    def pin_memory(self) -> MicroBatch:
        """A copy in page-locked memory, from which `to` can copy without blocking the host."""
        return self.with_buffer(self.buffer.pin_memory())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """This micro-batch on ``device``: exactly one copy, or none (the same object) when it is
        already there.

        Kernel tables do not travel: they are derived on the device, once per micro-batch.
        """
        moved = self.buffer.to(device, non_blocking=non_blocking)
        return self if moved is self.buffer else self.with_buffer(moved)

    def to_huggingface(self) -> dict[str, Any]:
        """Return the keyword arguments of a Hugging Face causal language model for this pack.

        Returns:
            ``input_ids``, ``labels`` and ``position_ids`` ``(1, T)`` int64, ``cu_seq_lens_q`` and
            ``cu_seq_lens_k`` ``(N + 2,)`` int32, ``max_length_q`` and ``max_length_k`` int. The
            labels are those of the tokens themselves, because the model shifts them, and -100 where
            a token is no target. So the first token of every document has -100.
        """
        labels_T = torch.full_like(self.tokens, IGNORED_BY_HUGGING_FACE)
        labels_T[1:] = torch.where(
            self.loss_mask[:-1] > 0, self.labels[:-1], IGNORED_BY_HUGGING_FACE
        )
        cu_seqlens, max_seqlen = self.packed.cu_seqlens, self.packed.max_seqlen
        return {
            "input_ids": self.tokens.long()[None],
            "labels": labels_T.long()[None],
            "position_ids": self.packed.position_ids.long()[None],
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": max_seqlen,
            "max_length_k": max_seqlen,
        }


def _write_documents(
    views: dict[str, Tensor],
    documents: Sequence[Document | tuple[NDArray[np.integer], NDArray[np.integer] | None]],
    cu_seqlens: Int32Array,
    vocab_size: int | None,
) -> None:
    """Tokens, shifted labels and loss mask of every document; the buffer is zeroed: padding and
    tail need nothing.
    """
    tokens_T, labels_T, mask_T = (views[name].numpy() for name in ("tokens", "labels", "loss_mask"))
    for number, (given, target_mask) in enumerate(documents):
        tokens = np.asarray(given)
        if tokens.dtype not in _FIT_INT32 or tokens.ndim != 1:
            _check_tokens(number, tokens, None)
        start = int(cu_seqlens[number])
        end = start + len(tokens)
        tokens_T[start:end] = tokens
        labels_T[start : end - 1] = tokens[1:]
        if target_mask is None:
            mask_T[start : end - 1] = 1
            continue
        if len(target_mask) != end - start:
            raise ValueError(
                f"document {number} has {end - start} tokens but a target mask of {len(target_mask)} entries; "
                "the tokeniser must give one entry per token."
            )
        mask = np.asarray(target_mask)
        if mask.dtype != np.bool_ and ((mask != 0) != mask).any():  # weights, or labels with -100
            raise ValueError(
                f"document {number} has a target mask with other entries than 0 and 1; give 1 for tokens that are "
                "targets. Weights and labels are no masks."
            )
        counts = mask[1:] != 0
        labels_T[start : end - 1][~counts] = NO_LABEL
        mask_T[start : end - 1] = counts
    # Over the whole pack, not by document: two passes of some microseconds each.
    if tokens_T.min() < 0 or (vocab_size is not None and tokens_T.max() >= vocab_size):
        for number, (given, _) in enumerate(documents):
            _check_tokens(number, np.asarray(given), vocab_size)


def _check_tokens(number: int, tokens: NDArray[Any], vocab_size: int | None) -> None:
    """
    Raises:
        ValueError: the tokens of document ``number`` are no row of integers, or one is out of
            range.
    """
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"document {number} has tokens of type {tokens.dtype} and shape {tokens.shape}, beginning with "
            f"{tokens.flat[0]}; token numbers are one row of integers."
        )
    limit, rule = (
        (2**31, "is stored as int32")
        if vocab_size is None
        else (vocab_size, f"is below {vocab_size=}")
    )
    outside = (tokens < 0) | (tokens >= limit)
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(
            f"document {number} has token {tokens[at]} at position {at}; a token number is 0 or more and {rule}. "
            "Encode with the model's tokenizer."
        )
