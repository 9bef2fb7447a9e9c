"""Pinned host memory: pages of its own, given back when nobody has them; what goes wrong is told as what it is."""

import gc
import mmap

import pytest
import torch

from megatron_packed.memory.streams import CudaStreams


class Runtime:
    """CUDA's, as far as it is asked."""

    def __init__(self, code=0):
        self.code, self.registered = code, {}

    def cudaHostRegister(self, address, size, flags):
        if self.code == 0:
            assert all(address + size <= other or other + n <= address for other, n in self.registered.items())
            self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address):
        del self.registered[address]


@pytest.fixture
def streams(monkeypatch):
    made = CudaStreams(torch.device("cuda", 0))
    made.runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made.runtime)
    monkeypatch.setattr(made, "capturing", lambda: False)
    monkeypatch.setattr(made, "_forget_error", lambda: None)
    return made


def test_blocks_share_no_page_and_go_when_nobody_has_them(streams):
    blocks = [streams.host(size) for size in (1, 512, 5000, 3 * mmap.PAGESIZE)]
    for block, size in zip(blocks, (1, 512, 5000, 3 * mmap.PAGESIZE)):
        assert block.numel() == size and block.data_ptr() % mmap.PAGESIZE == 0
        assert streams.runtime.registered[block.data_ptr()] >= size
        assert torch.equal(block.fill_(7), torch.full((size,), 7, dtype=torch.uint8))
    del blocks, block
    gc.collect()
    assert streams.runtime.registered == {}


def test_short_memory_is_told_from_other_errors(streams, monkeypatch):
    for code, error in ((2, torch.OutOfMemoryError), (1, RuntimeError)):
        streams.runtime = Runtime(code)
        with pytest.raises(RuntimeError, match=f"failed with error {code}") as caught:
            streams.host(100)
        assert type(caught.value) is error
    with pytest.raises(torch.OutOfMemoryError, match="of host memory"):
        streams.host(2**62)
    monkeypatch.setattr(streams, "capturing", lambda: True)
    with pytest.raises(torch.OutOfMemoryError, match="captured"):
        streams.host(1)
