"""Check the language of all that the repository says, and draw samples of it for readers.

``python tests/language.py [PATH ...]`` prints every sentence that breaks a rule, and counts;
``--draw KIND --seed N`` prints random passages of a kind; ``--words`` counts the words of guides.
``tests/unit/test_language.py`` holds the rules. They are: a docstring begins as its kind requires,
no banned word, no sentence of more than 30 words, no statement that begins like a question.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 30
CODE = (
    "megatron_packed/",
    "benchmarks/",
    "te_patches/",
    "examples/",
    "docs/",
    "pretrain_hybrid.py",
)
"""Python whose functions' docstrings begin with a verb, and whose strings are read by users."""
GENERATED = (
    "docs/coming_from_megatron.md",
    "docs/coming_from_trainers.md",
    "docs/megatron_lines.md",
    "docs/support_matrix.md",
    "docs/measurements/",
)
"""Pages that scripts write: their language is checked, their words are not those of guides."""

QUESTION_WORDS = "What Whether Where Of Who Whoever How Which Why"
VERBS = """
Abort Accept Add Adopt Advance Aggregate Align All-gather All-reduce Allocate Allow Answer Append
Apply Arm Ask Assert Assign Attach Attend Attribute Average Await Back Balance Begin Bind Block
Bound Broadcast Build Cache Calculate Call Cancel Capture Carry Cast Check Choose Claim Clamp Clean
Clear Clip Close Collapse Collect Combine Compare Compile Compose Compress Compute Concatenate
Configure Connect Consume Continue Convert Convolve Copy Correct Count Cover Create Cut Deal Decide
Decode Decrease Deduplicate Defer Delete Deliver Derive Describe Destroy Detach Detect Determine
Disable Discard Dispatch Distribute Divide Do Double Download Draw Drop Dump Emit Empty Enable
Encode End Ensure Enter Enumerate Escape Estimate Evaluate Examine Exchange Exclude Execute Exercise Exit
Expand Explain Export Extend Extract Fail Fetch Fill Filter Find Finish Fit Fix Flatten Flush Fold
Follow Forbid Force Forget Fork Format Forward Free Freeze Fuse Gate Gather Generate Get Give Group
Grow Guard Guess Handle Hash Hide Hold Identify Ignore Implement Import Include Increase Infer
Initialise Initialize Insert Inspect Install Interpolate Interrupt Invoke Iterate Join Keep Kill
Label Launch Lay Leave Let Limit Link List Load Locate Lock Log Look Lower Make Map Mark Mask Match
Mean Measure Merge Mirror Mix Modify Monitor Move Multiply Name Normalise Normalize Note Notify
Number Offload Offset Open Optimise Order Overlap Overwrite Pack Pad Parse Partition Pass Patch
Pause Perform Permute Pick Pin Place Plan Plot Point Poll Pool Pop Populate Prefetch Prefix Prepare
Preprocess Prevent Print Probe Process Produce Profile Project Prompt Propagate Prove Provide Prune
Pull Push Put Query Queue Quote Raise Read Rebuild Recapture Receive Recompute Reconstruct Record
Reduce Refer Refill Refine Refresh Refuse Register Reject Release Reload Remember Remove Rename
Render Reorder Repeat Replace Replay Report Represent Request Require Rescale Reserve Reset Reshape
Resolve Restart Restore Restrict Resume Retain Retry Return Reuse Revert Rewrite Rotate Round Route
Run Sample Save Say Scale Scan Scatter Schedule Score Search See Select Send Separate Serialise
Serve Set Shard Share Shift Shorten Show Shrink Shuffle Shut Sign Simulate Skip Slice Solve Sort
Spawn Split Spread Stack Stage Start Step Stop Store Stream Strip Submit Substitute Subtract Sum
Summarise Suppress Surround Swap Switch Synchronise Synchronize Tabulate Take Tally Test Throw Tie
Time Tokenise Tokenize Toggle Total Trace Track Train Transform Translate Transpose Traverse Treat
Suspend Seed Reduce-scatter Adjust Sync
Trim Truncate Try Tune Turn Undo Unflatten Unify Unpack Unpermute Unpin Update Upload Use Validate
Verify View Visit Wait Wake Walk Warm Warn Watch Weigh Wrap Write Yield Zero
"""

