"""Tests of the last-operation record: the collective and its caller, or the running function."""

import json
import threading

import pytest
import torch

from megatron_packed.distributed import last_operation
from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.last_operation import (
    last_operation_of_error,
    last_operation_of_thread,
)
from megatron_packed.distributed.symmetric_exchange import SymmetricExchange
from megatron_packed.distributed.symmetric_rows import SymmetricRows
from megatron_packed.packed.cu_seqlens_and_seq_idx import aligned


class Group:
    """Stand-in for a destroyed process group, which torch refuses to use."""

    group_desc = "tp"


def test_an_error_in_a_collective_names_it_and_its_caller(monkeypatch):
    monkeypatch.setattr(
        last_operation.dist, "get_process_group_ranks", lambda group: list(range(20))
    )
    with pytest.raises(Exception) as raised:
        all_reduce_sum(torch.zeros(1), Group())
    shown = ", ".join(map(str, range(16)))
    assert last_operation_of_error(raised.value) == (
        f"all_reduce over tp (ranks {shown}, ...), called by code outside megatron_packed"
    )


def test_an_error_elsewhere_names_the_innermost_function_of_the_package():
    with pytest.raises(TypeError) as raised:
        aligned(None, 2)
    assert last_operation_of_error(raised.value) == "packed/cu_seqlens_and_seq_idx.py: as_lengths"


def test_an_error_in_an_exchange_of_rows_names_it(monkeypatch):
    monkeypatch.setattr(last_operation.dist, "get_process_group_ranks", lambda group: [0, 1])
    memory = object.__new__(SymmetricRows)
    memory.group = Group()
    x = torch.zeros(2, 1)
    products = {
        "all_gather_matmul": lambda: memory.all_gather_matmul(x, x.t(), keep=False),
        "matmul_reduce_scatter": lambda: memory.matmul_reduce_scatter(x, x.t()),
        "start_gather": lambda: memory.start_gather(x),
        "start_scatter": lambda: memory.start_scatter(x),
    }
    for name, product in products.items():
        with pytest.raises(Exception) as raised:  # there are no streams
            product()
        assert last_operation_of_error(raised.value) == (
            f"{name} over tp (ranks 0, 1), called by code outside megatron_packed"
        )


def test_an_error_in_an_exchange_names_it(monkeypatch):
    monkeypatch.setattr(last_operation.dist, "get_process_group_ranks", lambda group: [0, 1])
    memory = object.__new__(SymmetricExchange)
    memory.group = Group()
    with pytest.raises(Exception) as raised:  # the exchange has no streams
        memory.exchange(torch.zeros(2, 1))
    assert last_operation_of_error(raised.value) == (
        "exchange over tp (ranks 0, 1), called by code outside megatron_packed"
    )


def test_a_thread_that_waits():
    """Check the record of a thread that runs no function of this package, and of a thread that has
    ended."""
    go = threading.Event()
    thread = threading.Thread(target=go.wait, daemon=True)
    thread.start()
    assert last_operation_of_thread(thread.ident) == "code outside megatron_packed"
    go.set()
    thread.join()
    assert (
        last_operation_of_thread(thread.ident)
        == last_operation_of_thread(None)
        == "code outside megatron_packed"
    )


def test_the_collective_of_a_gpu_is_the_first_that_has_begun(monkeypatch):
    entry = {"process_group": ["1", "tp"], "profiling_name": "nccl:all_reduce"}
    entries = [
        {**entry, "record_id": 3, "state": "completed"},
        {**entry, "record_id": 4, "state": "scheduled", "profiling_name": "nccl:broadcast"},
        {**entry, "record_id": 5, "state": "started"},
    ]
    dump = lambda *_: json.dumps({"entries": entries})  # noqa: E731
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    me = threading.main_thread().ident
    assert "GPU" not in last_operation_of_thread(
        me
    )  # This thread may be in the driver, so no query of the device is allowed.
    monkeypatch.setattr(last_operation, "_WAITS_FOR_THE_DEVICE", "last_operation.py")
    assert last_operation_of_thread(me).endswith(", while its GPU was in nccl:all_reduce over tp")
    entries.pop()
    assert last_operation_of_thread(me).endswith(", while its GPU was in nccl:broadcast over tp")
    entries.pop()
    assert "GPU" not in last_operation_of_thread(me)
    monkeypatch.setattr(
        torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda *_: "", raising=False
    )
    assert "GPU" not in last_operation_of_thread(me)
