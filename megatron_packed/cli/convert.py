"""Convert a Hugging Face model to a checkpoint for training, or a trained checkpoint back.

  megatron-packed convert --from-hf MODEL_DIR --save DIR [--bf16]
  megatron-packed convert --to-hf NEW_DIR --load CHECKPOINTS --hf-config MODEL_DIR/config.json

The first command writes a checkpoint, for any parallel layout, and DIR/model.args with the flags
of the model. Train from it with --pretrained-checkpoint, or with --load and --finetune. The command
reads config.json and safetensors as data and runs no code of the model. Model options that are not
supported are refused by name. Supported families: nemotron_h, llama, mixtral.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_packed.cli.errors import EXIT_CHECKPOINT, UsageError

NAME = "convert"
HELP = "convert Hugging Face weights to a checkpoint, and back"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument(
        "--from-hf",
        metavar="DIR",
        help="directory with config.json and safetensors, to convert to a checkpoint",
    )
    way.add_argument(
        "--to-hf", metavar="DIR", help="new directory for safetensors, converted from a checkpoint"
    )
    parser.add_argument(
        "--save", metavar="DIR", help="with --from-hf: directory for the checkpoint and model.args"
    )
    parser.add_argument(
        "--bf16", action="store_true", help="with --from-hf: save weights for training with --bf16"
    )
    parser.add_argument(
        "--load",
        metavar="DIR",
        help="with --to-hf: directory of checkpoints, or a single checkpoint",
    )
    parser.add_argument(
        "--hf-config", metavar="FILE", help="with --to-hf: config.json of the original model"
    )
    parser.add_argument(
        "--ignore-key",
        metavar="KEY",
        action="append",
        default=[],
        help="unknown key of config.json to ignore, because it does not change what the model "
        "computes; may be repeated",
    )


def run(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    if run_flags:
        raise UsageError(
            f"{run_flags[0]} is not an option of convert; the model's flags come from config.json."
        )
    way, needed, other = ("--from-hf", ["save"], ["load", "hf_config"])
    if arguments.to_hf:
        way, needed, other = "--to-hf", ["load", "hf_config"], ["save", "bf16"]
    for name in needed:
        if not getattr(arguments, name):
            raise UsageError(f"--{name.replace('_', '-')} is required with {way}.")
    for name in other:
        if getattr(arguments, name):
            raise UsageError(f"--{name.replace('_', '-')} has no effect with {way}; leave it out.")
    from megatron_packed.checkpoint.errors import CheckpointError

    try:
        _to_huggingface(arguments) if arguments.to_hf else _from_huggingface(arguments)
    except CheckpointError as error:
        raise UsageError(f"convert: {error}", EXIT_CHECKPOINT) from None
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UsageError(f"convert: {said}", EXIT_CHECKPOINT) from None
    return 0


def _from_huggingface(arguments: argparse.Namespace) -> None:
    from megatron_packed.data.progress_bar import ProgressBar
    from megatron_packed.models.convert.import_huggingface import (
        ARGS_FILE,
        TOKENIZER,
        from_huggingface,
    )

    directory, root = Path(arguments.from_hf).absolute(), Path(arguments.save).absolute()
    with ProgressBar("converting", 1) as bar:
        done = from_huggingface(
            directory,
            root,
            bf16=arguments.bf16,
            ignored=arguments.ignore_key,
            on_progress=lambda done, total: bar.update(done, total=total),
        )
    print(f"{done.saved.path}: {done.saved.num_bytes:,} bytes")
    if done.rounded:
        print(f"{len(done.rounded)} tensors were rounded to bf16, for example {done.rounded[0]}.")
    print(f"{root / ARGS_FILE}, the flags of the model:\n\n{done.flags}")
    if not (directory / TOKENIZER).is_file():
        print(f"{directory} has no {TOKENIZER}; choose a tokenizer with --tokenizer-type.")
    quoted = shlex.quote(str(root))
    print(f"Train with: @{shlex.quote(str(root / ARGS_FILE))} --pretrained-checkpoint {quoted}")


def _to_huggingface(arguments: argparse.Namespace) -> None:
    from megatron_packed.data.progress_bar import ProgressBar
    from megatron_packed.models.convert.export_huggingface import to_huggingface

    directory = Path(arguments.to_hf).absolute()
    with ProgressBar("converting", 1) as bar:
        rounded = to_huggingface(
            Path(arguments.load),
            directory,
            Path(arguments.hf_config),
            ignored=arguments.ignore_key,
            on_progress=lambda done, total: bar.update(done, total=total),
        )
    print(f"{directory}: written")
    if rounded:
        print(
            f"{len(rounded)} tensors were rounded to the dtype of the original, for example "
            f"{rounded[0]}."
        )
