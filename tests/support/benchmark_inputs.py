"""Model sizes and data for quick runs of the benchmarks."""

import gzip
import json

TINY = {
    "T": 128,
    "pattern": "M-*",
    "hidden": 64,
    "heads": 2,
    "groups": 1,
    "ffn": 64,
    "mamba_heads": 2,
    "mamba_groups": 1,
    "vocab": 256,
}


def write_jsonl(path, records):
    text = "\n".join(json.dumps(record) for record in records) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def conversations(count, start=0):
    for number in range(start, start + count):
        yield {
            "messages": [
                {"role": "user", "content": f"What comes after {number}? " * (1 + number % 4)},
                {"role": "assistant", "content": f"After {number} comes {number + 1}."},
            ]
        }
