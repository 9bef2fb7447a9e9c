"""CUDA stream on which one part of a layer runs beside the rest of the layer.

[Note: parts beside the rest of a layer]
The part is enqueued on the side stream before the rest. The caller's stream waits for the part where
its result is needed. The backward pass needs no code: autograd runs the backward of a node on the
stream of its forward. It also orders two streams when a gradient passes from one to the other. A
capture of either pass contains both streams, because the side stream begins and ends at the caller's.

The allocator may reuse memory as soon as the host frees it, for later work of the stream that allocated
it. This is safe for the following reasons:

* Memory of the side stream is reused by the next part, which first waits for the caller's stream.
* Memory of the caller's stream that the part reads in forward is held until `SideStream.join`.
* Autograd runs nodes in the reverse order of their creation. So the backward of the part is enqueued
  after the backward of the rest. Next, the caller's stream waits for the gradient of the input that
  both read. Autograd itself keeps the gradients that pass between the streams, in a captured graph
  until the end of the capture.
* An output that backward computes again is computed on the stream of each consumer. See
  [Note: one output for each stream].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


class SideStream:
    """Runs a part of a layer beside the rest. See [Note: parts beside the rest of a layer].

    Args:
        device: a GPU, or the meta device, which has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream(device) if device.type == "cuda" else None

    def start(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run ``part(x)`` after the work so far; call it before any other function of ``x``.

        Returns:
            The result. The caller's stream may use it after `join`, and must hold ``x`` until then.
        """
        if self.stream is None:
            return part(x)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            return part(x)

    def join(self) -> None:
        """Let the caller's stream wait for the part."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of a GPU. All layers share it: cuBLAS has a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
