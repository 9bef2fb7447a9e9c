"""Convert checkpoints of megatron-core's models with Transformer Engine, trained on one GPU.

`megatron_checkpoints.py` has stand-ins for these layers, and for Transformer Engine's Adam.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

os.environ.update(NVIDIA_TF32_OVERRIDE="0", TRITON_F32_DEFAULT="ieee")  # no TF32 on either side

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import common.megatron_core as core
import common.megatron_training as training
import megatron_checkpoints as newer
from common.megatron_core import ARGS, GPT_ARGS, LENGTH, ROWS
from megatron_packed.models.convert.import_huggingface import Imported
from megatron_packed.models.convert.megatron.import_megatron import from_megatron
from megatron_packed.models.hybrid_model import HybridModel
from support import hybrid_cases as cases

PATTERN = "M*-EM*-E"
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "kv_channels": 16,
    "ffn_hidden_size": 96,
    "mamba_num_heads": 8,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
"""Sizes with which rows have the alignment that kernels of GPUs need."""
HYBRID = {
    **{name: value for name, value in ARGS.items() if not name.startswith("linear_")},
    **WIDE,
    "hybrid_layer_pattern": PATTERN,
}
GPT = {
    **GPT_ARGS,
    **{name: WIDE[name] for name in ("hidden_size", "kv_channels", "ffn_hidden_size")},
}
KINDS = {"hybrid": HYBRID, "gpt": GPT}
OURS = {"ssd_backend": "reference", "conv_backend": "reference"}
"""Kernels of the continued runs that need no tuning."""
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_on_gpu(args: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Build megatron-core's model with the layers that Megatron-LM trains."""
    from megatron.core.transformer import TransformerConfig

    names = {name for name in args if name.startswith(("mamba_", "moe_"))}
    names -= {"moe_router_load_balancing_type", "moe_aux_loss_coeff"}
    names |= {"hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"}
    names |= {"ffn_hidden_size", "normalization", "add_bias_linear"}
    pattern = args["hybrid_layer_pattern"]
    config = TransformerConfig(
        num_layers=len(pattern) if pattern else args["num_layers"],
        **{name: args[name] for name in sorted(names)},
        num_moe_experts=args["num_experts"],
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
    options: dict[str, Any] = {
        "vocab_size": ROWS,
        "max_sequence_length": 64,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": args["position_embedding_type"],
        "parallel_output": False,
    }
    if pattern:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel as TheirHybrid

        model = TheirHybrid(config, hybrid_stack_spec, hybrid_layer_pattern=pattern, **options)
    else:
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )
        from megatron.core.models.gpt.gpt_model import GPTModel

        model = GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), **options)
    return model.cuda().to(dtype)


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return megatron-core's logits ``(T, V)`` of one document, on the CPU."""
    places = torch.arange(len(tokens))[None].cuda()
    found: Tensor = model(tokens[None].cuda(), places, None)[0]
    return found.cpu()


def compile_little() -> None:
    """Take the smallest configuration of Triton's kernels, and compile no PyTorch functions.

    Both would take longer than this check. Larger tiles in float32 exceed the shared memory.
    """
    import torch._dynamo
    import triton

    torch._dynamo.config.disable = True
    tuned = triton.autotune

    def size(config: Any) -> int:
        sizes = (max(value, 1) for value in config.kwargs.values() if isinstance(value, int))
        return prod(sizes) * config.num_stages

    triton.autotune = lambda configs, key, **more: tuned([min(configs, key=size)], key, **more)


