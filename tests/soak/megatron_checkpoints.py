"""Write checkpoints with megatron-core in several layouts, convert them, and compare all weights.

megatron-core must be installed, without its dependencies: ``pip install --no-deps megatron-core
einops``. It runs on the CPU, so kernels that need a GPU have stand-ins that are never called.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _paths  # noqa: F401  helpers of the tests
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.models.convert.megatron.export_megatron import to_megatron
from megatron_packed.models.convert.megatron.import_megatron import from_megatron
from megatron_packed.models.hybrid_model import HybridModel
from support import hybrid_cases as cases

LAYOUTS = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
}
TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit."""
PATTERN = "M*-EM*-E"
ROWS = 128
ARGS: dict[str, Any] = {
    "hybrid_layer_pattern": PATTERN,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "mamba_state_dim": 16,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": ["aux_loss"],
    "moe_aux_loss_coeff": [0.0],
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "none",
    "multi_latent_attention": False,
}


def stand_ins() -> None:
    """Put stand-ins for packages and calls that need a GPU."""
    package = "mamba_ssm.ops.triton"
    names = ("mamba_ssm", "mamba_ssm.ops", package)
    leaves = (f"{package}.layernorm_gated", f"{package}.ssd_combined")
    for name in (*names, *leaves):
        sys.modules[name] = types.ModuleType(name)
    gated, scans = (sys.modules[name] for name in leaves)
    gated.RMSNorm = GatedNorm
    scans.mamba_chunk_scan_combined = scan
    scans.mamba_split_conv1d_scan_combined = scan
    device = torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: device
    from megatron.core import tensor_parallel
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    hybrid_block.TENorm = WrappedTorchNorm
    for module in (mamba_mixer, tensor_parallel):
        module.get_cuda_rng_tracker = Tracker


class Tracker:
    """Random states of the GPU, which the CPU does not have."""

    def fork(self, *_: Any) -> Any:
        return contextlib.nullcontext()


