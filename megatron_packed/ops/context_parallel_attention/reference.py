"""Context-parallel attention in plain PyTorch, for CPUs and as the reference in tests.

Autograd differentiates through the communication functions that the caller passes.

The softmax is computed in pieces of keys. For each query the module stores the largest score m so
far, the sum of exp(score - m) and the sum of exp(score - m) v. Both sums are rescaled when m grows
(Milakov and Gimelshein, arXiv:1805.02867). With ``all_gather`` there is one piece. With ``p2p`` there
is one piece per rank, and the first is the rank's own. Each token sees itself in the first piece, so
m is finite. Pairs that are not visible contribute exact zeros, so other documents change no bit.

Sums are fp32 (fp64 for fp64 inputs). Scores exist for ``BLOCK`` queries and one piece at a time.

Shapes as in ``api``; S keys of a piece, B queries of a block, G = N / K query heads for each
key/value head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_packed.ops.context_parallel_attention.api import Peers

BLOCK = 256
"""Number of queries that are processed together."""


class _Partial(NamedTuple):
    """Softmax of a block of queries over the pieces of keys so far."""

    largest_KGB: Tensor
    """Largest score so far, without gradient: the result does not depend on it."""
    total_KGB: Tensor
    """Sum of exp(score - largest)."""
    sum_KGBH: Tensor
    """Sum of exp(score - largest) times the value."""


def run(
    q_RNH: Tensor,
    k_RKH: Tensor,
    v_RKH: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    seq_idx_1T: Tensor,
    slots_T: Tensor,
    peers: Peers,
    softmax_scale: float,
    window_size: int | None,
    deterministic: bool,
) -> Tensor:
    math = torch.promote_types(q_RNH.dtype, torch.float32)
    rows, heads, head_dim = q_RNH.shape
    kv_heads = k_RKH.shape[1]
    # (R, N, H) -> (R, K, G, H) -> (K, G, R, H)
    q_KGRH = (q_RNH.to(math) * softmax_scale).view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    slots_cR = slots_T.view(peers.size, rows)
    mine_R, document_T = slots_cR[peers.rank], seq_idx_1T[0]
    blocks: list[_Partial | None] = [None] * -(-rows // BLOCK)
    for kv, slots_S in _pieces(torch.stack((k_RKH, v_RKH)), slots_cR, peers):
        k_SKH, v_SKH = kv.to(math)
        for number, (q_KGBH, slots_B) in enumerate(
            zip(torch.split(q_KGRH, BLOCK, dim=2), torch.split(mine_R, BLOCK))
        ):
            visible_BS = document_T[slots_B][:, None] == document_T[slots_S]
            # The slots of a document have the order of its positions, so a comparison of slots
            # gives the causal mask.
            visible_BS &= slots_B[:, None] >= slots_S
            if window_size is not None:
                visible_BS &= slots_B[:, None] - slots_S < window_size
            blocks[number] = _extend(blocks[number], q_KGBH, k_SKH, v_SKH, visible_BS)
    parts = [part.sum_KGBH / part.total_KGB.unsqueeze(-1) for part in blocks if part is not None]
    # (K, G, R, H) -> (R, K, G, H) -> (R, N, H)
    return (
        torch.cat(parts, dim=2).permute(2, 0, 1, 3).reshape(rows, heads, head_dim).to(q_RNH.dtype)
    )


def _pieces(kv_2RKH: Tensor, slots_cR: Tensor, peers: Peers) -> list[tuple[Tensor, Tensor]]:
    """Return the pieces: keys and values ``(2, S, K, H)``, and the slot of each of their rows."""
    if peers.comm_type == "all_gather":
        # (2, R, K, H) -> (R, 2, K, H) -> (T, 2, K, H) -> (2, T, K, H)
        return [(peers.gather_rows(kv_2RKH.transpose(0, 1)).transpose(0, 1), slots_cR.flatten())]
    assert peers.comm_type == "p2p", peers.comm_type
    pieces = [(kv_2RKH, slots_cR[peers.rank])]
    for step in range(1, peers.size):
        kv_2RKH = peers.pass_on(kv_2RKH)
        pieces.append((kv_2RKH, slots_cR[peers.rank - step]))
    return pieces


def _extend(
    part: _Partial | None, q_KGBH: Tensor, k_SKH: Tensor, v_SKH: Tensor, visible_BS: Tensor
) -> _Partial:
    scores_KGBS = q_KGBH @ k_SKH.permute(1, 2, 0).unsqueeze(1)
    scores_KGBS = scores_KGBS.masked_fill(~visible_BS, float("-inf"))
    largest_KGB = scores_KGBS.detach().amax(dim=-1)
    if part is not None:
        largest_KGB = torch.maximum(largest_KGB, part.largest_KGB)
    weights_KGBS = (scores_KGBS - largest_KGB.unsqueeze(-1)).exp()
    total_KGB, sum_KGBH = (
        weights_KGBS.sum(dim=-1),
        weights_KGBS @ v_SKH.transpose(0, 1).unsqueeze(1),
    )
    if part is None:
        return _Partial(largest_KGB, total_KGB, sum_KGBH)
    shrink_KGB = (part.largest_KGB - largest_KGB).exp()
    return _Partial(
        largest_KGB,
        part.total_KGB * shrink_KGB + total_KGB,
        part.sum_KGBH * shrink_KGB.unsqueeze(-1) + sum_KGBH,
    )
