"""Measures the packers on real data: fill, documents per pack, coverage, companions and speed.

    python benchmarks/packing_report.py DATA... --tokenizer FOLDER

DATA is a JSONL or JSONL.gz file with `text`, `messages` or `prompt`/`completion`, or a .npy file of
document lengths, which needs no tokenizer. FOLDER contains GPT-2's `encoder.json` and `vocab.bpe`.
A document counts as in training: its tokens and one end-of-document token. Messages are written as
ChatML; <|im_start|> and <|im_end|> count as one token each. Every number is the worst of all packed
epochs (lowest fill, largest count).
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import harness
from megatron_packed.data.keyed_random import KeyedRandom
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import METHODS, Packer
from megatron_packed.data.packing.packing_report import PackingReport
from megatron_packed.data.packing.pieces import OVERLONG_POLICIES, Pieces
from megatron_packed.packed.capture_sizes import CaptureSizes, choose_capacities
from pack_companions import companions

MILLION = 1_000_000
LENGTHS = Path(__file__).parents[1] / "tests" / "unit" / "data" / "gpt2_lengths.npz"
"""Tokens of every document of two real data sets, counted with GPT-2's tokenizer."""


def main() -> None:
    args = arguments()
    rows: list[dict[str, object]] = []
    full: list[dict[str, object]] = []
    for source in args.data:
        lengths = document_lengths(source, args.tokenizer, args.lengths)
        print(
            f"{name_of(source)}: {lengths.size} documents, {lengths.min()} to {lengths.max()} tokens"
        )
        for slots in args.slots:
            pieces = Pieces.cut(lengths, slots, args.policy)
            for method in METHODS:
                packer = Packer(
                    slots=slots, method=method, window=args.window, max_documents=args.max_documents
                )
                reports, row = measure(name_of(source), pieces, packer, args.seed, args.epochs)
                row["s per 1M documents"] = (
                    time_million(lengths, packer, args.seed) if args.million else ""
                )
                rows.append(row)
                full.append({**row, "epochs": [report.as_dict() for report in reports]})
                print(harness.table([row]).splitlines()[1], flush=True)
    print(harness.table(rows))
    print(harness.save("packing_report", full))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="folder with encoder.json and vocab.bpe")
    parser.add_argument(
        "--lengths", type=Path, help="folder that caches the lengths of tokenised files as .npy"
    )
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[2048, 8192, 32768], help="pack lengths in tokens"
    )
    parser.add_argument("--policy", choices=OVERLONG_POLICIES, default="truncate")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--max-documents", type=int)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument(
        "--million",
        action="store_true",
        help="also time how long packing a million documents takes",
    )
    return parser.parse_args()


def name_of(source: Path) -> str:
    return (
        source.name.removesuffix(".gz")
        .removesuffix(".jsonl")
        .removesuffix(".npy")
        .removesuffix(".gpt2")
    )


def document_lengths(source: Path, tokenizer: Path | None, keep: Path | None) -> NDArray[np.int64]:
    """Return the tokens of each document, including the end-of-document token."""
    if source.suffix == ".npy":
        return np.load(source).astype(np.int64)
    kept = keep / f"{name_of(source)}.gpt2.npy" if keep else None
    if kept and kept.exists():
        return np.load(kept).astype(np.int64)
    if tokenizer is None:
        sys.exit(f"{source} is text; add --tokenizer FOLDER with encoder.json and vocab.bpe.")
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer(str(tokenizer / "encoder.json"), str(tokenizer / "vocab.bpe"))
    lengths = np.array([count_tokens(bpe, record) for record in records(source)], dtype=np.int64)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, lengths.astype(np.int32))
    return lengths


