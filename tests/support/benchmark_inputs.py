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


def with_python(python):
    """Return `train_real.command_line` whose commands start a quick Python where one may be used.

    Deterministic mode sets variables before torch is imported, so it needs a fresh Python.
    """
    from train_real import command_line

    def quick(*arguments):
        command = command_line(*arguments)
        return command if "--deterministic-mode" in command else [str(python), *command[1:]]

    return quick
