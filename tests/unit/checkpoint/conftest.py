"""Fixtures: a small state with all relevant dtypes and shapes, and checkpoints of several files.

One process writes all files of a checkpoint.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_packed.checkpoint.directory import step_name
from megatron_packed.checkpoint.latest_hint import encode_hint
from megatron_packed.checkpoint.manifest import (
    Manifest,
    encode_extent,
    encode_manifest,
    header_metadata,
    merge_tensors,
)
from megatron_packed.checkpoint.shard_file import write_shard_file
from megatron_packed.checkpoint.tensor_shard import DTYPE_NAMES, TensorShard, split_replicated
from support.fork_server import fork_server


def make_state(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "layers.0.mixer.weight": normal(37, 71),
        "layers.0.norm.weight": normal(71).bfloat16(),
        "master/layers.0.norm.weight": normal(71),
        "half": normal(5, 3).half(),
        "double": normal(11).double(),
        "tokens": torch.randint(-(2**62), 2**62, (13,), generator=generator),
        "ids": torch.randint(-9, 9, (3, 3), generator=generator).int(),
        "short": torch.randint(-9, 9, (3,), generator=generator).short(),
        "tiny": torch.randint(-9, 9, (3,), generator=generator).to(torch.int8),
        "rng/rank_0/torch": torch.randint(0, 256, (5001,), generator=generator).to(torch.uint8),
        "flags": torch.rand(9, generator=generator) > 0.5,
        "step": torch.tensor(17 + seed),
        "nothing": torch.empty(0, 4),
    }


def write_by_hand(
    root: Path,
    step: int,
    state: dict[str, Tensor],
    world_size: int,
    sequence: int,
    share: Callable[[dict[str, Tensor], int, int], list[TensorShard]] = split_replicated,
) -> Path:
    """Write a checkpoint as ``world_size`` ranks would, with small blocks, and the file ``latest``."""
    directory = root / step_name(step)
    directory.mkdir(parents=True)
    save_id = f"{sequence:012x}"
    facts = {
        "run_id": "run",
        "save_id": save_id,
        "step": step,
        "world_size": world_size,
        "config_hash": "c0ffee",
    }
    records, held = [], []
    for rank in range(world_size):
        shards = share(state, rank, world_size)
        path = directory / f"rank_{rank:05d}.safetensors"
        strings = header_metadata(rank=rank, **facts)
        records.append(
            write_shard_file(path, rank, shards, strings, lambda site: None, block_bytes=4096)
        )
        part = {
            s.name: {"shape": list(s.global_shape), "dtype": DTYPE_NAMES[s.dtype], "ranges": []}
            for s in shards
        }
        for shard in shards:
            part[shard.name]["ranges"].append(encode_extent(shard.extent))
        held.append(part)
    manifest = Manifest(
        **facts,
        sequence=sequence,
        metadata={"consumed_tokens": step * 10},
        files=tuple(records),
        tensors=merge_tensors(held, directory),
    )
    (directory / "manifest.json").write_bytes(encode_manifest(manifest))
    (root / "latest").write_bytes(encode_hint(directory.name, sequence))
    return directory


def blank(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors like ``state`` with all bytes set to 1, so that tests detect writes."""
    return {
        name: torch.ones(t.nbytes, dtype=torch.uint8).view(t.dtype).view(t.shape)
        for name, t in state.items()
    }


def same_bytes(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
        and torch.equal(
            one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)
        )
        for name in one
    )


def exit_code_of(function: Callable[..., None], *args: object) -> int:
    """Run a function of a test module in a new process and return the exit code.

    The code is minus the signal number if a signal ended the process, and 1 if the function raised.
    The process comes from the fork server of the distributed tests, which has imported torch once.
    Forking pytest itself would copy locks that other threads hold.
    """
    process = fork_server().Process(target=function, args=args)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


class Tools:
    """Helpers that the tests of this folder share, passed to them as the fixture ``tools``."""

    make_state = staticmethod(make_state)
    write_by_hand = staticmethod(write_by_hand)
    blank = staticmethod(blank)
    same_bytes = staticmethod(same_bytes)
    exit_code_of = staticmethod(exit_code_of)


@pytest.fixture
def tools() -> type[Tools]:
    return Tools
