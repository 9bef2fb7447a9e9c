"""Train models with megatron-core, convert their checkpoints, and continue their runs.

It runs on the CPU, so kernels that need a GPU have stand-ins. See ``common/megatron_core.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.megatron_core import (
    ARGS,
    DOCUMENTS,
    GPT_ARGS,
    LENGTH,
    ROWS,
    OnCpu,
    stand_ins,
    their_model,
)
from common.megatron_training import Trainer, documents_of, logits
from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.models.convert.import_huggingface import Imported
from megatron_packed.models.convert.megatron.export_megatron import to_megatron
from megatron_packed.models.convert.megatron.import_megatron import from_megatron
from megatron_packed.models.hybrid_model import HybridModel
from support import hybrid_cases as cases
from support.runs import losses, run

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "dp2": {},
    "plain": {},
}
"""Sizes of each layout. ``plain`` is one rank whose optimizer is not distributed."""
KINDS = {"hybrid": (ARGS, ("tp2", "pp2", "dp2")), "gpt": (GPT_ARGS, ("tp2", "pp2", "dp2"))}
"""Options of each model, and the layouts that write the state of one rank again. With EP 2, Megatron
has other optimizers than on one rank, so such a run has its own first steps.
"""
TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit, and of losses."""
BF16_TOLERANCE = 2e-2
"""Largest difference of losses of runs in bf16, whose rounding differs."""
BEFORE, AFTER = 3, 3
"""Steps before and after the checkpoint."""
TOKENS = torch.arange(LENGTH) * 5 % ROWS


def on_rank(rank: int, world: int, kind: str, layout: str, folder: str, seed: str | None) -> None:
    """Save a checkpoint of one layout, on one rank.

    Args:
        seed: checkpoint with the state to save; new weights are trained when not given.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1")
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{folder}.store", rank=rank, world_size=world)
    stand_ins()
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel(**LAYOUTS[layout])
    bf16 = Path(folder).name.endswith("bf16")
    torch.manual_seed(1)
    with OnCpu(), contextlib.redirect_stdout(None):
        dtype = torch.bfloat16 if bf16 else torch.float32
        plain = layout == "plain"
        trainer = Trainer(their_model(kind, LAYOUTS[layout], dtype), bf16, distributed=not plain)
        args, documents, result = KINDS[kind][0], documents_of(7), {}
        if layout == "ep2":  # each rank trains on its share of the documents
            documents = documents[rank::world]
        if seed is not None:
            trainer.load(args, seed)
        else:
            result["before"] = [trainer.step(documents) for _ in range(BEFORE)]
        for sharding in ("fully_reshardable", "dp_reshardable")[: 1 if plain else 2]:
            name = folder if sharding == "fully_reshardable" else f"{folder}_buckets"
            os.makedirs(name, exist_ok=True)
            dist.barrier()
            dist_checkpointing.save(trainer.state(args, sharding), name)
            dist.barrier()
        if world == 1 and seed is None:
            with torch.no_grad():
                result["float32"] = logits(trainer.model, TOKENS)
                low = their_model(kind, {}, torch.bfloat16)
                low.load_state_dict(trainer.model.state_dict(), strict=False)
                result["bf16"] = logits(low, TOKENS).float()
        if seed is None or layout == "one":
            own = [trainer.step(documents) for _ in range(AFTER)]
            after = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(after)
            result["after"] = (after / world).tolist()
            if rank == 0:
                torch.save(result, f"{folder}.pt")
    dist.destroy_process_group()


def loaded_logits(rank: int, kind: str, folder: str, written: str) -> None:
    """Save the logits of megatron-core's model with weights that this project wrote."""
    dist.init_process_group("gloo", f"file://{folder}.store", rank=rank, world_size=1)
    stand_ins()
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel()
    with OnCpu(), torch.no_grad():
        model = their_model(kind, {})
        # A checkpoint of this project has no state of FP8 (_extra_state).
        wanted = {"model": model.sharded_state_dict()}
        state = dist_checkpointing.load(wanted, written, strict="ignore_all")
        model.load_state_dict(state["model"], strict=False)
        torch.save(logits(model, TOKENS), f"{folder}.pt")
    dist.destroy_process_group()


