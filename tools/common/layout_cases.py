"""Random models, packs and parallel layouts, and their training steps in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.config.sections.cuda_graph import MODULE_LAYERS, CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.models.run_model import build_model
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.resume.compared_runs import AskedRun
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.build_graphs import build_graphs, capture_graphs, released
from megatron_packed.training.build_job import Job, job_of_model
from megatron_packed.training.expert_bounds import ExpertBounds
from support.stand_in import RecordingBackend
from support.whole_state import Shards, everything

STEPS = 2
LENGTHS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 33, 48)
LOSSES = ("loss", "aux_loss", "mtp_losses")
LAYERS = {"M": 4, "*": 4, "G": 3, "E": 4, "-": 2}
"""Kinds of layers and how often each is drawn."""
MODULES = {
    "*": ("core_attn",),
    "M": ("mamba",),
    "G": ("gdn",),
    "-": ("mlp",),
    "E": ("moe", "moe_act"),
}
OFFLOADED = {
    "*": ("attn_norm", "qkv_linear", "core_attn", "attn_proj"),
    "M": ("mamba_norm", "mamba_in_proj", "mamba_scan", "mamba_out_proj"),
    "G": ("gdn_norm", "gdn_in_proj", "gdn_scan", "gdn_out_proj"),
    "-": ("mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"),
    "E": ("mlp_norm", "expert_fc1", "moe_act", "expert_fc2"),
}
"""Modules of recomputation and of offload, by the layers that contain them."""


@dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """One model, its options, the layout, and the packs of a step."""

    model: dict[str, Any]
    parallel: dict[str, Any]
    memory: dict[str, Any]
    graphs: dict[str, Any]
    """Options of CUDA graphs, empty without them; a stand-in captures them on the CPU."""
    capacities: tuple[int, ...]
    """Capacities of captured graphs, in documents."""
    processes: int
    slots: int
    accumulate: int
    vocab: int
    masked: bool
    """True trains on a part of the tokens."""
    seed: str

    def __str__(self) -> str:
        sizes = (
            f"{name.removesuffix('_size')} {size}" for name, size in self.layout.items() if size > 1
        )
        impl = self.graphs.get("cuda_graph_impl", "")
        return ", ".join([f"{self.processes} processes", *sizes, *[f"{impl} graphs"] * bool(impl)])

    @property
    def layout(self) -> dict[str, int]:
        """Sizes of the groups of ranks."""
        names = {
            "tp_size": "tensor_model_parallel_size",
            "cp_size": "context_parallel_size",
            "ep_size": "expert_model_parallel_size",
            "expert_tp_size": "expert_tensor_parallel_size",
        }
        sizes = {size: self.parallel[name] for size, name in names.items()}
        return {size: number for size, number in sizes.items() if number is not None}

    @property
    def packs(self) -> int:
        """Number of packs of a step, over all ranks."""
        sizes = self.layout
        return self.processes // (sizes["tp_size"] * sizes["cp_size"]) * self.accumulate

    def alone(self) -> LayoutCase:
        """Return the case of one process, with the same packs and nothing recomputed or offloaded."""
        one = dict.fromkeys(self.layout, 1)
        model = {**self.model, "moe_token_dispatcher_type": "allgather"}
        model |= {"moe_shared_expert_overlap": False, "moe_expert_rank_capacity_factor": None}
        sizes = {
            "tensor_model_parallel_size": one["tp_size"],
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": None,
        }
        return replace(
            self,
            model=model,
            parallel=sizes,
            memory={},
            graphs={},
            processes=1,
            accumulate=self.packs,
        )

    def config(self) -> RunConfig:
        """Return the configuration.

        Raises:
            ConfigError: the options do not fit each other.
        """
        return RunConfig(
            model=ModelConfig(**self.model),
            data=DataConfig(train_data_path=("absent.jsonl",)),
            packing=PackingConfig(seq_length=self.slots, global_batch_size=self.packs),
            # With an epsilon far above all gradients an update is proportional to the gradient.
            optim=OptimizerConfig(lr=1.0, clip_grad=0.5, adam_eps=1.0, weight_decay=0.01),
            parallel=ParallelConfig(**self.parallel),
            memory=MemoryConfig(**self.memory),
            cuda_graph=CudaGraphConfig(**self.graphs),
            training=TrainingConfig(train_iters=STEPS, device="cpu"),
        )

    def micro_batches(self, step: int, alignment: int, dp_size: int) -> list[MicroBatch]:
        """Return the packs of a step over all ranks, those of the first micro-batches first.

        Args:
            alignment: that of the layout; that of one process would place the documents differently.
        """
        draw = random.Random(f"{self.seed} {step}")
        rng = np.random.default_rng(draw.randrange(2**32))
        packs = []
        for _ in range(self.packs):
            left, documents = self.slots, []
            while left > 0 and draw.random() < 0.9:
                length = min(draw.choice(LENGTHS), left)
                mask = rng.random(length) < (0.5 if self.masked else 1)
                documents.append((rng.integers(0, self.vocab, length), mask))
                left -= length + -length % alignment
            packs.append(documents)
        if not any(mask[1:].any() for documents in packs for _, mask in documents):
            packs[0] = [(rng.integers(0, self.vocab, self.slots), None)]
        depths = ModelConfig(**self.model).mtp_depths
        main, *later = (
            sum(
                len(tokens[1 + depth :]) if mask is None else int(mask[1 + depth :].sum())
                for documents in packs
                for tokens, mask in documents
            )
            for depth in range(1 + depths)
        )
        scales = (1 / main, 1 / sum(map(bool, packs)), *(1 / max(count, 1) for count in later))
        built, sizes = [], CaptureSizes.from_capacities(self.capacities, self.slots)
        for first in range(0, len(packs), dp_size):
            together = packs[first : first + dp_size]
            documents = max(map(len, together))
            # Micro-batches that run together have the same capture size, or none has one.
            size = sizes.smallest_for(documents, self.slots) if self.graphs else None
            room = (documents, None) if size is None else (size.capacity, size.max_seqlen)
            built += [
                MicroBatch.build(pack, self.slots, room[0], scales, room[1], alignment)
                for pack in together
            ]
        return built


class Found(NamedTuple):
    """Results of a rank."""

    losses: Tensor
    """``(steps, N)``: losses of the tokens, routers and depths, and the gradient norm."""
    states: list[Shards]
    """Weights and moments after each step."""
    replays: int
    """Number of micro-batches that replayed a graph."""


def train(
    groups: ParallelGroups,
    case: LayoutCase,
    alignment: int,
    steps: Sequence[int] = range(STEPS),
    save: str | None = None,
    load: str | None = None,
) -> Found:
    """Take steps of training.

    Args:
        steps: numbers of the steps.
        save: folder of the checkpoint that is saved after the last step.
        load: folder of the checkpoint that is loaded before the first step.
    """
    config = case.config()
    if load is not None:  # with other initial weights, which the checkpoint replaces
        config = replace(config, training=replace(config.training, seed=config.training.seed + 1))
    model = build_model(config, case.vocab, "cpu", groups, dtype=torch.float64).train()
    with torch.no_grad():
        for layer in model.moe_layers:
            # Enlarge differences between scores, so that rounding changes no choice of experts.
            layer.mixer.router.weight.mul_(4)
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    job = job_of_model(model, config, groups)
    state = RunState(job.model, job.optimizer, groups, AskedRun(config=config))
    if load is not None:
        state.load(CheckpointConfig(load=load))
    losses, states = [], []
    batches = [
        case.micro_batches(step, alignment, groups.dp.size)[groups.dp.rank :: groups.dp.size]
        for step in steps
    ]
    with captured(case, job, groups, config, batches[0]) as bounds:
        for packs in batches:
            job.step(packs, config.optim.lr)
            held = StepValues.from_list(
                job.step.metrics.tolist(), depths=job.step.layout.depths
            ).held
            if held:
                bounds.make_room()
                job.step.redo(packs, config.optim.lr)
            norm = job.step.metrics[job.step.layout.slots["grad_norm"]]
            sums = [job.buffers.extras.get(name) for name in LOSSES]
            losses.append(torch.cat([*(x for x in sums if x is not None), norm.double()]))
            if held:  # captures graphs again, which changes the buffers of the step
                bounds.raise_for(job.step.layout.counts_of(job.step.numbers.tolist()))
            states.append(everything(job))
    if save is not None:
        state.save(CheckpointConfig(save=save))
    graphs = job.step.graphs
    return Found(torch.stack(losses), states, 0 if graphs is None else graphs.counters.replays)


@contextmanager
def captured(
    case: LayoutCase, job: Job, groups: ParallelGroups, config: RunConfig, first: list[MicroBatch]
) -> Iterator[ExpertBounds]:
    """Capture the graphs of a case inside the block, and yield the bounds of the expert buffers.

    Args:
        first: micro-batches of the first step, whose routing sets the bounds.
    """
    bounds = ExpertBounds(job.step, groups, packs_per_step=case.packs, say=lambda line: None)
    if bounds.unknown:
        bounds.observe(first)
    sizes = CaptureSizes.from_capacities(case.capacities, case.slots)
    backend = RecordingBackend()
    graphs = build_graphs(config, job, sizes, groups, lambda line: None, backend)
    if graphs is None:
        yield bounds
        return
    with released(graphs):
        capture_graphs(graphs, job.step, case.packs, groups)
        job.step.graphs = graphs
        yield bounds


def draw_case(draw: random.Random, seed: str) -> LayoutCase:
    """Return a random case. `RunConfig` may refuse its options."""
    pattern = draw_pattern(draw)
    processes, parallel = draw_parallel(draw, pattern)
    parts = parallel["tensor_model_parallel_size"] * parallel["context_parallel_size"]
    return LayoutCase(
        model=draw_model(draw, pattern, parts, single=processes == parts),
        parallel=parallel,
        memory=draw_memory(draw, pattern),
        graphs=draw_graphs(draw, pattern),
        capacities=tuple(sorted({draw.randint(1, 6), draw.choice([6, 20])})),
        processes=processes,
        slots=draw.choice([2 * parts * draw.randint(4, 12), 24, 48, 96, 16 * parts]),
        accumulate=draw.choice([1, 1, 2]),
        vocab=draw.choice([61, 211, 8 * draw.randint(4, 40) + 1]),
        masked=draw.random() < 0.5,
        seed=seed,
    )


def draw_other_layout(draw: random.Random, case: LayoutCase) -> LayoutCase | None:
    """Return the case in another random layout that has the same packs; None if it cannot."""
    pattern = case.model["hybrid_layer_pattern"]
    processes, parallel = draw_parallel(draw, pattern)
    parts = parallel["tensor_model_parallel_size"] * parallel["context_parallel_size"]
    if case.model.get("moe_router_load_balancing_type") == "global_aux_loss" and processes > parts:
        return None
    other = replace(case, parallel=parallel, memory=draw_memory(draw, pattern), processes=processes)
    other = replace(other, accumulate=1)
    if case.packs % other.packs:
        return None
    return replace(other, accumulate=case.packs // other.packs)


def draw_pattern(draw: random.Random) -> str:
    """Return a layer pattern, sometimes with depths of multi-token prediction."""

    def some(least: int, most: int) -> str:
        return "".join(draw.choices(*zip(*LAYERS.items()), k=draw.randint(least, most)))

    depths = [some(1, 2)] * draw.choice([0, 0, 0, 1, 2])
    return "/".join([some(1, 4), *depths])


def draw_parallel(draw: random.Random, pattern: str) -> tuple[int, dict[str, Any]]:
    """Return the number of processes and the options of their layout."""
    processes = draw.choice([2, 2, 3, 4, 4])
    tp, cp = draw.choice(
        [(tp, cp) for tp in (1, 2, 3, 4) for cp in (1, 2, 3, 4) if not processes % (tp * cp)]
    )
    experts = "E" in pattern
    ep = draw.choice([size for size in (1, 2, 4) if not processes % size]) if experts else 1
    sharded = draw.random() < 0.5
    overlapped = draw.random() < 0.5
    return processes, {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1 and draw.random() < 0.6,
        "context_parallel_size": cp,
        "cp_comm_type": draw.choice(["p2p", "a2a", "all_gather"]),
        "cp_partition_mode": draw.choice(["zigzag", "contiguous"]),
        "mamba_cp_comm_type": draw.choice(["heads", "state"]) if cp > 1 else "state",
        "linear_cp_mode": draw.choice(["headwise", "chunkwise"]) if cp > 1 else "chunkwise",
        "cp_comm_overlap_parts": draw.choice([1, 1, 2]) if cp > 1 else 1,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": draw.choice([None, 1]) if tp > 1 else None,
        "use_distributed_optimizer": sharded,
        "overlap_grad_reduce": overlapped,
        "overlap_param_gather": overlapped and sharded,
        "ddp_bucket_size": draw.choice([1000, 4000, 100_000]),
    }


def draw_graphs(draw: random.Random, pattern: str) -> dict[str, Any]:
    if draw.random() < 0.4:
        return {}
    values: dict[str, Any] = {"cuda_graph_impl": draw.choice(["local", "full_iteration"])}
    if values["cuda_graph_impl"] == "local" and draw.random() < 0.4:
        captured = [name for name, layer in MODULE_LAYERS.items() if layer in pattern]
        modules = [name for name in captured if draw.random() < 0.5]
        values["cuda_graph_modules"] = tuple(modules)
    return values


def draw_memory(draw: random.Random, pattern: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    kind = draw.choice([None, None, "uniform", "block", "selective"])
    if kind == "selective":
        modules = {
            "layernorm",
            *(name for symbol in set(pattern) for name in MODULES.get(symbol, ())),
        }
        chosen = [name for name in sorted(modules) if draw.random() < 0.6]
        if chosen:
            values |= {"recompute_granularity": kind, "recompute_modules": tuple(chosen)}
    elif kind:
        values |= {"recompute_granularity": "full", "recompute_method": kind}
        values |= {"recompute_num_layers": draw.randint(1, 3)}
        values |= {"offload_layer_inputs": draw.random() < 0.5}
    if draw.random() < 0.3:
        modules = {name for symbol in set(pattern) for name in OFFLOADED.get(symbol, ())}
        chosen = [name for name in sorted(modules) if draw.random() < 0.5]
        if chosen:
            values |= {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
            values |= {"offload_modules": tuple(chosen)}
    return values


def draw_model(draw: random.Random, pattern: str, parts: int, single: bool) -> dict[str, Any]:
    """Return random arguments of `ModelConfig`.

    Args:
        parts: number of ranks that share a layer; most sizes are multiples of it.
        single: True if all ranks share each pack.
    """

    def some(share: float = 0.3) -> bool:
        return draw.random() < share

    def shared(*sizes: int) -> int:
        """Return a size that mostly can be shared by the ranks."""
        return draw.choice(sizes) * (parts if some(0.8) else 1)

    activation = draw.choice(["squared_relu", "swiglu", "gelu"])
    experts = "E" in pattern
    groups, heads_of_group = shared(1, 2), draw.choice([1, 2, 3])
    mamba_groups = shared(1, 2)
    key_heads = shared(1, 2)
    values: dict[str, Any] = {
        "hybrid_layer_pattern": pattern,
        "hidden_size": 8 * shared(1, 2, 3),
        "ffn_hidden_size": 4 * shared(1, 3, 5),
        "squared_relu": activation == "squared_relu",
        "swiglu": activation == "swiglu",
        "add_bias_linear": not experts and some(),
        "normalization": draw.choice(["RMSNorm", "RMSNorm", "LayerNorm"]),
        "apply_layernorm_1p": some(),
        "init_method_std": 0.1,
        "untie_embeddings_and_output_weights": some(0.5),
        "make_vocab_size_divisible_by": draw.choice([1, 8, 16]) * parts,
    }
    if some(0.2):
        values |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 1.7}
    if "/" in pattern:
        values |= {"mtp_use_repeated_layer": pattern.count("/") > 1 and some(0.5)}
        values |= {"mtp_loss_scaling_factor": draw.choice([0.1, 0.5])}
    if "*" in pattern:
        values |= {
            "kv_channels": draw.choice([4, 6, 8]),
            "num_query_groups": groups,
            "num_attention_heads": groups * heads_of_group,
            "add_qkv_bias": some(),
            "attention_output_gate": some(),
            "qk_layernorm": some(),
            "qk_layernorm_scope": draw.choice(["head", "all_heads"]),
            "attention_norm_placement": draw.choice(["input", "input", "output"]),
            "window_size": f"{draw.choice([1, 3, 7, 20])},0" if some() else None,
            "position_embedding_type": draw.choice(["none", "rope"]),
            "rotary_percent": draw.choice([1.0, 0.5]),
        }
    if "M" in pattern:
        heads = mamba_groups * draw.choice([1, 2])
        values |= {
            "mamba_head_dim": draw.choice([4, 8]),
            "mamba_num_groups": mamba_groups,
            "mamba_num_heads": heads,
            "mamba_state_dim": draw.choice([4, 8, 12]),
            "mamba_chunk_size": draw.choice([4, 8, 16]),
            "mamba_norm_groups": draw.choice([None, None, heads]),
            "mamba_conv_bias": some(0.7),
        }
    if "G" in pattern:
        values |= {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": key_heads * draw.choice([1, 2, 3]),
            "linear_key_head_dim": draw.choice([4, 8]),
            "linear_value_head_dim": draw.choice([4, 6, 8]),
            "linear_conv_kernel_dim": draw.choice([2, 3, 4]),
            "linear_allow_neg_eigval": some(),
        }
    if experts:
        values |= expert_options(draw, parts, single)
    return values


def expert_options(draw: random.Random, parts: int, single: bool) -> dict[str, Any]:
    sigmoid, limited, hidden = (draw.random() < share for share in (0.5, 0.2, 0.4))
    experts = draw.choice([4, 8, 8, 12, 16])
    chosen = draw.randint(1, min(6, experts // 2))
    # global_aux_loss averages over the micro-batches so far, so the number of data-parallel ranks matters.
    balancing = ["aux_loss", "seq_aux_loss", "none", *["global_aux_loss"] * single]
    return {
        "num_experts": experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": 4 * parts * draw.choice([1, 2, 3]),
        "moe_latent_size": draw.choice([4, 12]) if draw.random() < 0.3 else None,
        "moe_shared_expert_intermediate_size": 4 * parts if hidden else None,
        "moe_shared_expert_gate": hidden and draw.random() < 0.4,
        "moe_shared_expert_overlap": hidden and draw.random() < 0.3,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": chosen == 1 or draw.random() < 0.4,
        "moe_router_topk_scaling_factor": draw.choice([None, 2.5]),
        "moe_router_enable_expert_bias": sigmoid and draw.random() < 0.6,
        "moe_router_num_groups": 4 if limited else None,
        "moe_router_group_topk": 2 if limited else None,
        "moe_router_load_balancing_type": draw.choice(balancing),
        "moe_aux_loss_coeff": draw.choice([0.0, 0.02]),
        "moe_z_loss_coeff": draw.choice([None, 1e-3]),
        "moe_token_dispatcher_type": draw.choice(["allgather", "alltoall"]),
        "moe_expert_rank_capacity_factor": draw.choice([None, "auto", "auto", 0.7, 1.5]),
        "moe_comm_overlap_parts": draw.choice([1, 1, 2, 3]),
    }
