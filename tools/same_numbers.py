"""Compare the numbers of training runs of this checkout with those of another, bit for bit.

    git worktree add ../before COMMIT
    python tools/same_numbers.py ../before [--device cuda] [--cases NAME ...] [--out FILE]

Each case is a short run. Both checkouts train its first half, each with its own package and script.
Then each continues from the checkpoint of the other checkout. The script compares all numbers of
the log except times and memory (losses, gradient norms, counts). It also compares every byte of
every tensor that was saved after each half (parameters, moments, random states), and the manifests.

On GPUs every case runs with ``--deterministic-mode``. Cases that need more GPUs than exist are
skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import common
import harness
from support.runs import TINY_MODEL, TINY_RUN, command_line, steps, write_conversations

REPOSITORY = common.REPOSITORY
HALF, LAST = 3, 6
"""Iterations of the first half, and of the complete run."""
OF_ONE_RUN = ("run_id", "save_id", "header_checksum", "sha256")
"""Entries of a checkpoint that are random, or a checksum of random entries."""
OF_A_CLOCK = ("_ms", "_per_s", "offload_hidden")
"""Endings of log fields that are times or depend on times."""
PRELOAD = (
    "torch",
    "torch.fx.experimental.symbolic_shapes",
    "numpy.random",
    "megatron_packed.training.pretrain",
)
ON_GPU: dict[str, Any] = {
    "device": "cuda",
    "deterministic_mode": True,
    "bf16": True,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "ffn_hidden_size": 512,
    "moe_ffn_hidden_size": 256,
    "mamba_head_dim": 64,
    "mamba_state_dim": 64,
    "mamba_chunk_size": 128,
    "seq_length": 512,
}
TP2 = {"tensor_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2, "num_attention_heads": 4, "mamba_cp_comm_type": "heads"}
ZIGZAG = {"cp_partition_mode": "zigzag"}
EP2 = {"expert_model_parallel_size": 2}
ZERO1 = {"use_distributed_optimizer": True, "ddp_bucket_size": 2000}
LAYER = {"recompute_granularity": "full", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective"}
OFFLOAD = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
NORMS_AND_PROJECTIONS = (
    *("attn_norm", "qkv_linear", "mamba_norm", "mamba_in_proj", "mamba_out_proj"),
    *("mlp_norm", "mlp_fc1", "mlp_fc2", "expert_fc1", "expert_fc2"),
)
INSIDE = ("core_attn", "attn_proj", "mamba_scan", "mlp_act", "moe_act")


@dataclass(frozen=True)
class Case:
    """Options of a run, in addition to the common options, and its number of processes."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1


