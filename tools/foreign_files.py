"""Convert random models of transformers and altered copies of their files.

Each random model is converted, exported with its original, with its config.json and with a new one,
and loaded by transformers again. The logits are those of transformers, and all tensors are the same to the bit.
An altered copy has the logits that transformers computes from the same files, or it is refused in
one sentence that names the key or the file. A refusal makes no folder.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from common import foreign_conversion as foreign
from common.altered_models import alter, old_form
from support.huggingface_models import FAMILIES

VARIANTS = 10
"""Number of models of a family whose copies are altered."""
COMMANDS = 5
"""One of this number of conversions runs the command."""
Row = dict[str, Any]


def save(family: str, number: int, seed: int, folder: Path) -> None:
    """Save a random model of transformers in one of three dtypes, in one file or in several."""
    draw = random.Random(f"{seed} {family} {number}")
    model = FAMILIES[family](draw, number)
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    model.to(dtype).save_pretrained(folder, max_shard_size=draw.choice(["5GB", "20KB"]))


def random_model(family: str, number: int, seed: int, folder: Path) -> Iterator[Row]:
    """Yield the outcome of the conversion and of each export of a random model."""
    hf, roots = folder / "hf", folder / "roots"
    roots.mkdir()
    save(family, number, seed, hf)
    found = foreign.outcome(hf, roots / "ours", (), command=number % COMMANDS == 0)
    yield {"case": "converted", **found._asdict()}
    if found.outcome == foreign.EQUAL:
        for case, exported in foreign.exports(hf, roots / "ours", folder / "back"):
            yield {"case": case, **exported._asdict()}


def write_old_form(path: Path) -> None:
    fields = json.loads(path.read_text())
    old_form(fields)
    path.write_text(json.dumps(fields))


def altered_model(
    family: str, number: int, seed: int, originals: Path, folder: Path, *, command: bool
) -> Row:
    """Return the outcome of the conversion of one altered copy, and of its exports if one is bad.

    Args:
        originals: folder of the models that are altered; a missing one is made.
    """
    draw = random.Random(f"{seed} altered {family} {number}")
    variant = draw.randrange(VARIANTS)
    original = originals / f"{family}_{variant}"
    if not original.exists():
        save(family, variant, seed, original)
    copy, roots = folder / "hf", folder / "roots"
    shutil.copytree(original, copy)
    roots.mkdir()
    if draw.random() < 0.5:
        write_old_form(copy / "config.json")
    made = alter(copy, draw)
    found = foreign.outcome(copy, roots / "ours", made.named, command=command)
    row = {"case": made.text, **found._asdict()}
    if found.outcome == foreign.EQUAL:
        for case, exported in foreign.exports(copy, roots / "ours", folder / "back"):
            if exported.outcome in foreign.BAD:
                row |= {"case": f"{made.text}, {case}", **exported._asdict()}
    return row


def rows(models: int, altered: int, seed: int, families: list[str]) -> Iterator[Row]:
    """Yield the outcome of each case, with its family and number."""
    for family in families:
        for number in range(models):
            with tempfile.TemporaryDirectory() as name:
                for row in random_model(family, number, seed, Path(name)):
                    yield {"kind": "random", "family": family, "number": number, **row}
    with tempfile.TemporaryDirectory() as originals:
        for number in range(altered):
            turn, family = number // len(families), families[number % len(families)]
            command = turn % COMMANDS == 0
            with tempfile.TemporaryDirectory() as name:
                row = altered_model(
                    family, turn, seed, Path(originals), Path(name), command=command
                )
            yield {"kind": "altered", "family": family, "number": turn, **row}


def table(found: list[Row]) -> str:
    """Return the number of each outcome, for each kind of case and for altered copies by family."""
    counted: dict[str, Counter[str]] = {}
    for row in found:
        title = row["case"] if row["kind"] == "random" else f"altered {row['family']}"
        counted.setdefault(title, Counter())[row["outcome"]] += 1
    lines = [" | ".join(["", *foreign.OUTCOMES])]
    for title, numbers in counted.items():
        lines.append(" | ".join([title, *(str(numbers[kind]) for kind in foreign.OUTCOMES)]))
    return "\n".join(lines)


def main(models: int, altered: int, seed: int, families: list[str], out: Path | None) -> int:
    """Return the exit code."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = []
    for row in rows(models, altered, seed, families):
        found.append(row)
        if row["outcome"] in (*foreign.BAD, foreign.ACCEPTED):
            print(json.dumps(row), flush=True)
    if out is not None:
        out.write_text("".join(json.dumps(row) + "\n" for row in found))
    bad = sum(row["outcome"] in foreign.BAD for row in found)
    print(table(found))
    print(f"{len(found) - bad} of {len(found)}")
    return int(bad > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=10, help="random models of a family")
    parser.add_argument("--altered", type=int, default=200, help="altered copies of all families")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="may be repeated")
    parser.add_argument("--out", type=Path, help="JSON Lines file with every outcome")
    given = parser.parse_args()
    sys.exit(
        main(given.models, given.altered, given.seed, given.family or list(FAMILIES), given.out)
    )
