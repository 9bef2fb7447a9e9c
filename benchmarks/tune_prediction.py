"""Is the step time that `megatron-packed tune --measure` predicts the step time of a run?

    python benchmarks/tune_prediction.py [hybrid1b] [shard8b] [--capacities N ...]

Makes documents of long-tailed lengths, lets `tune` measure the model on them, and trains with graphs for each capacity:
the recommended one and those given, that hold every pack. The run's mean step time is taken from its log, without the
first steps; no micro-batch may have run eagerly. Fails where a prediction is more than a tenth off.
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

CAPACITIES = (64, 256)
"""Beside the recommended one."""
ALLOWED = 0.1
STEPS, SKIPPED = 40, 15
REPOSITORY = Path(__file__).parent.parent


def flags_of(config: str, tiny: bool) -> list[str]:
    """The model of `model_step.py` with bytes for tokens; on a CPU its layers' kinds alone."""
    c = dict(CONFIGS[config])
    sizes = {"hidden": 64, "heads": 4, "groups": 2, "ffn": 64, "mamba_heads": 8, "mamba_groups": 1, "T": 256}
    c |= {**sizes, "pattern": "M*-"} if tiny else {}
    words = {
        "hybrid-layer-pattern": c["pattern"], "hidden-size": c["hidden"], "num-attention-heads": c["heads"],
        "num-query-groups": c["groups"], "kv-channels": 16 if tiny else 128, "ffn-hidden-size": c["ffn"],
        "mamba-num-heads": c["mamba_heads"], "mamba-num-groups": c["mamba_groups"],
        "mamba-head-dim": 16 if tiny else 64,
        "mamba-state-dim": 16 if tiny else 128, "normalization": "RMSNorm", "position-embedding-type": "none",
        "make-vocab-size-divisible-by": 512 if tiny else c["vocab"], "seq-length": c["T"], "global-batch-size": 4,
    }  # fmt: skip
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return [*flags, "--squared-relu", "--disable-bias-linear", *(["--device", "cpu"] if tiny else ["--bf16"])]


def write_documents(path: Path, tokens: int, packs: int) -> None:
    """Texts that fill about so many packs."""
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(np.log(tokens / 30) + 1.2 * draw.standard_normal(packs * 30)), 1, tokens).astype(int)
    ends = np.searchsorted(np.cumsum(lengths), tokens * packs)
    letters = draw.integers(97, 123, tokens, dtype=np.uint8).tobytes().decode()
    path.write_text("".join(json.dumps({"text": letters[:length]}) + "\n" for length in lengths[: ends + 1]))


def tuned(flags: list[str], data: Path, capacities: list[int]) -> dict[str, Any]:
    command = [sys.executable, "-m", "megatron_packed.cli.main", "tune", *flags, "--data", str(data), "--json",
               "--packing-method", "balanced", "--measure", str(data.with_name("costs.json"))]  # fmt: skip
    more = ["--capacities", *map(str, capacities)] if capacities else []
    ran = subprocess.run([*command, *more], stdout=subprocess.PIPE, text=True, check=True, cwd=REPOSITORY)
    return dict(json.loads(ran.stdout))


def trained(flags: list[str], data: Path, capacity: int, steps: int) -> list[dict[str, Any]]:
    """The log of a run with graphs for one capacity."""
    log = data.with_name(f"log_{capacity}.jsonl")
    command = [sys.executable, "pretrain_hybrid.py", *flags, "--data-path", str(data), "--lr", "1e-4", "--train-iters",
               str(steps), "--packing-method", "balanced", "--cuda-graph-impl", "local", "--cuda-graph-max-packed-seqs",
               str(capacity), "--log-jsonl", str(log)]  # fmt: skip
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY)
    if ran.returncode:
        raise SystemExit(ran.stdout[-3000:])
    return [json.loads(line) for line in log.read_text().splitlines()]


def compare(config: str, asked: list[int], tiny: bool, quick: bool) -> list[dict[str, Any]]:
    flags = flags_of(config, tiny)
    tokens = 256 if tiny else CONFIGS[config]["T"]
    steps, skipped = (6, 2) if quick else (STEPS, SKIPPED)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "documents.jsonl"
        write_documents(data, tokens, 4 * steps)
        prediction = tuned(flags, data, [capacity for capacity in asked if capacity <= tokens])
        most = prediction["packers"][0]["max"]
        for capacity in sorted({most, *(capacity for capacity in asked if most <= capacity <= tokens)}):
            expected = prediction["by_capacity"][str(capacity)]
            lines = trained(flags, data, capacity, steps)
            times = [line["step_time_ms"] for line in lines[skipped:]]
            measured = statistics.mean(times)
            found.append({
                "config": config, "capacity": capacity, "documents": most, "predicted_ms": expected["step_ms"],
                "measured_ms": measured, "median_ms": statistics.median(times),
                "predicted_over_measured": expected["step_ms"] / measured,
                "fallbacks": sum(line.get("graph_fallbacks", 0) for line in lines), "steps": len(times),
                "fastest_ms": min(times), "slowest_ms": max(times), "plan_hash": lines[-1]["plan_hash"],
            })  # fmt: skip
            print(harness.table([harness.plain(found[-1])]), flush=True)
    return found


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    return [
        {
            "config": config, "capacity": one["capacity"], "documents at most": one["documents"],
            "predicted ms": f"{one['predicted_ms']:.1f}", "measured ms: mean, median of steps":
            f"{one['measured_ms']:.1f}, {one['median_ms']:.1f} of {one['steps']}",
            "predicted / measured": f"{one['predicted_over_measured']:.3f}", "fallbacks": one["fallbacks"],
            **({"plan": one["plan_hash"]} if "plan_hash" in one else {}),
        }
        for config, found in results.items()
        for one in found
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", help=f"from {list(CONFIGS)} (default: all)")
    parser.add_argument("--capacities", nargs="*", type=int, default=CAPACITIES, help="beside the recommended one")
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    tiny = device_from(arguments.device).type == "cpu"
    results: dict[str, Any] = {}
    for config in arguments.configs or CONFIGS:
        results[config] = compare(config, list(arguments.capacities), tiny, arguments.quick)
        harness.save("tune_prediction", results, folder=arguments.results)
    print(harness.table(rows_of(results)))
    rows = [row for found in results.values() for row in found]
    off = [row for row in rows if row["fallbacks"] or abs(row["predicted_over_measured"] - 1) > ALLOWED]
    if off:
        raise SystemExit(f"{len(off)} of {len(rows)} predictions are more than {ALLOWED:.0%} off, or packs fell back.")


if __name__ == "__main__":
    main()
