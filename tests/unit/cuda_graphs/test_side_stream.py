"""Order of waits when the capture stream is used as a side stream, tested with fake streams."""

from contextlib import contextmanager

import pytest
import torch

from megatron_packed.cuda_graphs.capture_and_pool import CudaGraphBackend


class FakeStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    log = []
    current = [FakeStream(log, "current")]

    @contextmanager
    def on_stream(stream):
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    for name, fake in (
        ("Stream", lambda device: FakeStream(log, "side")),
        ("current_stream", lambda device: current[-1]),
        ("stream", on_stream),
        ("graph_pool_handle", lambda: (0, 1)),
        ("synchronize", lambda device: log.append("synchronize")),
        ("empty_cache", lambda: log.append("empty cache")),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    return log


BEFORE = ["side waits for current"]
AFTERWARDS = ["current waits for side", "synchronize", "empty cache"]


def test_a_pass_ends_in_order(log):
    with CudaGraphBackend(torch.device("cuda", 0)).side_stream():
        assert log == BEFORE
    assert log == BEFORE + AFTERWARDS


def test_a_pass_without_memory_ends_in_order_too(log):
    """After an out-of-memory error in the side stream, the current stream still waits for that stream.

    Callers catch this error, and the run continues with eager passes.
    """
    with (
        pytest.raises(torch.OutOfMemoryError, match="no room"),
        CudaGraphBackend(torch.device("cuda", 0)).side_stream(),
    ):
        raise torch.OutOfMemoryError("no room")
    assert log == BEFORE + AFTERWARDS


def test_a_device_in_error_does_not_hide_the_first_error(log, monkeypatch):
    def refuse(device):
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with (
        pytest.raises(ValueError, match="first"),
        CudaGraphBackend(torch.device("cuda", 0)).side_stream(),
    ):
        raise ValueError("first")
