"""Manifest of a cache directory of tokenised data: ``manifest.json`` with a checksum of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_packed.config.checksums import crc32c
from megatron_packed.data.errors import DataError, printable

CACHE_FORMAT = 4
"""Version of the cache. Increase this number when a change of the code stores the same sources
differently."""
_MANIFEST = "manifest.json"


def read_cache_manifest(directory: Path) -> dict[str, Any]:
    """Read and check the manifest of a cache directory.

    Raises:
        DataError: the manifest is missing, damaged, or of another format.
    """
    path = directory / _MANIFEST
    try:
        value = json.loads(path.read_bytes())
        stored = value.pop("crc32c")
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing, so {directory} is not a cache of tokenised data; check the path."
        ) from None
    except (OSError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged ({printable(str(error), 80)}); remove {directory} to build it again."
        ) from None
    if crc32c(canonical_json(value)) != stored:
        raise DataError(
            f"{path} is damaged (CRC32C differs); remove {directory} to build it again."
        )
    if value["format"] != CACHE_FORMAT:
        raise DataError(
            f"{directory} has format {value['format']}, expected {CACHE_FORMAT}; remove it to build it again."
        )
    return dict(value)


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write ``manifest`` and its checksum to ``manifest.json`` of a cache directory."""
    manifest = {**manifest, "crc32c": crc32c(canonical_json(manifest))}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def canonical_json(value: Any) -> bytes:
    """Return JSON with sorted keys and no spaces, so that equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