CASES: dict[str, Case] = {
    "one process": Case(),
    "bf16, dropout": Case({"bf16": True, "hidden_dropout": 0.1}),
    "deterministic mode": Case({"deterministic_mode": True, "hidden_dropout": 0.1}),
    "biases, GQA, SwiGLU, untied": Case(
        {
            "hybrid_layer_pattern": "*-M-",
            "num_experts": None,
            "num_query_groups": 1,
            "swiglu": True,
            "squared_relu": None,
            "disable_bias_linear": None,
            "add_qkv_bias": True,
            "normalization": "LayerNorm",
            "untie_embeddings_and_output_weights": True,
        }
    ),
    "documents, split": Case(
        {"sft": None, "overlong_policy": "split", "micro_batch_size": 2, "seq_length": 32}
    ),
    "aux losses, shared expert": Case(
        {
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_z_loss_coeff": 1e-3,
            "moe_shared_expert_intermediate_size": 32,
            "moe_router_score_function": "softmax",
            "moe_router_enable_expert_bias": None,
        }
    ),
    "capacity, by score": Case({"moe_expert_capacity_factor": 1.0}),
    "capacity, by position": Case(
        {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"}
    ),
    "recompute uniform": Case({**LAYER, "recompute_method": "uniform", "hidden_dropout": 0.1}),
    "recompute block": Case({**LAYER, "recompute_method": "block", "recompute_num_layers": 2}),
    "recompute core_attn": Case(PARTS),
    "recompute layers by name": Case({**PARTS, "recompute_modules": ("mamba", "mlp", "moe")}),
    "recompute layernorm, moe_act": Case(
        {**PARTS, "recompute_modules": ("core_attn", "layernorm", "moe_act")}
    ),
    "offload of inputs": Case(
        {
            **LAYER,
            "recompute_method": "uniform",
            "offload_layer_inputs": True,
            "min_offloaded_tensor_size": 1,
        }
    ),
    "offload of projections": Case({**OFFLOAD, "offload_modules": NORMS_AND_PROJECTIONS}),
    "offload inside layers": Case({**OFFLOAD, "offload_modules": INSIDE, "hidden_dropout": 0.1}),
    "graphs local": Case({"cuda_graph_impl": "local"}),
    "graphs local, parts": Case(
        {"cuda_graph_impl": "local", "cuda_graph_modules": ("attn", "mamba", "moe_router")}
    ),
    "graphs full_iteration": Case({"cuda_graph_impl": "full_iteration"}),
    "TP2": Case(TP2, 2),
    "TP2, sequence parallel": Case({**TP2, "sequence_parallel": True, "hidden_dropout": 0.1}, 2),
    "CP2 a2a": Case(CP2, 2),
    "CP2 all_gather": Case({**CP2, **ZIGZAG, "cp_comm_type": "all_gather"}, 2),
    "CP2 p2p": Case({**CP2, **ZIGZAG, "cp_comm_type": "p2p"}, 2),
    "EP2 allgather": Case(EP2, 2),
    "EP2 alltoall": Case(
        {
            **EP2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_shared_expert_intermediate_size": 32,
        },
        2,
    ),
    "EP2 in TP2": Case(
        {**TP2, **EP2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}, 2
    ),
    "DP2": Case({"hidden_dropout": 0.1}, 2),
    "DP2 overlap": Case({"overlap_grad_reduce": True, "ddp_bucket_size": 2000}, 2),
    "DP2 ZeRO-1": Case(ZERO1, 2),
    "DP2 ZeRO-1, overlap": Case(
        {**ZERO1, "overlap_grad_reduce": True, "overlap_param_gather": True, "bf16": True}, 2
    ),
    "DP2 graphs full_iteration": Case({**ZERO1, "cuda_graph_impl": "full_iteration"}, 2),
    "TP2 x CP2 p2p": Case(
        {**TP2, **CP2, **ZIGZAG, "sequence_parallel": True, "cp_comm_type": "p2p"}, 4
    ),
    "TP2 x CP2 x EP2, recompute": Case(
        {**TP2, **CP2, **EP2, "expert_tensor_parallel_size": 1, **PARTS}, 4
    ),
}


class Checkout:
    """Process that runs the script of one checkout."""

    def __init__(self, root: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        server = Path(__file__).with_name("run_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(server), str(root), *PRELOAD],
            cwd=root,  # a fork server finds packages in its working directory first
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, folder: Path, options: Mapping[str, Any], processes: int) -> None:
        """Start a run in ``folder``; `wait` returns its exit codes."""
        folder.mkdir(parents=True, exist_ok=True)
        fresh = bool(options.get("deterministic_mode"))  # sets variables before torch is imported
        job = {"folder": str(folder), "arguments": command_line(dict(options)), "fresh": fresh}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**job, "processes": processes}) + "\n")
        self._process.stdin.flush()

    def wait(self) -> list[int]:
        assert self._process.stdout is not None
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def untimed(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of a log without fields that depend on times."""
    return [
        {name: value for name, value in line.items() if not name.endswith(OF_A_CLOCK)}
        for line in lines
    ]


def different_lines(found: Path, expected: Path) -> list[str]:
    """Return the first difference of two logs, which are compared as text."""
    lines, wanted = (untimed(steps(run / "log.jsonl")) for run in (found, expected))
    if len(lines) != len(wanted):
        return [f"log of {len(lines)} lines, not {len(wanted)}"]
    for line, other in zip(lines, wanted):
        for name in [*other, *(line.keys() - other.keys())]:
            if repr(line.get(name)) != repr(other.get(name)):
                where = f"iteration {other.get('iteration')}: {name}"
                return [f"{where} {line.get(name)!r}, not {other.get(name)!r}"]
    return []


def different_tensors(found: Path, expected: Path) -> list[str]:
    """Return the names of tensors that differ in a byte between two files of the same rank."""
    tensors, wanted = load_file(found), load_file(expected)
    return [
        f"tensor {name} of {found.name}"
        for name in sorted(tensors.keys() | wanted.keys())
        if name not in tensors or name not in wanted or not same(tensors[name], wanted[name])
    ]


def same(found: Tensor, expected: Tensor) -> bool:
    """Compare shape, dtype and bytes."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    one, other = (tensor.reshape(-1).view(torch.uint8) for tensor in (found, expected))
    return torch.equal(one, other)


def different_entries(found: Any, expected: Any, name: str = "manifest") -> list[str]:
    """Return the places in which two JSON values differ, except entries that differ in every
    run.
    """
    if isinstance(found, dict) and isinstance(expected, dict):
        # Both ran with the same flags, so an option that the older checkout lacks has its default.
        added = () if not name.startswith("manifest.metadata.config") else found.keys()
        names = sorted((found.keys() - added | expected.keys()) - set(OF_ONE_RUN))
        pairs = [(found.get(key), expected.get(key), f"{name}.{key}") for key in names]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(a, b, f"{name}[{i}]") for i, (a, b) in enumerate(zip(found, expected))]
    else:
        # An older checkout may write None for an option that is now an empty list.
        empty = found in (None, []) and expected in (None, [])
        return [] if empty or found == expected else [f"{name}: {found!r}, not {expected!r}"]
    return [place for pair in pairs for place in different_entries(*pair)]


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Return a manifest; the first line of its file is the checksum of the others."""
    text = (checkpoint / "manifest.json").read_text()
    manifest: dict[str, Any] = json.JSONDecoder().raw_decode(text)[0]
    # The working directory of the run; both checkouts have their own.
    manifest["metadata"].pop("folder", None)
    return manifest


def different_checkpoints(found: Path, expected: Path) -> list[str]:
    """Return the differences between the newest checkpoints of two runs."""
    step = (
        f"step_{json.loads((expected / 'log.jsonl').read_text().splitlines()[-1])['iteration']:08}"
    )
    sides = [run / "checkpoints" / step for run in (found, expected)]
    names = [sorted(path.name for path in side.glob("*.safetensors")) for side in sides]
    if names[0] != names[1] or not names[1]:
        return [f"checkpoint {step}: files {names[0]}, not {names[1]}"]
    tensors = [
        place for name in names[0] for place in different_tensors(*(s / name for s in sides))
    ]
    return tensors + different_entries(*(manifest_of(side) for side in sides))


def write_data(folder: Path) -> None:
    """Write conversations, and plain documents with the same words."""
    folder.mkdir(parents=True)
    for part, count, seed in (("train", 110, 1), ("valid", 24, 2)):
        path = write_conversations(folder / f"sft_{part}.jsonl", count, seed)
        chats = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
        texts = [" ".join(turn["content"] for turn in turns) for turns in chats]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"text_{part}.jsonl").write_text("".join(lines))


def options_of(case: Case, device: str, data: Path) -> dict[str, Any]:
    """Return the options of a case, with paths that are equal for both checkouts."""
    options = {
        **TINY_MODEL,
        **TINY_RUN,
        "data_cache_path": data / "cache",
        "train_iters": LAST,
        "eval_interval": HALF - 1,
        "eval_iters": 1,
        "save": "checkpoints",
        "load": "checkpoints",
        "log_jsonl": "log.jsonl",
        "log_params_norm": True,
        **case.changes,
    }
    kind = "sft" if options["sft"] else "text"
    options["train_data_path"] = data / f"{kind}_train.jsonl"
    options["valid_data_path"] = data / f"{kind}_valid.jsonl"
    gpu = {name: value for name, value in ON_GPU.items() if name not in case.changes}
    return {**options, **gpu} if device == "cuda" else options


def ends(
    sides: Sequence[Checkout], places: Sequence[Path], options: dict[str, Any], processes: int
) -> list[str]:
    """Run both checkouts at the same time, and return the failures."""
    for side, place in zip(sides, places):
        side.start(place, options, processes)
    codes = [side.wait() for side in sides]
    return [
        f"{place.name}: exit codes {ended}, see {place}/output_0.txt"
        for ended, place in zip(codes, places)
        if any(ended)
    ]


def compared(
    case: Case, device: str, data: Path, folder: Path, sides: Sequence[Checkout]
) -> list[str]:
    """Run the two halves of a case in both checkouts, and stop at the first difference.

    Args:
        folder: receives the runs.
        sides: this checkout and the other checkout.
    Returns:
        Differences of the first half that has any.
    """
    places = [folder / "here", folder / "other"]
    options = options_of(case, device, data)
    for half, more in (("first", {"exit_interval": HALF}), ("second", {})):
        if half == "second":  # each continues from the checkpoint of the other checkout
            shutil.rmtree(places[0])
            shutil.copytree(places[1], places[0])
        found = ends(sides, places, {**options, **more}, case.processes)
        found = found or different_lines(*places) + different_checkpoints(*places)
        if found:
            return [f"{half} half: {found[0]}", *found[1:]]
    return []


def compare(
    other: Path, device: str, names: Sequence[str], folder: Path, jobs: int
) -> dict[str, list[str] | None]:
    """Return the differences of every case; None for a case that needs more GPUs than exist.

    Args:
        jobs: number of cases that run at the same time.
    """
    write_data(folder / "data")
    most = torch.cuda.device_count() if device == "cuda" else sys.maxsize
    free: Queue[tuple[Checkout, Checkout]] = Queue()
    pairs = [(Checkout(REPOSITORY), Checkout(other)) for _ in range(jobs)]
    for pair in pairs:
        free.put(pair)

    def result(name: str) -> list[str] | None:
        case, found = CASES[name], None
        if case.processes <= most:
            pair = free.get()
            place = folder / re.sub(r"\W+", "_", name)
            found = compared(case, device, folder / "data", place, pair)
            free.put(pair)
        said = "left out: too few GPUs" if found is None else "; ".join(found[:3]) or "same"
        print(f"{name:30} {case.processes} process(es)  {said}", flush=True)
        return found

    with ThreadPoolExecutor(jobs) as threads:
        results = dict(zip(names, threads.map(result, names)))
    for pair in pairs:
        for side in pair:
            side.close()
    return results


def commit_of(checkout: Path) -> str | None:
    """Return the commit, with ``-dirty`` if files differ from it; None without a git repository."""
    if not (checkout / ".git").exists():
        return None
    describe = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    asked = subprocess.run(["git", *describe], cwd=checkout, capture_output=True, text=True)
    return asked.stdout.strip() or None


def main() -> int:
    """Return the exit code: 1 if a number differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="cases that run at a time")
    parser.add_argument("--out", type=Path, help="JSON file that receives the differences")
    parser.add_argument(
        "--commits", nargs=2, metavar=("HERE", "OTHER"), help="for --out, where git is not there"
    )
    parser.add_argument("--folder", type=Path, help="new folder that keeps the runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary) / "runs").resolve()
        other, device = arguments.other.resolve(), arguments.device
        results = compare(other, device, arguments.cases, folder, arguments.jobs)
    if arguments.out:
        here, before = arguments.commits or (commit_of(REPOSITORY), commit_of(other))
        document = {"commits": {"here": here, "other": before}, "differences": results}
        harness.save(arguments.out.stem, document, folder=arguments.out.parent)
    ran = [found for found in results.values() if found is not None]
    equal = sum(not found for found in ran)
    print(f"{equal} of {len(ran)} cases have the same numbers in both checkouts")
    return int(equal < len(ran) or not ran)


if __name__ == "__main__":
    sys.exit(main())