BANNED = {
    "behind": "time is after, a place is below or next to",
    "nobody": "name the caller or the kernel, or say 'no ...'",
    "somebody": "name the caller or the kernel",
    "whoever": "name the caller or the kernel",
    "told": "reported, passed, given",
    "asked": "requested",
    "lend": "allocate from",
    "lends": "allocates from",
    "lent": "allocated from",
    "gives up": "frees, stops",
    "lies": "is at, is in",
    "anew": "again",
    "alike": "the same, identically, both",
    "mended": "fixed, repaired",
    "so many": "name the number",
    "so much": "name the amount",
    "one that": "name the thing",
    "those of whom": "name the things",
    "wants": "needs, requires",
    "thereby": "say what causes what",
    "thereof": "name the thing",
    "hence": "so",
    "forthwith": "at once",
    "likewise": "too, also",
    "rung": "capture size",
    "whereabouts": "say which file or line",
    "surroundings": "environment",
}
"""Words and phrases that no text of the project uses, with their replacement."""
BANNED_PATTERN = re.compile(r"(?<![\w-])(" + "|".join(BANNED) + r")(?![\w-])", re.IGNORECASE)

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""Passages that may stay: ``(path, text that the passage contains)`` -> reason."""

SKIPPED_FILES = ("tests/language.py", "tests/unit/test_language.py", "LICENSE")
"""This rule book, which quotes what it bans, and its test."""


class Passage(NamedTuple):
    """One docstring, comment, message or paragraph of a page."""

    path: str
    line: int
    kind: str
    """``function``, ``test``, ``property``, ``class``, ``module`` or ``attribute`` (docstrings),
    ``comment``, ``message``, ``guide``, ``heading`` or ``name`` (of a test)."""
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


KINDS = {
    "docstrings": ("function", "test", "property", "class", "module", "attribute"),
    "comments": ("comment",),
    "messages": ("message",),
    "guides": ("guide",),
}
DOCSTRINGS = KINDS["docstrings"]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STRING_OR_COMMENT = re.compile(
    r'''""".*?(?<!\\)(?:\\\\)*"""|\'\'\'.*?(?<!\\)(?:\\\\)*\'\'\''''
    r"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|\#[^\n]*""",
    re.DOTALL,
)
"""A string or a comment of Python code. The module `tokenize` takes ten times as long."""
DIRECTIVE = re.compile(r"#\s*(!|fmt:|noqa|ruff:|type:|mypy:|pragma|shellcheck|SBATCH|-\*-)")


def passages(paths: Iterable[str]) -> Iterator[Passage]:
    """Yield all passages of files, whose paths are relative to the repository."""
    for path in paths:
        text = (ROOT / path).read_text(errors="replace")
        if path.endswith(".py"):
            yield from python_passages(path, text)
        elif path.endswith(".md"):
            yield from page_passages(path, text)
        elif path.endswith(".json") and path.startswith("megatron_packed/config/"):
            yield from row_passages(path, text)
        elif path.endswith((".sh", ".sbatch", ".yml", ".yaml", ".cfg", ".toml", ".args")):
            yield from comment_blocks(path, enumerate(text.splitlines(), 1))


def repository_files(under: Iterable[str] = ()) -> list[str]:
    """Return the files that say something, below the given paths if there are any."""
    return [name for name in listed_files(under) if name not in SKIPPED_FILES]


def listed_files(under: Iterable[str] = ()) -> list[str]:
    """Return the tracked and new files; in an unpacked source archive, all files."""
    if not (ROOT / ".git").exists():
        folders = [ROOT / name for name in under] or [ROOT]
        paths = sorted(path for folder in folders for path in [folder, *folder.rglob("*")])
        own = [path.relative_to(ROOT) for path in paths if path.is_file()]
        made = ("__pycache__", ".venv", "build")
        return [path.as_posix() for path in own if not {*made} & {*path.parts}]
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output([*command, "--", *under], text=True).split("\n")
    return [name for name in names if name and (ROOT / name).is_file()]


def python_passages(path: str, text: str) -> Iterator[Passage]:
    nodes = list(ast.walk(ast.parse(text)))
    documented = dict(docstrings(path, nodes))
    yield from documented.values()
    if path.startswith(CODE):
        yield from messages(path, nodes, documented)
    yield from names_of_tests(path, nodes)
    yield from comment_blocks(path, comments(text))


