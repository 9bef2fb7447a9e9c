"""Small models and optimizers of megatron-core on the CPU, with stand-ins for what needs a GPU.

megatron-core must be installed, without its dependencies: ``pip install --no-deps megatron-core
einops``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PATTERN = "MG*-EMG*-E"
ROWS = 128
LENGTH, DOCUMENTS = 23, 2
"""Target tokens of a document, and documents of a step."""
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
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
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
    "seq_length": LENGTH,
    "global_batch_size": DOCUMENTS,
}
GPT_ARGS: dict[str, Any] = {
    **{
        name: value
        for name, value in ARGS.items()
        if not name.startswith(("moe_", "mamba_", "linear_"))
    },
    "hybrid_layer_pattern": None,
    "num_layers": 4,
    "num_experts": None,
    "position_embedding_type": "rope",
}
"""Options of a GPT model, whose layers are stored as one tensor for each parameter."""
GPT_PATTERN = "*-" * GPT_ARGS["num_layers"]
"""Pattern of the hybrid model that is written back for the GPT model."""


class OnCpu(TorchFunctionMode):
    """Run calls that name the GPU on the CPU."""

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


def stand_ins() -> None:
    """Put stand-ins for packages and calls that need a GPU."""
    package = "mamba_ssm.ops.triton"
    names = ("mamba_ssm", "mamba_ssm.ops", package, "fla", "fla.modules", "fla.ops")
    leaves = (f"{package}.layernorm_gated", f"{package}.ssd_combined", "fla.modules.l2norm")
    unused = ("fla.modules.convolution", "fla.ops.gated_delta_rule")
    for name in (*names, *leaves, *unused):
        sys.modules[name] = types.ModuleType(name)
    gated, scans, norms = (sys.modules[name] for name in leaves)
    norms.l2norm = l2norm
    sys.modules["fla.modules.convolution"].causal_conv1d = None
    sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = None
    gated.RMSNorm = GatedNorm
    scans.mamba_chunk_scan_combined = scan
    scans.mamba_split_conv1d_scan_combined = scan
    calls_of_cuda()
    from megatron.core import tensor_parallel
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_mixer
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    hybrid_block.TENorm = WrappedTorchNorm
    for module in (mamba_mixer, common, tensor_parallel):
        module.get_cuda_rng_tracker = Tracker


def calls_of_cuda() -> None:
    """Put stand-ins for calls of ``torch.cuda``."""
    device = torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: device
    torch.cuda.current_stream = lambda *_: None


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


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """Divide vectors by their length, in float32, as flash-linear-attention does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(dim, keepdim=True) + eps)).to(x.dtype)


def scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **options: Any
) -> Tensor:
    """Run the recurrence of Mamba-2 token by token, with mamba-ssm's arguments."""
    (batch, length, heads, width), dtype = x.shape, x.dtype
    x, dt, B, C = (one.float() for one in (x, dt, B, C))
    dt = F.softplus(dt + options["dt_bias"].float())
    B, C = (one.repeat_interleave(heads // one.shape[2], dim=2) for one in (B, C))
    state, outputs = x.new_zeros(batch, heads, width, B.shape[-1]), []
    for t in range(length):
        added = (dt[:, t, :, None] * x[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(-2)
        state = torch.exp(dt[:, t] * A.float())[..., None, None] * state + added
        outputs.append((state * C[:, t].unsqueeze(-2)).sum(-1))
    skipped = options["D"].float().view(heads, -1) * x
    return (torch.stack(outputs, 1) + skipped).to(dtype)


def their_model(kind: str, layout: dict[str, int], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build megatron-core's model with layers of torch in place of those of Transformer Engine.

    Args:
        kind: ``hybrid``, ``gpt``, or ``gpt_hybrid`` for the hybrid model that equals the GPT model.
        layout: sizes of the parallel groups.
    """
    from megatron.core import parallel_state

    stages = layout.get("pipeline_model_parallel_size", 1)
    options: dict[str, Any] = {
        "vocab_size": ROWS,
        "max_sequence_length": 64,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": False,
        "parallel_output": False,
        "pg_collection": None,
    }
    if kind == "gpt":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        options["position_embedding_type"] = "rope"
        return GPTModel(their_config(GPT_ARGS, layout, dtype), spec, **options).to(dtype)
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    args, pattern = ARGS, PATTERN
    if kind == "gpt_hybrid":
        args, pattern = {**GPT_ARGS, "num_layers": len(GPT_PATTERN)}, GPT_PATTERN
        options["position_embedding_type"] = "rope"
    elif stages > 1:
        half = len(PATTERN) // 2
        pattern = f"{PATTERN[:half]}|{PATTERN[half:]}"
    config = their_config(args, layout, dtype)
    return HybridModel(config, layer_specs(), hybrid_layer_pattern=pattern, **options).to(dtype)


def their_config(args: dict[str, Any], layout: dict[str, int], dtype: torch.dtype) -> Any:
    """Return megatron-core's configuration of a model."""
    from megatron.core.transformer import TransformerConfig

    options = (
        *("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("ffn_hidden_size", "mamba_num_heads", "mamba_head_dim", "mamba_num_groups"),
        *("mamba_state_dim", "moe_router_topk", "moe_ffn_hidden_size", "normalization"),
        *("moe_shared_expert_intermediate_size", "moe_router_score_function"),
        *("moe_router_enable_expert_bias", "add_bias_linear"),
        *(name for name in args if name.startswith("linear_")),
    )
    return TransformerConfig(
        num_layers=args.get("num_layers") or len(PATTERN),
        **{name: args[name] for name in options if name in args},
        num_moe_experts=args["num_experts"],
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True,
        use_mamba_mem_eff_path=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=True,  # layers of the gated delta net run without Triton
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **layout,
    )


def layer_specs() -> Any:
    """Return the layers of megatron-core's hybrid models that need no Transformer Engine."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
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
    delta_net = spec(
        GatedDeltaNet,
        GatedDeltaNetSubmodules(in_proj=wide, out_norm=WrappedTorchNorm, out_proj=narrow),
    )
    mlp = functools.partial(
        MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=wide, linear_fc2=narrow)
    )
    moe = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
    add = get_bias_dropout_add

    def layer(module: Any, **parts: Any) -> Any:
        return spec(module, TransformerLayerSubmodules(**parts))

    gdn = layer(
        TransformerLayer,
        input_layernorm=WrappedTorchNorm,
        self_attention=delta_net,
        self_attn_bda=add,
    )
    gdn.submodules.sharded_state_dict_keys_map = {
        "input_layernorm.": "self_attention.in_proj.layer_norm_"
    }

    return spec(
        HybridStack,
        HybridStackSubmodules(
            mamba_layer=spec(
                MambaLayer,
                MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mamba, mamba_bda=add),
            ),
            gdn_layer=gdn,
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
