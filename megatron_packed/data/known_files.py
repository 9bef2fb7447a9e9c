"""Files of a run's data, and facts about the data that need no tokenising."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_packed.config.sections.data import DataConfig
from megatron_packed.data.errors import DataError, NotTokenizedError
from megatron_packed.data.sources.source_files import (
    expand_paths,
    index_path,
    names_indexed,
    tokens_path,
)
from megatron_packed.data.sources.tokenize_files import BuildOptions, check_before_building


class KnownData(NamedTuple):
    """Facts about the training data."""

    vocab_size: int | None
    """Entries of the vocabulary; None if the tokenizer cannot be read."""
    lengths: NDArray[np.int64] | None
    """Tokens of each training document; None if the data is not tokenised."""
    reason: str
    """Reason why the lengths are unknown; empty if they are known."""
    refusal: str
    """Error with which a run on this machine would end; empty if there is none."""


def first_lines_refusal(options: DataConfig) -> str:
    """Return why the first lines of the text files cannot be used; empty if they can."""
    texts = [path for path in options.train_paths if not names_indexed(path)]
    folder = Path(tempfile.mkdtemp(prefix="megatron_packed_"))
    try:
        check_before_building(
            expand_paths(texts, download=False) if texts else [],
            BuildOptions.from_config(options, show=False),
            folder / "quarantine.jsonl",  # stays, because the error names it
        )
    except NotTokenizedError:  # not downloaded from the Hugging Face Hub yet
        pass
    except (DataError, OSError) as error:
        return str(error).rstrip(".")
    shutil.rmtree(folder, ignore_errors=True)
    return ""


def file_sizes(paths: tuple[str, ...]) -> list[int]:
    """Return the bytes of each file that data paths name.

    Raises:
        DataError, OSError: a path names no file.
    """
    files: list[Path] = []
    for path in paths:
        indexed = names_indexed(path)
        files += (
            [index_path(path), tokens_path(path)]
            if indexed
            else expand_paths([path], download=False)
        )
    return [file.stat().st_size for file in files]
