"""Public names of a package that are imported at their first use (PEP 562).

The command line reports a wrong flag within a tenth of a second, before torch is imported. So the
import of a package must not import its modules.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(
    package: str, file: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    The names are those that the package's stub ``__init__.pyi`` imports, which type checkers read,
    too.

    Args:
        package: ``__name__`` of the package.
        file: ``__file__`` of the package.
    Example:
        ``from megatron_packed.config.run import RunConfig as RunConfig`` in the stub of
        ``megatron_packed.config`` makes ``megatron_packed.config.RunConfig`` import
        ``megatron_packed.config.run``. A name must differ from all module names of the package,
        because a module would hide the name.
    """
    module_of = stub_imports(Path(file).with_suffix(".pyi"))
    names = sorted(module_of)

    def resolve(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Do not store the value in the package, so that a later patch of the module takes effect.
        return getattr(import_module(module_of[name]), name)

    return names, resolve, lambda: names


def stub_imports(path: Path) -> dict[str, str]:
    """Return the module of each name that a stub imports: name -> module."""
    return {
        alias.name: str(statement.module)
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def lazy_function(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports its module when it is called.

    A class offers a function of a module above its own with it, without an import of that module.
    """

    def call(*arguments: Any, **keywords: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **keywords)

    return call
