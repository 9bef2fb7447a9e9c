"""Compares packed and padded batches of the same documents: forward and backward of the same model.

    python benchmarks/packed_vs_padded.py [run ...]

*Padded*: batches of 8 documents in shuffled order. Each document is padded to the longest of its
batch (not to a fixed maximum). The same varlen kernel computes the attention, with one row per
document; on rows of equal length it is as fast as a dense kernel. Padding adds nothing to the loss.

*Packed*: packs from the package's packer. A pack has as many tokens as the largest padded batch, so
that both sides need the same memory.

Every batch is built and page-locked before the measurement. The times contain copy, forward and
backward of all documents of the sample. Both sides must have the same targets and the same summed
loss.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import harness
from megatron_packed.data.packing.packer import Packer
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.packed.micro_batch import MicroBatch
from workloads import (
    Lengths,
    build_model,
    device_from,
    hash_of,
    lognormal_lengths,
    pinned,
    random_documents,
    shape_of,
)

ROWS = 8
SEED = 1234
LOSS_TOLERANCE = {"cuda": 2e-3, "cpu": 1e-5}
"""Allowed relative difference of the summed loss. On a GPU, bf16 sums depend on the tensor shapes.
"""
RECORDED = Path(__file__).parent.parent / "tests/unit/data/gpt2_lengths.npz"


class RunCase(NamedTuple):
    shape: str
    data: str
    longest: int
    """Limit of document lengths, in tokens. Longer documents are truncated, as in fine-tuning with
    this sequence length.
    """


CASES = {
    "hybrid1b_alpaca": RunCase("hybrid1b", "alpaca-like", 2048),
    "hybrid1b_sgd_chat": RunCase("hybrid1b", "sgd_chat.train", 2048),
    "hybrid1b_docs": RunCase("hybrid1b", "docs_longtail", 2048),
    "qwen0.6b_alpaca": RunCase("qwen0.6b", "alpaca-like", 2048),
}
PADDED_SLOTS = 131072
"""Token slots of all padded batches of a case. It determines how many documents are measured."""


def lengths_of(data: str, longest: int) -> Lengths:
    """Return the tokens of every document of a data set, in shuffled order."""
    if data == "alpaca-like":
        return lognormal_lengths(20000, mean=180, sigma=0.55, longest=longest)
    lengths = np.load(RECORDED)[data].astype(np.int64)
    return np.minimum(np.random.default_rng(SEED).permutation(lengths), longest)


def padding_share(lengths: Lengths, *, sort_window: int = 0) -> float:
    """Return the share of padding if batches of 8 documents are padded to their longest document.

    Args:
        sort_window: number of documents within which lengths are sorted before batching; 0 does not
            sort.
    """
    lengths = lengths[: lengths.size // ROWS * ROWS]
    if sort_window:
        windows = np.array_split(lengths, range(sort_window, lengths.size, sort_window))
        lengths = np.concatenate([np.sort(window) for window in windows])
    rows = lengths.reshape(-1, ROWS)
    return float(1 - rows.sum() / (ROWS * rows.max(1).sum()))


def sample_of(lengths: Lengths, slots: int) -> Lengths:
    """Return the first batches of 8 documents whose padded token slots reach ``slots``."""
    rows = lengths[: lengths.size // ROWS * ROWS].reshape(-1, ROWS)
    batches = 1 + int(np.searchsorted(np.cumsum(ROWS * rows.max(1)), slots))
    return rows[:batches].reshape(-1)


def padded_batches(documents: list[np.ndarray]) -> list[MicroBatch]:
    """Build batches of 8 documents. Each row is a document followed by padding without targets."""
    batches = []
    for start in range(0, len(documents), ROWS):
        rows = documents[start : start + ROWS]
        longest = (
            -(-max(len(row) for row in rows) // 8) * 8
        )  # Collators pad rows to a multiple of 8 tokens.
        padded = [
            (np.pad(row, (0, longest - len(row))), np.arange(longest) < len(row)) for row in rows
        ]
        batches.append(MicroBatch.build(padded, longest * len(rows)))
    return batches


def packed_batches(documents: list[np.ndarray], slots: int) -> list[MicroBatch]:
    """Build packs of ``slots`` tokens."""
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    packs = Packer(slots=slots).pack(lengths, SEED)
    return [
        MicroBatch.build([(documents[index], None) for index in packs[number]], slots)
        for number in range(len(packs))
    ]


def packing_of(lengths: Lengths, slots: int) -> dict[str, float]:
    """Return fill and packing time of the complete data set in packs of ``slots`` tokens."""
    started = time.perf_counter()
    packs = Packer(slots=slots).pack(lengths, SEED)
    seconds = time.perf_counter() - started
    return {
        "documents": int(lengths.size),
        "fill": round(float(lengths.sum() / (len(packs) * slots)), 5),
        "ms_per_1000_documents": round(1e6 * seconds / lengths.size, 3),
    }


def measure(
    case: RunCase, device: torch.device, *, padded_slots: int, passes: int
) -> dict[str, Any]:
    harness.free_memory()
    shape = shape_of(case.shape, device)
    longest, everything = case.longest, lengths_of(case.data, case.longest)
    if device.type == "cpu":  # scales all documents down to at most 128 tokens
        longest, everything = 128, np.maximum(2, everything * 128 // case.longest)
    lengths = sample_of(everything, padded_slots)
    documents = random_documents(lengths.tolist(), shape.vocab, SEED)
    padded = padded_batches(documents)
    slots = -(-max(batch.layout.total_tokens for batch in padded) // 128) * 128
    sides = {"padded": padded, "packed": packed_batches(documents, slots)}
    sides = {name: [pinned(batch, device) for batch in batches] for name, batches in sides.items()}

    model = build_model(shape, device, max_positions=longest + 8)
    buffers = FlatBuffers(model)

    def run_pass(name: str) -> None:
        for batch in sides[name]:
            model.forward_backward(batch.to(device, non_blocking=True))

    @torch.no_grad()
    def summed_loss(name: str) -> float:
        return float(sum(model(batch.to(device)).loss_sum.double() for batch in sides[name]))

    losses = {name: summed_loss(name) for name in sides}
    functions = {name: (lambda name=name: run_pass(name)) for name in sides}
    seconds = harness.interleaved_seconds(functions, warm=1, repeats=passes)
    buffers.zero_grad()
    real = int(lengths.sum())
    found: dict[str, Any] = {
        "like": shape.like,
        "parameters": model.num_parameters,
        "data": case.data,
        "longest": longest,
        "plan_hash": hash_of(lengths.tolist()),
        "padding_of_the_set": round(padding_share(everything), 4),
        "padding_of_the_set_sorted_in_windows_of_512": round(
            padding_share(everything, sort_window=512), 4
        ),
        "documents": len(documents),
        "real_tokens": real,
        "packing_of_the_set": packing_of(everything, slots),
        "speedup": harness.Spread.of_ratios(seconds["padded"], seconds["packed"]),
        "loss_difference": abs(losses["packed"] - losses["padded"]) / abs(losses["padded"]),
    }
    for name, batches in sides.items():
        found[name] = {
            "batches": len(batches),
            "slots": sum(batch.layout.total_tokens for batch in batches),
            "largest_batch": max(batch.layout.total_tokens for batch in batches),
            "fill": round(real / sum(batch.layout.total_tokens for batch in batches), 4),
            "targets": sum(batch.num_target_tokens for batch in batches),
            "loss_sum": losses[name],
            "pass_ms": harness.Spread.of(seconds[name]),
            "real_tokens_per_second": round(real / float(np.median(seconds[name]))),
            "documents_per_second": round(len(documents) / float(np.median(seconds[name])), 1),
            "peak_gib": harness.peak_gib(functions[name]),
        }
    return found


def problems_of(name: str, found: dict[str, Any], device: torch.device) -> list[str]:
    """Return the reasons why the two sides did not do the same work, one sentence each."""
    problems = []
    if found["padded"]["targets"] != found["packed"]["targets"]:
        problems.append(
            f"{name}: padded batches have {found['padded']['targets']} targets, "
            f"packed batches {found['packed']['targets']}"
        )
    if not found["loss_difference"] <= LOSS_TOLERANCE[device.type]:
        problems.append(
            f"{name}: summed losses differ by {found['loss_difference']:.1e}, "
            f"which is more than {LOSS_TOLERANCE[device.type]}"
        )
    return problems


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table of times, from results in the form of a result file."""
    rows = []
    for name, found in results.items():
        for label in ("padded", "packed"):
            side, last = found[label], label == "packed"
            rows.append(
                {
                    "case": name,
                    "side": label,
                    "batches": side["batches"],
                    "fill %": f"{100 * side['fill']:.1f}",
                    "pass ms": harness.shown(side["pass_ms"]),
                    "real tokens/s": side["real_tokens_per_second"],
                    "documents/s": side["documents_per_second"],
                    "peak GiB": side["peak_gib"],
                    "speed-up": harness.shown(found["speedup"]) if last else "",
                    "loss difference": f"{found['loss_difference']:.1e}" if last else "",
                }
            )
    return rows