def loaded_state(folder: Path, kind: str, first: dict[str, Tensor]) -> Iterator[tuple[bool, str]]:
    """Load checkpoints of this project with moments into megatron-core, and save them again.

    Args:
        first: tensors of the checkpoint that megatron-core wrote at first, as this project has them.
    """
    for layout, ranks in (("one", 1), ("tp2", 2), ("dp2", 2), ("ep2", 2)):
        name = f"back_{layout}"
        experts = LAYOUTS[layout].get("expert_model_parallel_size", 1)
        written = to_megatron(
            folder / "ours_one", folder / f"for_{layout}", expert_parallel=experts
        ).folder
        spawn(on_rank, ranks, ranks, kind, layout, str(folder / name), str(written))
        ours = tensors_of(from_megatron(folder / name, folder / f"ours_{name}"))
        same = ours.keys() == first.keys() and all(torch.equal(ours[n], first[n]) for n in first)
        yield same, f"{layout}: weights, moments and step that it loads from ours are equal: {same}"
    spawn(on_rank, 1, 1, kind, "one", str(folder / "own"), str(folder / "one"))
    own, other = (torch.load(folder / f"{name}.pt")["after"] for name in ("own", "back_one"))
    same = own == other
    yield same, f"its next losses are the same after its own checkpoint and after ours: {same}"


def check(folder: Path, kind: str) -> Iterator[tuple[bool, str]]:
    """Write all checkpoints of a model and convert them; yield whether each case is right."""
    _, layouts = KINDS[kind]
    spawn(on_rank, 1, 1, kind, "one", str(folder / "one"), None)
    theirs = torch.load(folder / "one.pt")
    converted = from_megatron(folder / "one", folder / "ours_one")
    first = tensors_of(converted)
    yield compare_logits(converted, theirs)
    yield compare_bf16_logits(folder, theirs)
    yield continued(folder, "one", theirs["after"], {})
    for name in layouts:
        spawn(on_rank, 2, 2, kind, name, str(folder / name), str(folder / "one"))
        found = from_megatron(folder / name, folder / f"ours_{name}")
        ours = tensors_of(found)
        same = ours.keys() == first.keys() and all(torch.equal(ours[n], first[n]) for n in first)
        yield same, f"{name}: {len(ours)} tensors are equal to those of one rank: {same}"
    own = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    yield continued(folder, layouts[0], theirs["after"], own)
    if kind == "hybrid":
        spawn(on_rank, 2, 2, kind, "ep2", str(folder / "ep2"), None)
        from_megatron(folder / "ep2", folder / "ours_ep2")
        yield continued(folder, "ep2", torch.load(folder / "ep2.pt")["after"], {})
    alone = from_megatron(folder / "one_buckets", folder / "ours_buckets")
    same = alone.saved.step == 0 and "dp_reshardable" in alone.notes[0]
    yield same, f"flat buffers: {len(tensors_of(alone))} tensors, and a sentence: {same}"
    written = to_megatron(folder / "ours_one", folder / "back").folder
    back = "gpt_hybrid" if kind == "gpt" else kind
    spawn(loaded_logits, 1, back, str(folder / "again"), str(written))
    same = torch.equal(torch.load(folder / "again.pt"), theirs["float32"])
    yield same, f"written back as a hybrid model: megatron-core's logits are the same: {same}"
    if kind == "hybrid":  # a GPT model comes back as a hybrid model, with other names
        yield from loaded_state(folder, kind, first)
    for name in ("plain", "one_bf16", "plain_bf16"):
        layout, bf16 = name.removesuffix("_bf16"), name.endswith("_bf16")
        spawn(on_rank, 1, 1, kind, layout, str(folder / name), None)
        from_megatron(folder / name, folder / f"ours_{name}", bf16=bf16)
        after = torch.load(folder / f"{name}.pt")["after"]
        tolerance = BF16_TOLERANCE if bf16 else TOLERANCE
        yield continued(folder, name, after, {"bf16": True} if bf16 else {}, tolerance)


