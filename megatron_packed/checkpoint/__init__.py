"""Checkpoints: safetensors files of each rank with a manifest, loaded in any parallel layout."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.checkpoint.background_save import BackgroundSaves as BackgroundSaves
    from megatron_packed.checkpoint.errors import CheckpointError as CheckpointError
    from megatron_packed.checkpoint.errors import CheckpointMismatchError as CheckpointMismatchError
    from megatron_packed.checkpoint.errors import NoCheckpointError as NoCheckpointError
    from megatron_packed.checkpoint.load import find_checkpoints as find_checkpoints
    from megatron_packed.checkpoint.load import load_checkpoint as load_checkpoint
    from megatron_packed.checkpoint.load_attempt import LoadedCheckpoint as LoadedCheckpoint
    from megatron_packed.checkpoint.manifest import Manifest as Manifest
    from megatron_packed.checkpoint.manifest import read_manifest as read_manifest
    from megatron_packed.checkpoint.read_tensors import read_tensor as read_tensor
    from megatron_packed.checkpoint.save import SavedCheckpoint as SavedCheckpoint
    from megatron_packed.checkpoint.save import save_checkpoint as save_checkpoint
    from megatron_packed.checkpoint.tensor_shard import TensorShard as TensorShard
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "background_save": ["BackgroundSaves"],
            "errors": ["CheckpointError", "CheckpointMismatchError", "NoCheckpointError"],
            "load": ["find_checkpoints", "load_checkpoint"],
            "load_attempt": ["LoadedCheckpoint"],
            "manifest": ["Manifest", "read_manifest"],
            "read_tensors": ["read_tensor"],
            "save": ["SavedCheckpoint", "save_checkpoint"],
            "tensor_shard": ["TensorShard"],
        },
    )
