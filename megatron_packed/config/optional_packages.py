"""Packages that this project can use, and unrelated packages with similar names, from
``optional_packages.json``; needs only the standard library.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


@dataclass(frozen=True, kw_only=True)
class Package:
    """Package that this project can use."""

    name: str
    module: str
    """Module that is imported to test the package."""
    use: str
    floor: str = ""
    """Oldest version that may be used, as in setup.cfg; empty if any version may be used."""
    why_this_floor: str = ""
    """Sentence with the fault of older versions."""
    install: str = ""
    """Install command; ``pip install`` with name and floor when empty."""
    build: str = ""
    """Requirement that is built against the installed torch; empty for a package with wheels."""
    required: bool = False
    kernels: Sequence[str] = ()
    """Backends that need the package, as ``op.backend`` of `ops.backend_dispatch`."""

    @property
    def command(self) -> str:
        wanted = f"'{self.name}>={self.floor}'" if self.floor else self.name
        if self.build:
            return f"MAX_JOBS=8 pip install --no-build-isolation {self.build}"
        return self.install or f"pip install {wanted}"

    def too_old(self) -> str:
        """Return a clause about an installed version below the floor; empty if there is none."""
        version = version_of(self.name)
        if not self.floor or version is None or _numbers(version) >= _numbers(self.floor):
            return ""
        return f"{self.name} {version}, which is older than {self.floor}"


PACKAGES = tuple(Package(**row) for row in _TABLES["packages"])
"""Packages; ``why_this_floor`` has the reason of a floor."""


def package_of_kernel(op: str, backend: str) -> Package | None:
    """Return the package that a backend of an op needs; None if it needs no optional package."""
    return next((package for package in PACKAGES if f"{op}.{backend}" in package.kernels), None)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, for example (2, 11, 0) for ``2.11.0a0+git``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def old_package(name: str) -> tuple[str, str] | None:
    """Return a clause about an installed package that is older than its floor, and the command that
    helps; None if it is absent or new enough.
    """
    package = next(package for package in PACKAGES if package.name == name)
    old = package.too_old()
    return (old, package.command) if old else None


@contextmanager
def required_packages(*, any_version: bool = False) -> Iterator[None]:
    """Exit with code 2 and one sentence if a required package is too old, or if an import of
    the block finds a required package absent.

    Args:
        any_version: do not check the versions of packages.
    Raises:
        ModuleNotFoundError: another module is absent.
        SystemExit: a required package is absent or too old.
    """
    old = [
        package
        for package in PACKAGES
        if package.required and not any_version and package.too_old()
    ]
    if old:
        wanted = " ".join(f"'{package.name}>={package.floor}'" for package in old)
        print(
            f"{sys.executable} has {', and '.join(package.too_old() for package in old)}; "
            f"run pip install {wanted}.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    try:
        yield
    except ModuleNotFoundError as error:
        package = next(
            (package for package in PACKAGES if package.required and package.module == error.name),
            None,
        )
        if package is None:
            raise
        print(
            f"{package.name} is not installed for {sys.executable}; activate the environment of "
            "megatron_packed, or run `megatron-packed doctor`, which lists what is missing.",
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def is_installed(module: str) -> bool:
    """Return whether a module is installed, without importing the module or its parent packages.

    A directory without code, for example the directory in which W&B stores its files, is not a
    package.
    """
    first, *submodules = module.split(".")
    spec = importlib.util.find_spec(first)
    for name in submodules:
        if spec is None:
            return False
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is not None and spec.origin is not None


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """Unrelated package that users install by mistake."""

    name: str
    what: str
    wanted_package: str
    """Name, in `PACKAGES`, of the package that the user wanted; empty if it is this project."""
    versions: str = ""
    """Pattern of the versions that are the unrelated package."""
    in_the_way: bool = False
    """True if the unrelated package has the module name of the wanted package, so that both cannot
    be installed.
    """

    @property
    def fix(self) -> str:
        """Command that removes the package and, if useful, installs the wanted package.

        A wanted package that has no wheel and is rarely needed is not installed.
        """
        away = f"pip uninstall -y {self.name}"
        package = next(
            (
                package
                for package in PACKAGES
                if package.name == self.wanted_package and not self.in_the_way
            ),
            None,
        )
        return away if package is None else f"{away} && {package.command}"


STRANGERS = tuple(Stranger(**row) for row in _TABLES["strangers"])


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is absent or unrecorded."""
    from importlib import metadata  # takes 30 ms, which processes of tokenizers do not need

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def strangers() -> list[tuple[Stranger, str]]:
    """Return the installed unrelated packages with their versions."""
    installed = [(stranger, version_of(stranger.name)) for stranger in STRANGERS]
    return [
        (candidate, version)
        for candidate, version in installed
        if version is not None and re.match(candidate.versions, version)
    ]
