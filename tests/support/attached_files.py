"""Checkpoints as an earlier version saved them: without attached files."""

from pathlib import Path

from megatron_packed.checkpoint.manifest import MANIFEST
from megatron_packed.checkpoint.sealed_json import seal, unseal


def remove_attached_files(folder: Path) -> None:
    """Remove the attached files of all checkpoints in a folder, also from their manifests."""
    for path in folder.glob(f"step_*/{MANIFEST}"):
        fields = unseal(path.read_bytes(), path)
        for record in fields.pop("attached"):
            path.with_name(record["name"]).unlink()
        path.write_bytes(seal(fields))
