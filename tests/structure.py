"""Numbers about the structure of the package: the path of a step, the places of a fact, the style.

``python tests/structure.py`` prints the numbers next to those of ``structure_before.json``, which
``--save-before`` writes. ``--list FIGURE`` prints the places that a number counts. ``--sizes
CHECKOUT`` prints the tokens of tests, tools, benchmarks and capabilities of this or another checkout.
``tests/unit/test_structure.py`` tests rules; sizes, paths and places of a fact are printed only. All
lines of a file count, also empty lines.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fact_places
import traced_step

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_packed"
BEFORE = Path(__file__).with_name("structure_before.json")

COMMENTED = ("cuda_graphs", "memory", "distributed", "training")
ROOMS = {"training": ("training", "resume", "inputs", "explain", "launch")}
"""Folders that an earlier folder was divided into; their lines count together."""
UNCOUNTED = {"ENCODING", "COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
"""Tokens that are not counted. Names, numbers, strings and operators remain."""
DIRECTIVE = re.compile(r"#\s*(!|fmt:|noqa|ruff:|type:|mypy:|pragma)")
"""Comments for tools. They are not counted as comments."""
OPENING = re.compile(r"\s*(What|Whether|Of|Who|How|Which|Where)\b")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTION_WORDS = frozenset(
    """found one given known described whole wrong about before then now words told lent borrowed strangers
    asked meant taken kept rest here there such alike anew bad more own""".split()  # noqa: SIM905
)
"""Words that say nothing as the whole name of a variable."""

INTERFACES = {"serve": "LimitedProcess imports it from the module of each child program"}
"""Functions that a caller finds by their name in several modules, with the caller."""


class Source(NamedTuple):
    """One file of the package."""

    path: str
    """Path relative to the package."""
    lines: int
    tokens: int
    comments: int
    nodes: list[ast.AST]

    def at(self, node: ast.AST, text: str) -> str:
        return f"{self.path}:{node.lineno} {text}"  # type: ignore[attr-defined]


class Figure(NamedTuple):
    """Number, and the places that it counts."""

    value: float
    found: list[str]

    @classmethod
    def count(cls, found: list[str]) -> Figure:
        return cls(len(found), found)


def read_sources(package: Path) -> list[Source]:
    return [read_source(path, package) for path in sorted(package.rglob("*.py"))]


def read_source(path: Path, package: Path) -> Source:
    text = path.read_text()
    with path.open("rb") as file:
        tokens, comments = count_tokens(file.readline)
    return Source(
        path=path.relative_to(package).as_posix(),
        lines=text.count("\n"),
        tokens=tokens,
        comments=comments,
        nodes=list(ast.walk(ast.parse(text))),
    )


def count_tokens(readline: Any) -> tuple[int, int]:
    """Return the number of counted tokens and the number of lines with a comment.

    An f-string counts as one token: Python 3.12 and later split it into its parts, earlier versions
    do not.
    """
    count = comments = depth = 0
    for token in tokenize.tokenize(readline):
        name = tokenize.tok_name[token.type]
        depth += name == "FSTRING_START"
        if name == "COMMENT":
            comments += DIRECTIVE.match(token.string) is None
        elif depth == 0:
            count += name not in UNCOUNTED
        elif name == "FSTRING_END":
            depth -= 1
            count += depth == 0
    return count, comments


def source_figures(sources: list[Source]) -> dict[str, Figure]:
    """Return all figures that are computed from the source, by name."""
    lines = sum(source.lines for source in sources)
    tokens = sum(source.tokens for source in sources)
    private = find(sources, private_torch)
    return {
        "tokens_per_line": Figure(round(tokens / lines, 2), []),
        **{f"comments_per_1000_lines_in_{name}": comments_in(sources, name) for name in COMMENTED},
        "functions_over_60_lines": Figure.count(find(sources, long_functions)),
        "files_over_400_lines": Figure.count(
            [f"{source.path} {source.lines}" for source in sources if source.lines > 400]
        ),
        "names_of_function_words_per_1000_lines": names_of_function_words(sources),
        "public_functions_more_than_once": Figure.count(repeated_functions(sources)),
        "class_methods_called_of": Figure.count(find(sources, methods_called_of)),
        "class_names_more_than_once": Figure.count(repeated_class_names(sources)),
        "nested_conditional_expressions": Figure.count(find(sources, nested_conditionals)),
        "tuple_attribute_assignments": Figure.count(find(sources, tuple_assignments)),
        "isinstance_full_iteration_elsewhere": Figure.count(find(sources, graph_type_tests)),
        "private_torch_references": Figure.count(private),
        "private_torch_files": Figure.count(by_file(private)),
        "docstrings_by_question_word": Figure.count(find(sources, question_docstrings)),
        "attribute_docstrings_by_question_word": Figure.count(find(sources, question_attributes)),
    }


def find(sources: list[Source], search: Any) -> list[str]:
    return [place for source in sources for place in search(source)]


def by_file(places: list[str]) -> list[str]:
    counts = Counter(place.split(":")[0] for place in places)
    return [f"{path} {count}" for path, count in counts.most_common()]


def comments_in(sources: list[Source], folder: str) -> Figure:
    rooms = ROOMS.get(folder, (folder,))
    inside = [source for source in sources if source.path.split("/")[0] in rooms]
    lines = sum(source.lines for source in inside)
    comments = sum(source.comments for source in inside)
    return Figure(round(1000 * comments / max(lines, 1), 1), [])


def long_functions(source: Source) -> Iterator[str]:
    """Find functions of more than 60 lines, from ``def`` to the last line.

    The signature of a Triton kernel does not count, because each of its arguments has a line.
    """
    for node in source.nodes:
        if isinstance(node, DEFINITIONS):
            first = node.body[0] if is_kernel(node) else node
            lines = node.end_lineno - first.lineno + 1
            if lines > 60:
                yield source.at(node, f"{node.name} {lines}")


def is_kernel(node: Any) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def names_of_function_words(sources: list[Source]) -> Figure:
    """Count assignment targets and parameters whose whole name is one of `FUNCTION_WORDS`."""
    places = find(sources, bindings_of_function_words)
    lines = sum(source.lines for source in sources)
    return Figure(round(1000 * len(places) / lines, 2), places)


def bindings_of_function_words(source: Source) -> Iterator[str]:
    for node in source.nodes:
        name = getattr(node, "arg", None) if isinstance(node, ast.arg) else None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if isinstance(node, ast.ExceptHandler):
            name = node.name
        if name is not None and name.strip("_") in FUNCTION_WORDS:
            yield source.at(node, name)


def repeated_functions(sources: list[Source]) -> list[str]:
    """Return functions of several modules, without interfaces.

    Back ends of ops have one interface, and so have the functions of `INTERFACES`.
    """
    places = defaultdict(list)
    for source in sources:
        if source.path.startswith("ops/"):
            continue
        for node in source.nodes[0].body:  # type: ignore[attr-defined]
            public = isinstance(node, DEFINITIONS) and not node.name.startswith("_")
            if public and node.name not in INTERFACES:
                places[node.name].append(source.path)
    return [
        f"{name} x{len(paths)}: {', '.join(paths)}"
        for name, paths in sorted(places.items())
        if len(paths) > 1
    ]


def methods_called_of(source: Source) -> Iterator[str]:
    """Find class methods that do not say what they make."""
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, DEFINITIONS) and part.name == "of":
                    yield source.at(part, node.name)


def repeated_class_names(sources: list[Source]) -> list[str]:
    places = defaultdict(list)
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(source.path)
    repeated = sorted((name, paths) for name, paths in places.items() if len(paths) > 1)
    return [f"{name} x{len(paths)}: {', '.join(paths)}" for name, paths in repeated]


def nested_conditionals(source: Source) -> Iterator[str]:
    """Find conditional expressions inside other conditional expressions. Each is reported once."""
    outer = [node for node in source.nodes if isinstance(node, ast.IfExp)]
    inner = {
        child: None
        for node in outer
        for child in ast.walk(node)
        if isinstance(child, ast.IfExp) and child is not node
    }
    for node in inner:
        yield source.at(node, ast.unparse(node))


def tuple_assignments(source: Source) -> Iterator[str]:
    """Find assignments such as ``self.a, self.b = a, b``.

    An attribute is among the targets, and the value is a tuple.
    """
    for node in source.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            tuples = [target for target in node.targets if isinstance(target, ast.Tuple)]
            if any(isinstance(part, ast.Attribute) for target in tuples for part in target.elts):
                yield source.at(node, ast.unparse(node))


def graph_type_tests(source: Source) -> Iterator[str]:
    if source.path.startswith("cuda_graphs/"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            call = ast.unparse(node)
            if re.search(r"\b(FullIterationGraphs|LayerGraphs)\b", call):
                yield source.at(node, call)


def private_torch(source: Source) -> Iterator[str]:
    """Find ``torch._x``, ``torch.distributed._x`` and imports of such names, also under an alias.

    A chain of attributes, for example ``torch._C._x``, counts once. Private attributes of tensors
    do not count.
    """
    names: dict[str, str] = {}
    for node in source.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                full = prefix + alias.name
                first = alias.name.split(".")[0]
                names[alias.asname or first] = full if prefix or alias.asname else first
                if is_private_torch(full):
                    yield source.at(node, full)
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            base = dotted(node.value, names)
            full = f"{base}.{node.attr}"
            if is_private_torch(full) and not is_private_torch(base):
                yield source.at(node, full)


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """Return the full name of a chain of attributes, or "" if the chain begins with no import."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def is_private_torch(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "torch" and any(re.match(r"_(?!_)", part) for part in rest)


