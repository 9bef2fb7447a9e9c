"""Checks of the paths of a configuration on this machine: input, output and data."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from megatron_packed.config.data_blend import BlendedPaths
from megatron_packed.config.data_files import (
    DATA_FILE_NAMES,
    TABLE_SUFFIXES,
    ZSTD_SUFFIX,
    is_data_name,
    reads_zstd,
)
from megatron_packed.config.errors import Fault, Problem, Problems
from megatron_packed.config.hub_paths import (
    DATASET,
    MODEL,
    TOKENIZER_FILES,
    address_cure,
    convert_cure,
    download_cure,
    hub_problem,
    is_hub_name,
    is_hub_path,
)
from megatron_packed.config.optional_packages import is_installed, old_package
from megatron_packed.config.options import Field
from megatron_packed.config.run import RunConfig, every_field
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.data import CACHE_NAME, TRAINING_DATA
from megatron_packed.config.sections.data_parts.tokenizer import CHAT_TEMPLATES, HUGGING_FACE
from megatron_packed.files.written_files import resolve_output

_LONGEST_PATH = 4096
_LOG_BEGINS = b'{"iteration"'


def path_problems(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems of paths: input must be readable, and output must have a writable directory."""
    for field in every_field():
        use = field.option.path
        # Files with data paths ("data_args") are read by the rules of their section.
        if use in (None, "data_args") or not sound(field.key):
            continue
        value = run.value_of(field)
        if use == "input_data":
            value = BlendedPaths.from_arguments(value).paths
        for path in value if isinstance(value, tuple) else filter(None, [value]):
            yield from _problem(_check_of(field, run), field.flag, path)
    for flag, path in run.data.paths_in_files if sound(*TRAINING_DATA) else ():
        yield from _problem(partial(_input_data, flag), flag, path)
    template = run.data.chat_template
    # A checkpoint contains the template of its training.
    starts = run.checkpoint.starts
    if (
        template is not None
        and sound("data.chat_template")
        and template not in CHAT_TEMPLATES
        and not any(_has_checkpoint(path) for path in starts if path is not None)
    ):
        yield from _problem(_chat_template, "--chat-template", template)
    yield from _cache_problems(run, sound)


def _problem(check: Callable[[str], Fault | None], flag: str, path: str) -> Problems:
    """Yield the problem of a path, if its check finds one.

    Errors of the file system itself, for example for a name that is too long, are problems as well.
    """
    try:
        fault = check(path)
    except OSError as error:
        fault = f"cannot be used: {error.strerror}", "correct the path"
    except ValueError as error:  # the text is not a valid file name on this file system
        fault = f"cannot be used: {error}", "correct the path"
    if fault is not None:
        yield Problem(flag, path, *fault, node_dependent=True)


def _check_of(field: Field, run: RunConfig) -> Callable[[str], Fault | None]:
    """Return the check of the paths of an option."""
    if field.key in _CHECKS_OF_OPTIONS:
        return partial(_CHECKS_OF_OPTIONS[field.key], run)
    if field.option.path == "input_data":
        return partial(_input_data, field.flag)
    return _CHECKS[field.option.path or ""]


def _has_checkpoint(path: str) -> bool:
    """Return whether a folder is or has a checkpoint, judged by names alone."""
    try:
        return Path(path, "manifest.json").is_file() or any(Path(path).glob("step_*"))
    except (OSError, ValueError):
        return False


def _cache_problems(run: RunConfig, sound: Sound) -> Problems:
    """Yield a problem if tokenised data cannot be written next to the first training file, where it
    is stored without --data-cache-path.
    """
    if run.data.data_cache_path is not None or not sound(*TRAINING_DATA):
        return
    for path in run.data.train_paths[:1]:
        place = Path.cwd() if is_hub_path(path) else Path(path).absolute().parent
        if (
            (os.path.isfile(path) or is_hub_path(path))
            and not (place / CACHE_NAME).exists()
            and not os.access(place, os.W_OK)
        ):
            yield Problem(
                "--data-cache-path",
                "",
                f"is required: this user cannot write to {place}, where tokenised data would be stored",
                "give a directory for tokenised data",
                node_dependent=True,
            )


