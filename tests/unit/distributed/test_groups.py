"""Tests of process groups in a world of one process, and of environments that are refused."""

from dataclasses import FrozenInstanceError, dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_packed.config.parallel_layout import GROUP_AXES
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.distributed import groups as groups_module
from megatron_packed.distributed.collectives import (
    all_gather_json,
    all_reduce_max,
    all_reduce_sum,
    barrier,
)
from megatron_packed.distributed.groups import Axis, ParallelGroups
from megatron_packed.distributed.init_process_groups import backend_for


@dataclass
class Config:
    distributed_backend: str | None = None
    distributed_timeout_minutes: float = 1.0


def test_one_process_is_the_identity_without_a_process_group() -> None:
    environment = {
        "WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "nowhere",
        "MASTER_PORT": "1",
    }
    for groups in (
        ParallelGroups.single(),
        ParallelGroups.create(Config(), "cpu", {}),
        ParallelGroups.create(Config(), "cpu", environment),
    ):
        assert not dist.is_initialized()
        assert (groups.world_size, groups.rank, groups.world_group) == (1, 0, None)
        assert {getattr(groups, name) for name in GROUP_AXES} == {Axis(group=None, size=1, rank=0)}
        tensor = torch.arange(3.0)
        assert (
            all_reduce_sum(tensor, groups.dp.group) is tensor
            and all_reduce_max(tensor, groups.dp.group) is tensor
        )
        assert all_gather_json(5, groups) == [5]
        barrier(groups)
        assert groups.shutdown()
    with pytest.raises(FrozenInstanceError):
        groups.dp = Axis()


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        (
            Config(),
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE is 2 but RANK, MASTER_ADDR, MASTER_PORT are not set; start",
        ),
        (Config(), {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not an integer"),
        (
            Config(),
            {"WORLD_SIZE": "2", "RANK": "2"},
            r"RANK is 2, but must be .* below WORLD_SIZE \(2\)",
        ),
        (
            Config(distributed_backend="nccl"),
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "nccl needs CUDA devices, but the device is cpu; choose gloo",
        ),
        (
            Config(distributed_backend="nccl"),
            {},
            "nccl needs CUDA devices, but the device is cpu; choose gloo",
        ),
        (
            Config(distributed_backend="mpi"),
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "backend 'mpi' is unknown; choose nccl",
        ),
    ],
)
def test_wrong_environments_are_refused_before_anything_starts(
    config, environment, message
) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelGroups.create(config, "cpu", environment)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("device", "given", "used"),
    [("cpu", None, "gloo"), ("cuda", None, "nccl"), ("cuda", "gloo", "gloo")],
)
def test_a_given_backend_is_used(device, given, used) -> None:
    config = ParallelConfig(distributed_backend=given)
    assert backend_for(config, torch.device(device)) == used


def test_collectives_wait_as_long_as_the_option_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Joined(Exception):
        """The processes would join now."""

    def join(*arguments: object) -> None:
        raise Joined(arguments[-1])

    monkeypatch.setattr(groups_module, "join_world", join)
    two = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with pytest.raises(Joined) as raised:
        ParallelGroups.create(ParallelConfig(distributed_timeout_minutes=7), "cpu", two)
    assert raised.value.args == (timedelta(minutes=7),)


def test_more_processes_than_devices_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ValueError,
        match="local rank 1 needs CUDA device 1, but the number of visible CUDA devices is 1; "
        "start at most 1 processes",
    ):
        ParallelGroups.create(Config(), "cuda", {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"})


def test_shutdown_aborts_after_its_timeout_if_the_library_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import threading
    import time

    release = threading.Event()
    aborted = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: release.wait(30))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborted.append(True))
    groups = ParallelGroups(device=torch.device("cpu"), world_size=2, owns_process_group=True)
    start = time.monotonic()
    assert groups.shutdown(timeout_seconds=0.1) is False
    assert time.monotonic() - start < 5 and aborted == [True]
    release.set()