def spawn(function: Any, processes: int, *arguments: Any) -> None:
    torch.multiprocessing.spawn(function, arguments, nprocs=processes)


def tensors_of(found: Imported) -> dict[str, Tensor]:
    manifest = read_manifest(found.saved.path)
    return {key: read_tensor(found.saved.path, key, manifest) for key in manifest.tensors}


def our_logits(found: Imported, dtype: torch.dtype) -> Tensor:
    model = HybridModel(found.model, vocab_size=ROWS, max_positions=64, dtype=dtype)
    tensors = tensors_of(found).items()
    weights = {n.removeprefix("model/"): one for n, one in tensors if n.startswith("model/")}
    model.load_state_dict(weights)
    batch = cases.make_pack([(TOKENS.numpy(), np.ones(LENGTH, bool))])
    with torch.no_grad():
        return model.logits(batch.tokens, batch.packed)[:LENGTH, :ROWS].float()


def compare_logits(found: Imported, theirs: dict[str, Any]) -> tuple[bool, str]:
    worst = distance(our_logits(found, torch.float32), theirs["float32"])
    return worst < TOLERANCE, f"logits: largest difference, relative to the largest: {worst:.1e}"


def compare_bf16_logits(folder: Path, theirs: dict[str, Any]) -> tuple[bool, str]:
    found = from_megatron(folder / "one", folder / "ours_low", bf16=True)
    ours = rounding(our_logits(found, torch.bfloat16), theirs["float32"])
    other = rounding(theirs["bf16"], theirs["float32"])
    text = f"bf16 logits: {ours:.1e} from float32 (RMS), megatron-core's own are {other:.1e}"
    return ours <= other, text


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def rounding(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def continued(
    folder: Path,
    name: str,
    expected: list[float],
    options: dict[str, Any],
    tolerance: float = TOLERANCE,
) -> tuple[bool, str]:
    """Continue a converted run on the documents of megatron-core's run, and compare the losses."""
    data, own = folder / f"documents_{name}.jsonl", folder / f"run_{name}"
    rows = (" ".join(map(str, row[:-1].tolist())) for row in documents_of(7))
    data.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    lines = (folder / f"ours_{name}" / "model.args").read_text().splitlines()
    flags = (shlex.split(line.removeprefix("--")) for line in lines)
    model = {flag.replace("-", "_"): tuple(values) or True for flag, *values in flags}
    done = run(
        {
            **model,
            "tokenizer_type": "NullTokenizer",
            "train_data_path": data,
            "seq_length": LENGTH + 1,
            "global_batch_size": DOCUMENTS,
            "micro_batch_size": 1,
            "train_iters": BEFORE + AFTER,
            "lr": 1.0,
            "use_checkpoint_opt_param_scheduler": True,
            "adam_beta2": 0.95,
            "load": folder / f"ours_{name}",
            "save": own / "checkpoints",
            "log_jsonl": own / "log.jsonl",
            "device": "cpu",
            "no_isolation_self_test": True,
            **options,
        },
        own,
        options.get("tensor_model_parallel_size", 1),
    )
    assert done.exit_code == 0, done.console
    found = losses(own / "log.jsonl")
    worst = max(abs(one / two - 1) for one, two in zip(found, expected, strict=True))
    size = options.get("tensor_model_parallel_size")
    layout = f" with TP {size}" if size else ""
    text = " ".join(f"{one:.5f}" for one in found)
    return worst < tolerance, f"{name}{layout}: next losses {text}, {worst:.1e} from megatron-core"


def main() -> int:
    results = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            for right, line in check(Path(folder), kind):
                print(f"{kind}, {line}", flush=True)
                results.append(right)
    print(f"{sum(results)} of {len(results)}")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
