"""Overlap of tensor-parallel collectives with products in a run: choice, set-up and messages."""

from __future__ import annotations

import torch

from megatron_packed.config import flag_names as flags
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.collectives import overlaps_tensor_parallel
from megatron_packed.config.sections.cuda_graph import TRANSFORMER_ENGINE
from megatron_packed.config.sections.model_parts.lora import APART
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.sequence_parallel_products import NO_OVERLAP, TensorOverlap
from megatron_packed.models.hybrid_model import HybridModel

OVERLAP_FASTER = "by default, because steps in graphs were measured to be faster"
OVERLAP_SLOWER = f"{flags.TP_COMM_OVERLAP} would make eager steps slower"


def overlap_of(config: RunConfig) -> TensorOverlap:
    """Return the collectives that run under products in this run, by its flags or by default."""
    parallel = config.parallel
    if not overlaps_tensor_parallel(config) or overlap_absence(config):
        return NO_OVERLAP
    return TensorOverlap(
        all_gather=parallel.tp_comm_overlap_ag,
        reduce_scatter=parallel.tp_comm_overlap_rs,
        reduce_scatter_dgrad=parallel.tp_comm_overlap_rs_dgrad,
        bulk_dgrad=parallel.tp_comm_bulk_dgrad,
        bulk_wgrad=parallel.tp_comm_bulk_wgrad,
    )


def overlap_absence(config: RunConfig) -> str:
    """Return why ``--tp-comm-overlap`` has no effect in this run; empty if it has one."""
    parallel = config.parallel
    if parallel.tensor_model_parallel_size == 1:
        return "every rank holds whole weight matrices"
    if not parallel.sequence_parallel:
        return f"without {flags.SEQUENCE_PARALLEL} no rows are gathered or scattered"
    if config.training.transformer_impl == TRANSFORMER_ENGINE:
        return "layers of TransformerEngine run their collectives themselves"
    return APART if config.model.adapts_all_projections else ""


def symmetric_bytes(config: RunConfig, dtype: torch.dtype) -> int:
    """Return the bytes of symmetric memory of a rank; 0 if nothing runs under products.

    All rows that linear layers exchange have the width of the hidden state.
    """
    if overlap_of(config) == NO_OVERLAP:
        return 0
    from megatron_packed.distributed.symmetric_memory import MOST_RANKS
    from megatron_packed.distributed.symmetric_rows import buffer_bytes, dtype_reasons

    size = config.parallel.tensor_model_parallel_size
    if size > MOST_RANKS or dtype_reasons(dtype):
        return 0
    return buffer_bytes(size, _row_bytes(config, dtype))


def _row_bytes(config: RunConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the rows of a rank between the layers."""
    from megatron_packed.distributed.symmetric_rows import row_bytes

    rows = config.packing.tokens_per_pack // config.parallel.ranks_per_row
    return row_bytes(rows, config.model.hidden_size, dtype)


def connect_overlap(model: HybridModel, config: RunConfig, groups: ParallelGroups) -> None:
    """Set up the symmetric memory of a model, before the first capture.

    This is a collective call. If symmetric memory cannot be used, products and collectives of the
    fused kind run one after the other, and ``products.reason`` has the reason. Without the flag all
    collectives then do, because in bulk alone they were not measured to be faster.
    """
    products = model.tp.products
    # The configuration decides, so all ranks return here, or all take part in the messages below.
    if products is None or products.overlap == NO_OVERLAP:
        return
    from megatron_packed.distributed.symmetric_rows import connect

    found = connect(products.group, groups, model.dtype, _row_bytes(config, model.dtype))
    if isinstance(found, str):
        products.reason = found
        if config.parallel.tp_comm_overlap is None:
            products.overlap = NO_OVERLAP
    else:
        products.memory = found


def overlap_words(overlap: TensorOverlap, reason: str = "") -> str:
    """Return what runs under products, and why no product is fused if there is a reason."""
    fused = {
        "all-gather": overlap.all_gather,
        "reduce-scatter": overlap.reduce_scatter,
        "reduce-scatter of dX": overlap.reduce_scatter_dgrad,
    }
    bulk = {
        "all-gather for dW": overlap.bulk_dgrad,
        "reduce-scatter of dX": overlap.bulk_wgrad and not overlap.reduce_scatter_dgrad,
    }
    chosen = [name for name, on in fused.items() if on]
    under = [name for name, on in bulk.items() if on]
    words = []
    if chosen and not reason:
        words.append(f"fused with products: {', '.join(chosen)}")
    if under:
        words.append(f"under another product: {', '.join(under)}")
    if chosen and reason:
        words.append(f"not fused with products: {', '.join(chosen)}, because {reason}")
    return "; ".join(words) or "every collective is switched off"


def overlap_line(model: HybridModel) -> str:
    """Return the line of the start of a run about the overlap; empty without overlap."""
    products = model.tp.products
    if products is None or (products.overlap == NO_OVERLAP and not products.reason):
        return ""
    if products.overlap == NO_OVERLAP:
        return f"tensor-parallel collectives: not under products, because {products.reason}"
    reason = products.reason if products.memory is None else ""
    adapters = f"; {APART}" if model.config.has_adapters else ""
    return f"tensor-parallel collectives: {overlap_words(products.overlap, reason)}{adapters}"


def unfused_lines(model: HybridModel) -> list[str]:
    """Return the lines of the end of a run about products that were to be fused and were not."""
    # Replays run no Python code, so only eager products are counted.
    unfused = {} if model.tp.products is None else model.tp.products.unfused
    return [
        f"{count:,} eager products were not fused with their collective: {reason}"
        for reason, count in unfused.items()
    ]
