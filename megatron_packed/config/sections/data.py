"""Options of data: files of documents with the rules between them; their tokenizer is in ``data_parts``."""

from __future__ import annotations

import os
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_packed.config.conditions import Condition, option_given, option_is_not
from megatron_packed.config.data_blend import BlendedPaths, NamedData, blend_fault, split_shares
from megatron_packed.config.data_fields import DataFields, pairs_fault, pairs_of
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.hub_paths import is_hub_path
from megatron_packed.config.options import Related, derived_option, option
from megatron_packed.config.section import Section, Sound
from megatron_packed.config.sections.data_parts.tokenizer import TokenizerOptions

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

SHUFFLED = "shuffled"
"""Value of --split-order that draws documents at random."""
CACHE_NAME = ".megatron_packed_cache"
"""Directory, next to the first data file, for tokenised data when --data-cache-path is not given.
"""
_NAMES_TRAINING = (
    "data_path",
    "train_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "mock_data",
)
UNDIVIDED_DATA = (
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
)
"""Options whose data --split does not divide."""
TRAINING_DATA = tuple(f"data.{name}" for name in _NAMES_TRAINING)
OF_TRAINED_BPE = (*_NAMES_TRAINING, "split", "split_order")
"""Options by which the cache finds a tokenizer that was trained on the data."""
"""Options that name training data; a run gives exactly one of them."""


def _paths_are_indexed(run: RunConfig) -> set[bool]:
    """Return, as a set, the answers to one question about each data path: is the path the prefix of
    an indexed data set? Indexed data sets are already tokenised.
    """
    paths = (*run.data.train_paths, *run.data.valid_blend.paths, *run.data.test_blend.paths)
    return {os.path.exists(path + ".idx") and not os.path.exists(path) for path in paths}


INDEXED_DATA = Condition(
    "no data path is an indexed data set",
    lambda run, processes: True in _paths_are_indexed(run),
)
UNTOKENISED_DATA = Condition(
    "all data is already tokenised", lambda run, processes: False in _paths_are_indexed(run)
)
UNMADE_DATA = Condition(
    "--mock-data makes other documents for each part",
    lambda run, processes: not run.data.mock_data,
)
EVALUATION_STEPS = option_is_not("training.eval_iters", 0)
VALIDATION_STEPS = Condition(
    "--eval-iters is 0, and --full-validation is not given",
    lambda run, processes: bool(run.training.eval_iters) or run.training.full_validation,
)


