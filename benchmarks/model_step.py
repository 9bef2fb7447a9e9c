"""Compares forward and backward of one micro-batch with megatron-core: same weights, same packs.

    python benchmarks/model_step.py [shard8b] [hybrid1b]

``shard8b`` is one rank's TP8 share of a model like Nemotron-H-8B with 4,096 tokens. ``hybrid1b`` is
a complete 797 M model with 8,192 tokens. Both models get the same weights, the same four packings
of 12 documents and the environment variables of a training run.

The results contain loss and gradient norm of both models, and their wall-clock and GPU-busy times.
The step of megatron_packed is also captured by hand in one CUDA graph, which is replayed on the
other packings. The eager models take turns, and each ratio compares two consecutive measurements.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import harness
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.models.flops import FlopCounter, peak_flops
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.micro_batch import MicroBatch

DOCUMENTS = 12
ROUNDS = 5
"""Number of profiles of each side. The sides take turns."""
CONFIGS = {
    "shard8b": {
        "T": 4096,
        "pattern": "M-M-M-M*-M-M-M-M*-M-M-M-M*-",
        "hidden": 4096,
        "heads": 4,
        "groups": 1,
        "ffn": 2688,
        "mamba_heads": 16,
        "mamba_groups": 1,
        "vocab": 16384,
    },
    "hybrid1b": {
        "T": 8192,
        "pattern": "M-M-M*-M-M-M*-M-M-M*-M-",
        "hidden": 2048,
        "heads": 16,
        "groups": 4,
        "ffn": 8192,
        "mamba_heads": 64,
        "mamba_groups": 8,
        "vocab": 32768,
    },
}


def packings(T: int, count: int) -> list[list[int]]:
    """Return the document lengths of ``count`` packs of T tokens with DOCUMENTS documents each."""
    lengths = []
    for seed in range(count):
        weights = torch.rand(DOCUMENTS, generator=torch.Generator().manual_seed(seed + 1)) + 0.05
        row = (weights / weights.sum() * T).long()
        row[-1] += T - row.sum()
        lengths.append(row.tolist())
    return lengths


def model_config(c: dict) -> ModelConfig:
    """Return the configuration of megatron_packed's model.

    If ``c`` has ``experts``, its E layers get that number of experts of size ``expert_ffn``. With
    ``delta_heads``, its G layers get these numbers of key heads and value heads.
    """
    experts = (
        {
            "num_experts": c["experts"],
            "moe_ffn_hidden_size": c["expert_ffn"],
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 1e-2,
        }
        if "experts" in c
        else {}
    )
    key_heads, value_heads = c.get("delta_heads", (None, None))
    delta_rule = (
        {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        }
        if key_heads
        else {}
    )
    return ModelConfig(
        hybrid_layer_pattern=c["pattern"],
        hidden_size=c["hidden"],
        num_attention_heads=c["heads"],
        num_query_groups=c["groups"],
        kv_channels=128,
        ffn_hidden_size=c["ffn"],
        squared_relu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="none",
        untie_embeddings_and_output_weights=True,
        mamba_num_heads=c["mamba_heads"],
        mamba_head_dim=64,
        mamba_state_dim=128,
        mamba_num_groups=c["mamba_groups"],
        vocab_size=c["vocab"],
        **experts,
        **delta_rule,
    )


def our_model(c: dict, device: torch.device | str = "cuda") -> HybridModel:
    """Build megatron_packed's model: bf16 on a GPU, float32 on a CPU."""
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return HybridModel(
        model_config(c),
        vocab_size=c["vocab"],
        max_positions=c["T"],
        device=device,
        dtype=dtype,
        seed=1234,
    )


def begin_megatron(backend: str = "nccl") -> None:
    """Set up megatron-core's process groups and random states for one process, once."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1, te_rng_tracker=True)


def megatron_model(c: dict, **options: Any) -> torch.nn.Module:
    """Return megatron-core's model in bf16. ``options`` are added to its configuration."""
    from megatron.core.activations import squared_relu
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel as MegatronHybridModel
    from megatron.core.transformer import TransformerConfig

    begin_megatron()
    config = TransformerConfig(
        num_layers=len(c["pattern"]),
        hidden_size=c["hidden"],
        num_attention_heads=c["heads"],
        kv_channels=128,
        num_query_groups=c["groups"],
        ffn_hidden_size=c["ffn"],
        mamba_num_heads=c["mamba_heads"],
        mamba_head_dim=64,
        mamba_state_dim=128,
        mamba_num_groups=c["mamba_groups"],
        bf16=True,
        params_dtype=torch.bfloat16,
        normalization="RMSNorm",
        add_bias_linear=False,
        activation_func=squared_relu,
        gated_linear_unit=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_dtype=torch.bfloat16,
        **options,
    )
    model = MegatronHybridModel(
        config=config,
        hybrid_stack_spec=hybrid_stack_spec,
        vocab_size=c["vocab"],
        max_sequence_length=c["T"],
        hybrid_layer_pattern=c["pattern"],
        position_embedding_type="none",
    )
    return model.cuda().bfloat16()


