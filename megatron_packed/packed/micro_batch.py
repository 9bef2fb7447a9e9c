"""`MicroBatch`: one pack with all tensors that a training step needs, in one byte buffer.

One copy moves the buffer to the device. A document of L tokens has at most L - 1 targets.
``labels[t]`` is the token after ``t`` in the same document. ``loss_mask[t]`` is 1 if this next token
is marked as a target. The last token of a document and the tail have no label, so a label never
belongs to another document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_packed.packed.cu_seqlens_and_seq_idx import (
    Int32Array,
    aligned,
    as_lengths,
    bounded_max_seqlen,
    cu_seqlens_from_lengths,
)
from megatron_packed.packed.host_to_device_buffer import BufferLayout
from megatron_packed.packed.params import (
    PackedSeqParams,
    packed_fields,
    write_packed,
)

NO_LABEL = 0
"""Label of a slot without a target: a valid token number, so that kernels can index with it."""

MOST_DEPTHS = 14
"""Largest number of depths of multi-token prediction, and the size of ``depth_scales``. It is a
constant, so that the layout of a micro-batch depends on T and N only.
"""

IGNORED_BY_HUGGING_FACE = -100
"""Label of a token that is not a target, in Hugging Face's models and in torch's cross-entropy."""

_FIT_INT32 = frozenset(map(np.dtype, (np.int8, np.uint8, np.int16, np.uint16, np.int32)))


class Document(NamedTuple):
    """One document, or a part of a document, that is packed."""

    tokens: NDArray[np.integer]
    """``(L,)`` token numbers, L >= 1."""
    target_mask: NDArray[np.integer] | None = None
    """``(L,)``, nonzero for tokens that are targets; None if all tokens are targets.

    Token 0 is never a target, because no token comes before it.
    """


@dataclass(frozen=True)
class MicroBatchLayout:
    """Positions of a micro-batch's tensors in its buffer. They depend only on T and N."""

    total_tokens: int
    """Number of token slots, T."""
    capacity: int
    """Largest number of real documents, N."""

    @property
    def buffer(self) -> BufferLayout:
        return _buffer_layout(self.total_tokens, self.capacity)


@lru_cache(maxsize=64)
def _buffer_layout(total_tokens: int, capacity: int) -> BufferLayout:
    return BufferLayout.from_fields(
        [
            ("tokens", torch.int32, (total_tokens,)),
            ("labels", torch.int32, (total_tokens,)),
            ("loss_mask", torch.float32, (total_tokens,)),
            ("scales", torch.float32, (2,)),
            ("depth_scales", torch.float32, (MOST_DEPTHS,)),
            *packed_fields(total_tokens, capacity),
        ]
    )