def names_of_tests(path: str, nodes: list[ast.AST]) -> Iterator[Passage]:
    """Yield the names of test functions, in words."""
    for node in nodes:
        if isinstance(node, DEFINITIONS) and node.name.startswith("test_"):
            yield Passage(path, node.lineno, "name", node.name.replace("_", " "))


def row_passages(path: str, text: str) -> Iterator[Passage]:
    """Yield the sentences in a data file of the package, which messages contain."""
    for number, line in enumerate(text.splitlines(), 1):
        for value in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
            if len(re.findall(r"[A-Za-z]{2,}", value)) >= 3 and " " in value:
                yield Passage(path, number, "message", value)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each comment of Python code."""
    line = end = 0
    for match in STRING_OR_COMMENT.finditer(text):
        if match.group().startswith("#"):
            line += text.count("\n", end, match.start())
            end = match.start()
            yield line + 1, match.group()


def docstrings(path: str, nodes: list[ast.AST]) -> Iterator[tuple[ast.AST, Passage]]:
    """Yield the constant of each docstring, of attributes too, and its passage."""
    for node in nodes:
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body):
            constant = (
                getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
            )
            if not (isinstance(constant, ast.Constant) and isinstance(constant.value, str)):
                continue
            kind = "attribute" if before is not None else docstring_kind(path, node)
            yield constant, Passage(path, statement.lineno, kind, constant.value)


def docstring_kind(path: str, node: ast.AST) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    if not isinstance(node, DEFINITIONS):
        return "attribute"
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        return "property"
    return "test" if path.startswith(("tests/", "tools/")) else "function"


def messages(
    path: str, nodes: list[ast.AST], documented: dict[ast.AST, Passage]
) -> Iterator[Passage]:
    """Yield strings of at least three words; a value that is put into one counts as a word."""
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if node in documented or node in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(getattr(part, "value", "X")) if isinstance(part, ast.Constant) else "X"
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and " " in text and not is_code(text):
            yield Passage(path, node.lineno, "message", text)


def is_code(text: str) -> bool:
    """Return whether a string is a program, markup or a pattern, which no user reads as a sentence."""
    return (
        re.search(
            r"^\s*(import|from|def|class|return|if) |[{};]\s*\n|</?\w+[ >]|\\[sbdw]|\(\?",
            text,
            re.M,
        )
        is not None
    )


def comment_blocks(path: str, lines: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    """Join comments on consecutive lines into one passage."""
    block: list[str] = []
    first = last = 0
    for number, line in lines:
        match = re.search(r"(?:^|\s)#(?!!)\s?(.*)", line)
        words = match.group(1) if match and not DIRECTIVE.match(line.strip()) else None
        if block and (words is None or number != last + 1):
            yield Passage(path, first, "comment", "\n".join(block))
            block = []
        if words is not None:
            first = first if block else number
            block.append(words)
            last = number
    if block:
        yield Passage(path, first, "comment", "\n".join(block))


def page_passages(path: str, text: str) -> Iterator[Passage]:
    """Yield headings, paragraphs, list entries and table cells of a page, without its code."""
    block: list[str] = []
    first = 0
    fenced = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.strip().startswith("```")
        plain = not fenced and not fence
        starts = re.match(r"\s*([-*]|\d+\.|>|!!!|\?\?\?) |\s*[#|<]|\s*$", line)
        if block and (not plain or starts):
            yield Passage(path, first, "guide", "\n".join(block))
            block = []
        fenced ^= fence
        if not plain or not line.strip() or line.strip().startswith("<!--"):
            continue
        if line.startswith("#"):
            yield Passage(path, number, "heading", line.lstrip("# "))
        elif line.strip().startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                if re.search(r"[A-Za-z]", cell):
                    yield Passage(path, number, "guide", cell.strip())
        else:
            first = first if block else number
            block.append(re.sub(r"^\s*([-*>]|\d+\.) ", "", line))


def sentences(text: str) -> list[str]:
    """Split a passage into sentences; code, links and lists of code become one word.

    Blank lines, list entries, ``name:`` entries of a docstring and literal blocks end a sentence.
    """
    text = re.sub(r"```.*?```|^\s*\|.*$", "\n\n", text, flags=re.S | re.M)
    text = re.sub(r"``.+?``|`[^`]+`|\{\{.+?\}\}", "CODE", text, flags=re.S)
    text = re.sub(r"CODE(,\s+CODE)+", "CODE", text)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "LINK", text)
    text = re.sub(r"\b(e\.g|i\.e|etc|vs|cf|approx|Fig|No|incl)\.", r"\1", text)
    found = []
    for block in re.split(r"\n\s*\n|\n\s*[-*] |\n\s*(?=[\w.`*, ]{1,40}: )|::\s*\n", text):
        found += re.split(
            r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_]*[A-Z0-9`-])", " ".join(block.split())
        )
    return [sentence for sentence in found if sentence]


def words(sentence: str) -> int:
    """Count the words of a sentence: what has a letter or digit between spaces."""
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def faults(passage: Passage) -> Iterator[tuple[str, str]]:
    """Yield ``(rule, what breaks it)`` for a passage."""
    yield from opening_faults(passage)
    prose = re.sub(r"``.+?``|`[^`]+`|https?://\S+|\]\([^)]*\)", "CODE", passage.text, flags=re.S)
    for match in BANNED_PATTERN.finditer(" ".join(prose.split())):
        yield "banned", f"'{match.group()}': {BANNED[match.group().lower()]}"
    if passage.kind in ("heading", "name"):
        return
    for sentence in sentences(passage.text):
        if words(sentence) > MOST_WORDS:
            yield "long", f"{words(sentence)} words: {sentence}"
        if re.match(rf"({'|'.join(QUESTION_WORDS.split())})\b(?!.*\?)", sentence) and (
            passage.kind not in DOCSTRINGS or not passage.text.lstrip().startswith(sentence[:20])
        ):
            yield "question", sentence


def opening_faults(passage: Passage) -> Iterator[tuple[str, str]]:
    if passage.kind not in DOCSTRINGS or not passage.text.strip():
        return
    line = passage.text.strip().splitlines()[0]
    first = line.split()[0].rstrip(".,:;")
    if first in QUESTION_WORDS.split():
        yield "opening", line
    elif passage.kind == "function" and first not in VERBS.split():
        yield "verb", line


def excepted(passage: Passage) -> bool:
    flat = " ".join(passage.text.split())
    return any(passage.path == path and part in flat for path, part in EXCEPTIONS)


def all_faults(paths: Iterable[str]) -> Iterator[tuple[Passage, str, str]]:
    for passage in passages(paths):
        if not excepted(passage):
            for rule, fault in faults(passage):
                yield passage, rule, fault


def is_guide(path: str) -> bool:
    return path.startswith("docs/") and path.endswith(".md") and not path.startswith(GENERATED)


def word_counts() -> dict[str, int]:
    """Return the words of each guide, without code blocks and the bars of tables."""
    texts = {path: (ROOT / path).read_text() for path in repository_files() if is_guide(path)}
    return {path: words(re.sub(r"```.*?```", "", texts[path], flags=re.S)) for path in texts}


def draw(everything: Iterable[Passage], kind: str, seed: int, count: int) -> list[Passage]:
    """Draw passages of one kind at random, without those of fewer than four words."""
    found = sorted(p for p in everything if p.kind in KINDS[kind] and words(p.text) > 3)
    return random.Random(seed).sample(found, min(count, len(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the language of the repository.")
    parser.add_argument("paths", nargs="*", help="files and folders; all without any")
    parser.add_argument("--draw", choices=KINDS, help="print random passages of this kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--words", action="store_true", help="count the words of the guides")
    args = parser.parse_args()
    if args.draw:
        everything = passages(repository_files(args.paths))
        for passage in draw(everything, args.draw, args.seed, args.count):
            print(f"--- {passage} ({passage.kind})\n{passage.text.strip()}")
        return
    if args.words:
        counts = word_counts()
        print(*(f"{count:7} {path}" for path, count in counts.items()), sep="\n")
        print(f"{sum(counts.values()):7} in all")
        return
    rules: Counter[str] = Counter()
    for passage, rule, fault in all_faults(repository_files(args.paths)):
        rules[rule] += 1
        print(f"{passage} {passage.kind} {rule}: {fault}")
    print(dict(rules) or "no faults")


if __name__ == "__main__":
    main()