def question_docstrings(source: Source) -> Iterator[str]:
    """Find docstrings of modules, classes and functions that begin with a word of `OPENING`."""
    for node in source.nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, *DEFINITIONS)):
            text = ast.get_docstring(node)
            if text and OPENING.match(text):
                yield source.at(node.body[0], text.splitlines()[0])


def question_attributes(source: Source) -> Iterator[str]:
    """Find attribute docstrings that begin with a word of `OPENING`."""
    for node in source.nodes:
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for before, after in zip(node.body, node.body[1:]):
                if isinstance(before, (ast.Assign, ast.AnnAssign)) and isinstance(after, ast.Expr):
                    text = getattr(after.value, "value", None)
                    if isinstance(text, str) and OPENING.match(text):
                        yield source.at(after, text.splitlines()[0])


def all_figures() -> dict[str, Figure]:
    """Return the figures of a traced step and of the source, by name."""
    tracer = traced_step.trace(PACKAGE)
    sources = read_sources(PACKAGE)
    options = fact_places.files_of_options(PACKAGE)
    return {
        "frames_from_model_to_attention": Figure.count(tracer.road),
        "switches_of_one_step": Figure.count(tracer.switches),
        "files_that_name_a_kind": Figure.count(fact_places.files_of_a_kind(PACKAGE)),
        "comparisons_of_symbols": Figure.count(find(sources, fact_places.comparisons_of_symbols)),
        "files_that_name_an_option": Figure(
            fact_places.files_per_option(options),
            [f"{option} {len(files)}: {', '.join(files)}" for option, files in options.items()],
        ),
        "places_that_derive_shapes": Figure.count(fact_places.places_of_shapes(PACKAGE)),
        **source_figures(sources),
        **{
            f"tokens: {folder}": Figure(tokens, [])
            for folder, tokens in fact_places.tokens_by_folder(sources).items()
        },
        **{name: Figure(tokens, []) for name, tokens in tokens_outside(ROOT).items()},
        **{name: Figure(tokens, []) for name, tokens in tokens_of_capabilities(ROOT).items()},
    }


