"""Chunks of a pack for the gated delta rule, computed once per micro-batch for all layers.

Each document is cut into chunks of 64 tokens from its own first token; its last chunk may be
shorter. So a chunk has tokens of one document only, and the chunks of a document do not depend on
its place in the pack. All shapes depend only on the number of tokens and the number of documents, and
the host reads nothing back, so a CUDA graph can capture the computation.

The states pass along walks. A walk is a document, or a segment of a long one. Joints are the places where
two walks of a document meet. The two ends of a part of a pack are one more joint, number 0.

Letters: T tokens, D documents of ``cu_seqlens`` (with the tail and empty ones), Q chunks, W walks, J joints.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk."""


class DeltaRuleTables(NamedTuple):
    """Chunks in the order of the pack, then empty chunks up to the fixed number Q; and all walks.

    Example:
        Documents of 65, 0 and 3 tokens: Q is (68 + 3 * 63) // 64 = 4. The chunks are 0..64, 64..65,
        65..68 and the empty 68..68, of documents 0, 0, 2 and 2. ``first_chunk_D`` is [0, 2, 2] and
        ``num_chunks_D`` is [2, 0, 1]. The walks are 0..65, 65..68 and the empty 68..68. With segments of
        64 tokens the walks are 0..64, 65..68, 64..65 and 68..68. Then the first and the third meet at joint 0,
        and ``joints_5J`` is [[0], [64], [64], [65], [0]].
    """

    document_Q: Tensor
    """``(Q,)`` int32: document of each chunk, an index into ``cu_seqlens``; D - 1 if empty."""
    start_Q: Tensor
    """``(Q,)`` int32: first token of each chunk; T if the chunk is empty."""
    end_Q: Tensor
    """``(Q,)`` int32: token after the last token of each chunk; T if the chunk is empty."""
    first_chunk_D: Tensor
    """``(D,)`` int32: first chunk of each document; of an empty one, that of the next document."""
    num_chunks_D: Tensor
    """``(D,)`` int32: number of chunks of each document; 0 for an empty document."""
    walks_4W: Tensor
    """``(4, W)`` int32: walks in descending order of their lengths, equal ones in the order of the pack.

    The first token, the token after the last one, the joint at the walk's start and the joint at its
    end; -1 if there is no joint.
    """
    counts_2: Tensor
    """``(2,)`` int32: number of walks that have tokens, and number of joints."""
    joints_5J: Tensor
    """``(5, J)`` int32: the two walks that meet at each joint, and if the state there depends on another joint.

    The first token of the walk before the joint, and the token after its last one. The same of the walk
    after the joint. Then 1 if the walk before it begins at a joint, else 0. Joint 0 of a part has the
    last walk of the part before it, and the first walk after it.
    """

    @property
    def of_part(self) -> bool:
        """Return True for the tables of a part, which have a joint more than the most walks need."""
        more_walks = self.walks_4W.shape[1] - self.num_chunks_D.shape[0]
        return self.joints_5J.shape[1] > more_walks


def max_chunks(tokens: int, documents: int) -> int:
    """Return Q, the largest number of chunks that ``documents`` of together ``tokens`` can have."""
    return (tokens + documents * (CHUNK - 1)) // CHUNK


def segment_tokens(value_heads: int) -> int:
    """Return the tokens of a segment, with which one long document keeps a GPU busy.

    A walk is a sequence of dependent products, and the walks of all heads run at the same time. With fewer
    heads shorter segments pay for the product of each joint. Measured on an H200 with 4, 16 and 32 heads.
    """
    return CHUNK * max(value_heads, 8)


def build_tables(
    cu_seqlens: Tensor, tokens: int, *, segment: int | None = None, of_part: bool = False
) -> DeltaRuleTables:
    """Build the tables of a pack.

    Args:
        cu_seqlens: ``(D + 1,)`` int32, first 0, last ``tokens``; documents may be empty.
        tokens: number of tokens of the pack, T.
        segment: tokens of a walk that is not the last one of its document, a multiple of 64; None for
            one walk per document.
        of_part: the tokens are a part of a pack.
    """
    documents = cu_seqlens.shape[0] - 1
    chunks = _pieces(cu_seqlens, tokens, CHUNK, max_chunks(tokens, documents))
    return DeltaRuleTables(*chunks, *_walks(cu_seqlens, tokens, segment or max(tokens, 1), of_part))


