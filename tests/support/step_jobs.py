"""Tiny training job on the CPU with graphs, its micro-batches, and a hash of its state."""

import hashlib
import pickle
import random
from functools import partial

import numpy as np
import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.logging import LoggingConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.resume.held_state import held_state
from megatron_packed.training.build_job import build_job

SLOTS, VOCAB = 48, 61
CONFIG = ModelConfig(
    hybrid_layer_pattern="M*-E/*E",
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    mamba_head_dim=8,
    mamba_state_dim=16,
    mamba_num_groups=2,
    mamba_chunk_size=8,
    add_bias_linear=False,
    normalization="RMSNorm",
    squared_relu=True,
    position_embedding_type="rope",
    num_experts=5,
    moe_ffn_hidden_size=16,
    moe_aux_loss_coeff=1e-2,
    moe_router_load_balancing_type="global_aux_loss",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)


CAPTURE_SIZES = CaptureSizes.from_capacities([2, 5], SLOTS)
GROUPS = ParallelGroups.single()
step_values = partial(StepValues.from_list, depths=CONFIG.mtp_depths)


def config_of(**graphs):
    graphs = {"cuda_graph_impl": "local", **graphs}
    if graphs["cuda_graph_impl"] != "none":
        graphs.setdefault("cuda_graph_warmup_steps", 1)  # a CPU has no kernels to tune
    return RunConfig(
        model=CONFIG,
        data=DataConfig(train_data_path=("absent.jsonl",), sft=True),
        packing=PackingConfig(seq_length=SLOTS, global_batch_size=3),
        optim=OptimizerConfig(lr=1e-2),
        training=TrainingConfig(
            train_iters=5, device="cpu", loss_spike_policy="skip", loss_spike_window=4
        ),
        cuda_graph=CudaGraphConfig(**graphs),
        logging=LoggingConfig(log_params_norm=True, log_num_zeros_in_grad=True),
    )


def job_of(config):
    return build_job(config, GROUPS, VOCAB)


def micro_batch(lengths, seed=3):
    draw = np.random.default_rng(seed)
    size = CAPTURE_SIZES.smallest_for(len(lengths), SLOTS)
    documents = [(draw.integers(0, VOCAB, length), None) for length in lengths]
    capacity, longest = (None, None) if size is None else (size.capacity, size.max_seqlen)
    return MicroBatch.build(documents, SLOTS, capacity, (1 / 100, 1 / 3, 1 / 90), longest)


def state_hash(job):
    """Return a hash of weights, optimizer, buffers, gradients, statistics and random states."""
    digest = hashlib.sha256()
    tensors = {held.shard.name: held.shard.tensor for held in held_state(job.model, job.optimizer)}
    # Every step begins with loads of zero, so loads of an earlier step mean nothing.
    tensors |= {
        f"buffer {name}": tensor
        for name, tensor in job.model.named_buffers()
        if not name.startswith("global_balance.")
    }
    tensors |= {
        "storage": job.buffers.storage,
        "metrics": job.step.metrics,
        "rng": torch.get_rng_state(),
    }
    tensors["spikes"] = job.optimizer.spikes.recent
    for name, tensor in sorted(tensors.items()):
        digest.update(
            name.encode()
            + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    digest.update(pickle.dumps((np.random.get_state(), random.getstate(), job.model.training)))
    return digest.hexdigest()
