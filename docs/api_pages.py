"""Pages of the API for the site: one for each package, with its public names from ``__all__``.

`mkdocs.yml` names this file as a hook. The pages exist only in the built site, so that no name is
written twice.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PACKAGE = "megatron_packed"
INTRODUCTION = (
    "Public names of each package. [Use it from Python](../python.md) shows them at work."
)


def public_packages() -> dict[str, list[str]]:
    """Return the public names of each package that has some, by the package's dotted name."""
    folders = sorted(path.parent for path in (ROOT / PACKAGE).rglob("__init__.py"))
    names = [".".join(folder.relative_to(ROOT).parts) for folder in folders]
    exported = {name: getattr(import_module(name), "__all__", []) for name in names}
    return {
        name: [n for n in found if n != "__version__"] for name, found in exported.items() if found
    }


def defining_modules(package: str) -> dict[str, str]:
    """Return the module that defines each name, from the imports for type checkers."""
    source = (ROOT / package.replace(".", "/") / "__init__.py").read_text()
    return {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the API to those of docs/."""
    packages = public_packages()
    lines = [f"- [`{name}`]({name}.md)" for name in packages]
    pages = {"README": "\n".join(["# API", "", INTRODUCTION, "", *lines, ""])}
    for package, names in packages.items():
        modules = defining_modules(package)
        entries = [f"::: {modules[name]}.{name}" for name in names]
        pages[package] = "\n\n".join([f"# `{package}`", *entries, ""])
    for name, text in pages.items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files