def _input_file(path: str) -> Fault | None:
    place = Path(path)
    if not place.exists():
        return _missing(path)
    if place.is_dir():
        return "is a directory, but a file is needed", "give a file in it"
    if not place.is_file():
        return "is not a regular file", "give a file that can be read more than once"
    if not os.access(path, os.R_OK):
        return "cannot be read by this user", "change its permissions"
    if place.stat().st_size == 0:
        return "is empty", "give a file that is not empty"
    return None


def _input_data(flag: str, path: str) -> Fault | None:
    """Check a data path that a flag gives; return (rule, cure) or None.

    A data path is on the Hugging Face Hub, or it is a file, a directory, a pattern that matches a
    file, or the prefix of an indexed data set. A directory must contain JSON or Parquet files, or a
    Hugging Face data set.
    """
    if len(path) > _LONGEST_PATH:
        return (
            f"has {len(path):,} characters, but a path has at most {_LONGEST_PATH:,}",
            "correct the path",
        )
    if is_hub_path(path):
        return hub_problem(path, DATASET)
    cure = address_cure(path, flag)
    if cure is not None:
        return "is an address of the web, but data is read from files", cure
    if is_hub_name(path) and not os.path.exists(path + ".idx"):
        return f"does not exist{_looked_in()}", download_cure(path, DATASET, flag)
    if os.path.isdir(path):
        if any(
            os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json")
        ):
            return _pyarrow()
        held = [name for _, _, names in os.walk(path) for name in names]
        if any(map(is_data_name, held)):
            return _libraries(held)
        return f"contains no {DATA_FILE_NAMES}", "give the files, or another directory"
    if any(character in path for character in "*?[") and not os.path.exists(path):
        matched = glob.glob(path, recursive=True)
        if not matched:
            return (
                "matches no file",
                "correct the pattern, and quote it to keep the shell from expanding it",
            )
        return _libraries(matched)
    if path.endswith((".idx", ".bin")) and os.path.exists(path):
        return (
            "is only one file of an indexed data set",
            f"give the common prefix of both files, {path[:-4]}",
        )
    if not os.path.exists(path) and (
        os.path.exists(path + ".idx") or os.path.exists(path + ".bin")
    ):
        return _indexed(path)
    return _input_file(path) or _libraries([path])


def _libraries(names: Sequence[str]) -> Fault | None:
    """Check that the libraries that read the files are installed; return (rule, cure) or None."""
    if any(name.endswith(ZSTD_SUFFIX) for name in names) and not reads_zstd():
        return (
            "is compressed with zstd, which needs Python 3.14 or pyarrow",
            "pip install 'megatron-packed[data]'",
        )
    return _pyarrow() if any(name.endswith(TABLE_SUFFIXES) for name in names) else None


def _pyarrow() -> Fault | None:
    if is_installed("pyarrow"):
        old = old_package("pyarrow")
        return None if old is None else (f"would be read by {old[0]}", old[1])
    return (
        "needs pyarrow, which is not installed",
        "pip install 'megatron-packed[data]', or give the data as JSONL",
    )


def _indexed(prefix: str) -> Fault | None:
    """Check both files of an indexed data set; return (rule, cure) or None."""
    for suffix in (".idx", ".bin"):
        fault = _input_file(prefix + suffix)
        if fault is not None and not (suffix == ".bin" and fault[0] == "is empty"):
            return (
                f"is an indexed data set, but its {suffix} file {fault[0]}",
                "create or copy both files",
            )
    return None


def _missing(path: str) -> tuple[str, str]:
    try:
        float(path)
    except ValueError:
        return f"does not exist{'' if path.startswith('/') else _looked_in()}", "correct the path"
    return (
        "is a weight without a path after it",
        "give WEIGHT PATH [WEIGHT PATH ...], or paths only",
    )


def _looked_in() -> str:
    return f" (looked in {Path.cwd()})"


def _input_directory(path: str) -> Fault | None:
    place = Path(path)
    if not place.exists():
        return "does not exist", "correct the path"
    if not place.is_dir():
        return "is not a directory", "give a directory"
    return (
        None
        if os.access(path, os.R_OK | os.X_OK)
        else ("cannot be read by this user", "change its permissions")
    )