def data_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table of data sets: documents, padding, and the packing of the sample."""
    return [
        {
            "case": name,
            "model": found["like"],
            "data": found["data"],
            "documents": found["documents"],
            "real tokens": found["real_tokens"],
            "padding of the whole set": f"{100 * found['padding_of_the_set']:.1f} %",
            "if sorted in windows of 512": f"{100 * found['padding_of_the_set_sorted_in_windows_of_512']:.1f} %",
            "slots of a pack": found["packed"]["largest_batch"],
            "fill of the whole set": f"{100 * found['packing_of_the_set']['fill']:.2f} %",
            "packing it, ms per 1000 documents": found["packing_of_the_set"][
                "ms_per_1000_documents"
            ],
            "plan": found["plan_hash"],
        }
        for name, found in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"from {list(CASES)} (default: all)")
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device = device_from(arguments.device)
    padded_slots = PADDED_SLOTS if device.type == "cuda" else 3000
    passes = 1 if arguments.quick else 5
    results, problems = {}, []
    for name in arguments.cases or CASES:
        started = time.perf_counter()
        results[name] = measure(CASES[name], device, padded_slots=padded_slots, passes=passes)
        problems += problems_of(name, results[name], device)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        path = harness.save("packed_vs_padded", results, folder=arguments.results)
    print(harness.table(rows_of(harness.plain(results))))
    print(path)
    if problems:
        raise SystemExit("not comparable: " + "; ".join(problems))


if __name__ == "__main__":
    main()
