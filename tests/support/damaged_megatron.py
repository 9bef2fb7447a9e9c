"""Damaged and hostile copies of Megatron's checkpoints, and one process that reads them all."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.models.convert.import_huggingface import Imported
from megatron_packed.models.convert.megatron import torch_dist
from megatron_packed.models.convert.megatron.import_megatron import from_megatron
from megatron_packed.models.convert.megatron.pickle_process import PickleProcess
from support import megatron_checkpoint as theirs

SENTENCE = 1200
"""Most characters of an error message."""


class Runs:
    """Object whose pickle calls a function when pickle loads it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "os.system": lambda path: pickle.dumps(Runs(os.system, f"touch {path}")),
    "eval": lambda path: pickle.dumps(Runs(eval, f"open({str(path)!r}, 'w')")),
    "torch.hub": lambda path: pickle.dumps(Runs(torch.hub.load, str(path))),
    "getattr": lambda path: pickle.dumps(Runs(getattr, "a", "join")),
    "protocol 0": lambda path: f"cos\nsystem\n(S'touch {path}'\ntR.".encode(),
    "INST": lambda path: f"(S'touch {path}'\nios\nsystem\n.".encode(),
    "extension": lambda path: b"\x80\x02\x82\x01)R.",
    "OBJ": lambda path: f"(cos\nsystem\nS'touch {path}'\no.".encode(),
    "state of a class": lambda path: b"\x80\x02ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.",
    "no end": lambda path: pickle.dumps({"a": 1})[:-1],
    "no bytes": lambda path: b"",
}
"""Pickles that call something when pickle loads them, or that are cut."""


@contextmanager
def one_reader() -> Iterator[None]:
    """Read all checkpoints with one child process, which otherwise starts for each."""

    class Shared(PickleProcess):
        def close(self) -> None:
            """Leave the process running."""

    process = Shared()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_dist, "PickleProcess", lambda: process)
        yield
    PickleProcess.close(process)


def replace_pickle(path: Path, content: bytes) -> None:
    """Write ``torch.save``'s archive again with another pickle."""
    old = {one.filename: zipfile.ZipFile(path).read(one) for one in zipfile.ZipFile(path).filelist}
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in old.items():
            archive.writestr(name, content if name.endswith("/data.pkl") else value)


def replace_item(folder: Path, content: bytes, beginning: str = "") -> None:
    """Give a tensor of ``.metadata`` an archive with another pickle.

    Args:
        beginning: of the name of the tensor.
    """
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(one for one in metadata.storage_data if one.fqn.startswith(beginning))
    place = metadata.storage_data[index]
    torch.save(torch.zeros(3), folder / "item")
    replace_pickle(folder / "item", content)
    archive = (folder / "item").read_bytes()
    (folder / "item").rename(folder / "__9_0.distcp")
    place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(archive)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def make_hostile(folder: Path, place: str, content: bytes) -> None:
    """Put a pickle at a place: a file, ``item`` for a weight, or ``moment`` for a moment."""
    if place == ".metadata":
        (folder / place).write_bytes(content)
    elif place in ("item", "moment"):
        replace_item(folder, content, "optimizer." if place == "moment" else "")
    else:
        if not (folder / place).exists():
            torch.save({"step": torch.tensor(7)}, folder / place)
        replace_pickle(folder / place, content)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Return the content with one change: cut, a flipped bit, other bytes, or a lost range."""
    place = draw.randrange(len(content))
    kind = draw.randrange(4)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return (
            content[:place]
            + bytes([content[place] ^ 1 << draw.randrange(8)])
            + content[place + 1 :]
        )
    if kind == 2:
        return content[:place] + draw.randbytes(4) + content[place + 4 :]
    return content[:place] + content[place + draw.randrange(1, 40) :]


def imported(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint of this project."""
    manifest = read_manifest(path)
    return {name: read_tensor(path, name, manifest) for name in manifest.tensors}


def damaged_copies(folder: Path, count: int, seed: int, *, common_file: bool) -> int:
    """Convert damaged and hostile copies of a checkpoint, and return how many were refused.

    Every fifth copy has a hostile pickle. A damaged one gives one sentence and nothing else, or the
    same checkpoint, or its weights alone and a sentence. Damage in unused bytes may stay unnoticed.
    """
    draw, refused, found = random.Random(seed), 0, theirs.tensors()
    source, weights = folder / "c", folder / "weights"
    state, options = {**found, **theirs.optimizer(found)}, {"parts": 2, "common_file": common_file}
    theirs.write(source, state, theirs.TRAINED_ARGS, more=theirs.TRAINED, **options)
    theirs.write(weights, found, theirs.TRAINED_ARGS, **options)
    done, alone = (
        from_megatron(one, folder / f"first_{one.name}", bf16=True) for one in (source, weights)
    )
    files = sorted(path.name for path in source.iterdir())
    places = (".metadata", "common.pt", "item", "moment", "train_state.pt")
    for number in range(count):
        copy, root, was_run = (folder / f"{kind}{number}" for kind in ("c", "ours", "was_run"))
        shutil.copytree(source, copy)
        hostile = number % 5 == 0
        if hostile:
            make = HOSTILE[draw.choice(sorted(HOSTILE))]
            make_hostile(copy, places[number // 5 % len(places)], make(was_run))
        else:
            path = copy / draw.choice(files)
            path.write_bytes(mutated(path.read_bytes(), draw))
        try:
            again = from_megatron(copy, root, bf16=True)
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < SENTENCE, str(error)
            assert "Traceback" not in str(error) and not list(root.glob("step_*"))
        else:
            assert not hostile, (number, "a hostile file was read")
            without = len(again.notes) == 1 and "only the weights are imported" in again.notes[0]
            assert_same(again, alone if without else done, number)
        assert not was_run.exists()
        shutil.rmtree(copy)
        shutil.rmtree(root, ignore_errors=True)
    return refused


def assert_same(again: Imported, done: Imported, number: int) -> None:
    """Check that two checkpoints have the same flags, counters and tensors."""
    assert again.flags == done.flags, number
    first, second = (read_manifest(one.saved.path).metadata for one in (again, done))
    assert first == second, number
    found, right = imported(again.saved.path), imported(done.saved.path)
    assert found.keys() == right.keys(), number
    assert all(torch.equal(found[name], right[name]) for name in right), number