def on_process(_: int, kind: str, folder: str, device: str) -> None:
    """Train a model in each format, and save its checkpoint, logits and next losses."""
    os.environ.update(MASTER_ADDR="127.0.0.1")
    warnings.simplefilter("ignore")
    args, documents = KINDS[kind], training.documents_of(7)
    if device == "cuda":
        compile_little()
        torch.cuda.set_device(0)
        training.logits = logits
    else:
        core.stand_ins()
        core.ARGS.update(HYBRID)
        core.GPT_ARGS.update(GPT)
        core.PATTERN = PATTERN
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/store_{kind}", rank=0, world_size=1)
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel()
    if device == "cuda":
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1)

    def build(dtype: torch.dtype) -> nn.Module:
        return model_on_gpu(args, dtype) if device == "cuda" else core.their_model(kind, {}, dtype)

    with core.OnCpu() if device == "cpu" else contextlib.nullcontext():
        for name, dtype in FORMATS.items():
            torch.manual_seed(1)
            trainer = training.Trainer(build(dtype), bf16=name == "bf16")
            for _ in range(newer.BEFORE):
                trainer.step(documents)
            written = f"{folder}/{kind}_{name}"
            os.makedirs(written)
            dist_checkpointing.save(trainer.state(args, "fully_reshardable"), written)
            result: dict[str, Any] = {}
            with torch.no_grad():
                result["logits"] = training.logits(trainer.model, newer.TOKENS).float()
                if name == "fp32":
                    low = build(torch.bfloat16)
                    low.load_state_dict(trainer.model.state_dict(), strict=False)
                    result["bf16"] = training.logits(low, newer.TOKENS).float()
            result["after"] = [trainer.step(documents) for _ in range(newer.AFTER)]
            torch.save(result, f"{written}.pt")
    dist.destroy_process_group()


def our_logits(found: Imported, dtype: torch.dtype, device: str) -> Tensor:
    model = HybridModel(found.model, vocab_size=ROWS, max_positions=64, dtype=dtype, device=device)
    tensors = newer.tensors_of(found).items()
    model.load_state_dict(
        {n.removeprefix("model/"): one for n, one in tensors if n.startswith("model/")}
    )
    batch = cases.make_pack([(newer.TOKENS.numpy(), np.ones(LENGTH, bool))])
    batch = batch.to(torch.device(device))
    with torch.no_grad():
        return model.logits(batch.tokens, batch.packed)[:LENGTH, :ROWS].float().cpu()


def check(folder: Path, kind: str, device: str) -> list[tuple[bool, str]]:
    """Convert the checkpoints of a model, and compare logits and losses."""
    exact, low = (torch.load(folder / f"{kind}_{name}.pt") for name in FORMATS)
    first = from_megatron(folder / f"{kind}_fp32", folder / f"ours_{kind}_fp32")
    narrow = from_megatron(folder / f"{kind}_fp32", folder / f"ours_{kind}_narrow", bf16=True)
    from_megatron(folder / f"{kind}_bf16", folder / f"ours_{kind}_bf16", bf16=True)
    worst = newer.distance(our_logits(first, torch.float32, device), exact["logits"])
    ours = newer.rounding(our_logits(narrow, torch.bfloat16, device), exact["logits"])
    theirs = newer.rounding(exact["bf16"], exact["logits"])
    results = [
        (
            worst < newer.TOLERANCE,
            f"largest difference of logits, relative to the largest: {worst:.1e}",
        ),
        (
            ours <= theirs,
            f"bf16 logits: {ours:.1e} from float32 (RMS), megatron-core's own are {theirs:.1e}",
        ),
    ]
    more: dict[str, Any] = {"device": device, **(OURS if device == "cuda" else {})}
    jobs = (
        (f"{kind}_fp32", exact["after"], more, newer.TOLERANCE),
        (f"{kind}_bf16", low["after"], {**more, "bf16": True}, newer.BF16_TOLERANCE),
    )
    with ThreadPoolExecutor() as pool:
        results += pool.map(lambda job: newer.continued(folder, *job), jobs)
    return results


def main(device: str) -> int:
    """Return the exit code."""
    passed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        started = [
            torch.multiprocessing.spawn(on_process, (kind, str(folder), device), join=False)
            for kind in KINDS
        ]
        for one in started:
            while not one.join():
                pass
        with ThreadPoolExecutor() as pool:
            found = dict(zip(KINDS, pool.map(lambda kind: check(folder, kind, device), KINDS)))
    for kind, results in found.items():
        for right, line in results:
            print(f"{kind}, {line}: {'right' if right else 'wrong'}")
            passed.append(right)
    print(f"{sum(passed)} of {len(passed)}")
    return int(not all(passed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    sys.exit(main(parser.parse_args().device))
