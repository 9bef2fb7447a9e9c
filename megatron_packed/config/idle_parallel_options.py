"""Options of the parallel axes without effect in some runs, and the reasons."""

from __future__ import annotations

from megatron_packed.config.exchanged_heads import exchanges_of_run, parts_of_layers
from megatron_packed.config.idle_model_options import Idle, keys_in
from megatron_packed.config.layer_pattern import MOE
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import TRANSFORMER_ENGINE
from megatron_packed.config.sections.tensor_overlap import PARTS

_TENSOR_OVERLAP = keys_in("parallel", " ".join(("tp_comm_overlap", *PARTS)))


def _no_replicas(run: RunConfig, processes: int) -> bool:
    layout = run.layout(processes)
    of_experts = MOE in run.model.hybrid_layer_pattern and layout.expert_dp_size > 1
    return layout.size("dp_cp") == 1 and not of_experts


PARALLEL_IDLE: tuple[Idle, ...] = (
    Idle(
        "--tensor-model-parallel-size is 1",
        lambda run, _: run.parallel.tensor_model_parallel_size == 1,
        (
            *keys_in("parallel", "sequence_parallel expert_tensor_parallel_size"),
            *_TENSOR_OVERLAP,
        ),
    ),
    Idle(
        "--sequence-parallel is not given",
        lambda run, _: not run.parallel.sequence_parallel,
        _TENSOR_OVERLAP,
    ),
    Idle(
        "layers of TransformerEngine run their collectives themselves",
        lambda run, _: run.training.transformer_impl == TRANSFORMER_ENGINE,
        _TENSOR_OVERLAP,
    ),
    Idle(
        "--tp-comm-overlap is not given",
        lambda run, _: not run.parallel.tp_comm_overlap,
        keys_in("parallel", " ".join(PARTS)),
    ),
    Idle(
        "every collective is switched off",
        lambda run, _: not any(getattr(run.parallel, part) for part in PARTS),
        ("parallel.tp_comm_overlap",),
    ),
    Idle(
        "tensor-parallel ranks dispatch different tokens",
        lambda run, _: run.parallel.splits_tokens_of_experts,
        ("model.moe_shared_expert_overlap",),
    ),
    Idle(
        "--tp-comm-overlap-rs-dgrad runs this collective in another way",
        lambda run, _: run.parallel.tp_comm_overlap_rs_dgrad,
        ("parallel.tp_comm_bulk_wgrad",),
    ),
    Idle(
        "--context-parallel-size is 1",
        lambda run, _: run.parallel.context_parallel_size == 1,
        keys_in("parallel", "cp_comm_type mamba_cp_comm_type cp_comm_overlap_parts"),
    ),
    Idle(
        "no layer exchanges heads in more than one part",
        lambda run, _: max(parts_of_layers(run).values(), default=1) == 1,
        ("parallel.cp_comm_overlap_parts",),
    ),
    Idle(
        "no all-to-all has parts of equal, static sizes",
        lambda run, _: not exchanges_of_run(run),
        ("parallel.all_to_all_backend",),
    ),
    Idle(
        "the run has one process",
        lambda run, processes: processes == 1,
        keys_in("parallel", "distributed_backend distributed_timeout_minutes"),
    ),
    Idle(
        "no two ranks have the same weights",
        _no_replicas,
        (
            *keys_in(
                "parallel", "use_distributed_optimizer overlap_grad_reduce overlap_param_gather"
            ),
            "training.check_grad_hash_across_dp_replicas_interval",
        ),
    ),
    Idle(
        "graphs of whole steps gather the weights at the end of each step",
        lambda run, _: run.cuda_graph.captures_steps,
        ("parallel.overlap_param_gather",),
    ),
    Idle(
        "no two ranks have the same weights, and fp32 weights have no masters",
        lambda run, processes: not run.training.bf16 and _no_replicas(run, processes),
        ("training.check_weight_hash_across_dp_replicas_interval",),
    ),
)
"""Entries of `idle_options.IDLE`."""
