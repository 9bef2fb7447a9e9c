"""Packs real documents and a tokenizer trained on them into one archive for `train_real.py`.

    python benchmarks/prepare_real.py runs/real.zip --set NAME TRAIN [VALID] [--set ...]

The archive allows `train_real.py` to run on a machine that has neither data nor tokenizer. TRAIN
and VALID are JSONL or JSONL.gz files that `pretrain_hybrid.py` can read. Without VALID every 20th
line of TRAIN is used for validation. Each set becomes ``NAME/train.jsonl.gz``,
``NAME/valid.jsonl.gz`` and ``NAME/tokenizer/``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import harness  # noqa: F401  (makes the package importable)
from megatron_packed.data.tokenizers.bpe_training import train_bpe

HELD_OUT_EVERY = 20
LIMIT_MB = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--set",
        dest="sets",
        nargs="+",
        action="append",
        required=True,
        metavar=("NAME", "TRAIN [VALID]"),
        help="name of a set and its one or two files; can be repeated",
    )
    parser.add_argument("--vocab-size", type=int, default=16384, help="entries of each tokenizer")
    arguments = parser.parse_args()
    for given in arguments.sets:
        if not 2 <= len(given) <= 3:
            parser.error(
                "--set takes a name, a training file and optionally a validation file; "
                f"got {len(given)} arguments"
            )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, *files in arguments.sets:
            prepare(Path(folder) / name, [Path(file) for file in files], arguments.vocab_size)
        with zipfile.ZipFile(arguments.output, "w") as archive:
            for path in sorted(Path(folder).rglob("*")):
                archive.write(path, path.relative_to(folder))
    megabytes = arguments.output.stat().st_size / 1e6
    print(f"{arguments.output}: {megabytes:.1f} MB")
    if megabytes > LIMIT_MB:
        raise SystemExit(
            f"the archive is larger than {LIMIT_MB} MB; use fewer files or smaller ones"
        )


def prepare(folder: Path, files: list[Path], vocab_size: int) -> None:
    """Split and compress one set, and train its tokenizer on the training part."""
    folder.mkdir()
    lines = read(files[0])
    if len(files) == 2:
        train, valid = lines, read(files[1])
    else:
        train = [line for number, line in enumerate(lines) if number % HELD_OUT_EVERY]
        valid = lines[::HELD_OUT_EVERY]
    write(folder / "train.jsonl.gz", train)
    write(folder / "valid.jsonl.gz", valid)
    with tempfile.TemporaryDirectory() as cache:
        train_bpe([folder / "train.jsonl.gz"], vocab_size, cache)
        (made,) = (path.parent for path in Path(cache).glob("tokenizer-*/tokenizer.json"))
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        for part in ("tokenizer.json", "tokenizer_config.json"):
            (tokenizer / part).write_bytes((made / part).read_bytes())
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    print(
        f"{folder.name}: {len(train)} training documents, {len(valid)} validation documents, "
        f"{len(vocabulary)} tokens in the vocabulary"
    )


def read(file: Path) -> list[bytes]:
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [line for line in data.split(b"\n") if line.strip()]


def write(file: Path, lines: Iterable[bytes]) -> None:
    """Write compressed lines without a time stamp, so that equal lines give equal bytes."""
    file.write_bytes(gzip.compress(b"\n".join(lines) + b"\n", compresslevel=9, mtime=0))


if __name__ == "__main__":
    main()