# Parameter name of megatron_packed inside a layer -> name of megatron-core, by kind of layer.
_LAYER_NAMES = {
    "M": {
        "norm.weight": "mixer.in_proj.layer_norm_weight",
        "norm.bias": "mixer.in_proj.layer_norm_bias",
        "mixer.in_proj.weight": "mixer.in_proj.weight",
        "mixer.conv1d.weight": "mixer.conv1d_weight",
        "mixer.conv1d.bias": "mixer.conv1d_bias",
        "mixer.A_log": "mixer.A_log",
        "mixer.D": "mixer.D",
        "mixer.dt_bias": "mixer.dt_bias",
        "mixer.norm.weight": "mixer.norm.weight",
        "mixer.out_proj.weight": "mixer.out_proj.weight",
    },
    "*": {
        "norm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "norm.bias": "self_attention.linear_qkv.layer_norm_bias",
        "mixer.qkv.weight": "self_attention.linear_qkv.weight",
        "mixer.qkv.bias": "self_attention.linear_qkv.bias",
        "mixer.proj.weight": "self_attention.linear_proj.weight",
        "mixer.proj.bias": "self_attention.linear_proj.bias",
    },
    "-": {
        "norm.weight": "mlp.linear_fc1.layer_norm_weight",
        "norm.bias": "mlp.linear_fc1.layer_norm_bias",
        "mixer.fc1.weight": "mlp.linear_fc1.weight",
        "mixer.fc1.bias": "mlp.linear_fc1.bias",
        "mixer.fc2.weight": "mlp.linear_fc2.weight",
        "mixer.fc2.bias": "mlp.linear_fc2.bias",
    },
}


def copy_weights(ours: HybridModel, theirs: torch.nn.Module, pattern: str) -> None:
    """Copy every parameter of megatron_packed's model into megatron-core's model.

    Every parameter of both models must be part of a pair.
    """
    names = {
        "embedding.weight": "embedding.word_embeddings.weight",
        "final_norm.weight": "decoder.final_norm.weight",
        "final_norm.bias": "decoder.final_norm.bias",
        "output.weight": "output_layer.weight",
    }
    for number, symbol in enumerate(pattern):
        for mine, their in _LAYER_NAMES[symbol].items():
            names[f"layers.{number}.{mine}"] = f"decoder.layers.{number}.{their}"
    source, target = dict(ours.named_parameters()), dict(theirs.named_parameters())
    # The names of biases and of the output layer stand for models that have them.
    names = {mine: their for mine, their in names.items() if mine in source}
    assert set(names) == set(source), set(names) ^ set(source)
    assert set(names.values()) == set(target), set(names.values()) ^ set(target)
    with torch.no_grad():
        for mine, their in names.items():
            target[their].copy_(source[mine].reshape(target[their].shape))


class Ours:
    def __init__(self, c: dict, model: HybridModel, batches: list[MicroBatch]) -> None:
        self.model, self.batches = model, batches
        self.buffers = FlatBuffers(model)
        self.loss = torch.zeros((), device="cuda")

    def step(self, number: int) -> None:
        output = self.model.forward_backward(self.batches[number])
        self.loss.copy_(output.loss)

    def check(self, number: int) -> tuple[float, float]:
        self.buffers.zero_grad()
        self.step(number)
        return self.loss.item(), self.buffers.grads.norm().item()


