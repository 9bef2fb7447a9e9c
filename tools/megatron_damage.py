"""Convert damaged and hostile checkpoints of Megatron, with the state of the optimizer."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import common  # noqa: F401  paths of helpers
from support.damaged_megatron import damaged_copies, one_reader


def main(files: int, seed: int) -> int:
    """Return the exit code."""
    for common_file in (True, False):
        with tempfile.TemporaryDirectory() as temporary, one_reader():
            count = files - files // 2 if common_file else files // 2
            refused = damaged_copies(Path(temporary), count, seed, common_file=common_file)
        print(f"{refused} of {count} refused, the others loaded unchanged", flush=True)
    print(f"{files} of {files}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sys.exit(main(given.files, given.seed))
