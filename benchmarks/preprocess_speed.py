"""Measures the lines per second of `megatron-packed preprocess` on clean and on damaged lines.

    python benchmarks/preprocess_speed.py [--lines 100000] [--workers N]

The damaged input consists of the clean lines, most of them with random damage. A line may have a
flipped bit, inserted bytes, a part removed or repeated, its end cut off, or other content.
Preprocessing must count every line as used, blank or bad.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from functools import partial
from pathlib import Path

import harness
from megatron_packed.data.index.preprocess import PreprocessOptions, preprocess
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.data.tokenizers.bpe_training import train_bpe
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer

STRANGE = (
    b"",
    b"[]",
    b"null",
    b'{"text": 3}',
    b"[" * 3000,
    b'{"text": NaN}',
    b'{"text": "\\udc00"}',
    b"\0\0\0",
)


def clean_line(draw: random.Random, words: list[str]) -> bytes:
    text = " ".join(draw.choices(words, k=draw.randrange(5, 120)))
    return json.dumps({"id": draw.randrange(10**9), "text": text}).encode()


def damaged(line: bytes, draw: random.Random) -> bytes:
    at, way = draw.randrange(len(line)), draw.randrange(8)
    if way == 0:
        return line  # some lines stay undamaged
    if way == 1:
        return line[:at] + bytes([line[at] ^ 1 << draw.randrange(8)]) + line[at + 1 :]
    if way == 2:
        return line[:at] + draw.randbytes(4) + line[at:]
    if way == 3:
        return line[:at] + line[at + 9 :]
    if way == 4:
        return line[: at + 9] + line[at:]
    return line[:at] if way == 5 else draw.choice(STRANGE) if way == 6 else draw.randbytes(at)


def measure(file: Path, lines: int, make_tokenizer, folder: Path, workers: int) -> dict[str, float]:
    options = PreprocessOptions(append_eod=True, max_bad_fraction=1.0, workers=workers)
    begin = time.perf_counter()
    report, _ = preprocess([file], folder / "out", make_tokenizer, options)
    seconds = time.perf_counter() - begin
    assert report.lines == report.blank + report.good + report.num_bad and report.lines >= lines
    return {
        "lines": report.lines,
        "bad": report.num_bad,
        "tokens": report.tokens,
        "seconds": round(seconds, 2),
        "lines_per_second": round(report.lines / seconds),
        "mb_per_second": round(file.stat().st_size / seconds / 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    draw = random.Random(1)  # noqa: S311
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randrange(2, 10))) for _ in range(5000)]
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [clean_line(draw, words) for _ in range(arguments.lines)]
        clean, fuzzed = folder / "clean.jsonl", folder / "fuzzed.jsonl"
        clean.write_bytes(b"\n".join(lines))
        fuzzed.write_bytes(b"\n".join(damaged(line, draw) for line in lines))
        trained = train_bpe([clean], 4096, folder)
        for tokenizer, make in (
            ("bytes", ByteTokenizer),
            ("BPE", partial(HuggingFaceTokenizer, trained.path)),
        ):
            for file in (clean, fuzzed):
                row = measure(file, arguments.lines, make, folder, arguments.workers)
                results.append(
                    {
                        "tokenizer": tokenizer,
                        "input": file.stem,
                        "workers": arguments.workers,
                        **row,
                    }
                )
                print(results[-1], flush=True)
    harness.save("preprocess_speed", results)


if __name__ == "__main__":
    main()
