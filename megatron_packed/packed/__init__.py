"""Packed micro-batches: documents of different lengths in one buffer of fixed size.

``cu_seqlens_and_seq_idx.py`` computes padded offsets from lengths, and document numbers and positions
from offsets. ``host_to_device_buffer.py`` places all tensors in one buffer, so that one copy moves
them to the device. ``cp_partition.py`` splits a pack over context-parallel ranks.
``capture_sizes.py`` defines the sizes for which CUDA graphs are captured.
"""