class GatedNorm(nn.Module):
    """Gated norm of mamba-ssm: RMS of ``x * silu(z)`` for each group of channels."""

    def __init__(self, size: int, *, eps: float, group_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.group_size = group_size

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        gated = (x * F.silu(z)).float().unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return (gated * scale).flatten(-2).to(x.dtype) * self.weight


def scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **options: Any
) -> Tensor:
    """Run the recurrence of Mamba-2 token by token, with mamba-ssm's arguments."""
    batch, length, heads, width = x.shape
    dt = F.softplus(dt + options["dt_bias"])
    B, C = (one.repeat_interleave(heads // one.shape[2], dim=2) for one in (B, C))
    state, outputs = x.new_zeros(batch, heads, width, B.shape[-1]), []
    for t in range(length):
        added = (dt[:, t, :, None] * x[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(-2)
        state = torch.exp(dt[:, t] * A)[..., None, None] * state + added
        outputs.append((state * C[:, t].unsqueeze(-2)).sum(-1))
    skipped = options["D"].view(heads, -1) * x
    return torch.stack(outputs, 1) + skipped


def their_model(layout: dict[str, int]) -> nn.Module:
    """Build megatron-core's model on this rank, with layers of torch in place of those of TE."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import TransformerConfig

    options = (
        *("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("ffn_hidden_size", "mamba_num_heads", "mamba_head_dim", "mamba_num_groups"),
        *("mamba_state_dim", "moe_router_topk", "moe_ffn_hidden_size", "normalization"),
        *("moe_shared_expert_intermediate_size", "moe_router_score_function"),
        *("moe_router_enable_expert_bias", "add_bias_linear"),
    )
    config = TransformerConfig(
        num_layers=len(PATTERN),
        **{name: ARGS[name] for name in options},
        num_moe_experts=ARGS["num_experts"],
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True,
        use_mamba_mem_eff_path=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        pipeline_dtype=torch.float32,
        **layout,
    )
    stages = layout.get("pipeline_model_parallel_size", 1)
    half = len(PATTERN) // 2
    return HybridModel(
        config,
        layer_specs(),
        vocab_size=ROWS,
        max_sequence_length=64,
        hybrid_layer_pattern=PATTERN if stages == 1 else f"{PATTERN[:half]}|{PATTERN[half:]}",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        parallel_output=False,
        pg_collection=None,
    )


def layer_specs() -> Any:
    """Return the layers of megatron-core's hybrid models that need no Transformer Engine."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    norms = {
        MambaLayer: {"norm.": "mixer.in_proj.layer_norm_"},
        TransformerLayer: {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
        MLPLayer: {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    }  # names of Transformer Engine, whose linear layers contain the norm

    def spec(module: Any, submodules: Any, **params: Any) -> Any:
        if module in norms:
            submodules.sharded_state_dict_keys_map = norms[module]
        return ModuleSpec(module=module, submodules=submodules, params=params)

    wide, narrow = ColumnParallelLinear, RowParallelLinear
    mamba = spec(MambaMixer, MambaMixerSubmodules(in_proj=wide, out_proj=narrow))
    attention = spec(
        SelfAttention,
        SelfAttentionSubmodules(
            linear_qkv=wide, core_attention=DotProductAttention, linear_proj=narrow
        ),
        attn_mask_type=AttnMaskType.causal,
    )
    mlp = functools.partial(
        MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=wide, linear_fc2=narrow)
    )
    moe = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
    add = get_bias_dropout_add

    def layer(module: Any, **parts: Any) -> Any:
        return spec(module, TransformerLayerSubmodules(**parts))

    return spec(
        HybridStack,
        HybridStackSubmodules(
            mamba_layer=spec(
                MambaLayer,
                MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mamba, mamba_bda=add),
            ),
            attention_layer=layer(
                TransformerLayer,
                input_layernorm=WrappedTorchNorm,
                self_attention=attention,
                self_attn_bda=add,
            ),
            mlp_layer=layer(MLPLayer, pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=add),
            moe_layer=layer(
                TransformerLayer, pre_mlp_layernorm=WrappedTorchNorm, mlp=moe, mlp_bda=add
            ),
        ),
    )


def on_rank(rank: int, world: int, port: int, name: str, folder: str, seed: str | None) -> None:
    """Save a checkpoint in one layout, on one rank.

    Args:
        seed: folder with the weights; random weights when not given.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    stand_ins()
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel(**LAYOUTS[name])
    torch.manual_seed(rank)
    model = their_model(LAYOUTS[name])
    group = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    if seed is not None:
        wanted = {"model": model.sharded_state_dict(metadata=group)}
        # A checkpoint of this project has no state of FP8 (_extra_state).
        state = dist_checkpointing.load(wanted, seed, strict="log_all")
        model.load_state_dict(state["model"], strict=False)
    else:
        with torch.no_grad():
            for parameter in model.state_dict().values():
                if isinstance(parameter, Tensor) and parameter.is_floating_point():
                    parameter.normal_(std=0.5)
    if world == 1:
        torch.save(logits(model), f"{folder}.pt")
    if rank == 0:
        os.makedirs(folder)
    dist.barrier()
    state = {
        "model": model.sharded_state_dict(metadata=group),
        "args": argparse.Namespace(**ARGS),
        "iteration": 7,
    }
    dist_checkpointing.save(state, folder)
    dist.barrier()
    dist.destroy_process_group()


def logits(model: nn.Module) -> Tensor:
    """Return megatron-core's logits ``(T, V)`` of one document."""
    tokens = torch.arange(24)[None] * 5 % ROWS
    mask = torch.ones(1, 1, 24, 24).triu(1).bool()
    with torch.no_grad():
        return model(tokens, torch.arange(24)[None], mask)[0]


def check(folder: Path) -> Iterator[tuple[bool, str]]:
    """Write all checkpoints and convert them; yield whether each case is right, and its numbers."""
    first: dict[str, Tensor] = {}
    for number, name in enumerate(LAYOUTS):
        world = 1 if name == "one" else 2
        seed = None if name == "one" else str(folder / "one")
        arguments = (world, 29700 + number, name, str(folder / name), seed)
        torch.multiprocessing.spawn(on_rank, arguments, nprocs=world)
        found = from_megatron(folder / name, folder / f"ours_{name}")
        manifest = read_manifest(found.saved.path)
        ours = {key: read_tensor(found.saved.path, key, manifest) for key in manifest.tensors}
        first = first or ours
        same = all(torch.equal(ours[key], first[key]) for key in first)
        yield same, f"{name}: {len(ours)} tensors, equal to those of one rank: {same}"
        if name == "one":
            yield compare_logits(found.model, ours, torch.load(folder / "one.pt"))
    written = to_megatron(folder / "ours_one", folder / "back")
    arguments = (1, 29720, "one", str(folder / "again"), str(written))
    torch.multiprocessing.spawn(on_rank, arguments, nprocs=1)
    same = torch.equal(torch.load(folder / "again.pt"), torch.load(folder / "one.pt"))
    yield same, f"written back: megatron-core's logits are the same: {same}"


def compare_logits(config: Any, tensors: dict[str, Tensor], theirs: Tensor) -> tuple[bool, str]:
    model = HybridModel(config, vocab_size=ROWS, max_positions=64)
    model.load_state_dict({name.removeprefix("model/"): one for name, one in tensors.items()})
    tokens = torch.arange(24) * 5 % ROWS
    batch = cases.make_pack([(tokens.numpy(), np.ones(24, bool))])
    with torch.no_grad():
        ours = model.logits(batch.tokens, batch.packed)[:24, :ROWS]
    worst = float((ours - theirs).abs().max())
    largest = float(theirs.abs().max())
    right = worst < TOLERANCE * largest
    return right, f"logits: largest difference {worst:.1e}, largest logit {largest:.1f}"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for right, line in check(Path(folder)):
            print(line, flush=True)
            results.append(right)
    print(f"{sum(results)} of {len(results)}")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
