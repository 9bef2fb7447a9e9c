"""Compares the losses of runs with optimizer state in bf16 with those of runs in float32.

    python benchmarks/state_precision.py runs/packs [--gpus 4] [--steps 1000]

The data set comes from `prepare_packs.py`. Each run trains `hybrid_1b` from the same random weights on
one GPU, with two packs of 2,048 tokens in a step and each pack once. Three runs have float32 state and
differ in the order of their documents alone. Two have bf16 moments and masters stored as remainders;
their moments are rounded stochastically or to nearest, and their documents have the order of the first
run. Up to ``--gpus`` runs are at work at the same time. The mean loss of the last steps is compared with
that of the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

import harness
from megatron_packed.data.index.indexed_file import IndexedFile
from megatron_packed.data.index.indexed_writer import IndexedWriter
from train_real import ROOT, read_log
from workloads import device_from

LOW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


class Run(NamedTuple):
    """Flags of a run, and the seed of the order of its documents."""

    flags: str = ""
    order: int = 1


RUNS = {
    "fp32": Run(),
    "fp32, second order of data": Run(order=2),
    "fp32, third order of data": Run(order=3),
    "bf16 moments, stochastic": Run(LOW),
    "bf16 moments, nearest": Run(f"{LOW} --moment-rounding nearest"),
}
FIRST = "fp32"
MODEL = ROOT / "examples" / "recipes" / "models" / "hybrid_1b.args"
RUN = """--tokenizer-type NullTokenizer --null-tokenizer-eod-id 50256 --vocab-size 50304
--micro-batch-size 1 --global-batch-size 2 --no-isolation-self-test --log-interval 1 --eval-iters 0"""
OPTIMIZER = """--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1
--adam-beta2 0.95 --clip-grad 1.0 --seed 7"""
GPU_RUN = "--seq-length 2048 --bf16 --cuda-graph-impl full_iteration"
QUICK_RUN = """--seq-length 64 --vocab-size 304 --null-tokenizer-eod-id 300 --bf16 --hybrid-layer-pattern M-*
--hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2 --num-query-groups 1 --kv-channels 16
--mamba-num-heads 4 --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 1"""
COUNTED = 50
"""Number of the last steps whose mean loss is compared."""


def write_reordered(data: Path, written: Path, order: int) -> None:
    """Write the documents of a data set in another order.

    Args:
        order: seed of the order.
    """
    source = IndexedFile(data)
    documents = list(pairwise(source.document_starts().tolist()))
    with IndexedWriter(written, np.uint16) as writer:
        for number in np.random.default_rng(order).permutation(len(documents)):
            writer.add_document(source.tokens(*documents[number]))


def launch(words: list[str], gpu: str | None) -> str:
    """Train in a process on a GPU; return its output if it failed, else an empty string."""
    finished = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_hybrid.py"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=None if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
    )
    return finished.stdout if finished.returncode else ""


def command_words(name: str, steps: int, *, quick: bool, device: str) -> list[str]:
    """Return the command line of a run, but for its data and its log."""
    words = [f"@{MODEL}", *RUN.split(), *OPTIMIZER.split()]
    words += (QUICK_RUN if quick else GPU_RUN).split()
    return [*words, "--train-iters", str(steps), "--device", device, *RUNS[name].flags.split()]


def run(
    name: str, arguments: argparse.Namespace, device: str, gpus: SimpleQueue[str]
) -> dict[str, Any]:
    """Train on a free GPU, and return the values of its log."""
    gpu = gpus.get()
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_reordered(arguments.data, Path(folder, "documents"), RUNS[name].order)
            words = command_words(name, arguments.steps, quick=arguments.quick, device=device)
            words += ["--data-path", f"{folder}/documents", "--data-cache-path", f"{folder}/cache"]
            words += ["--log-jsonl", f"{folder}/log.jsonl"]
            if failed := launch(words, gpu if device == "cuda" else None):
                return {"failed": failed.replace(folder, ".")[-2000:]}
            steps, _ = read_log(Path(folder) / "log.jsonl")
    finally:
        gpus.put(gpu)
    losses = [step["lm_loss"] for step in steps]
    return {
        "plan_hash": steps[0]["plan_hash"],
        "steps": len(steps),
        "mean_loss": statistics.fmean(losses[-COUNTED:]),
        "loss": [round(loss, 4) for loss in losses[:: max(len(losses) // 40, 1)]],
        "step_ms": harness.Spread.of([step["step_time_ms"] / 1e3 for step in steps[-COUNTED:]]),
        "memory_gib": round(steps[-1]["memory_gib"], 2),
    }


def compared(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the relative differences from the first run, and the spread of the runs in float32."""
    means = {name: found["mean_loss"] for name, found in runs.items() if "mean_loss" in found}
    if FIRST not in means:
        return {}
    full = [mean for name, mean in means.items() if name.startswith(FIRST)]
    return {
        "spread": round((max(full) - min(full)) / means[FIRST], 6),
        "difference": {name: round(mean / means[FIRST] - 1, 6) for name, mean in means.items()},
    }


def rows_of(results: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table, from results in the form of a result file."""
    differences = results["compared"].get("difference", {})
    rows: list[dict[str, object]] = []
    for name, found in results["runs"].items():
        failed = "failed" in found
        rows.append(
            {
                "run": name,
                "mean loss": "failed" if failed else f"{found['mean_loss']:.4f}",
                "difference": f"{differences[name]:+.3%}" if name in differences else "",
                "step ms": "" if failed else harness.shown(found["step_ms"]),
                "GiB": "" if failed else found["memory_gib"],
                "plan": "" if failed else found["plan_hash"][:12],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="data set of prepare_packs.py, without .bin")
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs, if CUDA_VISIBLE_DEVICES names none"
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device).type
    gpus: SimpleQueue[str] = SimpleQueue()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    for gpu in given.split(",") if given else map(str, range(arguments.gpus)):
        gpus.put(gpu)
    with ThreadPoolExecutor(gpus.qsize()) as pool:
        jobs = {name: pool.submit(run, name, arguments, device, gpus) for name in arguments.runs}
        runs = {name: job.result() for name, job in jobs.items()}
    results = {"steps": arguments.steps, "runs": runs, "compared": compared(runs)}
    path = harness.save("state_precision", results, folder=arguments.results)
    print(harness.table(rows_of(harness.plain(results))))
    print(json.dumps(results["compared"]), path, sep="\n")


if __name__ == "__main__":
    main()
