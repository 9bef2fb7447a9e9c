"""Model with several buckets and stages, and a record of gradients when a bucket is reduced."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.zero1_layout import Bucket
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_job import Job

SLOTS, VOCAB = 48, 211
PATTERN = "M*-EM*E"


def config_of(
    device: str = "cpu",
    *,
    bf16: bool = False,
    bucket: int = 4000,
    graphs: bool = False,
    **model: object,
) -> RunConfig:
    options = {
        "hybrid_layer_pattern": PATTERN,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "mamba_head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_state_dim": 16,
        "mamba_num_groups": 2,
        "mamba_chunk_size": 8,
        "normalization": "RMSNorm",
        "squared_relu": True,
        "num_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 16,
        "moe_aux_loss_coeff": 1e-2,
        "moe_z_loss_coeff": 1e-3,
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        **model,
    }
    return RunConfig(
        model=ModelConfig(**options),
        data=DataConfig(train_data_path=("absent.jsonl",), sft=True),
        packing=PackingConfig(seq_length=SLOTS, global_batch_size=3),
        optim=OptimizerConfig(lr=1e-2, clip_grad=0.0),  # clipping would scale gradients in place
        parallel=ParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=bucket),
        training=TrainingConfig(train_iters=5, device=device, bf16=bf16, seed=1),
        cuda_graph=CudaGraphConfig(cuda_graph_impl="local", cuda_graph_warmup_steps=1)
        if graphs
        else CudaGraphConfig(),
    )


def packs(count: int, capture_sizes: CaptureSizes | None = None) -> list[MicroBatch]:
    draw = np.random.default_rng(0)
    lengths = [(19, 8, 3, 1), (30,), ()]
    filled = [
        [(draw.integers(0, VOCAB, n), None) for n in lengths[number % 3]] for number in range(count)
    ]
    capture_sizes_ = [
        None if capture_sizes is None else capture_sizes.smallest_for(len(pack), SLOTS)
        for pack in filled
    ]
    sizes = [
        (None, None) if size is None else (size.capacity, size.max_seqlen)
        for size in capture_sizes_
    ]
    return [
        MicroBatch.build(pack, SLOTS, capacity, (1 / 100, 1 / 8), longest)
        for pack, (capacity, longest) in zip(filled, sizes)
    ]


def seen_at_start(job: Job, monkeypatch: pytest.MonkeyPatch) -> dict[Bucket, Tensor]:
    """Return a dict that the next step fills: bucket -> its gradients when its reduction began."""
    buffers, seen = job.buffers, {}
    overlapped = job.step.overlapped
    assert overlapped is not None
    bucket_grads = type(buffers).bucket_grads

    def noting(self, bucket):
        assert bucket not in seen, "begun twice"
        seen[bucket] = bucket_grads(self, bucket).clone()
        return bucket_grads(self, bucket)

    monkeypatch.setattr(type(buffers), "bucket_grads", noting)
    return seen