class Theirs:
    """Model of megatron-core in eager mode with exact cu_seqlens, its fastest eager path."""

    def __init__(self, c: dict, model: torch.nn.Module, batches: list[MicroBatch]) -> None:
        self.model, self.batches = model, batches
        self.loss = torch.zeros((), device="cuda")
        self.packs = [batch.packed.to_megatron_core() for batch in batches]

    def step(self, number: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        self.accumulate(number)

    def accumulate(self, number: int) -> None:
        batch = self.batches[number]
        per_token = self.model(
            input_ids=batch.tokens.long()[None],
            position_ids=batch.packed.position_ids.long()[None],
            attention_mask=None,
            labels=batch.labels.long()[None],
            packed_seq_params=self.packs[number],
        )
        loss = (per_token.float().view(-1) * batch.loss_mask).sum() * batch.scales[0]
        loss.backward()
        self.loss.copy_(loss.detach())

    def check(self, number: int) -> tuple[float, float]:
        self.step(number)
        squares = [
            p.grad.float().square().sum() for p in self.model.parameters() if p.grad is not None
        ]
        return self.loss.item(), torch.stack(squares).sum().sqrt().item()


def make_batches(
    c: dict, lengths: list[list[int]], capacity: int, max_seqlen: int | None = None
) -> list[MicroBatch]:
    batches = []
    for seed, row in enumerate(lengths):
        random = torch.Generator().manual_seed(100 + seed)
        documents = [
            (torch.randint(0, c["vocab"], (n,), generator=random).numpy(), None) for n in row
        ]
        targets = sum(n - 1 for n in row)
        scales = (1 / targets, 1.0)
        batches.append(MicroBatch.build(documents, c["T"], capacity, scales, max_seqlen).to("cuda"))
    return batches


def graph_replay(ours: Ours, c: dict, lengths: list[list[int]]) -> dict[str, object]:
    """Capture one forward and backward by hand, and replay it on the other packings."""
    # The grid of a captured kernel is fixed, so the capacity and max_seqlen must be large enough
    # for every packing that is replayed.
    static = make_batches(c, lengths[:1], DOCUMENTS, max_seqlen=c["T"])[0]
    batches = make_batches(c, lengths[1:], DOCUMENTS)
    ours.batches = [static]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            ours.step(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step(0)
    comparisons = []
    for number, batch in enumerate(batches, start=1):
        static.buffer.copy_(batch.buffer)
        ours.buffers.zero_grad()
        graph.replay()
        replayed = ours.loss.item(), ours.buffers.grads.norm().item()
        gradients = ours.buffers.grads.clone()
        ours.batches = [batch]
        eager = ours.check(0)
        difference = (
            ours.buffers.grads - gradients
        ).norm().item() / ours.buffers.grads.norm().item()
        again = ours.check(0), ours.buffers.grads.clone()
        second = ours.check(0)
        spread = (ours.buffers.grads - again[1]).norm().item() / ours.buffers.grads.norm().item()
        comparisons.append(
            {
                "packing": number,
                "loss_replay": replayed[0],
                "loss_eager": eager[0],
                "grad_norm_replay": replayed[1],
                "grad_norm_eager": eager[1],
                "grad_difference": difference,
                "eager_against_eager": spread,
                "finite": bool(torch.isfinite(gradients).all()),
                "second_loss": second[0],
            }
        )
    times = harness.wall_and_busy(graph.replay)
    del graph
    return {
        "packings": comparisons,
        "wall_ms": times.wall,
        "busy_ms": times.busy,
        "wall_over_busy": times.ratio,
    }


def run(
    name: str, *, kernels: int, skip_megatron: bool, save: Callable[[dict[str, object]], object]
) -> dict[str, object]:
    """Measure one model. ``save`` stores the results before the replays, which take longest."""
    c = CONFIGS[name]
    lengths = packings(c["T"], 4)
    plan_hash = hashlib.sha256(repr(lengths).encode()).hexdigest()[:12]
    batches = make_batches(c, lengths, DOCUMENTS)
    model = our_model(c)
    result: dict[str, object] = {
        "tokens": c["T"],
        "plan_hash": plan_hash,
        "documents": DOCUMENTS,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    sides: dict[str, object] = {}
    if not skip_megatron:
        theirs_model = megatron_model(c)
        copy_weights(model, theirs_model, c["pattern"])
        sides["megatron_core"] = Theirs(c, theirs_model, batches)
    ours = Ours(c, model, batches)
    sides["megatron_packed"] = ours
    for label, side in sides.items():
        loss, norm = side.check(0)
        result[label] = {"loss": loss, "grad_norm": norm}

    def cycling(side):
        numbers = iter(range(1 << 30))
        return lambda: side.step(next(numbers) % len(batches))

    walls = harness.interleaved({label: cycling(side) for label, side in sides.items()})
    counter = FlopCounter(model.config, c["vocab"])
    flops = sum(counter.training(row).total for row in lengths) / len(lengths)
    peak = peak_flops(torch.device("cuda"))
    profiles: dict[str, list[harness.Busy]] = {label: [] for label in sides}
    for _ in range(ROUNDS):
        for label, side in sides.items():
            torch.cuda.reset_peak_memory_stats()
            profiles[label].append(harness.gpu_busy(cycling(side), calls=len(batches)))
            result[label]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    busy_s = {
        label: [one.milliseconds / 1e3 for one in rounds] for label, rounds in profiles.items()
    }
    for label in sides:
        wall, busy = walls[label], harness.Spread.of(busy_s[label])
        result[label] |= {
            "wall_ms": wall,
            "busy_ms": busy,
            "wall_over_busy": round(wall.median / busy.median, 3),
            "launches": profiles[label][0].launches,
            "mfu_of_wall": round(flops / (wall.median / 1e3) / peak, 4) if peak else None,
            "mfu_of_busy": round(flops / (busy.median / 1e3) / peak, 4) if peak else None,
        }
        print(f"--- {name} {label}: {kernels} longest kernels (ms per call)")
        for kernel, milliseconds in profiles[label][-1].kernels[:kernels]:
            print(f"{milliseconds:9.3f}  {kernel[:120]}")
    if not skip_megatron:
        mine, other = result["megatron_packed"], result["megatron_core"]
        result["busy_ratio"] = harness.Spread.of_ratios(
            busy_s["megatron_packed"], busy_s["megatron_core"]
        )
        result["loss_difference"] = abs(mine["loss"] - other["loss"]) / abs(other["loss"])
        result["grad_norm_difference"] = (
            abs(mine["grad_norm"] - other["grad_norm"]) / other["grad_norm"]
        )
        sides.pop("megatron_core")
        del theirs_model
        torch.cuda.empty_cache()
    save(result)
    result["graph"] = graph_replay(ours, c, lengths)
    return result


def save_with(
    results: dict[str, Any], name: str, arguments: argparse.Namespace, found: dict[str, object]
) -> Path:
    """Save the results of the models before and those found for this model."""
    return harness.save(arguments.name, {**results, name: found}, folder=arguments.results)


def begin_alone(*, port: int) -> None:
    """Set the environment variables of a job of one process, and select the first GPU.

    megatron-core reads the distributed variables. `apply_environment` sets those of
    megatron_packed's kernels.
    """
    for key, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }.items():
        os.environ.setdefault(key, value)
    apply_environment(TrainingConfig(train_iters=1))
    torch.cuda.set_device(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="*", help=f"from {list(CONFIGS)} (default: all)")
    parser.add_argument(
        "--kernels",
        type=int,
        default=22,
        help="number of kernels to print for each implementation, slowest first",
    )
    parser.add_argument("--skip-megatron", action="store_true", help="measure only megatron_packed")
    parser.add_argument("--name", default="model_step", help="name of the result file")
    parser.add_argument(
        "--results", type=Path, help="folder of the result file (default: benchmarks/results)"
    )
    arguments = parser.parse_args()
    begin_alone(port=29511)
    results: dict[str, Any] = {}
    for name in arguments.configs or CONFIGS:
        save = partial(save_with, results, name, arguments)
        results[name] = run(
            name, kernels=arguments.kernels, skip_megatron=arguments.skip_megatron, save=save
        )
        path = save(results[name])
        torch.cuda.empty_cache()
    rows = []
    for name, result in results.items():
        for label in ("megatron_core", "megatron_packed", "graph"):
            if label in result:
                rows.append(
                    {
                        "config": name,
                        "path": label,
                        **{
                            key: result[label].get(key)
                            for key in (
                                "loss",
                                "grad_norm",
                                "wall_ms",
                                "busy_ms",
                                "wall_over_busy",
                                "mfu_of_busy",
                                "launches",
                            )
                        },
                    }
                )
        print(
            {
                key: result[key]
                for key in ("busy_ratio", "loss_difference", "grad_norm_difference", "plan_hash")
                if key in result
            }
        )
        print(*result["graph"]["packings"], sep="\n")
    print(harness.table(rows))
    print(path)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
