"""Options of collectives: the backend of all-to-alls, and tensor-parallel ones under matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_packed.config.conditions import Condition, option_given, option_is_not
from megatron_packed.config.exchanged_heads import exchanges_of_run
from megatron_packed.config.options import option
from megatron_packed.config.section import Section
from megatron_packed.config.sections.cuda_graph import TRANSFORMER_ENGINE
from megatron_packed.config.sections.model_parts.lora import APART

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

AUTO, NCCL, SYMMETRIC_MEMORY = "auto", "nccl", "symmetric_memory"


EQUAL_PARTS = Condition(
    "no all-to-all has parts of equal, static sizes",
    lambda run, processes: bool(exchanges_of_run(run)) or run.parallel.chooses_partition,
)


class AllToAllOptions(Section):
    """Backend of all-to-alls whose parts have equal, static sizes."""

    all_to_all_backend: str = option(
        NCCL,
        "Backend of all-to-alls whose parts have equal, static sizes: the collective (nccl), or "
        "copies between the GPUs of one host (symmetric_memory). With auto, CUDA graphs use the "
        "copies where the GPUs support them.",
        choices=(NCCL, SYMMETRIC_MEMORY, AUTO),
        only_if=EQUAL_PARTS,
    )


OVERLAP = "tensor-parallel overlap"
_PARTS = (
    "tp_comm_overlap_ag",
    "tp_comm_overlap_rs",
    "tp_comm_overlap_rs_dgrad",
    "tp_comm_bulk_dgrad",
    "tp_comm_bulk_wgrad",
)
"""Options that choose the collectives of ``--tp-comm-overlap``."""


OVERLAPS_BY_DEFAULT = False
"""True if ``--tp-comm-overlap`` is the default of the runs for which `overlaps_tensor_parallel` says so."""


def overlaps_tensor_parallel(run: RunConfig) -> bool:
    """Return whether tensor-parallel collectives are to run under products, where there are any.

    Without the flag they do in CUDA graphs with bf16. There they shorten a step: from 192.5 to 180.3 ms
    on two H200. They lengthen an eager step from 454 to 594 ms (2026-11-29).
    """
    given = run.parallel.tp_comm_overlap
    if given is not None:
        return given
    return OVERLAPS_BY_DEFAULT and run.cuda_graph.enabled and run.training.bf16


TENSOR_PARALLEL = option_is_not("parallel.tensor_model_parallel_size", 1)
SEQUENCE_PARALLEL_LINEAR = (
    TENSOR_PARALLEL,
    option_given("parallel.sequence_parallel"),
    Condition(
        "layers of TransformerEngine run their collectives themselves",
        lambda run, processes: run.training.transformer_impl != TRANSFORMER_ENGINE,
    ),
    Condition(
        APART,
        lambda run, processes: not run.model.adapts_all_projections,
    ),
)
OVERLAPS = (
    *SEQUENCE_PARALLEL_LINEAR,
    Condition(
        "--tp-comm-overlap is not given", lambda run, processes: overlaps_tensor_parallel(run)
    ),
)
SOME_PART = Condition(
    "every collective is switched off",
    lambda run, processes: any(getattr(run.parallel, part) for part in _PARTS),
)
BULK_WGRAD = Condition(
    "--tp-comm-overlap-rs-dgrad runs this collective in another way",
    lambda run, processes: not run.parallel.tp_comm_overlap_rs_dgrad,
)


class TensorOverlapOptions(Section, group=OVERLAP):
    """Collectives of sequence-parallel linear layers that run under matrix products."""

    tp_comm_overlap: bool | None = option(
        None,
        "Run the collectives of sequence-parallel linear layers under matrix products. Without the "
        "flag a run decides; its --explain row has the reason.",
        only_if=(*SEQUENCE_PARALLEL_LINEAR, SOME_PART),
    )
    tp_comm_overlap_ag: bool = option(
        True,
        "Do not fuse the all-gather before a matrix product with this product.",
        flag="disable-tp-comm-overlap-ag",
        negated=True,
        only_if=OVERLAPS,
    )
    tp_comm_overlap_rs: bool = option(
        True,
        "Do not fuse the reduce-scatter after a matrix product with this product.",
        flag="disable-tp-comm-overlap-rs",
        negated=True,
        only_if=OVERLAPS,
    )
    tp_comm_overlap_rs_dgrad: bool = option(
        False,
        "Fuse the reduce-scatter of an input gradient with its product, instead of running it "
        "under the product of the weight gradient.",
        only_if=OVERLAPS,
    )
    tp_comm_bulk_dgrad: bool = option(
        True,
        "Do not gather the rows for a weight gradient under the product of the input gradient.",
        flag="disable-tp-comm-bulk-dgrad",
        negated=True,
        only_if=OVERLAPS,
    )
    tp_comm_bulk_wgrad: bool = option(
        True,
        "Do not scatter an input gradient under the product of the weight gradient.",
        flag="disable-tp-comm-bulk-wgrad",
        negated=True,
        only_if=(*OVERLAPS, BULK_WGRAD),
    )
