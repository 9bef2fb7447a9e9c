"""WeightSource of a checkpoint, read one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_packed.checkpoint.load import Step, newest_checkpoint
from megatron_packed.checkpoint.manifest import Manifest, read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor


class WeightSource(Protocol):
    """Source of the tensors of an export."""

    @property
    def path(self) -> Path:
        """Checkpoint that messages name."""

    @property
    def manifest(self) -> Manifest:
        """Shapes and dtypes of the tensors, and the metadata of the run."""

    def read(self, name: str) -> Tensor:
        """Return one complete tensor by its name in a checkpoint."""


class StoredWeights(NamedTuple):
    """Checkpoint of whole weights, or one of adapters alone."""

    path: Path
    manifest: Manifest

    @classmethod
    def newest(cls, checkpoint: Path, step: Step = None) -> StoredWeights:
        """Open ``checkpoint``, or the newest one in it; see `newest_checkpoint`."""
        path = newest_checkpoint(checkpoint, step)
        return cls(path, read_manifest(path))

    def read(self, name: str) -> Tensor:
        """Return one complete tensor by its name in the checkpoint."""
        return read_tensor(self.path, name, self.manifest)


def weights_in(checkpoint: Path | WeightSource) -> WeightSource:
    """Return the weights themselves, or those of the newest checkpoint in a directory."""
    return StoredWeights.newest(checkpoint) if isinstance(checkpoint, Path) else checkpoint
