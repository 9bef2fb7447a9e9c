"""Packed micro-batches: documents of different lengths in one buffer of fixed size.

``cu_seqlens.py`` turns lengths into padded offsets, ``seq_idx.py`` offsets into document numbers
and positions, ``host_to_device_buffer.py`` lays all of it out for one copy to the device.
``cp_partition.py`` splits a pack over context-parallel ranks, ``capture_sizes.py`` pads metadata to
the sizes that CUDA graphs are captured for.
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
