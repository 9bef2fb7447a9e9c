"""Bytes that a layer saves for backward with the GPU kernels, against a layer on the meta device.

The Triton kernels of this package run in the interpreter. Libraries that need a GPU are replaced by
functions that save the same tensors as the libraries (their ``save_for_backward``). So the tests
measure the views and copies that the layers themselves make.
"""

from contextlib import contextmanager
from itertools import product as product_of
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_packed.config.sections.memory import RECOMPUTED_IN, MemoryConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.models.estimate.step_memory import Work
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.ops.grouped_mlp import grouped_mm
from megatron_packed.packed.micro_batch import MicroBatch
from support.hybrid_cases import tiny_config
from support.traced_units import saved_bytes as traced_bytes
from support.traced_units import units_of

TOKENS, CHUNK = 32, 16
OWN = (
    "rms_norm",
    "gated_rms_norm",
    "gated_delta_rule",
    "activation",
    "rope",
    "permute",
    "router_logits",
)
# `scan` below saves what mamba-ssm saves.
TRITON = {**dict.fromkeys(OWN, "triton"), "ssd": "mamba_ssm"}
CASES = {
    "MLP": ("-", {}),
    "SwiGLU": ("-", {"squared_relu": False, "swiglu": True}),
    "attention": ("*", {}),
    "one group": ("*", {"num_query_groups": 1}),
    "as many groups as heads": ("*", {"num_query_groups": 4}),
    "rope": ("*", {"position_embedding_type": "rope"}),
    "Mamba": ("M", {}),
    "gated delta net": ("G", {}),
    "experts": ("E", {}),
    "experts, losses and a shared one": (
        "E",
        {
            "moe_aux_loss_coeff": 0.1,
            "moe_z_loss_coeff": 0.1,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "experts, loss per document": (
        "E",
        {
            "moe_aux_loss_coeff": 0.1,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_per_document": True,
        },
    ),
    "experts, loss over all ranks": (
        "E",
        {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "global_aux_loss"},
    ),
    "latent experts": ("E", {"moe_latent_size": 24}),
    "latent experts and a shared one": (
        "E",
        {"moe_latent_size": 8, "moe_shared_expert_intermediate_size": 24},
    ),
}


class Saves(torch.autograd.Function):
    """Stand-in for a library's op: returns a new tensor and saves the arguments for backward.

    With ``with_output`` the result is saved too.
    """

    @staticmethod
    def forward(ctx, shape, with_output, extra, *tensors):
        out = tensors[0].new_zeros(shape)
        more = [tensors[0].new_zeros(size, dtype=torch.float32) for size in extra]
        ctx.save_for_backward(*tensors, *more, *([out] if with_output else []))
        return out


def flash_attention(q, k, v, cu_seqlens, max_seqlen, **options):
    return Saves.apply(q.shape, True, [q.shape[:2]], q, k, v)


def convolution(x, weight, bias, seq_idx, **options):
    return Saves.apply(x.shape, False, [], x)


def scan(x, dt, A_log, B, C, D, dt_bias, seq_idx, cu_seqlens, **options):
    steps = (x.shape[1], TOKENS // CHUNK, CHUNK)
    return Saves.apply(x.shape, False, [steps, steps], x, dt, B, C)


def product(x, weight, offs):
    """Compute the grouped product by one plain product per expert."""
    ends = offs.tolist()
    parts = [
        x[start:end] @ weight[number] for number, (start, end) in enumerate(zip([0, *ends], ends))
    ]
    return F.pad(torch.cat(parts), (0, 0, 0, x.shape[0] - ends[-1]))


def experts(x, w1, w2, offsets, *, activation, backend, apart):
    return grouped_mm


@contextmanager
def libraries():
    layers = "megatron_packed.layers"
    with (
        mock.patch(f"{layers}.attention.varlen_attention", flash_attention),
        mock.patch(f"{layers}.recurrent_mixer.causal_conv1d", convolution),
        mock.patch(f"{layers}.kinds.mamba.ssd", scan),
        mock.patch("megatron_packed.ops.grouped_mlp.api.grouped_mlp_backend", experts),
        mock.patch.object(grouped_mm, "_product", product),
    ):
        yield


def saved_bytes(function, without):
    """Return the bytes of all storages that autograd saves, except ``without``, and the result."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()
    return sum(size for address, (size, _) in kept.items() if address not in without), result


MODULES = (
    "core_attn",
    "layernorm",
    "moe_act",
    "mamba",
    "gdn",
    "mlp",
    "moe",
    "layernorm mamba gdn mlp moe core_attn",
)
RECOMPUTED = [
    (case, modules)
    for case, modules in product_of(
        ("MLP", "rope", "Mamba", "gated delta net", "experts, losses and a shared one"), MODULES
    )
    if any(
        RECOMPUTED_IN.get(module, CASES[case][0]) == CASES[case][0] for module in modules.split()
    )
]


@pytest.mark.parametrize(("case", "modules"), [*((case, "") for case in CASES), *RECOMPUTED])
def test_saved_bytes(case, modules):
    pattern, changes = CASES[case]
    memory = MemoryConfig()
    if modules:
        memory = MemoryConfig(
            recompute_granularity="selective", recompute_modules=tuple(modules.split())
        )
    values = {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 16,
        "linear_norm_epsilon": 1e-6,
        "moe_aux_loss_coeff": 0.0,
        "position_embedding_type": "none",
        "untie_embeddings_and_output_weights": False,
        "mamba_chunk_size": CHUNK,
    }
    config = tiny_config(pattern, **values | changes)
    model, planned, plain = (
        HybridModel(
            config,
            vocab_size=64,
            max_positions=TOKENS,
            dtype=torch.bfloat16,
            backends=TRITON,
            memory=options,
            device=device,
        ).train()
        for device, options in (("cpu", memory), ("meta", memory), ("meta", None))
    )
    buffers = FlatBuffers(model)
    pack = MicroBatch.build([([1] * (TOKENS // 2), None)] * 2, TOKENS)
    packed = model.prepare(pack.packed)
    hidden = torch.randn(TOKENS, 32, dtype=torch.bfloat16, requires_grad=True)
    shared = [
        *buffers.params.values(),
        pack.buffer,
        *packed.tables.tensors(),
    ]
    shared += [model.rotary.cos_PR, model.rotary.sin_PR] if model.rotary is not None else []
    with libraries():
        found, _result = saved_bytes(
            lambda: model.layers[0](hidden, packed),
            {t.untyped_storage().data_ptr() for t in shared},
        )
    work = Work(tokens=TOKENS, documents=2)
    [layer], [kept] = units_of(planned, work), units_of(plain, work)
    assert layer.saves_input
    expected = traced_bytes(layer) + hidden.nbytes
    # A CPU has other masks and counts of the router.
    if pattern == "E":
        assert expected == pytest.approx(found, rel=0.03)
    else:
        assert expected == found
    assert bool(modules) == (traced_bytes(layer) < traced_bytes(kept))
