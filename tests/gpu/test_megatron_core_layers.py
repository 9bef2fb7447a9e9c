"""Layers of megatron-core in graphs: replay equals eager bit for bit over changing packs."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.gpu

LAYERS = """
import os, sys
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}.items():
    os.environ.setdefault(name, value)
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.sections.training import TrainingConfig

# Before torch, TransformerEngine and mamba-ssm are imported: they read the environment then.
apply_environment(TrainingConfig(train_iters=1, deterministic_mode=True))

import numpy as np
import torch
from torch import nn

torch.cuda.set_device(0)
torch.distributed.init_process_group("nccl", init_method="file://" + sys.argv[1], rank=0, world_size=1)

from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_packed import KeywordLayer, LayerGraphs
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch

T, D, PATTERN = 512, 512, "M-*-"
DEVICE = torch.device("cuda", 0)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1, te_rng_tracker=True)
config = TransformerConfig(
    num_layers=len(PATTERN), hidden_size=D, num_attention_heads=4, kv_channels=128, num_query_groups=2,
    ffn_hidden_size=2 * D, mamba_num_heads=16, mamba_head_dim=64, mamba_state_dim=64, mamba_num_groups=2,
    bf16=True, params_dtype=torch.bfloat16, normalization="RMSNorm", add_bias_linear=False,
    activation_func=squared_relu, gated_linear_unit=False, attention_dropout=0.0, hidden_dropout=0.0,
    pipeline_dtype=torch.bfloat16,
)
model = HybridModel(
    config=config, hybrid_stack_spec=hybrid_stack_spec, vocab_size=128, max_sequence_length=T,
    hybrid_layer_pattern=PATTERN, position_embedding_type="none",
).cuda().bfloat16().train()
layers = nn.ModuleList(model.decoder.layers)
adapters = {f"layers.{number}": KeywordLayer(layer) for number, layer in enumerate(layers)}
buffers = FlatBuffers(layers)
given = torch.randn(T, 1, D, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)


def results(micro_batch):
    buffers.zero_grad()
    leaf = given.clone().requires_grad_()
    hidden = leaf * 1
    for layer in layers:
        hidden = layer(hidden_states=hidden, attention_mask=None, packed_seq_params=micro_batch.packed)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    hidden.float().square().mean().backward()
    return [hidden.detach().clone(), leaf.grad, buffers.grads.clone()]


def pack(lengths, size):
    documents = [(np.zeros(length, np.int32), None) for length in lengths]
    return MicroBatch.build(documents, T, size.capacity, (1.0, 1.0), size.max_seqlen).pin_memory()


sizes = CaptureSizes.from_capacities([4, 32], T)
graphs = LayerGraphs(adapters, results, total_tokens=T, capture_sizes=sizes, device=DEVICE)
graphs.capture(lambda size: pack([T // size.capacity] * size.capacity, size))
assert graphs.counters.captures == 2 * (1 + 2 * len(PATTERN)), (graphs.counters, graphs.refusals)
for lengths in ([T], [100, 30, 250, 132], [16] * 32, [5, 300], [T - 1], [64] * 8, [1] * 20):
    size = sizes.smallest_for(len(lengths), T)
    replayed = results(graphs.place(pack(lengths, size)))
    graphs.slots.vacate()  # from here on the layers run eagerly
    eager = results(pack(lengths, size).to(DEVICE))
    for name, one, other in zip(("outputs", "input gradients", "parameter gradients"), replayed, eager):
        assert one.isfinite().all() and one.any(), (name, lengths)
        assert torch.equal(one, other), (name, lengths, (one - other).abs().max())
assert graphs.counters.replays == 7 and not graphs.counters.module_fallbacks, graphs.counters
graphs.close()
torch.distributed.destroy_process_group()
print("the end", flush=True)
"""


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_layers_of_megatron_core_replay_what_they_compute(tmp_path):
    """Replayed layers of megatron-core compute the same as eager layers.

    They run in a separate process: megatron-core has global state and sets determinism at import.
    """
    command = [sys.executable, "-c", LAYERS, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout.endswith("the end\n"), done.stderr[-4000:]
