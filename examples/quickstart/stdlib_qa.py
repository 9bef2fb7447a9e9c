"""Make questions and answers from the documentation that ships with this Python interpreter.

    python examples/quickstart/stdlib_qa.py OUT_DIR

writes ``train.jsonl`` and ``valid.jsonl`` in the ``messages`` schema: questions about the modules,
classes, functions and methods of the standard library, answered by their docstrings and signatures.
The source files are read with ``ast``; nothing is imported or downloaded. The same interpreter
gives the same files. All questions about one object are in the same file, so that no training
answer appears in validation. The script needs only Python 3.10.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SKIPPED_DIRECTORIES = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "_bundled",
    "lib-dynload",
    "turtledemo",
}
VALID_SHARE = 0.05

ASK = {
    "module": (
        "What is the Python module `{name}` for?",
        "Describe the standard library module `{name}`.",
        "Explain Python's `{name}` module to me.",
        "What does the documentation of the module `{name}` say?",
    ),
    "class": (
        "What is the class `{name}`?",
        "Describe the class `{name}` of Python's standard library.",
        "When would I use `{name}`?",
        "What does the documentation of the class `{name}` say?",
    ),
    "function": (
        "What does the function `{name}` do?",
        "Explain `{name}`.",
        "How do I use the Python function `{name}`?",
        "What does the documentation of `{name}` say?",
    ),
    "method": (
        "What does the method `{name}` do?",
        "Explain the method `{name}`.",
        "How do I use `{name}`?",
        "What happens when I call `{name}`?",
    ),
    "property": (
        "What is the property `{name}`?",
        "What does `{name}` tell me?",
    ),
}
ASK_SIGNATURE = (
    "What is the signature of `{name}`?",
    "Which arguments does `{name}` take?",
    "How is `{name}` called?",
)
ASK_MEMBERS = {
    "module": (
        "What does the module `{name}` contain?",
        "List the public functions and classes of `{name}`.",
    ),
    "class": (
        "Which methods does `{name}` have?",
        "List the public methods of the class `{name}`.",
    ),
}
ASK_NAME = (
    'What in the module `{module}` has this description: "{summary}"',
    'In `{module}`, what would I use for this: "{summary}"',
)


class Item(NamedTuple):
    """One documented object of the standard library."""

    kind: str
    name: str
    module: str
    signature: str
    doc: str
    members: tuple[str, ...] = ()
    """Line for each public member of a module or class."""

    @property
    def summary(self) -> str:
        return first_sentence(self.doc)


class Pair(NamedTuple):
    item: Item
    messages: list[dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out_dir", type=Path, help="directory for train.jsonl and valid.jsonl")
    parser.add_argument(
        "--valid-share",
        type=float,
        default=VALID_SHARE,
        help="share of objects kept for validation",
    )
    arguments = parser.parse_args()
    started = time.perf_counter()
    items = list(documented_items(Path(sysconfig.get_paths()["stdlib"])))
    pairs = list(unique(pair for item in items for pair in questions(item)))
    counts = write_split(pairs, arguments.out_dir, arguments.valid_share)
    answers = sorted(
        sum(len(m["content"]) for m in pair.messages if m["role"] == "assistant") for pair in pairs
    )
    if not answers:
        sys.exit(
            f"no docstrings in {sysconfig.get_paths()['stdlib']}; install this Python's standard library sources."
        )
    kinds = ", ".join(
        f"{n} {kind}" for kind, n in sorted(Counter(item.kind for item in items).items())
    )
    print(f"Python {sys.version.split()[0]}: {len(items)} documented objects ({kinds})")
    print(
        f"answers of {answers[0]} to {answers[-1]} characters, median {answers[len(answers) // 2]}"
    )
    for name, count in counts.items():
        print(f"{count} conversations in {arguments.out_dir / name}")
    print(f"{time.perf_counter() - started:.1f} s")


# -------------------------------------------------------------------------------------------------------------
# reading


def documented_items(library: Path) -> Iterator[Item]:
    """Yield all documented objects of the folder ``library``, in the order of file names."""
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        parts = inside.with_suffix("").parts
        if SKIPPED_DIRECTORIES.intersection(inside.parts[:-1]) or not all(
            part.isidentifier() for part in parts
        ):
            continue
        if parts[-1] in ("__main__", "test") or parts[-1].startswith(("test_", "_sysconfigdata")):
            continue
        tree = parse(path)
        if tree is not None:
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield from items_of_module(module, tree)


def parse(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None


def items_of_module(module: str, tree: ast.Module) -> Iterator[Item]:
    members: list[str] = []
    inner: list[Item] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            inner += items_of_class(module, f"{module}.{node.name}", node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_public(node.name):
            inner += item_of_function(module, f"{module}.{node.name}", node, "function")
        else:
            continue
        members.append(member_line(node))
    doc = docstring(tree)
    if doc:
        yield Item("module", module, module, f"import {module}", doc, tuple(members))
    yield from inner


def items_of_class(module: str, name: str, node: ast.ClassDef) -> Iterator[Item]:
    members: list[str] = []
    inner: list[Item] = []
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and is_public(child.name):
            members.append(member_line(child))
            kind = "property" if is_property(child) else "method"
            inner += item_of_function(module, f"{name}.{child.name}", child, kind)
        elif isinstance(child, ast.ClassDef) and is_public(child.name):
            inner += items_of_class(module, f"{name}.{child.name}", child)
    doc = docstring(node)
    if doc:
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        yield Item(
            "class",
            name,
            module,
            f"class {node.name}({bases})" if bases else f"class {node.name}",
            doc,
            tuple(members),
        )
    yield from inner


def item_of_function(
    module: str, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, kind: str
) -> Iterator[Item]:
    doc = docstring(node)
    if doc:
        yield Item(kind, name, module, signature(node), doc)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{prefix} {node.name}({ast.unparse(node.args)}){returns}"


def member_line(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    summary = first_sentence(docstring(node))
    return f"- `{node.name}`: {summary}" if summary else f"- `{node.name}`"


def docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the cleaned docstring; empty if there is none or it is not valid text."""
    doc = (ast.get_docstring(node) or "").strip()
    try:
        doc.encode("utf-8")
    except UnicodeEncodeError:
        return ""
    return doc


