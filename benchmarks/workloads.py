"""Models and documents that several benchmarks share.

The model sizes are those of public models, so that the times can be compared with published ones.
The weights are random. On a CPU every model shrinks to a few channels and keeps its layers: this
checks that a benchmark works, and the times mean nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.data.packing.packer import Packer
from megatron_packed.layers.moe.router import Router
from megatron_packed.models import hybrid_model
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.init import initial_value, seed_of
from megatron_packed.packed.micro_batch import MicroBatch

Lengths = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model, and the tokens of one micro-batch."""

    like: str
    """Public model that has these sizes, or a short description."""
    pattern: str
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    slots: int
    swiglu: bool = True
    rope: bool = True
    mamba: dict[str, int] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        options: dict[str, Any] = {f"mamba_{name}": value for name, value in self.mamba.items()}
        return ModelConfig(
            hybrid_layer_pattern=self.pattern,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            kv_channels=self.head_dim,
            ffn_hidden_size=self.ffn,
            swiglu=self.swiglu,
            squared_relu=not self.swiglu,
            normalization="RMSNorm",
            add_bias_linear=False,
            vocab_size=self.vocab,
            position_embedding_type="rope" if self.rope else "none",
            rotary_base=500000.0,
            **options,
        )

    def shrunk(self) -> Shape:
        """Return the same layers with sizes for a CPU."""
        return Shape(
            like=self.like,
            pattern=self.pattern,
            hidden=64,
            heads=4,
            groups=2,
            head_dim=16,
            ffn=128,
            vocab=512,
            slots=256,
            swiglu=self.swiglu,
            rope=self.rope,
            mamba={"num_heads": 4, "head_dim": 16, "state_dim": 16, "num_groups": 2}
            if self.mamba
            else {},
        )


SHAPES = {
    "llama1b": Shape(
        like="Llama-3.2-1B, 16 blocks",
        pattern="*-" * 16,
        hidden=2048,
        heads=32,
        groups=8,
        head_dim=64,
        ffn=8192,
        vocab=128256,
        slots=4096,
    ),
    "qwen0.6b": Shape(
        like="Qwen3-0.6B without its norm of queries and keys, 28 blocks",
        pattern="*-" * 28,
        hidden=1024,
        heads=16,
        groups=8,
        head_dim=128,
        ffn=3072,
        vocab=151936,
        slots=4096,
    ),
    "thin16": Shape(
        like="16 narrow blocks: the host is slower than the GPU",
        pattern="*-" * 16,
        hidden=512,
        heads=8,
        groups=2,
        head_dim=64,
        ffn=1536,
        vocab=32768,
        slots=4096,
    ),
    "thin28": Shape(
        like="28 narrow blocks: the host is slower than the GPU",
        pattern="*-" * 28,
        hidden=512,
        heads=8,
        groups=2,
        head_dim=64,
        ffn=1536,
        vocab=32768,
        slots=4096,
    ),
    "wide": Shape(
        like="4 blocks of Llama-3-8B: the GPU is slower than the host",
        pattern="*-" * 4,
        hidden=4096,
        heads=32,
        groups=8,
        head_dim=128,
        ffn=14336,
        vocab=32768,
        slots=8192,
    ),
    "hybrid": Shape(
        like="a small Nemotron-H, 4 attention layers of 28",
        pattern="M-M-M*-" * 4,
        hidden=1024,
        heads=16,
        groups=4,
        head_dim=64,
        ffn=4096,
        vocab=32768,
        slots=4096,
        swiglu=False,
        rope=False,
        mamba={"num_heads": 32, "head_dim": 64, "state_dim": 128, "num_groups": 8},
    ),
    "hybrid1b": Shape(
        like="hybrid1b of model_step.py, 797 M",
        pattern="M-M-M*-M-M-M*-M-M-M*-M-",
        hidden=2048,
        heads=16,
        groups=4,
        head_dim=128,
        ffn=8192,
        vocab=32768,
        slots=8192,
        swiglu=False,
        rope=False,
        mamba={"num_heads": 64, "head_dim": 64, "state_dim": 128, "num_groups": 8},
    ),
}


def shape_of(name: str, device: torch.device) -> Shape:
    shape = SHAPES[name]
    return shape if device.type == "cuda" else shape.shrunk()


def build_model(
    shape: Shape,
    device: torch.device,
    *,
    max_positions: int,
    backends: Mapping[str, Any] | None = None,
) -> HybridModel:
    """Build a model with random weights in training mode: bf16 on a GPU, float32 on a CPU.

    The same shape always gets the same weights.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with filled_on_device(device):
        return HybridModel(
            shape.config,
            vocab_size=shape.vocab,
            max_positions=max_positions,
            device=device,
            dtype=dtype,
            backends=backends,
        ).train()


@contextmanager
def filled_on_device(device: torch.device) -> Iterator[None]:
    """Initialize large matrices on the device while the context is active.

    The model itself draws all weights on the CPU, which takes 10 s for a billion parameters. This
    context draws only the large matrices on the device. All other parameters get the model's usual
    values.
    """

    def fill(
        model: nn.Module, config: ModelConfig, seed: int, *, tp_rank: int, tp_size: int
    ) -> None:
        assert tp_size == 1, "benchmarks build models without tensor parallelism"
        generator = torch.Generator(device).manual_seed(seed)
        for name, module in model.named_modules():
            if isinstance(module, Router):
                module.routing_seed = seed_of(seed, name)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2 and parameter.numel() > 1 << 20:
                    parameter.normal_(0.0, config.init_method_std, generator=generator)
                else:
                    parameter.copy_(initial_value(name, parameter.shape, config, seed))

    with mock.patch.object(hybrid_model, "initialize", fill):
        yield


def lognormal_lengths(
    count: int, *, mean: float, sigma: float, longest: int, seed: int = 0
) -> Lengths:
    """Return the tokens of ``count`` documents, drawn from a lognormal distribution.

    Args:
        mean: mean length, in tokens.
        sigma: standard deviation of the logarithm of the length.
        longest: largest length; all lengths are clipped to [16, longest].

    A mean of 180 with sigma 0.55 resembles the Alpaca data set in the padding: batches of 8
    documents are half padding. The published speed-up of 1.85x from leaving the padding out rests
    on that share. `packed_vs_padded.py` reports the padding of every data set that it uses.
    """
    random = np.random.default_rng(seed)
    drawn = np.exp(np.log(mean) - sigma**2 / 2 + sigma * random.standard_normal(count))
    return np.clip(np.rint(drawn), min(16, longest), longest).astype(np.int64)


def filled_packs(slots: int, count: int, *, mean: float, seed: int = 0) -> list[list[int]]:
    """Return the document lengths of ``count`` packs, as the packer fills them.

    Lengths resemble the Alpaca data set. Each pack fills almost all of its ``slots`` tokens.
    """
    documents = max(64, int(1.2 * count * slots / mean))
    lengths = lognormal_lengths(
        documents, mean=mean, sigma=0.55, longest=min(2048, slots), seed=seed
    )
    packs = Packer(slots=slots).pack(lengths, seed)
    return [lengths[packs[number]].tolist() for number in range(count)]


def random_documents(lengths: Sequence[int], vocab: int, seed: int) -> list[NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab, int(length)) for length in lengths]


def pinned(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return a host micro-batch as the loader returns it: in page-locked memory if there is a GPU."""
    return batch.pin_memory() if device.type == "cuda" else batch


def hash_of(value: object) -> str:
    """Return 12 hexadecimal digits that identify a pack plan."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def device_from(name: str) -> torch.device:
    """Return the device of a name. ``auto`` means the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)
