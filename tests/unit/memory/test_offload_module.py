"""Offload of a module that a library user defines."""

import torch
from torch import nn

from megatron_packed.memory.apply import offload_module
from support.late_streams import ORDERS, LateStreams
from support.offloaded_layers import offloader

D, LAYERS = 8, 4


class Block(nn.Module):
    """Layer without any code for offload, called with a keyword argument."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, hidden_TD, *, scale=1.0):
        return hidden_TD + self.second(torch.nn.functional.gelu(self.first(hidden_TD))) * scale


def gradients(offload=None):
    """Return the gradients of three micro-batches through the same layers."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Block() for _ in range(LAYERS))
    for layer in layers if offload is not None else ():
        offload_module(layer, offload)
    for rows in (5, 9, 3):
        hidden_TD = torch.randn(rows, D)
        for layer in layers:
            hidden_TD = layer(hidden_TD, scale=0.5)
        loss = hidden_TD.square().sum()
        if offload is None:
            loss.backward()
            continue
        with offload.whole_pass():
            loss.backward()
        offload.end_step()
    return [parameter.grad for parameter in layers.parameters()], layers


def test_gradients_are_those_without_offload():
    """Delayed copies change no bit of gradients, and each layer is one offloaded group."""
    expected, _ = gradients()
    saved = []
    for streams in (None, *(LateStreams(order, prompt=True) for order in ORDERS)):
        offload = offloader(streams, max_buffers=2)
        save = offload.save
        offload.save = lambda tensors, save=save: saved.append(len(tensors)) or save(tensors)
        found, _ = gradients(offload)
        assert all(map(torch.equal, found, expected))
    assert len(saved) == (1 + len(ORDERS)) * 3 * LAYERS and min(saved) >= 2


def test_the_forward_of_the_class_comes_back():
    """Deleting the replaced forward restores the module."""
    _, layers = gradients(offloader())
    for layer in layers:
        del layer.forward
        assert "forward" not in vars(layer)
    assert layers[0](torch.ones(2, D)).shape == (2, D)
