"""Measures tokens per second and MFU of whole training runs of a recipe's model.

    python benchmarks/recipe_mfu.py runs/real.zip docs_longtail [--recipe gated_delta_1b]

The archive comes from `prepare_real.py`. One process trains the model on one set of real documents
with bf16. As in the recipe for fine-tuning on one GPU, a pack has 8,192 tokens and a step 32 packs.
The runs differ in the kind of CUDA graphs. Steps after the first quarter count.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import harness
from harness import Spread
from train_real import ROOT, command_line, read_log
from workloads import device_from

RUN = {
    "seq-length": 8192,
    "micro-batch-size": 1,
    "global-batch-size": 32,
    "train-iters": 8,
    "lr": 6e-4,
    "lr-decay-style": "constant",
    "lr-warmup-iters": 2,
    "bf16": True,
    "eval-interval": 1000,
    "eval-iters": 1,
    "tokenizer-type": "HuggingFaceTokenizer",
}
QUICK = {
    **RUN,
    "seq-length": 128,
    "global-batch-size": 1,
    "train-iters": 4,
    "bf16": False,
    "hidden-size": 32,
    "ffn-hidden-size": 48,
    "num-attention-heads": 2,
    "num-query-groups": 1,
    "kv-channels": 16,
    "linear-num-key-heads": 1,
    "linear-num-value-heads": 2,
    "linear-key-head-dim": 16,
    "linear-value-head-dim": 16,
    "vocab-size": 16384,
    "no-isolation-self-test": True,
}
GRAPHS = ("local", "full_iteration", "none")


def spread(values: Iterable[float]) -> Spread:
    """Return the spread of values that have no unit of time."""
    listed = list(values)
    return Spread.of_ratios(listed, [1.0] * len(listed))


def run(folder: Path, name: str, recipe: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train in a process, and return the values of its log."""
    words = command_line(name, folder, options)
    model = ROOT / "examples" / "recipes" / "models" / f"{recipe}.args"
    # Later options replace those of the file.
    command = [*words[:2], f"@{model}", *words[2:]]
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if finished.returncode != 0:
        raise SystemExit(f"exit code {finished.returncode}\n{finished.stdout[-4000:]}")
    steps, _ = read_log(folder / "log.jsonl")
    settled = steps[len(steps) // 4 :]
    utilisations = [step["mfu"] for step in settled if step["mfu"] is not None]
    kernels = re.search(r"^kernels: .*(?:\n  .*)*", finished.stdout, re.MULTILINE)
    parameters = re.search(r"([\d,]+) parameters", finished.stdout)
    return {
        "parameters": int(parameters[1].replace(",", "")) if parameters else None,
        "kernels": " ".join(kernels[0].split()) if kernels else None,
        "plan_hash": steps[0]["plan_hash"],
        "steps": len(settled),
        "step_ms": Spread.of([step["step_time_ms"] / 1e3 for step in settled]),
        "tokens_per_second": spread(step["tokens_per_second"] for step in settled),
        "mfu": spread(utilisations) if utilisations else None,
        "pack_fill": [step["pack_fill"] for step in settled],
        "loss": [round(step["lm_loss"], 5) for step in steps],
        "memory_gib": round(steps[-1]["memory_gib"], 2),
    }


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table, from results in the form of a result file."""
    return [
        {
            "graphs": name,
            "step ms": harness.shown(found["step_ms"]),
            "tokens/s": harness.shown(found["tokens_per_second"]),
            "MFU": harness.shown(found["mfu"]) if found["mfu"] else "",
            "GiB": found["memory_gib"],
            "last loss": found["loss"][-1],
            "plan": found["plan_hash"][:12],
        }
        for name, found in results["runs"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path, help="file made by prepare_real.py")
    parser.add_argument("set", help="name of a set in the archive")
    parser.add_argument("--recipe", default="gated_delta_1b", help="model in examples/recipes")
    parser.add_argument(
        "--graphs", nargs="+", default=GRAPHS, choices=GRAPHS, help="kinds of graphs"
    )
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    on_gpu = device_from(arguments.device).type == "cuda"
    options = {**(QUICK if arguments.quick else RUN), "device": arguments.device}
    results: dict[str, Any] = {"recipe": arguments.recipe, "set": arguments.set, "runs": {}}
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(arguments.archive) as archive:
        archive.extractall(folder)
        for name in arguments.graphs if on_gpu else ("none",):
            graphs = {"cuda-graph-impl": name}
            found = run(
                Path(folder) / arguments.set, arguments.set, arguments.recipe, options | graphs
            )
            results["runs"][name] = found
            path = harness.save(f"recipe_{arguments.recipe}", results, folder=arguments.results)
            print(f"{name}: {found['step_ms']} ms, MFU {found['mfu']}", flush=True)
    print(harness.table(rows_of(harness.plain(results))))
    print(path)


if __name__ == "__main__":
    main()
