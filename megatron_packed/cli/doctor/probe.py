"""Probes of packages, kernels and GPUs, run in a separate process: ``python -m
megatron_packed.cli.doctor.probe PIPE NAME ...``.

Sends an answer for each name, in order, to the pipe with this file descriptor; output of libraries
goes to the standard streams. A name is ``import:MODULE``, ``kernels`` (the backend that each op would
choose), ``kernel:OP.BACKEND`` (a small real call), or ``gpu``. An answer with ``error`` gives the
reason of a failure. After an answer with ``last`` the process ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any


def answer_probes(answers: Connection, names: Sequence[str]) -> None:
    for name in names:
        answer = answer_to(name)
        answers.send(answer)
        if answer.get("last"):
            return


def answer_to(name: str) -> dict[str, Any]:
    """Return the answer of one probe; every exception becomes an answer."""
    kind, _, what = name.partition(":")
    try:
        if kind == "import":
            return _import(what)
        if kind == "gpu":
            from megatron_packed.cli.doctor.gpu import gpu_findings

            return {"findings": list(gpu_findings())}
        from megatron_packed.cli.doctor import kernel_probes

        return kernel_probes.compare(what) if kind == "kernel" else kernel_probes.choices()
    except Exception as error:  # a broken package may raise anything
        text = " ".join(str(error).split())[:400]
        return {"error": f"{type(error).__name__}: {text}", "last": kind == "kernel" and _on_gpu()}


def _on_gpu() -> bool:
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()


def _import(module: str) -> dict[str, Any]:
    if module == "apex":  # an unrelated apex is detected without running its code
        from megatron_packed.optim.adamw_multi_tensor import stranger_by_its_name

        stranger = stranger_by_its_name()
        if stranger is not None:
            return {"stranger": stranger}
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        if find_spec(".".join(parts[:length])) is None:
            return {"absent": True}
    imported, package = import_module(module), sys.modules[parts[0]]
    if getattr(imported, "__file__", None) is None:
        folder = next(iter(imported.__path__))
        return {
            "error": f"{folder} is a directory without code that is imported instead of the package"
        }
    version = getattr(imported, "__version__", None) or getattr(package, "__version__", "")
    return {"version": str(version)}


if __name__ == "__main__":
    answer_probes(Connection(int(sys.argv[1])), sys.argv[2:])
