"""Counts of the places that know one fact: a kind of layer, an option, the shapes of a rank.

`structure.py` prints them. No test bounds them: the fewer places know a fact, the less a new kind, a
new option or a new layout costs.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structure import Source

KIND = re.compile(
    r'GATED_DELTA_NET|gated_delta|GatedDelta|linear_num_|linear_key_head|delta_rule|"gdn"'
)
"""Names of the gated delta net, which stands for all kinds of layers."""
OF_THE_KIND = ("ops/gated_delta_rule/", "models/convert/families/")
"""Folders in which a kind may have its names."""
OPTIONS = (
    "split_order",
    "answer_end",
    "loss_spike_policy",
    "moe_router_group_topk",
    "profile_ranks",
    "require_fast_kernels",
    "use_checkpoint_args",
    "mamba_cp_comm_type",
)
"""Options that were added one by one, each by its own commit."""
SYMBOLS = {"MAMBA", "ATTENTION", "MLP", "MOE", "GATED_DELTA_NET"}
"""Constants of the symbols of kinds."""
LETTERS = {"M", "*", "-", "E", "G"}
PATTERN_WORDS = re.compile(r"symbol|pattern|layer_types|kind")
"""Names whose comparison with a letter is one with the symbol of a kind."""
SIZES = re.compile(
    r"tensor_model_parallel_size|context_parallel_size|expert_(model|tensor)_parallel_size"
    r"|\b(tp|cp|ep)\.size\b|(//|/|%) (tp|cp|ep|split)\b"
)
"""Expressions that derive the shapes of a rank."""
ELSEWHERE = ("layers/", "distributed/", "config/megatron/")
"""Folders that have to know the sizes of the layout."""
FOLDERS = {
    "ops": ("0.3k, 14.7k overrides", "4.8k"),
    "training, resume, inputs, explain, launch, reporting": ("19.5k", "56.6k"),
    "training": ("15.3k", "39.5k"),
    "resume": (),
    "inputs": (),
    "explain": (),
    "launch": (),
    "data": ("5.3k", "51.3k"),
    "config": ("4.2k", "2.9k"),
    "files": (),
    "models": ("22k, 8 families", "81k"),
    "layers": ("in models", "in models"),
    "distributed": ("15.4k, 10k back ends of EP", "7.3k"),
    "cli": ("0", "6.2k"),
    "checkpoint": ("4.9k", "5.7k"),
    "cuda_graphs": ("1.8k", "0"),
    "reporting": ("4.2k", "17.1k"),
    "memory, optim, packed": ("3.8k", "12.3k"),
}
"""Folders, with the tokens of torchtitan (b5bcd76) and of OLMo-core (fa6c501) on the same subject."""


def files_of_a_kind(package: Path) -> list[str]:
    """Return the files of all types, outside of the kind's own folders, that name the kind."""
    found = []
    for path in _tracked_files(package):
        name = path.relative_to(package).as_posix()
        if not name.startswith(OF_THE_KIND) and KIND.search(_text(path)):
            found.append(name)
    return found


def files_of_options(package: Path) -> dict[str, list[str]]:
    """Return for each option of `OPTIONS` the files that name its field or its flag."""
    texts = {path.relative_to(package).as_posix(): _text(path) for path in _tracked_files(package)}
    return {
        option: [
            name
            for name, text in texts.items()
            if re.search(rf"\b{option}\b|--{option.replace('_', '-')}\b", text)
        ]
        for option in OPTIONS
    }


def files_per_option(found: dict[str, list[str]]) -> float:
    """Return the median number of files."""
    return float(median(map(len, found.values())))


def comparisons_of_symbols(source: Source) -> Iterator[str]:
    """Find comparisons, memberships and keys of tables that use the symbol of a kind.

    `models/convert` and the table of symbols itself have to know them.
    """
    if source.path.startswith("models/convert/") or source.path == "config/layer_pattern.py":
        return
    for node in source.nodes:
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if any(map(_is_symbol, operands)) or _compares_a_letter(operands):
                yield source.at(node, ast.unparse(node))
        elif isinstance(node, ast.Dict):
            for key in node.keys:
                if key is not None and _is_symbol(key):
                    yield source.at(key, ast.unparse(key))


def _is_symbol(node: ast.expr) -> bool:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(map(_is_symbol, node.elts))
    name = getattr(node, "id", None) or getattr(node, "attr", None)
    return name in SYMBOLS


def _compares_a_letter(operands: list[ast.expr]) -> bool:
    letters = [x for x in operands if isinstance(x, ast.Constant) and x.value in LETTERS]
    others = [x for x in operands if not isinstance(x, ast.Constant)]
    return bool(letters) and any(PATTERN_WORDS.search(ast.unparse(x)) for x in others)


def places_of_shapes(package: Path) -> list[str]:
    """Return the lines that derive the shapes of a rank from the sizes of the layout."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name.startswith(ELSEWHERE):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if SIZES.search(line):
                found.append(f"{name}:{number} {line.strip()}")
    return found


def tokens_by_folder(sources: list[Source]) -> dict[str, int]:
    """Return the tokens of each entry of `FOLDERS`, and of the whole package."""
    by_folder = {
        names: sum(
            source.tokens for source in sources if source.path.split("/")[0] in names.split(", ")
        )
        for names in FOLDERS
    }
    return by_folder | {"all": sum(source.tokens for source in sources)}


def _tracked_files(package: Path) -> list[Path]:
    """Return the files that belong to the repository, or all if there is none."""
    listed = subprocess.run(
        ["git", "-C", str(package), "ls-files", "-z"], capture_output=True, text=True
    )
    names = listed.stdout.split("\0")[:-1]
    paths = [package / name for name in names] or list(package.rglob("*"))
    return sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


def _text(path: Path) -> str:
    return path.read_text(errors="replace")
