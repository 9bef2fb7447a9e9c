"""Pages of the API for the site: one for each package with public names, from its ``__init__.pyi``.

`mkdocs.yml` names this file as a hook. The pages exist only in the built site, so that no name is
written twice.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_packed.lazy_exports import stub_imports  # noqa: E402

INTRODUCTION = (
    "Public names of each package. [Use it from Python](../python.md) shows them at work."
)


def public_packages() -> dict[str, list[str]]:
    """Return the full path of each public name, by the package's dotted name, in alphabetical order."""
    stubs = sorted((ROOT / "megatron_packed").rglob("__init__.pyi"))
    return {
        ".".join(stub.parent.relative_to(ROOT).parts): [
            f"{module}.{name}" for name, module in sorted(stub_imports(stub).items())
        ]
        for stub in stubs
    }


def api_pages() -> dict[str, str]:
    """Return the Markdown of each page by its name.

    A name that several packages export is described once, in the innermost package. The others link
    to it.
    """
    packages = public_packages()
    described: set[str] = set()
    pages = {}
    for package, paths in sorted(packages.items(), reverse=True):  # inner packages come first
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
