"""Default kernels of the ops that a test runs, and a fingerprint of their code.

``docs/default_kernels.json`` lists for each op the parts of models that use it and its default
backends on GPUs, with the date and the commit since which each is the default. On a CPU every op
runs its last backend, the reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from megatron_packed.ops.backend_dispatch import Backend, Op
from support.code_prints import Sources, digest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "default_kernels.json"
EVERY_MODEL = "every model"
WITHOUT_KERNELS = {"Data", "Tokenizer", "Prompt format"}
"""Columns of the support matrix whose tests train no model."""


def ops_sources() -> Sources:
    return Sources(ROOT / "megatron_packed" / "ops", ROOT)


@cache
def table() -> dict[str, dict[str, Any]]:
    return cast("dict[str, dict[str, Any]]", json.loads(TABLE.read_text()))


def op_of(name: str) -> Op:
    return cast(Op, import_module(f"megatron_packed.ops.{name}.api").OP)


def default_backend(name: str, *, gpu: bool) -> Backend:
    """Return the backend that ``auto`` tries first on a GPU, or the reference of a CPU."""
    automatic = [backend for backend in op_of(name).backends if backend.automatic]
    return automatic[0 if gpu else -1]


def missing_kernels() -> list[str]:
    """Return a sentence for each default kernel of GPUs that this machine cannot import."""
    sentences = []
    for name in table():
        backend = default_backend(name, gpu=True)
        try:
            backend.load()
        except Exception as error:  # A broken optional package may raise any exception at import.
            sentences.append(f"{name} {backend.name}: {type(error).__name__}: {error}")
    return sentences


def ops_of(claims: Mapping[str, Iterable[str]], layers: Iterable[str]) -> list[str]:
    """Return the ops that a test runs, from its claims: column -> rows.

    A test without a layer in its claims counts as a test of all ops.

    Args:
        layers: rows of the support matrix that are layers.
    """
    if set(claims) <= WITHOUT_KERNELS:
        return []
    rows = {row for of_column in claims.values() for row in of_column}
    if not rows & {*layers}:
        return list(table())
    return [name for name, entry in table().items() if {*entry["parts"]} & {*rows, EVERY_MODEL}]


def fingerprint(sources: Sources, ops: Iterable[str], *, gpu: bool) -> str:
    """Return the fingerprint of default kernels; empty without ops.

    It changes if another backend becomes the default, or if the code of the default changes.

    Args:
        sources: files of ``megatron_packed/ops``.
    """
    texts: list[str] = []
    for name in ops:
        backend = default_backend(name, gpu=gpu)
        since = table()[name]["defaults"][-1] if gpu else {}
        texts += [name, backend.name, since.get("commit", ""), *_code(sources, backend)]
    return digest(texts) if texts else ""


def _code(sources: Sources, backend: Backend) -> list[str]:
    """Return the code of a backend, without the function of its reasons against inputs."""
    name, _, inner = backend.module.partition(":")
    path = sources.file(name, ROOT / "megatron_packed")
    assert path is not None, backend.module
    public = [one for one in sources.module(path).definitions if not one.startswith("_")]
    first = [inner] if inner else [one for one in public if one != "not_supported_reasons"]
    return sources.texts((path, one) for one in first)
