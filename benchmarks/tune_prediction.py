"""Compares step times predicted by `megatron-packed tune --measure` with step times of runs.

    python benchmarks/tune_prediction.py [hybrid1b] [shard8b] [--lengths FILE ...] [--capacities N ...]

The script writes documents, lets `tune` measure the model on them, and trains with CUDA graphs at
each capacity. The capacities are the recommended one, and twice and four times as many documents.
``--capacities`` replaces the last two; capacities that are too small for a pack are left out.

Lengths are long-tailed, or come from real data: ``--lengths`` reads a file of token counts, one per
line. Documents longer than a pack are cut. The mean step time of the run is read from its log,
without the first steps. The script fails if a prediction is wrong by more than a tenth, or if a
micro-batch ran eagerly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import harness
from model_step import CONFIGS
from workloads import device_from

ALLOWED = 0.1
STEPS, SKIPPED = 40, 15
REPOSITORY = Path(__file__).parent.parent


def flags_of(config: str, tiny: bool) -> list[str]:
    """Return the flags of a model of `model_step.py` with a byte tokenizer.

    On a CPU the model keeps only the kinds of layers and gets small sizes.
    """
    c = dict(CONFIGS[config])
    sizes = {
        "hidden": 64,
        "heads": 4,
        "groups": 2,
        "ffn": 64,
        "mamba_heads": 8,
        "mamba_groups": 1,
        "T": 256,
    }
    c |= {**sizes, "pattern": "M*-"} if tiny else {}
    words = {
        "hybrid-layer-pattern": c["pattern"],
        "hidden-size": c["hidden"],
        "num-attention-heads": c["heads"],
        "num-query-groups": c["groups"],
        "kv-channels": 16 if tiny else 128,
        "ffn-hidden-size": c["ffn"],
        "mamba-num-heads": c["mamba_heads"],
        "mamba-num-groups": c["mamba_groups"],
        "mamba-head-dim": 16 if tiny else 64,
        "mamba-state-dim": 16 if tiny else 128,
        "normalization": "RMSNorm",
        "position-embedding-type": "none",
        "make-vocab-size-divisible-by": 512 if tiny else c["vocab"],
        "seq-length": c["T"],
        "global-batch-size": 4,
    }
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return [
        *flags,
        "--squared-relu",
        "--disable-bias-linear",
        *(["--device", "cpu"] if tiny else ["--bf16"]),
    ]


def document_lengths(path: Path | None, tokens: int, packs: int) -> list[int]:
    """Return the lengths of documents that fill about ``packs`` packs.

    A length includes the end-of-document token.
    """
    if path is None:
        draw = np.random.default_rng(0)
        lengths = np.exp(np.log(tokens / 30) + 1.2 * draw.standard_normal(packs * 30))
    else:
        lengths = np.loadtxt(path, ndmin=1)
    lengths = np.clip(lengths, 2, tokens).astype(int)
    ends = np.searchsorted(np.cumsum(lengths), tokens * packs)
    return list(map(int, lengths[: ends + 1]))


def write_documents(path: Path, lengths: list[int]) -> None:
    letters = (
        np.random.default_rng(0).integers(97, 123, max(lengths), dtype=np.uint8).tobytes().decode()
    )
    path.write_text(
        "".join(json.dumps({"text": letters[: length - 1]}) + "\n" for length in lengths)
    )


def tuned(flags: list[str], data: Path, *more: object) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "megatron_packed.cli.main",
        "tune",
        *flags,
        "--data",
        str(data),
        "--json",
        "--packing-method",
        "balanced",
        *map(str, more),
    ]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=REPOSITORY)
    return dict(json.loads(ran.stdout))


def trained(flags: list[str], data: Path, capacity: int, steps: int) -> list[dict[str, Any]]:
    """Run a training with graphs for one capacity, and return the records of its log."""
    log = data.with_name(f"log_{capacity}.jsonl")
    command = [
        sys.executable,
        "pretrain_hybrid.py",
        *flags,
        "--data-path",
        str(data),
        "--lr",
        "1e-4",
        "--train-iters",
        str(steps),
        "--packing-method",
        "balanced",
        "--cuda-graph-impl",
        "local",
        "--cuda-graph-max-packed-seqs",
        str(capacity),
        "--log-jsonl",
        str(log),
    ]
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY
    )
    if ran.returncode:
        raise SystemExit(ran.stdout[-3000:])
    return [json.loads(line) for line in log.read_text().splitlines()]


def compare(
    config: str, path: Path | None, asked: list[int], tiny: bool, quick: bool
) -> list[dict[str, Any]]:
    flags = flags_of(config, tiny)
    tokens = 256 if tiny else CONFIGS[config]["T"]
    steps, skipped = (6, 2) if quick else (STEPS, SKIPPED)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "documents.jsonl"
        write_documents(data, document_lengths(path, tokens, 4 * steps))
        most = tuned(flags, data)["packers"][0]["max"]
        capacities = sorted(
            {most, *(n for n in asked or (2 * most, 4 * most) if most <= n <= tokens)}
        )
        prediction = tuned(
            flags, data, "--measure", data.with_name("costs.json"), "--capacities", *capacities
        )
        for capacity in capacities:
            expected = prediction["by_capacity"][str(capacity)]
            lines = trained(flags, data, capacity, steps)
            times = [line["step_time_ms"] for line in lines[skipped:]]
            measured = statistics.mean(times)
            found.append(
                {
                    "config": config,
                    "data": "made up" if path is None else path.stem,
                    "capacity": capacity,
                    "documents": most,
                    "predicted_ms": expected["step_ms"],
                    "measured_ms": measured,
                    "median_ms": statistics.median(times),
                    "predicted_over_measured": expected["step_ms"] / measured,
                    "fallbacks": sum(line.get("graph_fallbacks", 0) for line in lines),
                    "steps": len(times),
                    "fastest_ms": min(times),
                    "slowest_ms": max(times),
                    "plan_hash": lines[-1]["plan_hash"],
                }
            )
            print(harness.table([harness.plain(found[-1])]), flush=True)
    return found


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    return [
        {
            "config": config,
            "data": one.get("data", "made up"),
            "capacity": one["capacity"],
            "documents at most": one["documents"],
            "predicted ms": f"{one['predicted_ms']:.1f}",
            "measured ms: mean, median of steps": f"{one['measured_ms']:.1f}, {one['median_ms']:.1f} of {one['steps']}",
            "predicted / measured": f"{one['predicted_over_measured']:.3f}",
            "fallbacks": one["fallbacks"],
            **({"plan": one["plan_hash"][:12]} if "plan_hash" in one else {}),
        }
        for config, found in results.items()
        for one in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="*", help=f"from {list(CONFIGS)} (default: all)")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=Path,
        default=[None],
        help="files with the lengths of real documents in tokens, one file per data set",
    )
    parser.add_argument(
        "--capacities",
        nargs="+",
        type=int,
        default=[],
        help="document capacities to measure in addition to the recommended one "
        "(default: twice and four times the recommended one)",
    )
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    tiny = device_from(arguments.device).type == "cpu"
    results: dict[str, Any] = {}
    for config in arguments.configs or CONFIGS:
        results[config] = []
        for path in arguments.lengths:
            results[config] += compare(config, path, arguments.capacities, tiny, arguments.quick)
            harness.save("tune_prediction", results, folder=arguments.results)
    print(harness.table(rows_of(results)))
    rows = [row for found in results.values() for row in found]
    off = [
        row for row in rows if row["fallbacks"] or abs(row["predicted_over_measured"] - 1) > ALLOWED
    ]
    if off:
        raise SystemExit(
            f"{len(off)} of {len(rows)} predictions are wrong by more than {ALLOWED:.0%}, "
            "or micro-batches ran eagerly."
        )


if __name__ == "__main__":
    main()
