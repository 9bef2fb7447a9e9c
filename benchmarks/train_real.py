"""Trains a hybrid model of about 100 M parameters on real documents, and checks the loss curve.

    python benchmarks/train_real.py runs/real.zip [SET ...]

The archive comes from `prepare_real.py`. `pretrain_hybrid.py` trains each set for 200 steps in a
separate process, with the command that a user would type. The checks read the log of that process:

- The last validation loss is below the bound of the set, and below the unigram entropy of the
  validation targets.
- No step's loss is above 1.5 times the running median.
- No step was skipped.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import harness
from megatron_packed.data.sources.tokenized_dataset import TokenizedDataset
from workloads import device_from

ROOT = Path(__file__).parent.parent
SFT_SETS = ("sgd_chat",)
"""Sets of conversations, which train only on the answers. The other sets are plain text."""
VALID_BOUNDS: dict[str, float | None] = {"sgd_chat": 2.5, "docs_longtail": 4.5}
"""Bound of the validation loss after 200 steps on a GPU, in nats per target token.

None checks nothing and only reports the loss.
"""
SPIKE, MEDIAN_STEPS = 1.5, 20

MODEL = {
    "hybrid-layer-pattern": "M-M*-MEM-M*-MEM-",
    "hidden-size": 768,
    "num-attention-heads": 12,
    "num-query-groups": 4,
    "kv-channels": 64,
    "ffn-hidden-size": 3072,
    "mamba-num-groups": 4,
    "num-experts": 8,
    "moe-ffn-hidden-size": 1024,
    "moe-shared-expert-intermediate-size": 1024,
    "seq-length": 8192,
    "global-batch-size": 4,
}
TINY_MODEL = {
    "hybrid-layer-pattern": "M*-E",
    "hidden-size": 32,
    "num-attention-heads": 2,
    "num-query-groups": 1,
    "kv-channels": 16,
    "ffn-hidden-size": 64,
    "mamba-num-heads": 4,
    "mamba-head-dim": 16,
    "mamba-state-dim": 16,
    "mamba-num-groups": 1,
    "num-experts": 4,
    "moe-ffn-hidden-size": 32,
    "seq-length": 256,
    "global-batch-size": 2,
}
COMMON = {
    "moe-router-topk": 2,
    "moe-aux-loss-coeff": 1e-2,
    "squared-relu": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "micro-batch-size": 1,
    "lr-decay-style": "cosine",
    "adam-beta2": 0.95,
    "weight-decay": 0.1,
    "tokenizer-type": "HuggingFaceTokenizer",
}
GPU_RUN = {
    "bf16": True,
    "train-iters": 200,
    "lr": 1e-3,
    "min-lr": 1e-4,
    "lr-warmup-iters": 20,
    "eval-interval": 50,
    "eval-iters": 8,
}
QUICK_RUN = {
    "train-iters": 6,
    "lr": 1e-3,
    "min-lr": 1e-4,
    "lr-warmup-iters": 2,
    "eval-interval": 3,
    "eval-iters": 1,
    "no-isolation-self-test": True,
}


def command_line(name: str, folder: Path, options: dict[str, Any]) -> list[str]:
    """Return the command that a user would type, for files in ``folder``."""
    options = {
        "log-jsonl": folder / "log.jsonl",
        **options,
        "sft": name in SFT_SETS,
        "train-data-path": folder / "train.jsonl.gz",
        "valid-data-path": folder / "valid.jsonl.gz",
        "data-cache-path": folder / "cache",
        "tokenizer-model": folder / "tokenizer",
    }
    words = []
    for option, value in options.items():
        if value is not False:
            words += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    return [sys.executable, str(ROOT / "pretrain_hybrid.py"), *words]


def train(name: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Run the training of one set, and return the values from its log."""
    command = command_line(name, folder, options)
    started = time.perf_counter()
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.perf_counter() - started
    if finished.returncode != 0:
        raise SystemExit(
            f"{name}: training failed with exit code {finished.returncode}\n{finished.stdout[-4000:]}"
        )
    steps, validations = read_log(folder / "log.jsonl")
    settled = steps[len(steps) // 4 :]  # leaves out the steps with compilation and tuning
    utilisations = [step["mfu"] for step in settled if step["mfu"] is not None]
    parameters = re.search(r"([\d,]+) parameters", finished.stdout)
    return {
        "command": " ".join(["python", "pretrain_hybrid.py", *command[2:]]).replace(
            str(folder), name
        ),
        "parameters": int(parameters[1].replace(",", "")) if parameters else None,
        "seconds_in_all": round(seconds, 1),
        "plan_hash": steps[0]["plan_hash"],
        "unigram_entropy": round(unigram_entropy(folder), 4),
        "valid_loss": [
            [record["iteration"], round(record["valid_loss"], 5)] for record in validations
        ],
        "loss": [round(step["lm_loss"], 5) for step in steps],
        "grad_norm": [round(step["grad_norm"], 4) for step in steps],
        "largest_over_running_median": round(
            largest_over_running_median([step["lm_loss"] for step in steps]), 4
        ),
        "skipped_steps": sum(step["skipped"] for step in steps),
        "step_ms": harness.Spread.of([step["step_time_ms"] / 1e3 for step in settled]),
        "tokens_per_second": round(
            statistics.median(step["tokens_per_second"] for step in settled)
        ),
        "mfu": round(statistics.median(utilisations), 4) if utilisations else None,
        "pack_fill": round(statistics.mean(step["pack_fill"] for step in steps), 4),
        "docs_per_pack": round(statistics.mean(step["docs_per_pack"] for step in steps), 2),
        "epochs": steps[-1]["epoch"],
        "memory_gib": round(steps[-1]["memory_gib"], 2),
    }


def read_log(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the records of steps and of validations in a log."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [r for r in records if "lm_loss" in r], [r for r in records if "valid_loss" in r]


def unigram_entropy(folder: Path) -> float:
    """Return the unigram entropy of the validation targets, in nats.

    It is the lowest loss of a model that predicts each token without context.
    """
    for manifest in folder.glob("cache/*/manifest.json"):
        dataset = TokenizedDataset(manifest.parent)
        if any(
            Path(source["file"]).name == "valid.jsonl.gz" for source in dataset.manifest["sources"]
        ):
            return dataset.target_entropy()
    raise SystemExit(f"{folder.name}: the data cache has no tokenised validation data")


def largest_over_running_median(losses: list[float]) -> float:
    """Return the largest ratio of a step's loss to the median loss of the previous steps."""
    ratios = [
        loss / statistics.median(losses[max(0, number - MEDIAN_STEPS) : number])
        for number, loss in enumerate(losses)
        if number
    ]
    return max(ratios, default=1.0)


def problems_of(name: str, found: dict[str, Any], bound: float | None) -> list[str]:
    final = found["valid_loss"][-1][1]
    problems = []
    if bound is not None and not final < bound:
        problems.append(f"{name}: validation loss {final} is not below its bound {bound}")
    if bound is not None and not final < found["unigram_entropy"]:
        problems.append(
            f"{name}: validation loss {final} is not below the unigram entropy {found['unigram_entropy']}"
        )
    if not found["largest_over_running_median"] <= SPIKE:
        problems.append(
            f"{name}: one step's loss is {found['largest_over_running_median']} times the running median"
        )
    if found["skipped_steps"]:
        problems.append(f"{name}: {found['skipped_steps']} steps were skipped")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path, help="file made by prepare_real.py")
    parser.add_argument("sets", nargs="*", help="names in the archive (default: all)")
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    on_gpu = device_from(arguments.device).type == "cuda"
    options = {
        **COMMON,
        **(MODEL if on_gpu and not arguments.quick else TINY_MODEL),
        "device": arguments.device,
    }
    options |= QUICK_RUN if arguments.quick else GPU_RUN if on_gpu else {**GPU_RUN, "bf16": False}
    judged = on_gpu and not arguments.quick
    results, problems = {}, []
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(arguments.archive) as archive:
            archive.extractall(folder)
        for name in arguments.sets or sorted(path.name for path in Path(folder).iterdir()):
            results[name] = train(name, Path(folder) / name, options)
            problems += problems_of(name, results[name], VALID_BOUNDS.get(name) if judged else None)
            path = harness.save("train_real", results, folder=arguments.results)
            print(f"{name}: {results[name]['seconds_in_all']} s in all", flush=True)
    print(harness.table(rows_of(harness.plain(results))))
    print(path)
    if problems:
        raise SystemExit("failed: " + "; ".join(problems))


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table, from results in the form of a result file."""
    return [
        {
            "set": name,
            "parameters": found["parameters"],
            "steps": len(found["loss"]),
            "first loss": found["loss"][0],
            "last loss": found["loss"][-1],
            "validation": found["valid_loss"][-1][1],
            "unigram entropy": found["unigram_entropy"],
            "loss/median at most": found["largest_over_running_median"],
            "step ms": harness.shown(found["step_ms"]),
            "tokens/s": found["tokens_per_second"],
            "MFU": found["mfu"],
            "fill": found["pack_fill"],
            "GiB": found["memory_gib"],
        }
        for name, found in results.items()
    ]


if __name__ == "__main__":
    main()
