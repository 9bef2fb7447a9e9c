"""Layers that are recomputed from offloaded inputs."""

from functools import partial

import torch
from torch import nn

from megatron_packed.memory.activation_offload import Offload
from megatron_packed.memory.recompute import checkpoint

CPU, D, LAYERS = torch.device("cpu"), 4, 6
OF_A_ROW = D * 4 + 2
"""Bytes of one row of a layer's inputs."""


class Layer(nn.Module):
    """Layer with two inputs of different dtypes, and optional dropout."""

    def __init__(self, number):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(D, D, generator=generator))
        self.dropout = 0.0

    def forward(self, x_TD, scale_T1, weights):
        hidden = torch.tanh(x_TD @ self.weight) * scale_T1.float()
        return x_TD + nn.functional.dropout(hidden, self.dropout, self.training) * weights


class Model(nn.Module):
    """Recomputed layers whose inputs ``save`` saves; without ``save`` nothing is recomputed."""

    def __init__(self, seed=0):
        super().__init__()
        self.layers = nn.ModuleList(Layer(10 * seed + number) for number in range(LAYERS))
        self.save, self.fail_at, self.watch = None, None, lambda number: None

    def forward(self, x_TD):
        scale_T1 = x_TD.detach().abs().mean(dim=1, keepdim=True).bfloat16()
        for number, layer in enumerate(self.layers):
            if number == self.fail_at:
                raise KeyError("in mid-forward")
            self.watch(number)
            run = (
                layer
                if self.save is None
                else partial(checkpoint, layer, rewind=True, save=self.save)
            )
            x_TD = run(x_TD, scale_T1.detach() * (1 + number), 0.5)
        return x_TD.square().sum()


def pack(rows, seed=0):
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(100 * rows + seed))


def offloader(streams=None, **options):
    return Offload(CPU, **{"min_elements": 1, "streams": streams, **options})


def gradients(streams, max_buffers=3, steps=4, **options):
    model, offload = Model(), offloader(streams, max_buffers=max_buffers, **options)
    model.save, said = offload.save, []
    for rows in range(4, 4 + steps):
        model(pack(rows)).backward()
        offload.join()
        offload.end_step()
        said += offload.messages()
    return [parameter.grad for parameter in model.parameters()], offload, said
