"""Kernels whose results leak from document to document, for checks of isolation."""

import pytest
import torch
from torch import Tensor

from megatron_packed.layers import recurrent_mixer
from megatron_packed.layers.kinds import gated_delta_net
from megatron_packed.ops.ssd import reference as ssd_reference


def one_document(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return offsets that describe a complete pack as one document."""
    joined = torch.full_like(cu_seqlens, tokens)
    joined[0] = 0
    return joined


def leaking_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    convolve = recurrent_mixer.causal_conv1d
    monkeypatch.setattr(
        recurrent_mixer,
        "causal_conv1d",
        lambda x, w, b, seq_idx, **kw: convolve(x, w, b, torch.zeros_like(seq_idx), **kw),
    )


def leaking_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = ssd_reference.run
    monkeypatch.setattr(
        ssd_reference,
        "run",
        lambda *inputs, **kw: scan(*inputs[:7], torch.zeros_like(inputs[7]), *inputs[8:], **kw),
    )


def leaking_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    run_rule = gated_delta_net.gated_delta_rule

    def without_boundaries(*inputs, tables, **options):
        *tensors, seq_idx, cu_seqlens = inputs
        joined = one_document(cu_seqlens, seq_idx.shape[1])
        return run_rule(*tensors, torch.zeros_like(seq_idx), joined, **options)

    monkeypatch.setattr(gated_delta_net, "gated_delta_rule", without_boundaries)