CAPABILITIES = (
    *("explain/*.py", "cli/doctor/*.py", "reporting/run_facts.py", "reporting/console.py"),
    # The same parts before folders had rooms.
    *("training/explain*.py", "training/kernels.py", "training/run_description.py"),
    *("training/run_facts.py", "training/console.py", "training/closing_lines.py"),
    "training/sample_text.py",
)
"""Files that say what a run or a machine has and why: rows, kernels, facts and lines of the console."""
REQUESTS = ("op_requests.py", "state_messages.py")
"""Files of ``explain`` that trace a model; estimates and plans need them, too."""


def tokens_of_capabilities(checkout: Path) -> dict[str, int]:
    """Return the tokens of the files of `CAPABILITIES`, in this or an earlier checkout."""
    package = checkout / "megatron_packed"
    paths = {path for pattern in CAPABILITIES for path in package.glob(pattern)}
    sources = [read_source(path, package) for path in paths if path.name not in REQUESTS]
    return {"tokens: capabilities and kernels": sum(source.tokens for source in sources)}


LONG_CHECKS = ("tools", "tests/soak", "tests/unit/tools")
"""Folders of long checks, today and before, and of the tests that run a few cases of them."""


def tokens_outside(checkout: Path) -> dict[str, int]:
    """Return the tokens of tests, of long checks and of benchmarks, which share no file."""
    counts = dict.fromkeys(("tests", "tools", "benchmarks"), 0)
    for folder in counts:
        for source in read_sources(checkout / folder):
            path = f"{folder}/{source.path}"
            counts["tools" if path.startswith(LONG_CHECKS) else folder] += source.tokens
    return {f"tokens: {name}": count for name, count in counts.items()}


