"""Pinned host blocks on separate pages, their release, the errors of pinning, and free memory."""

import gc
import mmap
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_packed.memory import offload_streams as streams_module
from megatron_packed.memory.available_host_memory import KEPT_FREE, available_bytes
from megatron_packed.memory.offload_streams import CudaStreams


class Runtime:
    """Fake of the CUDA runtime with the two functions that register host memory."""

    def __init__(self, code=0):
        self.code, self.registered = code, {}

    def cudaHostRegister(self, address, size, flags):
        if self.code == 0:
            assert all(
                address + size <= other or other + n <= address
                for other, n in self.registered.items()
            )
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
    monkeypatch.setattr(made, "_clear_error", lambda: None)
    return made


def test_blocks_share_no_page_and_are_freed_with_their_last_reference(streams):
    blocks = [streams.pinned(size) for size in (1, 512, 5000, 3 * mmap.PAGESIZE)]
    for block, size in zip(blocks, (1, 512, 5000, 3 * mmap.PAGESIZE)):
        assert block.numel() == size and block.data_ptr() % mmap.PAGESIZE == 0
        assert streams.runtime.registered[block.data_ptr()] >= size
        assert torch.equal(block.fill_(7), torch.full((size,), 7, dtype=torch.uint8))
    del blocks, block
    gc.collect()
    assert streams.runtime.registered == {}


def test_out_of_memory_is_distinguished_from_other_errors(streams, monkeypatch):
    for code, error in ((2, torch.OutOfMemoryError), (1, RuntimeError)):
        streams.runtime = Runtime(code)
        with pytest.raises(RuntimeError, match=f"failed with error {code}") as caught:
            streams.pinned(100)
        assert type(caught.value) is error
    monkeypatch.setattr(streams_module, "available_bytes", lambda: None)
    with pytest.raises(torch.OutOfMemoryError, match="MiB of host memory: "):
        streams.pinned(2**62)
    monkeypatch.setattr(streams_module, "available_bytes", lambda: KEPT_FREE + 100)
    with pytest.raises(
        torch.OutOfMemoryError, match="less than 4,096 of the 4,096 MiB of host memory"
    ):
        streams.pinned(101)
    streams.runtime = Runtime()
    assert streams.pinned(100).numel() == 100
    monkeypatch.setattr(streams, "capturing", lambda: True)
    with pytest.raises(torch.OutOfMemoryError, match="captured"):
        streams.pinned(1)


GIB = 2**30


def test_headroom_is_what_the_worst_moment_left_with_what_the_allocator_does_not_use(
    streams, monkeypatch
):
    """`free_bytes` adds free device memory to reserved memory that was unused at the peak.

    5 GiB of the device are free. The allocator has reserved 9 GiB, its peak was 7 GiB, and 1 GiB is
    in use now. So 5 + 9 - 7 = 7 GiB are free.
    """
    figures = {
        "mem_get_info": (5 * GIB, 80 * GIB),
        "memory_reserved": 9 * GIB,
        "max_memory_allocated": 7 * GIB,
        "memory_allocated": GIB,
    }
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, figure=figure: figure)
    assert streams.free_bytes() == 7 * GIB


def test_shared_host_memory_and_nonblocking_copies(streams, monkeypatch):
    for integrated in (0, 1):
        properties = SimpleNamespace(is_integrated=integrated)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device, found=properties: found
        )
        assert streams.shares_host_memory() is bool(integrated)
    target = mock.Mock()
    streams.copy(target, "source")
    target.copy_.assert_called_once_with(
        "source", non_blocking=True
    )  # a blocking copy would make the host wait


MACHINE = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n"}
"""Files of a machine with 8 GiB of available memory."""
TWO = {
    "proc/self/cgroup": "0::/job/rank\n",
    "sys/fs/cgroup/job/rank/memory.max": "max\n",
    "sys/fs/cgroup/job/rank/memory.current": "7\n",
    "sys/fs/cgroup/job/memory.max": f"{6 * GIB}\n",
    "sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
    "sys/fs/cgroup/job/memory.stat": f"anon 5\nactive_file {GIB}\ninactive_file {2 * GIB}\n",
}
ONE = {
    # As seen inside a container, where the group's folder is the root.
    "proc/self/cgroup": "5:cpu:/\n4:memory:/docker/abc\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 9\ntotal_inactive_file {GIB // 2}\n",
}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        (MACHINE, 8 * GIB),
        (MACHINE | TWO, 4 * GIB),
        (ONE, 5 * GIB // 2),
        (MACHINE | ONE, 5 * GIB // 2),
        (ONE | {"sys/fs/cgroup/memory/memory.usage_in_bytes": str(9 * GIB)}, 0),
    ],
    ids=["nobody says", "machine", "version 2", "version 1", "machine and version 1", "beyond"],
)
def test_what_the_machine_and_its_control_groups_leave(files, left, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == left