class FileOptions(Section, group="files"):
    """Files of training, validation and test documents, and their division."""

    data_path: tuple[str, ...] = option(
        (),
        "Training data. A path is a file of JSON lines, a JSON array, a .parquet or .txt file, or "
        "a directory or pattern of such files. It may also be a Hugging Face data set on disk "
        "(save_to_disk), or the prefix of an indexed data set (.bin and .idx). Lines and rows have "
        "messages, conversations, prompt/completion, instruction/output, text or input_ids. With a "
        "weight before each path, the data is a blend.",
        path="input_data",
        resume="data",
    )
    train_data_path: tuple[str, ...] = option(
        (),
        "Training data, given like --data-path, for use with --valid-data-path.",
        path="input_data",
        resume="data",
    )
    valid_data_path: tuple[str, ...] = option(
        (),
        "Validation data, given like --data-path.",
        path="input_data",
        only_if=VALIDATION_STEPS,
        excludes=Related("mock_data", "it also makes this data"),
    )
    test_data_path: tuple[str, ...] = option(
        (),
        "Test data, given like --data-path. Its loss is reported at the end of training.",
        path="input_data",
        only_if=EVALUATION_STEPS,
        excludes=Related("mock_data", "it also makes this data"),
    )
    data_args_path: str | None = option(
        None,
        "File with the paths and weights of --data-path, used instead of that option.",
        path="data_args",
        resume="data",
    )
    per_split_data_args_path: str | None = option(
        None,
        'JSON file that names training, validation and test data: {"train": [...], "valid": '
        '[...], "test": [...]}. Replaces --train-data-path, --valid-data-path and '
        "--test-data-path.",
        path="data_args",
        resume="data",
    )
    mock_data: bool = option(
        False,
        "Train, validate and test on made documents of counting tokens, which depend on --seed. "
        "No file is read; with --sft, a third of each document is a prompt.",
        resume="data",
    )
    split: str | None = option(
        None,
        "Proportions of training, validation and test documents in every --data-path, for "
        "example 969,30,1. All documents train when not given.",
        resume="data",
        excludes=tuple(
            Related(name, "only the data of --data-path is divided") for name in UNDIVIDED_DATA
        ),
    )
    split_order: str = derived_option(
        "Choice of documents by --split. With file, consecutive documents of a file form a "
        "split. With shuffled, documents are drawn with a fixed key; data sets with the same "
        "number of documents are divided the same way.",
        derived="shuffled with --sft and --split, else file",
        derive=lambda data: SHUFFLED if data.sft and data.split is not None else "file",
        choices=("file", SHUFFLED),
        only_if=(option_given("data.split"), UNMADE_DATA),
        resume="data",
        earlier=lambda stored: "file",
    )
    sft: bool = option(
        False,
        "Fine-tune on conversations or prompts with answers; only answers are targets.",
        resume="data",
    )
    data_fields: tuple[str, ...] = option(
        (),
        "Names of the fields in all data, for example prompt=question,completion=answers.text. "
        "Targets: prompt and completion; instruction and output (with input, system, history, "
        "tools); messages or conversations (with system, tools); text. All but text may have "
        "label, the field that is true for an accepted answer. A dot enters an object, a number "
        "selects an element of a list, and [*] after a list makes a document of each element.",
        only_if=UNTOKENISED_DATA,
        resume="data",
    )
    max_bad_fraction: float = option(
        0.01,
        "Maximum fraction of unusable lines in the data. Above it the data is refused; below it "
        "the lines are skipped and counted. Lines with an empty answer do not count.",
        minimum=0,
        maximum=1,
        only_if=UNTOKENISED_DATA,
    )
    data_cache_path: str | None = option(
        None,
        "Directory for tokenised data; a directory next to the first data file when not given.",
        path="output_directory",
        only_if=UNTOKENISED_DATA,
    )
    mmap_bin_files: bool = option(
        True,
        "Read tokens of indexed data sets from the file when they are needed, instead of "
        "through a memory map.",
        flag="no-mmap-bin-files",
        negated=True,
        only_if=INDEXED_DATA,
    )
    num_workers: int = option(
        2,
        "Number of micro-batches that a background thread prepares ahead of the step; 0 "
        "prepares each one when it is needed.",
        unit="micro-batches",
        minimum=0,
        maximum=1024,
    )

    @cached_property
    def named(self) -> NamedData:
        """Words of all data paths, given by options or by files; the files are read once."""
        if self.per_split_data_args_path is not None:
            from megatron_packed.config.parser.data_path_files import read_per_split_data_args

            return read_per_split_data_args(self.per_split_data_args_path)
        train, fault = self.train_data_path or self.data_path, ""
        if self.data_args_path is not None:
            from megatron_packed.config.parser.data_path_files import read_data_args

            train, _, _, fault = read_data_args(self.data_args_path)
        return NamedData(train, self.valid_data_path, self.test_data_path, fault)

    @property
    def fields(self) -> DataFields | None:
        """Fields that --data-fields names; None if the lines have the usual fields."""
        return DataFields.from_pairs(pairs_of(self.data_fields))

    @property
    def train_blend(self) -> BlendedPaths:
        """Return the training data from whichever option names it."""
        return BlendedPaths.from_arguments(self.named.train)

    @property
    def train_paths(self) -> tuple[str, ...]:
        """Paths of the training data, without weights."""
        return self.train_blend.paths

    @property
    def valid_blend(self) -> BlendedPaths:
        return BlendedPaths.from_arguments(self.named.valid)

    @property
    def test_blend(self) -> BlendedPaths:
        return BlendedPaths.from_arguments(self.named.test)

    @property
    def paths_in_files(self) -> list[tuple[str, str]]:
        """Data paths that a file names, each with the option that names the file."""
        named_by = self._naming_training
        if named_by == ["data_args_path"]:
            return [(self.flag("data_args_path"), path) for path in self.train_paths]
        if named_by == ["per_split_data_args_path"]:
            blends = (self.train_blend, self.valid_blend, self.test_blend)
            return [
                (self.flag("per_split_data_args_path"), path)
                for blend in blends
                for path in blend.paths
            ]
        return []

    @property
    def _naming_training(self) -> list[str]:
        """Given options that name training data; a correct configuration has exactly one."""
        return [name for name in _NAMES_TRAINING if getattr(self, name)]

    def flag_of(self, split: str) -> str:
        """Return the flag of the option that names the ``valid`` or ``test`` data."""
        return self.flag(
            f"{split}_data_path"
            if self.per_split_data_args_path is None
            else "per_split_data_args_path"
        )

    @property
    def shares(self) -> tuple[Fraction, Fraction, Fraction]:
        """Fractions of documents for training, validation and test."""
        shares_of_split = None if self.split is None else split_shares(self.split)
        return shares_of_split or (Fraction(1), Fraction(0), Fraction(0))

    @property
    def has_validation(self) -> bool:
        """Return whether there are documents to validate on."""
        made = self.mock_data and self.split is None
        return made or bool(self.named.valid) or bool(self.shares[1])

    @property
    def validation_paths(self) -> tuple[str, ...]:
        """Paths that contribute validation documents."""
        if self.mock_data:
            return ("mock",)
        return self.valid_blend.paths if self.split is None else self.train_paths

    @property
    def has_test(self) -> bool:
        """Return whether test documents are requested; --split may still select none in a small
        data set.
        """
        return bool(self.named.test) or bool(self.shares[2])

    def rules(self, sound: Sound) -> Problems:
        yield from super().rules(sound)
        if sound(*_NAMES_TRAINING):
            yield from self._source_rules()
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            if sound(name):
                yield from self._path_rules(self.flag(name), getattr(self, name))
        if sound("data_fields") and self.data_fields:
            yield from self._field_rules(sound)
        if sound("split") and self.split is not None:
            yield from self._split_rules(self.split)

    def _source_rules(self) -> Problems:
        """Yield problems unless exactly one option names the training data and its file is valid."""
        naming = self._naming_training
        if not naming:
            yield Problem(
                "--data-path",
                "",
                "is required: no training data is given",
                "give --data-path FILE [FILE ...]",
            )
        if len(naming) > 1:
            yield self.problem(
                naming[0],
                f"contradicts {self.flag(naming[1])}: both name the training data",
                "give all training files with one of them",
            )
        for file in ("data_args_path", "per_split_data_args_path"):
            if naming == [file]:
                yield from self._file_rules(file)

    def _file_rules(self, file: str) -> Problems:
        """Yield problems of the file that names the data."""
        if self.named.fault:
            cure = "give a file with WEIGHT PATH [WEIGHT PATH ...], or with paths only"
            if file == "per_split_data_args_path":
                cure = 'give a file like {"train": ["3", "a", "1", "b"], "valid": ["c"], "test": ["d"]}'
            yield self.problem(file, self.named.fault, cure, node_dependent=True)
        for arguments in self.named[:3]:
            yield from self._path_rules(self.flag(file), arguments)
        for name in ("valid_data_path", "test_data_path"):
            if file == "per_split_data_args_path" and getattr(self, name):
                yield self.problem(
                    name,
                    f"contradicts {self.flag(file)}, which names all data",
                    "name the data in that file, or leave the file out",
                )

    def _path_rules(self, flag: str, arguments: tuple[str, ...]) -> Problems:
        fault = blend_fault(arguments)
        if fault:
            yield Problem(
                flag,
                " ".join(arguments),
                fault,
                "give WEIGHT PATH [WEIGHT PATH ...], or paths only",
            )

    def _field_rules(self, sound: Sound) -> Problems:
        flag, shown = self.flag("data_fields"), " ".join(self.data_fields)
        fault = pairs_fault(pairs_of(self.data_fields))
        if fault is not None:
            yield Problem(flag, shown, *fault)
            return
        assert self.fields is not None
        if self.fields.trains_text and self.sft:
            cure = "remove --sft, or name the fields of prompts and answers"
            yield Problem(flag, shown, "text has no answers, which --sft trains", cure)
        elif not self.fields.trains_text and not self.sft and sound("sft"):
            yield Problem(
                flag, shown, "names prompts and answers, whose training needs --sft", "add --sft"
            )

    def _split_rules(self, split: str) -> Problems:
        if split_shares(split) is None:
            yield Problem(
                "--split",
                split,
                "must be one to three proportions for training, validation and test, and the "
                "first must be above 0",
                "give, for example, 969,30,1",
            )


class DataConfig(  # dataclass fields follow the bases from right to left
    TokenizerOptions, FileOptions, title="data"
):
    """Options of training, validation and test documents, and of the tokenizer."""

    @property
    def hub_paths(self) -> list[str]:
        """Paths of data and tokenizer on the Hugging Face Hub."""
        blends = (self.train_blend, self.valid_blend, self.test_blend)
        paths = [*(path for blend in blends for path in blend.paths), self.tokenizer_model or ""]
        return [path for path in paths if is_hub_path(path)]
