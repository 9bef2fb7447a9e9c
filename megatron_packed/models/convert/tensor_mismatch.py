"""Sentences about files whose tensors do not fit config.json, each with the cure that helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.family import OUTPUT, TABLE
from megatron_packed.models.convert.weight_rows import Shape, Weight

QUANTISED_CURE = (
    "take the model in bf16, which is often published beside the quantised one, or dequantise the "
    "weights and save them in bf16"
)
_QUANTISED_ENDINGS = (
    ".absmax",
    ".input_scale",
    ".qweight",
    ".qzeros",
    ".scales",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
)
"""Ends of the names of tensors that only quantised models have."""
_OTHER_MODEL = "config.json and the weights belong to different models; take both from one model"


def check_tensors(
    shapes_in_files: Mapping[str, Shape],
    weights: Mapping[str, Weight],
    model: ModelConfig,
    output: str,
    directory: Path,
) -> None:
    """Check that files have exactly the tensors of a model.

    Args:
        shapes_in_files: shape of each tensor of the files by name.
        weights: the model's tensors by name.
        output: name of the output table in the files, also of a model without one.
    Raises:
        CheckpointError: tensors are missing, extra or of another shape; the message lists every
            problem.
    """
    expected = {part.name: part.shape for weight in weights.values() for part in weight.parts}
    tables = [weights[name].parts[0].name for name in (TABLE, OUTPUT) if name in weights]
    problems = _resized(shapes_in_files, expected, tables, model)
    resized = tables if problems else []
    for name in sorted(expected.keys() | shapes_in_files.keys()):
        if name not in shapes_in_files and name == output:
            problems[f"tie_word_embeddings is false, but the files have no {name}"] = (
                "set tie_word_embeddings to true in config.json, if the model shares its table"
            )
        elif name not in shapes_in_files:
            problems[f"{name} is missing"] = _OTHER_MODEL
        elif name not in expected and name == output:
            table = weights[TABLE].parts[0].name
            problems[f"tie_word_embeddings is true, but {name} differs from {table}"] = (
                "set tie_word_embeddings to false in config.json, if the model has two tables"
            )
        elif name not in expected:
            quantised = name.endswith(_QUANTISED_ENDINGS)
            problems[f"{name} is extra"] = QUANTISED_CURE if quantised else _OTHER_MODEL
        elif shapes_in_files[name] != expected[name] and name not in resized:
            shapes = (
                f"{list(shapes_in_files[name])}, but config.json implies {list(expected[name])}"
            )
            problems[f"{name} has shape {shapes}"] = _OTHER_MODEL
    if problems:
        cures = dict.fromkeys(problems.values())
        raise CheckpointError(some(list(problems), "; "), path=directory, cure="; ".join(cures))


def _resized(
    shapes_in_files: Mapping[str, Shape],
    expected: Mapping[str, Shape],
    tables: Sequence[str],
    model: ModelConfig,
) -> dict[str, str]:
    """Return the problem of tables with the same number of rows, which is not ``vocab_size``.

    The key is the sentence, and the value is its cure.
    """
    stored_tables = [name for name in tables if len(shapes_in_files.get(name, ())) == 2]
    rows = {
        shapes_in_files[name][0]
        for name in stored_tables
        if shapes_in_files[name][1:] == expected[name][1:]
    }
    if len(rows) != 1 or rows == {model.vocab_size}:
        return {}
    count = rows.pop()
    have = "have" if len(stored_tables) > 1 else "has"
    sentence = (
        f"{' and '.join(stored_tables)} {have} {count} rows, but vocab_size is {model.vocab_size}"
    )
    return {
        sentence: f"set vocab_size to {count} in config.json, if the model's tables were resized"
    }


def some(lines: Sequence[str], between: str = ", ") -> str:
    """Return at most 20 lines, and the number of the others; names may contain ends of lines."""
    omitted = f" and {len(lines) - 20} more" if len(lines) > 20 else ""
    return between.join(lines[:20]).replace("\n", "\\n") + omitted