def first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n", 1)[0].split())
    sentence = paragraph.split(". ", 1)[0]
    return sentence if len(sentence) <= 200 else ""


def is_public(name: str) -> bool:
    return not name.startswith("_")


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
    return not names.isdisjoint({"property", "cached_property"})


# -----------------------------------------------------------------------------------------------------------
# questions


def questions(item: Item) -> Iterator[Pair]:
    """Yield conversations about one object; hashes of its name choose wording and questions."""
    ask = pick(ASK[item.kind], item.name, "ask").format(name=item.name)
    answer = item.doc
    callable_item = item.kind in ("function", "method")
    if (callable_item or item.kind == "class") and number(item.name, "show signature") % 4:
        answer = f"```python\n{item.signature}\n```\n{item.doc}"
    turns = [(ask, answer)]
    extra: list[tuple[str, str]] = []
    if callable_item:
        extra.append(
            (
                pick(ASK_SIGNATURE, item.name, "signature").format(name=item.name),
                f"`{item.signature}`",
            )
        )
    if len(item.members) > 1:
        wording = pick(ASK_MEMBERS[item.kind], item.name, "members").format(name=item.name)
        extra.append((wording, "\n".join(item.members)))
    if item.kind != "module" and len(item.summary) > 20:
        wording = pick(ASK_NAME, item.name, "name").format(module=item.module, summary=item.summary)
        extra.append((wording, f"`{item.name}`, a {item.kind}."))
    if extra and number(item.name, "several turns") % 4 == 0:
        turns.append(extra.pop(0))
    yield conversation(item, turns)
    for turn in extra:
        if number(item.name, turn[0]) % 2 == 0:
            yield conversation(item, [turn])


def conversation(item: Item, turns: list[tuple[str, str]]) -> Pair:
    messages = []
    for question, answer in turns:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return Pair(item, messages)


def number(*parts: str) -> int:
    """Return a number that depends only on ``parts``: the same in every process and machine."""
    return int.from_bytes(hashlib.blake2b("\n".join(parts).encode(), digest_size=8).digest(), "big")


def pick(choices: tuple[str, ...], name: str, purpose: str) -> str:
    return choices[number(name, purpose) % len(choices)]


def unique(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """Drop conversations with an earlier answer (inherited or copied docstrings) or question."""
    seen: set[str] = set()
    for pair in pairs:
        answers = "\n".join(m["content"] for m in pair.messages if m["role"] == "assistant")
        asked = pair.messages[0]["content"]
        if answers in seen or asked in seen:
            continue
        seen |= {answers, asked}
        yield pair


# -------------------------------------------------------------------------------------------------------------
# writing


def write_split(pairs: list[Pair], directory: Path, valid_share: float) -> dict[str, int]:
    """Write both files in an order that mixes the modules; return the number of lines of each."""
    directory.mkdir(parents=True, exist_ok=True)
    threshold = int(valid_share * 2**64)
    valid = [pair for pair in pairs if number(pair.item.name, "split") < threshold]
    train = [pair for pair in pairs if number(pair.item.name, "split") >= threshold]
    counts = {}
    for name, part in (("train.jsonl", train), ("valid.jsonl", valid)):
        part.sort(key=lambda pair: number(pair.item.name, pair.messages[0]["content"], "order"))
        lines = (
            json.dumps({"messages": pair.messages}, ensure_ascii=False) + "\n" for pair in part
        )
        temporary = directory / f".{name}.tmp"
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(directory / name)
        counts[name] = len(part)
    return counts


if __name__ == "__main__":
    main()
