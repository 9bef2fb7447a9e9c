"""Tiny model with graphs over its layers on the CPU, and packs for it."""

import numpy as np
import torch

from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from support.hybrid_cases import tiny_config
from support.stand_in import RecordingBackend

T, VOCAB = 64, 61
CAPTURE_SIZES = CaptureSizes.from_capacities([4, 12, T], T)


def tiny_model(pattern="M*-EG*", **changes) -> HybridModel:
    values = {
        "linear_value_head_dim": 8,
        "moe_aux_loss_coeff": 0.1 if "E" in pattern else 0.0,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": False,
    }
    config = tiny_config(pattern, **values | changes)
    return HybridModel(config, vocab_size=VOCAB, max_positions=T, seed=7).train()


def documents(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [(random.integers(0, VOCAB, length), None) for length in lengths]


def pack(lengths, seed=0, capture_sizes=CAPTURE_SIZES, **options):
    longest = max([*lengths, T - sum(lengths)])
    capture_size = capture_sizes.smallest_for(len(lengths), longest)
    size = (
        {}
        if capture_size is None
        else {"capacity": capture_size.capacity, "max_seqlen": capture_size.max_seqlen}
    )
    return MicroBatch.build(documents(lengths, seed), T, scales=(0.05, 0.5), **size | options)


def random_packs(count, seed=0):
    """Return lengths of packs: one document, documents of length 1, a full capture size, a tail,
    and random packs.
    """
    random = np.random.default_rng(seed)
    packs = [[T], [1] * T, [1] * 4, [1] * 12, [60], [2, 3], [16, 16, 16, 16]]
    while len(packs) < count:
        lengths, left = [], int(random.integers(1, T + 1))
        while left > 0 and len(lengths) < 20:
            lengths.append(int(random.integers(1, left + 1)))
            left -= lengths[-1]
        packs.append(lengths)
    return packs


class Job:
    """Model and its gradients, optionally with graphs."""

    def __init__(
        self,
        model,
        *,
        graphs=False,
        backend=None,
        capture_sizes=CAPTURE_SIZES,
        names=None,
        routers_alone=False,
        **options,
    ):
        self.model, self.buffers = model, FlatBuffers(model)
        self.backend = backend or RecordingBackend()
        self.said = []
        self.runner = None
        if graphs:
            modules = {
                f"layers.{n}": layer
                for n, layer in enumerate(model.layers)
                if names is None or n in names
            }
            if routers_alone:
                layers = enumerate(model.layers)
                modules = {
                    f"layers.{n}.mixer.router": layer.mixer.router
                    for n, layer in layers
                    if layer in model.moe_layers
                }
            self.runner = LayerGraphs(
                modules,
                self.drive,
                total_tokens=T,
                capture_sizes=capture_sizes,
                device=torch.device("cpu"),
                tables=model.pack_tables.derive,
                check=model.pack_tables.check,
                backend=self.backend,
                warmup_steps=2,
                say=self.said.append,
                **options,
            )

    def capture(self):
        self.runner.capture(lambda size: full_of(size))
        return self

    def drive(self, micro_batch):
        output = self.model(micro_batch)
        output.loss.backward()
        return output

    def step(self, micro_batch):
        """Return the losses and the gradients of one micro-batch."""
        self.buffers.zero_grad()
        output = self.drive(micro_batch if self.runner is None else self.runner.place(micro_batch))
        values = [
            output.loss,
            output.loss_sum,
            output.aux_loss,
            output.per_token_loss_T,
            output.tokens_per_expert,
        ]
        return [value.detach().clone() for value in values] + [self.buffers.grads.clone()]


def full_of(capture_size):
    """Return a pack with as many equal documents as the capture size permits."""
    count = min(capture_size.capacity, T)
    lengths = [T // count] * count
    return MicroBatch.build(
        documents(lengths), T, capture_size.capacity, (0.05, 0.5), capture_size.max_seqlen
    )


def assert_equal(found, wanted):
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
