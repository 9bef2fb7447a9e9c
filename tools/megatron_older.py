"""Convert checkpoints of megatron-core 0.13.1 with their optimizer, and continue their runs.

Newer versions do not write the kind ``fully_sharded_model_space``, in which tensors may be stored as
blocks. Only the GPT model is built with this version.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megatron_checkpoints as newer
from common.megatron_core import GPT_ARGS, OnCpu, Tracker, calls_of_cuda, their_model
from common.megatron_training import Trainer, documents_of
from megatron_packed.models.convert.megatron.import_megatron import from_megatron

SHARDING = "fully_sharded_model_space"
TP2 = {"tensor_model_parallel_size": 2}
CASES: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, TP2),
    "one_bf16": (1, {}),
    "dp2_bf16": (2, {}),
    "tp2_bf16": (2, TP2),
}
"""Ranks and sizes of parallel groups."""


def stand_ins() -> None:
    """Put stand-ins for calls that need a GPU, and for names that newer packages do not have."""
    calls_of_cuda()
    np.product = np.prod
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import gpt_model

    def built(*args: Any, pg_collection: Any = None, **options: Any) -> Any:
        return own(*args, **options)

    own, gpt_model.GPTModel = gpt_model.GPTModel, built
    tensor_parallel.get_cuda_rng_tracker = Tracker


def on_rank(rank: int, world: int, layout: dict[str, int], folder: str) -> None:
    """Train, save a checkpoint and the losses of the next steps, on one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1")
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{folder}.store", rank=rank, world_size=world)
    stand_ins()
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel(**layout)
    bf16 = folder.endswith("bf16")
    torch.manual_seed(1)
    with OnCpu(), contextlib.redirect_stdout(None):
        dtype = torch.bfloat16 if bf16 else torch.float32
        trainer, documents = Trainer(their_model("gpt", layout, dtype), bf16), documents_of(7)
        for _ in range(newer.BEFORE):
            trainer.step(documents)
        os.makedirs(folder, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(trainer.state(GPT_ARGS, SHARDING), folder)
        dist.barrier()
        after = [trainer.step(documents) for _ in range(newer.AFTER)]
        if rank == 0:
            torch.save(after, f"{folder}.pt")
    dist.destroy_process_group()


def main() -> int:
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, (world, layout) in CASES.items():
            newer.spawn(on_rank, world, world, layout, str(folder / name))
            bf16 = name.endswith("bf16")
            from_megatron(folder / name, folder / f"ours_{name}", bf16=bf16)
            after = torch.load(folder / f"{name}.pt")
            options = {"bf16": True} if bf16 else {}
            tolerance = newer.BF16_TOLERANCE if bf16 else newer.TOLERANCE
            right, line = newer.continued(folder, name, after, options, tolerance)
            print(line, flush=True)
            results.append(right)
    print(f"{sum(results)} of {len(results)}")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