class _Pieces(NamedTuple):
    """Documents cut into pieces from their own first token, in the order of the pack; P pieces."""

    document_P: Tensor
    start_P: Tensor
    end_P: Tensor
    first_piece_D: Tensor
    num_pieces_D: Tensor


def _pieces(cu_seqlens: Tensor, tokens: int, length: int, most: int) -> _Pieces:
    """Cut each document into pieces of ``length`` tokens; empty pieces follow up to the number ``most``."""
    starts_D = cu_seqlens[:-1]
    num_pieces_D = (cu_seqlens[1:] - starts_D + (length - 1)) // length
    ends_D = num_pieces_D.cumsum(0, dtype=torch.int32)
    first_piece_D = ends_D - num_pieces_D
    piece_P = torch.arange(most, dtype=torch.int32, device=cu_seqlens.device)
    # A piece belongs to the first document whose last piece is not before it. The spare pieces get the
    # number of the last document and no tokens.
    document_P = torch.searchsorted(ends_D, piece_P, right=True, out_int32=True)
    document_P = document_P.clamp_max(starts_D.shape[0] - 1)
    # A spare piece would start at or after the end of the last document, which is T.
    start_P = starts_D[document_P] + (piece_P - first_piece_D[document_P]) * length
    start_P = start_P.clamp_max(tokens)
    end_P = torch.minimum(start_P + length, cu_seqlens[1:][document_P])
    return _Pieces(document_P, start_P, end_P, first_piece_D, num_pieces_D)


def _walks(
    cu_seqlens: Tensor, tokens: int, segment: int, of_part: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last three tables."""
    joints, borders = max(tokens - 1, 0) // segment, int(of_part)
    pieces = _pieces(cu_seqlens, tokens, segment, cu_seqlens.shape[0] - 1 + joints)
    document_W, start_W, end_W = pieces[:3]
    begins_W = (start_W < end_W) & (start_W > cu_seqlens[:-1][document_W])
    ends_W = end_W < cu_seqlens[1:][document_W]
    joints_W = begins_W.cumsum(0, dtype=torch.int32)
    num_joints_1 = joints_W[-1:] + borders
    number_J = torch.arange(1, joints + 1, dtype=torch.int32, device=cu_seqlens.device)
    walk_J = torch.searchsorted(joints_W, number_J, out_int32=True).clamp_max(len(start_W) - 1)
    walk_before_J, walk_after_J = walk_J - 1, walk_J
    joint_at_start_W = torch.where(begins_W, joints_W - 1 + borders, -1)
    # The joint at the end of a walk is the next joint at which a walk begins.
    joint_at_end_W = torch.where(ends_W, joints_W + borders, -1)
    if of_part:
        is_first_W = (start_W < end_W) & (start_W == 0)
        is_last_W = (start_W < end_W) & (end_W == tokens)
        begins_W = begins_W | is_first_W
        joint_at_start_W = joint_at_start_W.masked_fill(is_first_W, 0)
        joint_at_end_W = joint_at_end_W.masked_fill(is_last_W, 0)
        last_walk_1 = is_last_W.int().argmax(0, keepdim=True).int()
        first_walk_1 = is_first_W.int().argmax(0, keepdim=True).int()
        walk_before_J = torch.cat([last_walk_1, walk_before_J])
        walk_after_J = torch.cat([first_walk_1, walk_after_J])
    walks_4W = torch.stack([start_W, end_W, joint_at_start_W, joint_at_end_W])
    begins_1J = begins_W[walk_before_J].int()[None]
    joints_5J = torch.cat([walks_4W[:2, walk_before_J], walks_4W[:2, walk_after_J], begins_1J])
    return (*_longest_first(walks_4W, num_joints_1), joints_5J)


def _longest_first(walks_4W: Tensor, joints_1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the walks in order, and the number of those that have tokens beside that of the joints."""
    length_W = walks_4W[1] - walks_4W[0]
    order_W = length_W.argsort(descending=True, stable=True)
    occupied_1 = length_W.sign().sum(0, keepdim=True, dtype=torch.int32)
    return walks_4W[:, order_W], torch.cat([occupied_1, joints_1])
