"""Public names of a package, imported when they are first used (PEP 562).

A wrong flag is reported in a tenth of a second, before torch is imported. So no package may import
its modules when it is imported itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, exports: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    Type checkers do not see these names: the package imports them once more under
    ``TYPE_CHECKING``. A test compares the two.

    Args:
        package: its ``__name__``.
        exports: public names by the module that defines them; modules are relative to the package.
            No name may be that of a module of the package, which would hide it.
    Example:
        ``{"run": ["RunConfig"]}`` makes ``megatron_packed.config.RunConfig`` import
        ``megatron_packed.config.run``.
    """
    module_of = {name: f"{package}.{module}" for module, names in exports.items() for name in names}

    names = sorted(module_of)

    def resolve(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # The value is not stored in the package, so that a name patched in its module counts.
        return getattr(import_module(module_of[name]), name)

    return names, resolve, lambda: names
