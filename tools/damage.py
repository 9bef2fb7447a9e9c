"""Damage files of a checkpoint at random and load it.

The load must refuse the checkpoint or take the previous checkpoint.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import common
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import load_checkpoint
from megatron_packed.checkpoint.tensor_shard import whole_tensors

PREVIOUS, NEWEST = 10, 20
_spec = importlib.util.spec_from_file_location(
    "checkpoint_tools", common.TESTS / "unit" / "checkpoint" / "conftest.py"
)
tools = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tools)


def flip_bit(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def cut_off(file: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])


def make_longer(file: Path, draw: random.Random) -> None:
    file.write_bytes(file.read_bytes() + draw.randbytes(draw.randint(1, 5000)))


def zero_a_block(file: Path, draw: random.Random) -> None:
    """Zero a block, as a disk does that lost the block; at least one byte changes."""
    data = bytearray(file.read_bytes())
    start = draw.choice([at for at, byte in enumerate(data) if byte])
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    file.write_bytes(data)


def repeat_a_block(file: Path, draw: random.Random) -> None:
    """Overwrite a block with another block until the file has changed."""
    before = file.read_bytes()
    data = bytearray(before)
    while bytes(data) == before:
        size = draw.randint(1, min(4096, len(data)))
        source, target = (draw.randrange(len(data) - size + 1) for _ in range(2))
        data[target : target + size] = before[source : source + size]
    file.write_bytes(data)


def remove(file: Path, draw: random.Random) -> None:
    file.unlink()


def of_the_previous(file: Path, draw: random.Random) -> None:
    """Replace the file with the same file of the previous checkpoint."""
    previous = (
        file.parent.with_name(file.parent.name.replace(f"{NEWEST:02}", f"{PREVIOUS:02}"))
        / file.name
    )
    shutil.copyfile(previous, file)


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    damage.__name__: damage
    for damage in (
        flip_bit,
        cut_off,
        make_longer,
        zero_a_block,
        repeat_a_block,
        remove,
        of_the_previous,
    )
}


def main(files: int, seed: int, kinds: Sequence[str] = tuple(DAMAGE)) -> int:
    """Return the exit code: 0 if every load was correct.

    A load is correct if it refuses, or loads the previous checkpoint with equal bytes.

    Args:
        kinds: names of `DAMAGE`; each file gets one of them at random.
    """
    draw, handled, fell_back = random.Random(seed), 0, 0
    previous, newest = tools.make_state(PREVIOUS), tools.make_state(NEWEST)
    with tempfile.TemporaryDirectory() as name:
        sound = Path(name) / "sound"
        tools.write_by_hand(sound, PREVIOUS, previous, 3, 1)
        tools.write_by_hand(sound, NEWEST, newest, 3, 2)
        names = sorted(path.name for path in (sound / f"step_{NEWEST:08}").iterdir())
        for number in range(files):
            root = shutil.copytree(sound, Path(name) / "copy")
            file = root / f"step_{NEWEST:08}" / names[number % len(names)]
            damage = DAMAGE[draw.choice(kinds)]
            damage(file, draw)
            found, said = tools.blank(newest), []
            try:
                step = load_checkpoint(root, whole_tensors(found), warn=said.append).step
            except CheckpointError as error:
                step, said = None, [str(error)]
            good = tools.same_bytes(found, previous if step == PREVIOUS else tools.blank(newest))
            good = good and step in (PREVIOUS, None) and any(file.name in line for line in said)
            handled, fell_back = handled + good, fell_back + (step == PREVIOUS)
            if not good:
                print(
                    f"{damage.__name__} of {file.name}: step {step} was loaded; {said}", flush=True
                )
            shutil.rmtree(root)
    print(
        f"{handled} of {files} damaged files were found; {fell_back} loads took the previous checkpoint"
    )
    return int(handled != files)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kind", action="append", choices=DAMAGE, help="may be repeated; default all"
    )
    arguments = parser.parse_args()
    sys.exit(main(arguments.files, arguments.seed, arguments.kind or tuple(DAMAGE)))
