"""Exchanges in which every rank sends another part to each: heads for tokens, and rows by count.

Legend: T tokens of the whole pack, N heads (or groups of heads), c ranks, W channels; letters name
the same dimension before and after it is split.

[Note: exchange of heads]
Under context parallelism each rank holds all heads of its slice of the tokens; a mixer over the
sequence wants all tokens of some heads. One exchange turns the first layout (context-parallel,
``cp``) into the second (head-parallel, ``hp``) for all tensors of a layer together: what rank r is
to get of each tensor is laid side by side in one message, ``(T/c, W)``, so that a layer has one
collective each way whatever the number of its tensors. The messages arrive in the order of ranks,
and slices of tokens are contiguous, so the tokens arrive in their own order and nothing is sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.differentiable import Group, linear_map


def rows_to_heads(tensors: Sequence[Tensor], group: Group | None) -> tuple[Tensor, ...]:
    """From all heads of this rank's tokens to all tokens of its heads; one all-to-all forward, one
    backward.

    Args:
        tensors: ``(T/c, N_i, ...)`` each, of one dtype; ``N_i`` is a multiple of c, or divides it:
            then neighbouring ranks get copies of a head (rank r gets head ``r * N_i // c``), and
            its gradient is the sum of theirs.
    Returns:
        ``(T, max(N_i/c, 1), ...)`` each: views into what ``rows_to_columns`` returns.
    Raises:
        ValueError: rows or dtypes differ, or heads do not fit the ranks.
    Example:
        c = 2: x ``(4, 6, 64)``, B ``(4, 1, 128)`` -> x ``(8, 3, 64)``, B ``(8, 1, 128)``, the
        latter on both ranks.
    """
    if group is None:
        return tuple(tensors)
    ranks = dist.get_world_size(group)
    heads = [max(x.shape[1] // ranks, 1) for x in tensors]
    widths = [n * x[0, 0].numel() for n, x in zip(heads, tensors)]
    return tuple(
        part.view(-1, n, *x.shape[2:])
        for part, n, x in zip(
            torch.split(rows_to_columns(tensors, group), widths, dim=1), heads, tensors
        )
    )


def rows_to_columns(tensors: Sequence[Tensor], group: Group | None) -> Tensor:
    """``rows_to_heads`` with the result in one piece, for who reads neighbours together (the
    convolution of x, B, C).

    Returns:
        ``(T, W)``: the channels of this rank's heads of each tensor, side by side in this order.
    """
    # See [Note: exchange of heads].
    if group is None:
        return torch.cat([x.flatten(1) for x in tensors], dim=1)
    ranks = dist.get_world_size(group)
    tensors = [_shared_heads(x, ranks) for x in tensors]
    rows = _common_rows(tensors)
    # (T/c, N, ...) -> (T/c, c, W_i) -> (c, T/c, W_i), side by side
    x_cTW = torch.cat([x.reshape(rows, ranks, -1).transpose(0, 1) for x in tensors], dim=2)
    return exchange_equal_parts(x_cTW, group).flatten(0, 1)


def heads_to_rows(tensors: Sequence[Tensor], group: Group | None) -> tuple[Tensor, ...]:
    """Back: from all tokens of this rank's heads to all heads of its tokens; one all-to-all
    forward, one backward.

    Args:
        tensors: ``(T, N_i/c, ...)`` each, of one dtype.
    Returns:
        ``(T/c, N_i, ...)`` each.
    Raises:
        ValueError: rows or dtypes differ, or the rows do not divide among the ranks.
    """
    # See [Note: exchange of heads].
    if group is None:
        return tuple(tensors)
    ranks = dist.get_world_size(group)
    rows = _common_rows(tensors)
    if rows % ranks:
        raise ValueError(
            f"{rows} tokens do not divide among the {ranks} ranks of the group {group.group_desc!r}."
        )
    # (T, N/c, ...) -> (c, T/c, W_i), side by side
    # One message for all tensors: an all-to-all of small tensors costs its latency, not its bytes.
    x_cTW = torch.cat([x.reshape(ranks, rows // ranks, -1) for x in tensors], dim=2)
    x_cTW = exchange_equal_parts(x_cTW, group)
    return tuple(
        # (c, T/c, W_i) -> (T/c, c, W_i) -> (T/c, N, ...)
        part.transpose(0, 1).reshape(rows // ranks, ranks * x.shape[1], *x.shape[2:])
        for part, x in zip(torch.split(x_cTW, [x[0].numel() for x in tensors], dim=2), tensors)
    )


def exchange_rows(
    x_RD: Tensor, sent: Sequence[int], received: Sequence[int], group: Group | None
) -> Tensor:
    """Send ``sent[r]`` rows to each rank r, in their order, and get ``received[r]`` from it;
    backward sends them back.

    Args:
        x_RD: ``(sum(sent), ...)``.
        sent: host integers, one per rank; what this rank sends to r, r must expect of it.
        received: likewise.
    Returns:
        ``(sum(received), ...)``, in the order of the ranks they come from.
    """
    # Host integers, known before the call: the sizes of the exchange never wait for the device.
    there = partial(_all_to_all, sent=list(sent), received=list(received))
    back = partial(_all_to_all, sent=list(received), received=list(sent))
    return linear_map(x_RD, group, there, back)


def exchange_equal_parts(x: Tensor, group: Group | None) -> Tensor:
    """``(c, ...)``: part r goes to rank r, part s comes from rank s. This map is its own adjoint."""
    return linear_map(x, group, _all_to_all, _all_to_all)


def _all_to_all(
    x: Tensor, group: Group, *, sent: list[int] | None = None, received: list[int] | None = None
) -> Tensor:
    # NCCL and gloo send flat memory; a transposed message would arrive in the wrong order.
    x = x.contiguous()
    result = torch.empty_like(x) if received is None else x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x, received, sent, group=group)
    return result


def _shared_heads(x: Tensor, ranks: int) -> Tensor:
    """``x`` with a copy of each head for each of the ranks that share it, where there are fewer
    heads than ranks.
    """
    heads = x.shape[1]
    if heads % ranks == 0:
        return x
    if ranks % heads:
        raise ValueError(
            f"{heads} heads do not fit {ranks} ranks: they must be a multiple of the ranks, or divide them."
        )
    # `expand` has the sum over the copies as its backward, which is the gradient of a shared head.
    return x.unsqueeze(2).expand(-1, -1, ranks // heads, *x.shape[2:]).flatten(1, 2)


def _common_rows(tensors: Sequence[Tensor]) -> int:
    rows, dtypes = {x.shape[0] for x in tensors}, {x.dtype for x in tensors}
    if len(rows) != 1 or len(dtypes) != 1:
        kinds = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)
        raise ValueError(
            f"tensors of one exchange have the same tokens and dtype, not {kinds or 'none at all'}."
        )
    return rows.pop()
