"""Packed micro-batches: documents of different lengths in one buffer of fixed size.

``cu_seqlens.py`` computes padded offsets from lengths. ``seq_idx.py`` computes document numbers and
positions from offsets. ``host_to_device_buffer.py`` places all tensors in one buffer, so that one
copy moves them to the device. ``cp_partition.py`` splits a pack over context-parallel ranks.
``capture_sizes.py`` defines the sizes for which CUDA graphs are captured.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.packed.capture_sizes import CaptureSize as CaptureSize
    from megatron_packed.packed.capture_sizes import CaptureSizes as CaptureSizes
    from megatron_packed.packed.capture_sizes import choose_capacities as choose_capacities
    from megatron_packed.packed.cp_partition import Partition as Partition
    from megatron_packed.packed.micro_batch import Document as Document
    from megatron_packed.packed.micro_batch import MicroBatch as MicroBatch
    from megatron_packed.packed.micro_batch import MicroBatchLayout as MicroBatchLayout
    from megatron_packed.packed.params import PackedSeqParams as PackedSeqParams
    from megatron_packed.packed.shared_tables import SharedTables as SharedTables
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "capture_sizes": ["CaptureSize", "CaptureSizes", "choose_capacities"],
            "cp_partition": ["Partition"],
            "micro_batch": ["Document", "MicroBatch", "MicroBatchLayout"],
            "params": ["PackedSeqParams"],
            "shared_tables": ["SharedTables"],
        },
    )
