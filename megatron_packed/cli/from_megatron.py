"""Print the command line of this project for a file of Megatron-LM, and the outcome of each flag.

  megatron-packed from-megatron model_config.yaml > run.sh
  megatron-packed from-megatron train.sh > run.sh

The file is a model_config.yaml of Megatron-LM's functional tests, or a shell script of assignments
and one torchrun command. The output is a shell script: the command, with the outcomes as comments.
A flag is the same, accepted (the trained model is the same without it), different, open (its value
is a variable that is not set) or refused. Refused flags are left out of the command, and the exit
code is then 2. Flags of the model that the file does not give are listed if their defaults differ.
Values of variables such as DATA_PATH come from the file and from the environment. Other variables
stay in the command and are named. A GPT model's --num-layers becomes a layer pattern: attention and
an MLP, or experts, for each layer. If the file has --data-path and --eval-interval but no validation
data, the command gets Megatron-LM's default --split 969,30,1. Settings of Megatron-Bridge after
run_recipe.py become flags, and its --mode lora the flags of adapters. A recipe itself is not read,
so the flags of its model are missing. Nothing in the file is executed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from megatron_packed.cli.command import EXIT_USAGE, UsageError, command, show
from megatron_packed.cli.megatron_outcomes import (
    FlagOutcome,
    LineOutcome,
    Use,
    line_outcome,
    other_defaults,
    split_of,
)
from megatron_packed.cli.megatron_script import read_script
from megatron_packed.config.errors import printable
from megatron_packed.config.megatron.bridge_settings import words_of_bridge
from megatron_packed.config.megatron.flags import REFUSAL_OF, TAKEN
from megatron_packed.config.megatron.gpt_layers import NUM_LAYERS, pattern_of_words
from megatron_packed.config.megatron.model_config_file import (
    VARIABLE,
    MegatronLine,
    read_model_config,
)
from megatron_packed.config.parser.command_line import spellings

TAKEN_OVER = re.compile(
    r"NCCL_(?!.*(PLUGIN|FILE|HOME))\w+|TORCH_NCCL_\w+|PYTORCH_CUDA_ALLOC_CONF|CUDA_DEVICE_MAX_CONNECTIONS"
    r"|CUBLAS_WORKSPACE_CONFIG|NVTE_ALLOW_NONDETERMINISTIC_ALGO|OMP_NUM_THREADS"
)
"""Environment variables that act on a run of this project. Names of files and libraries are not
taken from a foreign file.
"""
HEADINGS = {
    FlagOutcome.SAME: "same",
    FlagOutcome.ACCEPTED: "accepted; the trained model is the same without them",
    FlagOutcome.DIFFERENT: "different",
    FlagOutcome.OPEN: "open",
    FlagOutcome.REFUSED: "refused, and left out of the command",
}
_SHOWN = 500


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="model_config.yaml or a shell script")


@command(
    "from-megatron",
    "translate a command line of Megatron-LM, with the outcome of each flag",
    _add_arguments,
    takes_run_flags=False,
)
def from_megatron_command(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    try:
        yaml = arguments.file.endswith((".yaml", ".yml"))
        read = read_model_config if yaml else read_script
        line = read(arguments.file, os.environ)
        words = words_of_bridge(line.arguments, {*spellings(), *TAKEN, *REFUSAL_OF})
    except ValueError as error:
        raise UsageError(f"{arguments.file}: {error}.") from None
    added = split_of(words)
    argv, replaced = _with_pattern([*words, *added])
    outcome = line_outcome(argv, _processes(line.launcher))
    show("\n".join([*_heading(arguments.file, line, outcome), "", *_command(line, outcome), ""]))
    show("\n".join(_outcomes(outcome)))
    if replaced:
        show(_comment(replaced))
    if added:
        show(_comment(f"Added: {' '.join(added)}, the default of Megatron-LM."))
    return 0 if outcome.taken else EXIT_USAGE


def _with_pattern(argv: list[str]) -> tuple[list[str], str]:
    """Return the words with a layer pattern in place of a GPT model's ``--num-layers``, and a
    sentence about it. The sentence is empty if nothing is replaced.
    """
    pattern = pattern_of_words(argv)
    named = any(word in spellings() and spellings()[word].field.flag in pattern for word in argv)
    if not pattern or named:
        return argv, ""
    at = argv.index(NUM_LAYERS)
    old = " ".join(argv[at : at + 2])
    return [*argv[:at], *pattern, *argv[at + 2 :]], (
        f"In place of {old}: {' '.join(pattern)}, attention and an MLP for each layer."
    )


def _processes(launcher: Sequence[str]) -> int | None:
    """Return the number of processes that the script starts, or None if it does not say."""
    numbers = dict(zip(launcher[::2], map(int, launcher[1::2]), strict=True))
    if "--nproc-per-node" not in numbers:
        return None
    return max(1, numbers["--nproc-per-node"] * numbers.get("--nnodes", 1))


def _heading(path: str, line: MegatronLine, outcome: LineOutcome) -> Iterator[str]:
    counts = [
        f"{sum(use.outcome is kind for use in outcome.uses)} {kind.value}" for kind in FlagOutcome
    ]
    yield _comment(f"{path}: {len(outcome.uses)} flags, of them {', '.join(counts)}.")
    if line.unset:
        yield _comment(f"Set these variables first: {', '.join(line.unset)}.")
    dropped = [name for name in line.environment if not TAKEN_OVER.fullmatch(name)]
    if dropped:
        yield _comment(f"Environment variables that are not taken over: {', '.join(dropped)}.")
    if line.left_out:
        yield _comment(f"Keys of the file that are not read: {', '.join(line.left_out)}.")


def _command(line: MegatronLine, outcome: LineOutcome) -> Iterator[str]:
    """Yield the lines of the command, quoted for a shell."""
    for name, value in line.environment.items():
        if TAKEN_OVER.fullmatch(name):
            yield f"export {name}={quoted(value)}"
    parts = [" ".join(["megatron-packed train", *line.launcher])]
    accepted_uses = [use for use in outcome.uses if use.outcome is not FlagOutcome.REFUSED]
    parts += [" ".join([use.flag, *_values(use)]) for use in accepted_uses]
    yield " \\\n  ".join(parts)


def _values(use: Use) -> list[str]:
    """Return the values for a shell. A variable alone may hold several, for example a blend."""
    spelling = spellings().get(use.flag)
    many = spelling is not None and spelling.field.kind.many
    return [word if many and VARIABLE.fullmatch(word) else quoted(word) for word in use.texts]


def quoted(word: str) -> str:
    """Return a word for a shell that expands its variables and nothing else.

    Example:
        ``${DATA_PATH}/a b`` gives ``"${DATA_PATH}"'/a b'``.
    """
    parts, at = [], 0
    for match in VARIABLE.finditer(word):
        parts += [word[at : match.start()], f'"${{{match[1] or match[2]}}}"']
        at = match.end()
    parts.append(word[at:])
    text = "".join(
        part if i % 2 else shlex.quote(part) * bool(part) for i, part in enumerate(parts)
    )
    return text or "''"


def _outcomes(outcome: LineOutcome) -> Iterator[str]:
    """Yield one comment for each flag that is not the same, in groups."""
    groups: Mapping[FlagOutcome, list[Use]] = {
        kind: [use for use in outcome.uses if use.outcome is kind] for kind in FlagOutcome
    }
    for kind, uses in groups.items():
        if uses:
            yield _comment(f"{len(uses)} {HEADINGS[kind]}:")
        if uses and kind is FlagOutcome.SAME:
            yield _comment("  " + " ".join(use.flag for use in uses), 10 * _SHOWN)
            continue
        for use in uses:
            yield _comment(f"  {' '.join([use.flag, *use.texts])}: {use.reason}")
    defaults = list(other_defaults(outcome.uses))
    if defaults:
        yield _comment(f"{len(defaults)} flags of the model are not given and have other defaults:")
    for flag, sentence in defaults:
        yield _comment(f"  {flag}: {sentence}")
    for problem in outcome.missing:
        yield _comment(f"missing: {problem}")


def _comment(text: str, limit: int = _SHOWN) -> str:
    return f"# {printable(text, limit)}"
