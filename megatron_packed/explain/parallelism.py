"""Lines of ``--explain`` about tensor, context, data and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_packed.config.exchanged_heads import (
    exchanges_of_run,
    parts_of_layers,
    reorders_rows,
)
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.parallel import NOT_BUILT
from megatron_packed.distributed.sequence_parallel_products import NO_OVERLAP
from megatron_packed.distributed.symmetric_memory import dtype_reasons, not_supported_reasons
from megatron_packed.explain.capability import OFF, ON, PARTIAL, Capability
from megatron_packed.models.equal_exchanges import OPTION, uses_symmetric_memory
from megatron_packed.models.run_model import dtype_of
from megatron_packed.models.tensor_overlap import overlap_absence, overlap_of, overlap_words

CPU = torch.device("cpu")


def parallel_capabilities(
    config: RunConfig, world_size: int, device: torch.device = CPU
) -> Iterator[Capability]:
    """Yield how ``world_size`` processes divide matrices, tokens, batches and experts among them."""
    parallel = config.parallel
    yield from _tensor_parallel(config, device)
    cp, comm = parallel.context_parallel_size, parallel.cp_comm_type
    if cp == 1:
        yield Capability("context parallelism", OFF, "every rank holds all tokens of its packs")
    else:
        padded = (
            f"; documents start at multiples of {config.document_alignment} tokens"
            if config.document_alignment > 1
            else ""
        )
        yield Capability(
            "context parallelism",
            ON,
            f"the tokens of each pack are split over {cp} ranks, by {comm}{padded}"
            f"{_states_and_heads(config)}",
        )
    yield from _replicas(config, world_size)
    if parallel.overlap_grad_reduce:
        gather = (
            "; updated weights are gathered during the next step"
            if config.gathers_during_next_step
            else ""
        )
        yield Capability(
            "overlap", ON, f"gradient reduction begins during the last backward pass{gather}"
        )
    else:
        yield Capability(
            "overlap",
            OFF,
            "gradients are reduced after the last backward pass",
            "--overlap-grad-reduce",
        )
    yield from _experts(config)
    yield from _shared_expert(config, device)
    yield from _equal_exchanges(config, device)
    for axis in NOT_BUILT.values():
        yield Capability(axis, OFF, "not supported yet")


def _states_and_heads(config: RunConfig) -> str:
    """Describe passed states, and the parts of exchanged heads if the run requests an overlap."""
    parallel = config.parallel
    passing = [kind for kind in config.model.kinds if kind.exchanges(parallel) == "states"]
    said = "".join(f"; {kind.layer}s pass states" for kind in passing)
    if reorders_rows(config):
        said += ", and all-to-alls reorder the rows of attention"
    parts = parts_of_layers(config)
    if parts and parallel.cp_comm_overlap_parts > 1:
        numbers = (f"{number} for each {kind.symbol} layer" for kind, number in parts.items())
        said += f"; parts in which heads travel: {', '.join(numbers)}"
    return said


def _tensor_parallel(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    tp = config.parallel.tensor_model_parallel_size
    if tp == 1:
        yield Capability("tensor parallelism", OFF, "every rank holds whole weight matrices")
        return
    yield Capability("tensor parallelism", ON, f"each weight matrix is split over {tp} ranks")
    if config.parallel.sequence_parallel:
        yield Capability(
            "sequence parallelism",
            ON,
            f"between the layers each rank holds 1 / {tp} of the tokens",
        )
    else:
        yield Capability(
            "sequence parallelism",
            OFF,
            "between the layers each rank holds all tokens",
            "--sequence-parallel reduces memory",
        )
    yield _tensor_overlap(config, device)


def _tensor_overlap(config: RunConfig, device: torch.device) -> Capability:
    """Return which collectives of linear layers run under matrix products."""
    name, overlap = "tensor-parallel overlap", overlap_of(config)
    if overlap == NO_OVERLAP:
        if config.parallel.tp_comm_overlap:
            return Capability(name, OFF, overlap_absence(config))
        advice = "--tp-comm-overlap" if config.parallel.sequence_parallel else ""
        return Capability(name, OFF, "collectives and products run one after the other", advice)
    # The other ranks are not known here, so only this machine's reasons are.
    reasons = [*not_supported_reasons(device), *dtype_reasons(dtype_of(config))]
    reasons = reasons if overlap.fuses else []
    sentence = overlap_words(overlap, reasons[0] if reasons else "")
    if overlap.fuses and not reasons:
        sentence += "; fused if the GPUs of the ranks can access each other's memory"
    return Capability(name, PARTIAL if reasons else ON, sentence)


def _replicas(config: RunConfig, world_size: int) -> Iterator[Capability]:
    layout, parallel = config.layout(world_size), config.parallel
    sharded, each = parallel.use_distributed_optimizer, parallel.ranks_per_replica
    replicas, copies = layout.dp_size, layout.size("dp_cp") > 1
    copies |= config.model.has_experts and layout.expert_dp_size > 1
    collective = "reduce-scatter" if sharded else "all-reduce"
    collective = f"; gradients are summed by {collective}" if copies else ""
    if config.model.balances_all_ranks and layout.size("dp_cp") > 1:
        collective += ", and loads of experts once in each micro-batch"
    processes = "process" if each == 1 else "processes"
    if replicas == 1:
        yield Capability("data parallelism", OFF, f"one replica of {each} {processes}{collective}")
    else:
        yield Capability(
            "data parallelism", ON, f"{replicas} replicas of {each} {processes}{collective}"
        )
    if not copies:
        yield Capability("distributed optimizer", OFF, "no two ranks hold the same weights")
    else:
        yield Capability(
            "distributed optimizer",
            ON if sharded else OFF,
            f"every rank holds {'its part' if sharded else 'all'} of the fp32 master weights and "
            "moments",
            "" if sharded else "--use-distributed-optimizer",
        )


def _experts(config: RunConfig) -> Iterator[Capability]:
    parallel, model = config.parallel, config.model
    size = parallel.expert_model_parallel_size
    if not model.has_experts:
        return
    if size == 1:
        yield Capability("expert parallelism", OFF, "every rank holds all experts")
        return
    how = (
        f"the experts are split over {size} ranks; tokens are dispatched by "
        f"{model.moe_token_dispatcher_type}"
    )
    if model.moe_latent_size is not None:
        how += f", in rows of {model.moe_latent_size} channels"
    factor = config.expert_rank_capacity_factor
    if factor is not None:
        how += f"; their rows are bounded (--moe-expert-rank-capacity-factor {factor})"
    if config.asks_for_expert_rows:
        yield Capability(
            "expert parallelism",
            PARTIAL,
            f"{how}, with one host sync per E layer",
            "--moe-expert-rank-capacity-factor auto, or --moe-token-dispatcher-type allgather",
        )
    else:
        yield Capability("expert parallelism", ON, how)


def _shared_expert(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    """Yield whether the shared expert runs beside the dispatch, if the model has one."""
    model, name = config.model, "shared-expert overlap"
    if not model.has_experts or not model.moe_shared_expert_intermediate_size:
        return
    if not model.moe_shared_expert_overlap:
        yield Capability(name, OFF, "the shared expert runs after the other experts")
    elif device.type != "cuda":
        yield Capability(name, OFF, f"streams need a GPU, and the device is {device.type}")
    elif config.parallel.splits_tokens_of_experts:
        yield Capability(
            name,
            OFF,
            "tensor-parallel ranks dispatch different tokens, and the shared expert has "
            "collectives of its own",
        )
    else:
        yield Capability(
            name, ON, "the shared expert runs beside dispatch, experts and combination"
        )


def _equal_exchanges(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    """Yield how parts of equal sizes travel, if ranks exchange any."""
    name = "all-to-alls of equal parts"
    exchanged = {"cp": "heads", "ep": "rows for experts"}
    what = " and ".join(exchanged[axis] for axis in exchanges_of_run(config))
    if not what:
        return
    if not uses_symmetric_memory(config):
        graphs = config.cuda_graph.enabled and device.type == "cuda"
        advice = f"{OPTION} auto" if graphs else ""
        yield Capability(name, OFF, f"{what} travel by the collective", advice)
        return
    # The other ranks are not known here, so only this machine's reasons are.
    if reasons := not_supported_reasons(device):
        yield Capability(name, PARTIAL, f"{what} travel by the collective, because {reasons[0]}")
        return
    yield Capability(
        name,
        ON,
        f"{what} are copied through symmetric memory, if the GPUs of the ranks can access each "
        "other's memory",
    )