def _output_directory(path: str) -> Fault | None:
    # Raises if links form a loop, for which `Path.exists` returns False.
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)
    place = Path(path)
    if place.exists():
        if not place.is_dir():
            return "is a file, but a directory is needed", "choose another name, or remove the file"
        if os.access(path, os.W_OK | os.X_OK):
            return None
        return "cannot be written by this user", "change its permissions"
    return _parent_problem(place)


def _output_file(path: str) -> Fault | None:
    """Check an output file; return (rule, cure) or None. A link at the end of the path is followed."""
    place = resolve_output(path)
    if place.is_dir():
        return "is a directory, but a file is needed", "give a file in it"
    if place.exists() and not os.access(place, os.W_OK):
        return "cannot be written by this user", "change its permissions"
    # A new file is written next to the old one and gets its name.
    return _parent_problem(place)


def _log_file(path: str) -> Fault | None:
    """Check the file of --log-jsonl; return (rule, cure) or None.

    A resumed run continues its own log. Other files are refused, because the run would overwrite
    them.
    """
    fault = _output_file(path)
    if fault is not None or not os.path.exists(path):
        return fault
    with open(path, "rb") as file:
        begins = file.read(len(_LOG_BEGINS))
    if _LOG_BEGINS.startswith(
        begins
    ):  # a killed run may have written only a part of its first line
        return None
    return (
        "is not the log of a run, and would be overwritten",
        "give a new name, or the log of a run",
    )


def _parent_problem(place: Path) -> Fault | None:
    """Check that missing directories can be created; return (rule, cure) or None.

    They are created when something is written. The nearest existing parent must be a writable
    directory.
    """
    parent = next(parent for parent in place.absolute().parents if parent.exists())
    if not parent.is_dir():
        return f"cannot be created: {parent} is a file", "choose another path"
    if not os.access(parent, os.W_OK | os.X_OK):
        return (
            f"cannot be created: this user cannot write to {parent}",
            "change its permissions, or choose another path",
        )
    return None


def _loaded_run(run: RunConfig, path: str) -> Fault | None:
    """Check the --load directory; return (rule, cure) or None.

    The first run of a command that resumes itself has nothing to load yet. In such a command --save
    and --load are the same directory, which may be missing.
    """
    if Path(path).exists():
        return _input_directory(path)
    if run.checkpoint.saves_where_it_loads:
        return None
    return (
        "does not exist, so there is nothing to load",
        "correct it, leave it out, or give the same directory to --save",
    )


def _pretrained(run: RunConfig, path: str) -> Fault | None:
    if is_hub_name(path):
        cure = convert_cure(path, run.checkpoint.flag("pretrained_checkpoint"))
        return f"does not exist{_looked_in()}", cure
    return _input_directory(path)


def _tokenizer(run: RunConfig, path: str) -> Fault | None:
    reads_json = run.data.tokenizer_type == HUGGING_FACE
    if is_hub_path(path):
        return hub_problem(path, MODEL)
    if is_hub_name(path):
        files = TOKENIZER_FILES if reads_json else ()
        cure = download_cure(path, MODEL, "--tokenizer-model", files)
        return f"does not exist{_looked_in()}", cure
    if reads_json and Path(path).is_dir():
        path = str(Path(path) / "tokenizer.json")
        if not Path(path).exists():
            return (
                "contains no tokenizer.json",
                "give the directory of a Hugging Face model with a fast tokenizer",
            )
    return _input_file(path)


def _chat_template(path: str) -> Fault | None:
    fault = _input_file(path)
    return fault and (fault[0], f"{fault[1]}, or give {' or '.join(CHAT_TEMPLATES)}")


_CHECKS: dict[str, Callable[[str], Fault | None]] = {
    "input_file": _input_file,
    "input_directory": _input_directory,
    "output_file": _output_file,
    "output_directory": _output_directory,
    "log_file": _log_file,
}
"""Check of a path by its use."""
_CHECKS_OF_OPTIONS: dict[str, Callable[[RunConfig, str], Fault | None]] = {
    "checkpoint.load": _loaded_run,
    "checkpoint.pretrained_checkpoint": _pretrained,
    "data.tokenizer_model": _tokenizer,
}
"""Check of the path of an option that depends on other options."""
