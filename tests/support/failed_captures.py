"""Modules that cannot be captured, in a chain with modules that can."""

from contextlib import suppress

import torch
from torch import nn

from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.packed.capture_sizes import CaptureSizes
from support.graph_jobs import DEVICE, HIDDEN, T, full, new_backend, pack, released


class Foreign(nn.Module):
    """Module from outside the project; its forward calls ``trouble`` with the result."""

    def __init__(self, seed, trouble=None):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(
            (torch.randn(HIDDEN, HIDDEN, generator=generator) / 16).to(DEVICE)
        )
        self.trouble = trouble

    def forward(self, hidden, packed):
        result = torch.tanh(hidden @ self.weight) * (packed.seq_idx[0, :, None] % 7 + 1)
        if self.trouble is not None:
            self.trouble(result)
        return result


def asks_for_a_value(result):
    result.sum().item()


def swallows_the_error(result):
    with suppress(RuntimeError):
        result.sum().item()


def forgets_a_stream(result):
    """Queue work on another stream and never wait for it: capture detects this only at its end."""
    # torch returns its 32 streams in turn, which may include the current stream.
    current = torch.cuda.current_stream()
    other = next(stream for stream in iter(torch.cuda.Stream, None) if stream != current)
    other.wait_stream(current)
    with torch.cuda.stream(other):
        result.detach() * 2


def wants_all_memory(result):
    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)


class Chain:
    """Chain of foreign modules, with graphs for one capacity."""

    def __init__(self, *troubles, **options):
        self.modules = nn.ModuleList(
            Foreign(seed, trouble) for seed, trouble in enumerate(troubles)
        )
        self.buffers = FlatBuffers(self.modules)
        self.said = []
        modules = {f"module {number}": module for number, module in enumerate(self.modules)}
        self.runner = LayerGraphs(
            modules,
            self.drive,
            total_tokens=T,
            capture_sizes=CaptureSizes.from_capacities([16], T),
            device=DEVICE,
            backend=new_backend(),
            say=self.said.append,
            **options,
        )
        self.runner.capture(full)

    def drive(self, micro_batch):
        hidden = torch.ones(T, HIDDEN, device=DEVICE, requires_grad=True)
        result = hidden
        for module in self.modules:
            result = module(result, micro_batch.packed)
        result.square().sum().backward()
        return [result.detach().clone(), hidden.grad]

    def results(self, micro_batch):
        self.buffers.zero_grad()
        return [*self.drive(micro_batch), self.buffers.grads.clone()]

    def check(self):
        """Check that replay equals eager execution."""
        capture_sizes = CaptureSizes.from_capacities([16], T)
        for seed, lengths in enumerate([[T], [100, 200, 300], [64] * 16]):
            micro_batch = pack(lengths, seed, capture_sizes)
            found = self.results(self.runner.place(micro_batch))
            self.runner.slot.vacate()
            wanted = self.results(micro_batch.to(DEVICE))
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), lengths[:8]


TROUBLES = [asks_for_a_value, swallows_the_error, forgets_a_stream, wants_all_memory]


def fails_alone(trouble, **options):
    """Check that only the module with ``trouble`` is not captured, without lasting effects.

    Kernels, random numbers, later captures and memory must be as if there had been no failure.
    """
    usual = Chain(None, **options)
    usual.check()  # libraries allocate workspaces, which they never free
    usual.runner.close()
    del usual
    allocated, reserved = released()
    chain = Chain(None, trouble, None, **options)
    print(*chain.said, sep="\n")
    assert [list(module.captured) != [] for module in chain.runner.modules] == [True, False, True]
    assert chain.said[0].startswith("module 1 not captured for up to 16 documents: ")
    assert chain.runner.counters.captures == 1 + 2 * 2
    chain.check()
    assert chain.runner.counters.replays == 3 and chain.runner.counters.fallbacks.total() == 0
    assert chain.runner.counters.module_fallbacks.total() == 3
    torch.randn(100, device=DEVICE).sum().item()  # fails if the generator is still in capture mode
    torch.cuda.synchronize()
    later = Chain(None, None, **options)
    assert later.runner.counters.captures == 1 + 2 * 2, later.said
    later.check()
    for one in (chain, later):
        one.runner.close()
    del chain, later, one
    now_allocated, now_reserved = released()
    assert now_allocated - allocated <= 1 << 20, (
        f"{now_allocated - allocated:,} bytes more are allocated than before"
    )
    assert now_reserved - reserved <= 4 << 20, (
        f"{now_reserved - reserved:,} bytes more are reserved than before"
    )
