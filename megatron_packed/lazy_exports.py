"""Public names of a package that are imported at their first use (PEP 562).

The command line reports a wrong flag within a tenth of a second, before torch is imported. So the
import of a package must not import its modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, exports: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    Type checkers do not see these names, so the package also imports them under ``TYPE_CHECKING``.
    A test compares both lists.

    Args:
        package: ``__name__`` of the package.
        exports: module, relative to the package -> public names that the module defines. A name must
            differ from all module names of the package, because a module would hide the name.
    Example:
        ``{"run": ["RunConfig"]}`` makes ``megatron_packed.config.RunConfig`` import
        ``megatron_packed.config.run``.
    """
    module_of = {name: f"{package}.{module}" for module, names in exports.items() for name in names}

    names = sorted(module_of)

    def resolve(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Do not store the value in the package, so that a later patch of the module takes effect.
        return getattr(import_module(module_of[name]), name)

    return names, resolve, lambda: names


def lazy_function(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports its module when it is called.

    A class offers a function of a module above its own with it, without an import of that module.
    """

    def call(*arguments: Any, **keywords: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **keywords)

    return call
