"""Generator of docs/megatron_lines.md: outcomes of Megatron-LM's public training command lines.

    python docs/megatron_lines.py --megatron REPOSITORY --bridge REPOSITORY
    python docs/megatron_lines.py [--check]

The first command reads git repositories of Megatron-LM and Megatron-Bridge, bare or with files, and
writes docs/published/megatron_lines.json. Both commands write the page from that file. ``--check``
writes nothing and fails if the page differs from the generated page.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent))

from coming_from_megatron import NAMES, markdown
from published_lines import PublishedLine, recipe_lines, script_lines, test_cases

from megatron_packed.cli.megatron_outcomes import (
    FlagOutcome,
    LineOutcome,
    line_outcome,
    split_of,
)
from megatron_packed.config.megatron.gpt_layers import gpt_pattern
from megatron_packed.config.parser.command_line import spellings

PAGE = Path(__file__).parent / "megatron_lines.md"
RESULT = Path(__file__).parent / "published" / "megatron_lines.json"
FOLDERS = {
    "Megatron-LM": ("tests/functional_tests/test_cases", "examples"),
    "Megatron-Bridge": ("src/megatron/bridge/recipes",),
}
MOST_SHOWN = 40
"""Number of refused flags that the page lists."""
PATTERN = "--hybrid-layer-pattern"


class Need(NamedTuple):
    """Feature of Megatron-LM that this project does not have."""

    name: str
    flags: str
    """Pattern of the flags that request the feature."""
    values: str = ""
    """Pattern of the values that request it; any value when empty."""


NEEDS = (
    Need(
        "other kinds of multi-token prediction",
        "--(mtp-(detach-heads|hsm|standalone)|freeze-base-for-mtp)",
    ),
    Need(
        "pipelines", "--(pipeline-model|virtual-pipeline|num-layers-per-virtual).*", "[2-9]|1[0-9]"
    ),
    Need("FP8 or FP4", "--fp[48](-format)?"),
    Need("distillation", "--export-kd-.*"),
    Need("elastic width", "--flextron"),
    Need("other attention kinds", "--multi-latent-attention|--experimental-attention-variant"),
    Need("Megatron-FSDP", "--use-megatron-fsdp|--use-torch-fsdp2|--use-custom-fsdp"),
)


def collect(megatron: Path, bridge: Path) -> dict[str, Any]:
    """Return the outcomes of all lines of the two repositories."""
    sources = {"Megatron-LM": megatron, "Megatron-Bridge": bridge}
    with tempfile.TemporaryDirectory() as folder:
        roots = {name: Path(folder) / name for name in sources}
        for name, repository in sources.items():
            packed = _git(repository, "archive", "HEAD", *FOLDERS[name])
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(roots[name], filter="data")
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        lines = [
            *test_cases(roots["Megatron-LM"]),
            *script_lines(roots["Megatron-LM"], scratch),
            *recipe_lines(roots["Megatron-Bridge"], frozenset(NAMES)),
        ]
    commits = {
        name: _git(path, "rev-parse", "HEAD").decode().strip() for name, path in sources.items()
    }
    return {"commits": commits, "lines": [record(line) for line in lines]}


def _git(repository: Path, *words: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(repository), *words], capture_output=True, check=True
    ).stdout


def record(line: PublishedLine) -> dict[str, Any]:
    """Return the outcome of a line as data. Flags that replace the script's data are not counted."""
    more = [*line.added, *split_of([*line.words, *line.added])]
    outcome = line_outcome([*with_pattern(line.words), *more])
    added = sum(word.startswith("--") for word in more)
    added += PATTERN in with_pattern(line.words) and not _hybrid(line)
    uses = outcome.uses[: len(outcome.uses) - added]
    accepted = [use for use in uses if use.outcome is FlagOutcome.ACCEPTED]
    return {
        "group": line.group,
        "name": line.name,
        "hybrid": _hybrid(line),
        "uses": len(uses),
        "without_effect": len(accepted),
        "refused": [" ".join([use.flag, *use.texts])[:60] for use in outcome.refused],
        "unknown": sum(not use.known for use in uses),
        "missing": [problem.option for problem in outcome.missing],
        "needs": list(needs(outcome)),
    }


def _hybrid(line: PublishedLine) -> bool:
    return any(_is_pattern(word) for word in line.words)


def _is_pattern(word: str) -> bool:
    return word in spellings() and spellings()[word].field.flag == PATTERN


def with_pattern(words: tuple[str, ...]) -> list[str]:
    """Return the words with a layer pattern: ``*-`` or ``*E`` for each of a GPT model's layers."""
    if any(map(_is_pattern, words)) or "--num-layers" not in words:
        return list(words)
    at = words.index("--num-layers") + 1
    layers = int(words[at])
    pattern = gpt_pattern(layers, experts="--num-experts" in words)
    return [*words[:at], str(len(pattern)), *words[at + 1 :], PATTERN, pattern]


