"""Sum of base weights and adapters, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.manifest import Manifest
from megatron_packed.checkpoint.run_metadata import ADAPTERS
from megatron_packed.layers.lora import is_adapter
from megatron_packed.models.convert.adapters.factors import Factors, merged
from megatron_packed.models.convert.adapters.matrices import factor_name
from megatron_packed.models.convert.stored_weights import StoredWeights

MODEL = "model/"
"""Beginning of the names of weights in a checkpoint."""


@dataclass(frozen=True)
class MergedWeights:
    """Whole weights that base weights and adapters are together.

    Tensors that the checkpoint of adapters holds whole take the place of those of the base. Other
    tensors of the base are read unchanged.
    """

    base: StoredWeights
    adapters: StoredWeights
    rows: Mapping[str, Tensor]
    """Number of the adapter of each row, by the name of the weight; see `trained_rows`."""
    scale: float
    """Factor of the updates."""

    @property
    def path(self) -> Path:
        """Checkpoint of the adapters, for messages."""
        return self.adapters.path

    @cached_property
    def manifest(self) -> Manifest:
        """Records of the sum: the tensors of the base, and the metadata of the adapters' run."""
        tensors = {
            name: record
            for name, record in self.base.manifest.tensors.items()
            if name.startswith(MODEL)
        }
        if missing := [name for name in self._whole if name not in tensors]:
            raise CheckpointError(
                f"has {missing[0]}, which the base lacks", path=self.path, cure="give its own base"
            )
        metadata = {k: v for k, v in self.adapters.manifest.metadata.items() if k != ADAPTERS}
        metadata["config"] = _without_adapters(metadata["config"])
        return replace(self.adapters.manifest, tensors=tensors, metadata=metadata)

    @cached_property
    def _whole(self) -> list[str]:
        names = self.adapters.manifest.tensors
        return [name for name in names if name.startswith(MODEL) and not is_adapter(name)]

    def read(self, name: str) -> Tensor:
        """Return one complete tensor by its name in a checkpoint."""
        if name in self._whole:
            return self.adapters.read(name)
        value = self.base.read(name)
        weight = name.removeprefix(MODEL)
        if weight not in self.rows:
            return value
        stacked = Factors(
            *(self.adapters.read(MODEL + factor_name(weight, which)) for which in "AB")
        )
        return merged(value, stacked, self.scale, self.rows[weight])


def _without_adapters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run without the options of adapters."""
    model = {key: value for key, value in config["model"].items() if not key.startswith("lora_")}
    return {**config, "model": model}
