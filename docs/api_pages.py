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


def public_packages() -> list[str]:
    """Return the dotted names of all packages with public names, in alphabetical order."""
    folders = [path.parent for path in (ROOT / PACKAGE).rglob("__init__.py")]
    names = sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)
    return [name for name in names if public_names(name)]


def public_names(package: str) -> list[str]:
    names = getattr(import_module(package), "__all__", [])
    return [name for name in names if name != "__version__"]


def defining_modules(package: str) -> dict[str, str]:
    """Return the module that defines each public name, from the imports for type checkers."""
    source = (ROOT / package.replace(".", "/") / "__init__.py").read_text()
    return {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def api_pages() -> dict[str, str]:
    """Return the Markdown of each page by its name.

    A name that several packages export is described once, in the innermost package. The others link
    to it.
    """
    packages = public_packages()
    described: set[str] = set()
    pages = {}
    for package in reversed(packages):  # inner packages come before the ones that contain them
        modules = defining_modules(package)
        paths = [f"{modules[name]}.{name}" for name in public_names(package)]
        own = [path for path in paths if path not in described]
        links = [f"- [`{path.rpartition('.')[2]}`][{path}]" for path in paths if path in described]
        entries = ["\n".join(links), *(f"::: {path}" for path in own)]
        pages[package] = "\n\n".join([f"# `{package}`", *filter(None, entries), ""])
        described.update(paths)
    lines = [f"- [`{package}`]({package}.md)" for package in packages]
    return {"README": "\n".join(["# API", "", INTRODUCTION, "", *lines, ""]), **pages}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the API to those of docs/."""
    for name, text in api_pages().items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files
