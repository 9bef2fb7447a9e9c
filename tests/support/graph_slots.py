"""Faults of a graph's slot, and schedules of two micro-batches in flight."""

import torch

from megatron_packed.cuda_graphs.slots import Slot
from support.graph_jobs import (  # the import sets variables that make libraries deterministic
    DEVICE,
    T,
    pack,
)

IN_FLIGHT = [
    "F1 F2 B1 B2",
    "F1 F2 B2 B1",
    "F1 F2 B1 F3 B2 F4 B3 F5 B4 B5",
    "F1 F2 B2 F3 B1 F4 B4 F5 B3 B5",
]


def scheduled(job, text, place):
    """Return losses of a schedule's micro-batches and the gradients afterwards, by name.

    Micro-batch 3 has another capture size.
    """
    batches = [
        pack(lengths, seed)
        for seed, lengths in enumerate([[T], [9] * 50, [1] * T, [500, 24, 500], [128] * 8])
    ]
    job.buffers.zero_grad()
    outputs, found = {}, {}
    for step in text.split():
        number = int(step[1:])
        if step[0] == "F":
            outputs[number] = job.model(place(batches[number - 1]))
            found |= {f"loss of {number}": outputs[number].loss.detach().clone()}
            found |= {f"losses of {number}": outputs[number].per_token_loss_T.clone()}
        else:
            outputs.pop(number).loss.backward()
    return found | {
        name: parameter.main_grad.clone() for name, parameter in job.buffers.parameters.items()
    }


def _spoil(change):
    """Return a fault that applies ``change`` to the slot after every fill."""

    def apply(job, monkeypatch):
        true = Slot.fill

        def fill(self, micro_batch, size):
            placed = true(self, micro_batch, size)
            change(placed.packed)
            return placed

        monkeypatch.setattr(Slot, "fill", fill)

    return apply


def _one_token_more(packed):
    """Move a boundary in both of its forms, because a kernel reads one of them."""
    packed.cu_seqlens[1].add_(1)
    packed.seq_idx[..., packed.cu_seqlens[1].long() - 1] = 0


def _no_tables(job, monkeypatch):
    for graph in job.runner.graphs[job.runner.slot].tables.values():
        monkeypatch.setattr(graph, "replay", lambda: None)


def _another_pack(job, monkeypatch):
    """Fill the slot with a micro-batch other than the placed micro-batch."""
    true, other = Slot.fill, pack([400, 300, 200])

    def fill(self, micro_batch, size):
        placed = true(self, micro_batch, size)
        self.bytes_of(size).copy_(other.buffer)
        return placed

    monkeypatch.setattr(Slot, "fill", fill)


FAULTS = {
    "stale seq_idx": _spoil(lambda packed: packed.seq_idx.fill_(0)),
    "a boundary off by one": _spoil(_one_token_more),
    "unfilled tail": _spoil(lambda packed: packed.valid.fill_(True)),
    "positions not set back": _spoil(
        lambda packed: packed.position_ids.copy_(torch.arange(T, device=DEVICE, dtype=torch.int32))
    ),
    "tables not refreshed": _no_tables,
    "another slot": _another_pack,
}