def save_before(figures: dict[str, Figure]) -> None:
    """Write the figures and the package's last commit to ``structure_before.json``."""
    git = ["git", "-C", str(ROOT)]
    where = ["--", str(PACKAGE)]
    if subprocess.check_output([*git, "status", "--porcelain", *where]):
        sys.exit("megatron_packed/ differs from its last commit; commit it before --save-before.")
    commit = subprocess.check_output([*git, "log", "-1", "--format=%H", *where], text=True).strip()
    values = {name: figure.value for name, figure in figures.items()}
    BEFORE.write_text(json.dumps({"commit": commit, "figures": values}, indent=2) + "\n")


def print_table(figures: dict[str, Figure]) -> None:
    before = json.loads(BEFORE.read_text())
    commit = before["commit"][:10]
    print(f"{'':56}{'before':>10}{'now':>10}   (before: commit {commit}; torchtitan; OLMo-core)")
    for name, figure in figures.items():
        others = fact_places.FOLDERS.get(name.removeprefix("tokens: "), ())
        print(
            f"{name:56}{before['figures'].get(name, '-'):>10}{figure.value:>10}",
            *others,
            sep="   ",
        )
    print("\nprivate torch references by file:")
    print(*(f"  {line}" for line in figures["private_torch_files"].found), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print figures of the package's structure.")
    parser.add_argument(
        "--save-before", action="store_true", help="store the figures as the ones of before"
    )
    parser.add_argument("--list", metavar="FIGURE", help="print the places that this figure counts")
    parser.add_argument("--sizes", metavar="CHECKOUT", type=Path, help="print sizes of a checkout")
    args = parser.parse_args()
    if args.sizes:
        print(
            *(f"{name:40}{tokens:>10}" for name, tokens in tokens_outside(args.sizes).items()),
            *(f"{name:40}{n:>10}" for name, n in tokens_of_capabilities(args.sizes).items()),
            sep="\n",
        )
        return
    sys.path.insert(0, str(ROOT))
    figures = all_figures()
    if args.list is not None:
        if args.list not in figures:
            parser.error(f"--list {args.list}: no such figure; choose one of {', '.join(figures)}.")
        print(*figures[args.list].found, sep="\n")
        return
    if args.save_before:
        save_before(figures)
    print_table(figures)


if __name__ == "__main__":
    main()