def records(source: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(source, "rt") if source.suffix == ".gz" else source.open() as lines:
        yield from map(json.loads, lines)


def count_tokens(bpe: Any, record: dict[str, Any]) -> int:
    if "text" in record:
        return len(bpe.encode(record["text"]).ids) + 1
    if "messages" not in record:
        return len(bpe.encode(record["prompt"] + record["completion"]).ids) + 1
    # A message is <|im_start|> role newline content <|im_end|> newline: two special tokens and one
    # newline in addition to the text.
    texts = [f"{message['role']}\n{message['content']}" for message in record["messages"]]
    return sum(len(bpe.encode(text).ids) + 3 for text in texts) + 1


def measure(
    name: str, pieces: Pieces, packer: Packer, seed: int, epochs: int
) -> tuple[list[PackingReport], dict[str, object]]:
    """Pack some epochs. Return the reports, and one table row with the worst value of each number."""
    started = time.perf_counter()
    packed = [packer.pack(pieces.length, seed, epoch) for epoch in range(epochs)]
    seconds = time.perf_counter() - started
    reports = [PackingReport.from_packs(pieces, packs, packer) for packs in packed]
    met = [companions(first, second) for first, second in pairwise(packed)]
    again = sum(pair.again for pair in met)
    chance = sum(pair.by_chance for pair in met)
    pairs = sum(pair.pairs for pair in met)
    return reports, {
        "data": name,
        "slots": packer.slots,
        "method": packer.method,
        "packs": max(report.packs for report in reports),
        "fill %": floor2(min(report.fill for report in reports)),
        "possible %": floor2(best_fill(pieces, packer.slots)),
        "P50": max(report.documents_p50 for report in reports),
        "P90": max(report.documents_p90 for report in reports),
        "P99": max(report.documents_p99 for report in reports),
        "most": max(report.documents_max for report in reports),
        "<=64 %": floor2(min(report.coverage[64] for report in reports)),
        "<=106 %": floor2(min(report.coverage[106] for report in reports)),
        "meet again %": f"{100 * again / pairs:.2f}" if pairs else "",
        "by chance %": f"{100 * chance / pairs:.2f}" if pairs else "",
        "tokens in": pieces.counts.tokens_in,
        "kept": pieces.counts.tokens_kept,
        "truncated": pieces.counts.tokens_truncated,
        "dropped": pieces.counts.tokens_dropped,
        "us per document": f"{1e6 * seconds / epochs / max(len(pieces), 1):.1f}",
    }


def best_fill(pieces: Pieces, slots: int) -> float:
    """Return the fill of an epoch in which only the last pack has empty slots."""
    tokens = pieces.counts.tokens_kept
    return tokens / (-(-tokens // slots) * slots)


def floor2(share: float) -> str:
    """Format a share as a percentage with two decimals, rounded down."""
    return f"{int(share * 1e4 + 1e-6) / 100:.2f}"


def time_million(lengths: NDArray[np.int64], packer: Packer, seed: int) -> str:
    """Return the seconds to pack a million documents drawn from ``lengths``, on one core."""
    drawn = lengths[KeyedRandom(seed, "million").below(lengths.size, (MILLION,))]
    drawn = np.minimum(drawn, packer.slots)
    started = time.perf_counter()
    packer.pack(drawn, seed)
    return f"{time.perf_counter() - started:.1f}"


COLUMNS = (
    "data",
    "slots",
    "method",
    "packs",
    "fill %",
    "possible %",
    "P50",
    "P90",
    "P99",
    "most",
    "<=64 %",
    "<=106 %",
    "meet again %",
    "by chance %",
    "s per 1M documents",
)


def rows_of(results: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the rows of the table that compares the packers."""
    return [{column: row[column] for column in COLUMNS} for row in results]


def token_rows_of(results: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return one row for each data set and pack size: tokens kept, truncated and dropped."""
    columns = ("data", "slots", "tokens in", "kept", "truncated", "dropped")
    return [
        {column: row[column] for column in columns}
        for row in results
        if row["method"] == METHODS[0]
    ]


def capacity_rows_of(results: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return rows with the capacities that `auto` chooses, and the largest number of documents in a
    pack of three epochs.

    The rows are computed from the recorded lengths, for the data sets and pack sizes of the
    results.
    """
    lengths = np.load(LENGTHS)
    rows: dict[tuple[str, int], dict[str, object]] = {}
    for result in results:
        name, slots, method = str(result["data"]), int(str(result["slots"])), str(result["method"])
        if method not in ("balanced", "best_fit_decreasing"):
            continue
        capacities, most = capacities_of(lengths[name].astype(np.int64), slots, method)
        row = rows.setdefault((name, slots), {"data": name, "slots": slots})
        row[f"{method}: capacities"] = ", ".join(map(str, capacities))
        row[f"{method}: most in 3 epochs"] = int(most)
    return list(rows.values())


def capacities_of(lengths: NDArray[np.int64], slots: int, method: str) -> tuple[list[int], int]:
    """Return the capacities that `auto` chooses, and the largest number of documents in a pack of
    three epochs.
    """
    pieces = Pieces.cut(lengths, slots)
    packer = Packer(slots=slots, method=method)
    plan = PackPlan(pieces, pieces.length - 1, packer=packer, packs_per_step=1, seed=1234)
    first = plan.epoch(0).documents_per_pack
    capture_sizes = CaptureSizes.from_capacities(choose_capacities(first), slots)
    if method == "balanced":
        plan = plan.keeping_to(int(first.max()))
    counts = np.concatenate([plan.epoch(epoch).documents_per_pack for epoch in range(3)])
    return list(capture_sizes.capacities), int(counts.max())


if __name__ == "__main__":
    main()
