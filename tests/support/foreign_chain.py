"""Chain of modules from outside the project, with graphs."""

import torch
from torch import nn

from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.packed.capture_sizes import CaptureSizes
from support.stand_in import RecordingBackend
from support.tiny_graph_jobs import T, assert_equal, full_of, pack

D = 8
ONE = CaptureSizes.from_capacities([4], T)
FIRST, SECOND = [10, 20], [5, 6, 7]


class Foreign(nn.Module):
    """Module from outside the project that returns ``result(self, hidden, computed, packed)``."""

    def __init__(self, result=lambda self, hidden, computed, packed: computed):
        super().__init__()
        torch.manual_seed(3)
        self.weight, self.result = nn.Parameter(torch.randn(D, D) / D), result
        self.register_buffer("scale", torch.ones(D))
        self.skipped = False

    def forward(self, hidden, packed=None):
        computed = torch.tanh(hidden @ self.weight) * self.scale
        if packed is not None:
            computed = computed * (packed.seq_idx[0, :, None] + 1)
        return self.result(self, hidden, computed, packed)


def hidden_states(seed=0):
    torch.manual_seed(seed)
    return torch.randn(T, D, requires_grad=True)


def first_of(result):
    return result[0] if isinstance(result, tuple) else result


class Chain:
    """Chain of foreign modules, with graphs."""

    def __init__(
        self, *modules, call=lambda module, hidden, packed: module(hidden, packed), **options
    ):
        self.modules, self.call = nn.ModuleList(modules), call
        self.buffers, self.said, self.backend = FlatBuffers(self.modules), [], RecordingBackend()
        named = {f"module {number}": module for number, module in enumerate(modules)}
        self.runner = LayerGraphs(
            named,
            self.drive,
            **{
                "total_tokens": T,
                "capture_sizes": ONE,
                "device": torch.device("cpu"),
                "backend": self.backend,
                "say": self.said.append,
            }
            | options,
        )

    def capture(self):
        self.runner.capture(full_of)
        return self

    def forward(self, hidden, packed):
        hidden = hidden * 1
        for module in self.modules:
            hidden = first_of(self.call(module, hidden, packed))
        return hidden

    def drive(self, micro_batch):
        hidden = hidden_states()
        output = self.forward(hidden, micro_batch.packed)
        output.square().sum().backward()
        return output.detach().clone(), hidden.grad

    def audit(self, lengths):
        return self.runner.audit(
            pack(lengths, capture_sizes=self.runner.capture_sizes), deterministic=True
        )

    def results(self, micro_batch):
        self.buffers.zero_grad()
        return [*self.drive(micro_batch), self.buffers.grads.clone()]

    def check(self, replays=True):
        """Check that micro-batches give the same results with graphs and eagerly."""
        before = dict(self.runner.counters.module_fallbacks)
        for lengths in (FIRST, [T], SECOND):
            self.backend.scramble()
            placed = self.results(
                self.runner.place(pack(lengths, capture_sizes=self.runner.capture_sizes))
            )
            self.runner.slot.vacate()
            assert_equal(placed, self.results(pack(lengths)))
        assert not replays or dict(self.runner.counters.module_fallbacks) == before

    def place(self, lengths=FIRST):
        return self.runner.place(pack(lengths, capture_sizes=self.runner.capture_sizes)).packed


class Beside(Chain):
    """Foreign modules that all get the same input; their outputs are summed."""

    def forward(self, hidden, packed):
        return sum(module(hidden * 1, packed) for module in self.modules)
