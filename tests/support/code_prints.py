"""Fingerprints of code: a change of a function, or of what it uses, changes its fingerprint.

The code of a function is its definition, and every definition of the same sources that it names,
directly or through other definitions. Docstrings, comments and the layout of lines do not count,
nor do the names of files.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Definition = tuple[Path, str]
"""File and name of a definition at the top level of a module."""
Imported = tuple[str, str]
"""Module, and name in the module; the latter is empty for a module."""


class Module:
    """Definitions and imports at the top level of one file, also inside its branches."""

    def __init__(self, path: Path) -> None:
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, Imported] = {}
        self._read(ast.parse(path.read_text()).body)

    def _read(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self.imports |= imported_by(statement)
            elif isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                self.definitions.setdefault(statement.name, []).append(statement)
            elif isinstance(statement, (ast.If, ast.Try, ast.With)):
                children = ast.iter_child_nodes(statement)
                self._read(child for child in children if isinstance(child, ast.stmt))
            else:
                for node in ast.walk(statement):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        self.definitions.setdefault(node.id, []).append(statement)

    def automatic_fixtures(self) -> list[str]:
        """Return the names of fixtures that tests use without naming them."""
        return [
            name
            for name, (first, *_) in self.definitions.items()
            if isinstance(first, FUNCTIONS)
            and any("autouse" in ast.unparse(decorator) for decorator in first.decorator_list)
        ]


def imported_by(statement: ast.Import | ast.ImportFrom) -> dict[str, Imported]:
    """Return what each name that an import binds refers to."""
    if isinstance(statement, ast.ImportFrom):
        module = statement.module or ""
        return {alias.asname or alias.name: (module, alias.name) for alias in statement.names}
    return {alias.asname or alias.name: (alias.name, "") for alias in statement.names}


class Sources:
    """Files of one folder, in which the code of functions is followed.

    Args:
        folder: only definitions in this folder belong to the code of a function.
        root: folder from which modules are imported.
        fixtures: True if arguments of functions may be fixtures of ``conftest.py``.
    """

    def __init__(self, folder: Path, root: Path, *, fixtures: bool = False) -> None:
        self._folder, self._root, self._fixtures = folder, root, fixtures
        self._modules: dict[Path, Module] = {}
        self._names: dict[Definition, list[Definition]] = {}
        self._texts: dict[Definition, list[str]] = {}

    def module(self, path: Path) -> Module:
        if path not in self._modules:
            self._modules[path] = Module(path)
        return self._modules[path]

    def file(self, name: str, importer: Path) -> Path | None:
        """Return the file of an imported module; None if it is not in the folder."""
        relative = f"{name.replace('.', '/')}.py"
        places = (root / relative for root in (importer.parent, self._root))
        return next(
            (
                place
                for place in places
                if name and place.is_file() and self._folder in place.parents
            ),
            None,
        )

    def texts(self, first: Iterable[Definition], unnamed: Definition | None = None) -> list[str]:
        """Return the texts of definitions and of all definitions that they reach, sorted.

        Args:
            unnamed: definition whose own name is left out of its text.
        """
        found: dict[Definition, None] = {}
        waiting = list(first)
        while waiting:
            definition = waiting.pop()
            if definition not in found:
                found[definition] = None
                waiting += self._named_by(definition)
        return sorted(
            {
                text
                for definition in found
                for text in self._texts_of(definition, unnamed=definition == unnamed)
            }
        )

    def _texts_of(self, definition: Definition, *, unnamed: bool) -> list[str]:
        """Return the text of each statement of a definition; most are part of many tests."""
        path, name = definition
        statements = self.module(path).definitions[name]
        if unnamed:
            return [text_of(statement, name) for statement in statements]
        if definition not in self._texts:
            self._texts[definition] = [text_of(statement) for statement in statements]
        return self._texts[definition]

    def _named_by(self, definition: Definition) -> list[Definition]:
        """Return the definitions in the folder that a definition names."""
        if definition not in self._names:
            path, name = definition
            nodes = [
                node
                for statement in self.module(path).definitions[name]
                for node in ast.walk(statement)
            ]
            local: dict[str, Imported] = {}
            for node in nodes:
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    local |= imported_by(node)
            named: list[Definition] = []
            for node in nodes:
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    named += self._resolved(path, node.value.id, local, node.attr)
                elif isinstance(node, ast.Name):
                    named += self._resolved(path, node.id, local)
                elif isinstance(node, ast.arg) and self._fixtures:
                    named += self._resolved(path, node.arg, local) or self._fixture(path, node.arg)
            self._names[definition] = named
        return self._names[definition]

    def _resolved(
        self, path: Path, name: str, local: dict[str, Imported], attribute: str = ""
    ) -> list[Definition]:
        """Return the definition to which ``name`` or ``name.attribute`` refers in a file.

        The list is empty for a name that is not defined in the folder.

        Args:
            local: imports inside the function that uses the name.
        """
        module = self.module(path)
        if name in module.definitions:
            return [(path, name)]
        source, inner = local.get(name) or module.imports.get(name) or ("", "")
        file = self.file(source, path)
        if file is not None:
            inner = inner or attribute
            return self._resolved(file, inner, {}) if inner else []
        file = self.file(f"{source}.{inner}".strip("."), path)
        return self._resolved(file, attribute, {}) if file is not None and attribute else []

    def _fixture(self, path: Path, name: str) -> list[Definition]:
        """Return the fixture ``name`` of the nearest ``conftest.py`` above a file."""
        for folder in path.parents:
            conftest = folder / "conftest.py"
            if conftest.is_file() and name in self.module(conftest).definitions:
                return [(conftest, name)]
            if folder == self._root:
                break
        return []


def fingerprint_of_test(tests: Sources, path: Path, name: str) -> str:
    """Return the fingerprint of a test: 12 hexadecimal digits.

    Decorators belong to the code, and so do fixtures, helpers and constants in the folder of tests.
    The name of the test does not, so a test keeps its fingerprint when it is renamed or moved.

    Args:
        path: file of the test.
        name: name of the function, without its parameters; ``Class.function`` for a method.
    """
    own, _, method = name.partition(".")
    module = tests.module(path)
    always = [*({"pytestmark"} & module.definitions.keys()), *module.automatic_fixtures()]
    texts = tests.texts([(path, one) for one in (own, *always)], unnamed=(path, own))
    return digest([method, *texts])


def digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def text_of(statement: ast.stmt, without_name: str = "") -> str:
    """Return the code of a statement, without docstrings, comments and layout of lines."""
    return "".join(_words(statement, without_name))


def _words(node: object, without_name: str = "") -> Iterator[str]:
    """Yield the parts of a syntax tree.

    ``ast.dump`` is not used: its text differs between versions of Python.
    """
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for field, value in ast.iter_fields(node):
            named = field == "name" and without_name and value == without_name
            if value is None or value == [] or field in ("kind", "type_comment") or named:
                continue
            yield f" {field}="
            yield from _words(_without_strings(value) if field == "body" else value)
        yield ")"
    elif isinstance(node, list):
        for one in node:
            yield from _words(one)
            yield ","
    else:
        yield repr(node)


def _without_strings(body: object) -> object:
    """Return the statements of a body without those that are only a string."""
    if not isinstance(body, list):
        return body
    return [
        one
        for one in body
        if not (
            isinstance(one, ast.Expr)
            and isinstance(one.value, ast.Constant)
            and isinstance(one.value.value, str)
        )
    ]
