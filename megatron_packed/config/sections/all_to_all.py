"""Option of the backend of all-to-alls."""

from __future__ import annotations

from megatron_packed.config.conditions import Condition
from megatron_packed.config.exchanged_heads import exchanges_of_run
from megatron_packed.config.options import option
from megatron_packed.config.section import Section

AUTO, NCCL, SYMMETRIC_MEMORY = "auto", "nccl", "symmetric_memory"


EQUAL_PARTS = Condition(
    "no all-to-all has parts of equal, static sizes",
    lambda run, processes: bool(exchanges_of_run(run)),
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