class HostNumbers(NamedTuple):
    """Attributes of a micro-batch and of its metadata that are on the host."""

    num_seqs: int
    max_seqlen: int
    cu_seqlens_cpu: Tensor
    num_real_tokens: int
    num_target_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MicroBatch:
    """One pack: tensors as views of ``buffer``, and numbers that the host needs."""

    buffer: Tensor
    """``(num_bytes,)`` uint8; the memory of all other tensors except ``packed.cu_seqlens_cpu``."""
    layout: MicroBatchLayout
    tokens: Tensor
    """``(T,)`` int32, 0 on the tail and on padding."""
    labels: Tensor
    """``(T,)`` int32, the target of each slot, already shifted; `NO_LABEL` if there is no target."""
    loss_mask: Tensor
    """``(T,)`` float32, 1 for slots with a target, else 0."""
    packed: PackedSeqParams
    scales: Tensor
    """``(2,)`` float32 factors of the summed losses: 1 / number of target tokens, and 1 / number of
    non-empty packs. In training both numbers count the complete step.
    """
    depth_scales: Tensor
    """``(14,)`` float32: 1 / number of targets of each depth of multi-token prediction, counted like
    those of ``scales``; 0 for depths that do not exist.
    """
    num_real_tokens: int
    """Number of tokens of real documents, on the host."""
    num_target_tokens: int
    """Number of slots with a target, on the host."""

    @classmethod
    def build(
        cls,
        documents: Sequence[Document | tuple[NDArray[np.integer], NDArray[np.integer] | None]],
        total_tokens: int,
        capacity: int | None = None,
        scales: Sequence[float] | None = None,
        max_seqlen: int | None = None,
        alignment: int = 1,
        vocab_size: int | None = None,
    ) -> MicroBatch:
        """Pack ``documents`` in order into ``total_tokens`` slots, on the host.

        Without documents the pack consists only of the tail.

        Args:
            documents: documents, or pairs of tokens and target mask.
            total_tokens: number of slots, T.
            capacity: capacity in real documents; None for the number of ``documents``.
            scales: values of ``scales``, then of ``depth_scales``; None for those of this pack only,
                so that each loss is a mean over its targets.
            max_seqlen: upper bound of the longest row; None for the exact value.
            alignment: documents begin and end at multiples of this number of slots; unused slots of
                a document are padding.
            vocab_size: vocabulary size of the model, to check all token numbers. Without this check
                an invalid token number gives a NaN loss, because the device cannot raise an error.
        Raises:
            ValueError: the documents do not fit; a document is empty; a mask has another length than
                its document, or values other than 0 and 1. Also if a token is not an integer from 0
                to ``vocab_size - 1``; without ``vocab_size`` the limit is ``2**31 - 1``.
        """
        lengths = as_lengths([len(tokens) for tokens, _ in documents])
        cu_seqlens = cu_seqlens_from_lengths(aligned(lengths, alignment), total_tokens, capacity)
        max_seqlen = bounded_max_seqlen(cu_seqlens, max_seqlen)
        layout = MicroBatchLayout(total_tokens, cu_seqlens.size - 2)
        places = layout.buffer
        buffer = places.allocate()
        views = places.views(buffer)
        write_packed(views, cu_seqlens, lengths)
        _write_documents(views, documents, cu_seqlens, vocab_size)
        num_target_tokens = int(np.count_nonzero(views["loss_mask"].numpy()))
        if scales is None:
            scales = _own_scales(views)
        views["scales"].numpy()[:] = scales[:2]
        views["depth_scales"].numpy()[: len(scales) - 2] = scales[2:]
        numbers = HostNumbers(
            len(documents),
            max_seqlen,
            torch.from_numpy(cu_seqlens),
            int(lengths.sum()),
            num_target_tokens,
        )
        return cls._from_buffer(buffer, layout, numbers, views)

    @classmethod
    def _from_buffer(
        cls,
        buffer: Tensor,
        layout: MicroBatchLayout,
        numbers: HostNumbers,
        views: Mapping[str, Tensor] | None = None,
    ) -> MicroBatch:
        views = layout.buffer.views(buffer) if views is None else views
        return cls(
            buffer=buffer,
            layout=layout,
            tokens=views["tokens"],
            labels=views["labels"],
            loss_mask=views["loss_mask"],
            scales=views["scales"],
            depth_scales=views["depth_scales"],
            packed=PackedSeqParams.from_views(
                views,
                num_seqs=numbers.num_seqs,
                max_seqlen=numbers.max_seqlen,
                cu_seqlens_cpu=numbers.cu_seqlens_cpu,
            ),
            num_real_tokens=numbers.num_real_tokens,
            num_target_tokens=numbers.num_target_tokens,
        )

    @property
    def _numbers(self) -> HostNumbers:
        packed = self.packed
        return HostNumbers(
            packed.num_seqs,
            packed.max_seqlen,
            packed.cu_seqlens_cpu,
            self.num_real_tokens,
            self.num_target_tokens,
        )

    def __repr__(self) -> str:
        facts = vars(self)
        return (
            f"{type(self).__name__}({facts['num_real_tokens']} tokens, {facts['num_target_tokens']} targets, "
            f"{facts['packed']!r})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader's worker sends one tensor to the main process in place of one for each view.
        return MicroBatch._from_buffer, (self.buffer, self.layout, self._numbers)

    def with_buffer(self, buffer: Tensor) -> MicroBatch:
        """Return the same micro-batch with its tensors in another buffer, without shared tables.

        Args:
            buffer: buffer that has, or will get, the same bytes.
        Raises:
            ValueError: ``buffer`` has another size or dtype.
        """
        return self._from_buffer(buffer, self.layout, self._numbers)

    def pin_memory(self) -> MicroBatch:
        """Return a copy in pinned memory, from which `to` can copy without blocking the host."""
        return self.with_buffer(self.buffer.pin_memory())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """Return this micro-batch on ``device``, moved by one copy.

        If the micro-batch is already on ``device``, return the same object. Shared tables are not
        copied; they are computed on the device, once per micro-batch.
        """
        moved = self.buffer.to(device, non_blocking=non_blocking)
        return self if moved is self.buffer else self.with_buffer(moved)

    def to_huggingface(self) -> dict[str, Any]:
        """Return the keyword arguments of a Hugging Face causal language model for this pack.

        Returns:
            ``input_ids``, ``labels`` and ``position_ids`` ``(1, T)`` int64, ``cu_seq_lens_q`` and
            ``cu_seq_lens_k`` ``(N + 2,)`` int32, ``max_length_q`` and ``max_length_k`` int. Labels
            are the tokens themselves, because the model shifts them. The label is -100 for a token
            that is not a target, and so for the first token of every document.
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
    """Write the tokens, shifted labels and loss masks of all documents to a zeroed buffer.

    Padding and the tail stay zero.
    """
    tokens_T, labels_T, mask_T = (views[name].numpy() for name in ("tokens", "labels", "loss_mask"))
    for number, (token_numbers, target_mask) in enumerate(documents):
        tokens = np.asarray(token_numbers)
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
                "the tokenizer must return one entry per token."
            )
        mask = np.asarray(target_mask)
        if mask.dtype != np.bool_ and ((mask != 0) != mask).any():  # for example labels with -100
            raise ValueError(
                f"document {number} has a target mask with entries other than 0 and 1; pass 1 for tokens that are "
                "targets and 0 for others. A mask cannot contain weights or labels."
            )
        counts = mask[1:] != 0
        labels_T[start : end - 1][~counts] = NO_LABEL
        mask_T[start : end - 1] = counts
    # Check the complete pack, not each document: two passes take only some microseconds.
    if tokens_T.min() < 0 or (vocab_size is not None and tokens_T.max() >= vocab_size):
        for number, (token_numbers, _) in enumerate(documents):
            _check_tokens(number, np.asarray(token_numbers), vocab_size)


def _own_scales(views: dict[str, Tensor]) -> list[float]:
    """Return the scales of a pack alone.

    A target of depth k is a target of the main model that is at least k slots into its document.
    """
    positions = views["position_ids"].numpy()[views["loss_mask"].numpy() != 0]
    targets = [np.count_nonzero(positions >= depth) for depth in range(MOST_DEPTHS + 1)]
    main, *depths = (1 / max(int(count), 1) for count in targets)
    return [main, 1.0, *depths]


def _check_tokens(number: int, tokens: NDArray[Any], vocab_size: int | None) -> None:
    """Check the token numbers of a document.

    Raises:
        ValueError: the tokens of document ``number`` are not a one-dimensional array of integers, or
            a token is out of range.
    """
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"document {number} has tokens of type {tokens.dtype} and shape {tokens.shape}, beginning with "
            f"{tokens.flat[0]}; pass a one-dimensional array of integers."
        )
    limit, rule = (
        (2**31, "is stored as int32")
        if vocab_size is None
        else (vocab_size, f"is below {vocab_size=}")
    )
    outside = (tokens < 0) | (tokens >= limit)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise ValueError(
            f"document {number} has token {tokens[at]} at position {at}; a token number is 0 or more and {rule}. "
            "Encode the documents with the model's tokenizer."
        )