def needs(outcome: LineOutcome) -> Iterator[str]:
    """Yield the features that a line needs and this project does not have."""
    refused = {use.flag: " ".join(use.texts) for use in outcome.refused}
    for need in NEEDS:
        matching = (value for flag, value in refused.items() if re.fullmatch(need.flags, flag))
        if any(re.search(need.values, value) for value in matching):
            yield need.name


def page(result: Mapping[str, Any]) -> str:
    """Return the page for the outcomes in the result file."""
    lines = result["lines"]
    hybrid = [line for line in lines if line["hybrid"]]
    possible = [line for line in hybrid if not line["needs"]]
    commits = " and ".join(f"{name} at {commit[:12]}" for name, commit in result["commits"].items())
    groups: dict[str, list[Any]] = {"hybrid lines": hybrid, "all training lines": lines}
    for line in lines:
        groups.setdefault(line["group"], []).append(line)
    return "\n\n".join(
        [
            "<!-- Written by docs/megatron_lines.py. -->",
            "# Training command lines of Megatron",
            f"These are the training command lines in the public repositories of {commits}. The lines "
            "are functional tests, example scripts, and recipes of Megatron-Bridge. The data of a "
            "script is replaced by a small file.",
            "A use is one flag on one line. A use counts as accepted if this project takes the flag "
            "with its value. GPT models get the layer pattern of Megatron-LM's migration guide, `*-` "
            "or `*E` for each layer. The recipes named `peft` train adapters (LoRA). Their settings of "
            "Megatron-Bridge become flags `--lora-*`, and `--transformer-impl` becomes `local`, because the "
            "layers of TransformerEngine have no adapters in this project.",
            f"This project takes {_taken(hybrid)} of {len(hybrid)} hybrid lines as they are. "
            f"{len(possible)} need no feature that this project does not have, and {_taken(possible)} "
            "of these are taken.",
            markdown(
                ("lines", "number", "taken as they are", "flag uses", "accepted", "unknown"),
                (_row(name, group) for name, group in groups.items()),
            ),
            "## Hybrid lines",
            markdown(
                ("line", "flag uses", "of them without effect", "outcome", "refused"),
                (_line_row(line) for line in hybrid),
            ),
            "A `--min-lr` above `--lr` fails in megatron-core too. Variables such as `${DATA_PATH}` "
            "are values of Megatron's test runner. Options that a line does not give have the "
            "defaults of this project: no dropout, and no learned positions "
            "([Different](coming_from_megatron.md#different)).",
            "## Refused flags",
            f"The {MOST_SHOWN} most frequent refused flags of all training lines:",
            markdown(("flag", "hybrid lines", "all lines"), refused_flags(hybrid, lines)),
        ]
    )


def _taken(lines: Iterable[Mapping[str, Any]]) -> int:
    return sum(not line["refused"] and not line["missing"] for line in lines)


def _row(name: str, lines: list[Any]) -> tuple[str, ...]:
    uses, unknown = (sum(line[key] for line in lines) for key in ("uses", "unknown"))
    refused = sum(len(line["refused"]) for line in lines)
    share = f"{100 * (uses - refused) / uses:.1f} %"
    return (name, str(len(lines)), str(_taken(lines)), f"{uses:,}", share, str(unknown))


def _line_row(line: Mapping[str, Any]) -> tuple[str, ...]:
    refused = [f"`{text}`" for text in line["refused"]]
    refused += [f"{flag} is missing" for flag in line["missing"]]
    outcome = "refused" if refused else "taken"
    if line["needs"]:
        outcome = f"needs {', '.join(line['needs'])}"
    name = f"{line['group']}: {line['name']}"
    return (name, str(line["uses"]), str(line["without_effect"]), outcome, ", ".join(refused))


def refused_flags(hybrid: list[Any], lines: list[Any]) -> list[tuple[str, ...]]:
    """Return rows of the refused flags and their numbers of lines."""
    of_hybrid, of_all = (
        Counter(text.split()[0] for line in some for text in line["refused"])
        for some in (hybrid, lines)
    )
    order = sorted(of_all, key=lambda flag: (-of_all[flag], flag))
    return [(f"`{flag}`", str(of_hybrid[flag]), str(of_all[flag])) for flag in order[:MOST_SHOWN]]


def as_text(result: Mapping[str, Any]) -> str:
    """Return the result as JSON with one row for each line, so that a difference is readable."""
    rows = ",\n".join(json.dumps(line) for line in result["lines"])
    return f'{{"commits": {json.dumps(result["commits"])},\n"lines": [\n{rows}\n]}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", type=Path, help="git repository of Megatron-LM")
    parser.add_argument("--bridge", type=Path, help="git repository of Megatron-Bridge")
    parser.add_argument("--check", action="store_true", help="compare the page, and write nothing")
    arguments = parser.parse_args()
    if (arguments.megatron is None) != (arguments.bridge is None):
        parser.error("--megatron and --bridge belong together")
    if arguments.megatron is not None:
        result = collect(arguments.megatron, arguments.bridge)
        RESULT.write_text(as_text(result))
    text = page(json.loads(RESULT.read_text())) + "\n"
    if arguments.check:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
