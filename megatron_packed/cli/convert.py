"""Convert a Hugging Face model to a checkpoint for training, or a checkpoint to such a model.

  megatron-packed convert --to-hf NEW_DIR --load CHECKPOINTS
  megatron-packed convert --from-hf MODEL_DIR --save DIR [--bf16]
  megatron-packed convert --to-hf NEW_DIR --load CHECKPOINTS --hf-base MODEL_DIR

  megatron-packed convert --from-megatron CHECKPOINT_DIR --save DIR [--bf16]
  megatron-packed convert --to-megatron NEW_DIR --load CHECKPOINTS

  megatron-packed convert --to-peft NEW_DIR --load ADAPTERS --hf-base MODEL_DIR
  megatron-packed convert --from-peft DIR --load BASE --save DIR
  megatron-packed convert --merge --load ADAPTERS (--save DIR | --to-hf NEW_DIR)

The first command exports a model with a new config.json, generation_config.json and the files of
its tokenizer. It takes the first family that can hold the model, and lists the options that no
family can express. The second command writes a checkpoint, for any parallel layout, and DIR/model.args with the flags
of the model. Train from it with --pretrained-checkpoint, or with --load and --finetune. The command
reads config.json and safetensors as data and runs no code of the model. Model options that are not
supported are refused by name. The third command writes a converted model back with its original
config.json and with the tensors of vision and of multi-token prediction, which a conversion passes
over (but see --mtp-depths). Without the original's tensors, give its config.json with --hf-config.
The fourth command reads a checkpoint that Megatron wrote in any layout with --ckpt-format
torch_dist. If the optimizer was saved with --dist-ckpt-optim-fully-reshardable, --load continues
the run. A checkpoint of NeMo or Megatron-Bridge has no flags of Megatron: add the flags of its
model. The fifth command writes a checkpoint, with the state of its optimizer, for Megatron's
pretrain_hybrid.py.
The last three commands are for adapters of a run with --lora-rank. They write the folder that PEFT
or vLLM loads, read such a folder as a checkpoint for --load-adapter, and add adapters to their base.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_packed.cli.command import (
    EXIT_CHECKPOINT,
    EXIT_DATA,
    UsageError,
    command,
    show,
    show_aside,
)
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.hub_paths import MODEL, download_cure, is_hub_name, parse_hub_path
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest

if TYPE_CHECKING:
    from megatron_packed.checkpoint.load import Step
    from megatron_packed.models.convert.adapters.merged_weights import MergedWeights
    from megatron_packed.models.convert.import_huggingface import Imported, OnProgress
    from megatron_packed.models.convert.stored_weights import WeightSource

MOVED = " If the tokenizer is in another place now, give its path with --tokenizer-model."
FAMILY_NAMES = (
    "nemotron_h",
    "llama",
    "mixtral",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mamba2",
    "bamba",
    "granitemoehybrid",
)
"""Families of which a new config.json can be written; a test compares them with the registry."""
_ARGS_FILE = "model.args"
_PROGRAMS = ("peft", "vllm")
"""Programs for which adapters are written."""
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
"""Patterns of the files that --from-hf downloads."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--from-hf",
        metavar="DIR",
        help="directory with config.json and safetensors, or hf://ORGANISATION/NAME, to convert to "
        "a checkpoint",
    )
    way.add_argument(
        "--from-megatron",
        metavar="DIR",
        help="checkpoint of Megatron (torch_dist), or directory with its iter_* folders, to convert "
        "with the state of its optimizer",
    )
    way.add_argument(
        "--to-megatron",
        metavar="DIR",
        help="new directory for a checkpoint, which Megatron loads with --load; it has the state of "
        "the optimizer, layout fully_reshardable",
    )
    way.add_argument(
        "--to-hf", metavar="DIR", help="new directory for the Hugging Face model of a checkpoint"
    )
    way.add_argument(
        "--to-peft", metavar="DIR", help="new directory for adapters in the form of PEFT"
    )
    way.add_argument(
        "--from-peft",
        metavar="DIR",
        help="directory with adapter_config.json and adapter_model.safetensors, to convert to a "
        "checkpoint of adapters",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add the adapters in --load to their base, for --save or --to-hf",
    )
    _add_options(parser)
    _add_adapter_options(parser)
    parser.add_argument(
        "--mtp-depths",
        metavar="N",
        type=int,
        default=0,
        help="with --from-hf: convert multi-token prediction (mtp.*) as N depths; if files have one "
        "depth, all use its layers; 0, the default, passes over it",
    )


def _add_adapter_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter-for",
        metavar="PROGRAM",
        default="",
        help="with --to-peft: program that loads the adapters, peft or vllm; peft when not given",
    )
    parser.add_argument(
        "--pretrained-checkpoint",
        metavar="DIR",
        help="with --merge: checkpoint of the base, if it is not where the adapters found it",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save",
        metavar="DIR",
        help="with --from-hf or --from-megatron: directory for the checkpoint and model.args",
    )
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="with --from-hf or --from-megatron: save weights for training with --bf16",
    )
    parser.add_argument(
        "--load",
        metavar="DIR",
        help="with --to-hf or --to-megatron: directory of checkpoints, or a single checkpoint",
    )
    parser.add_argument(
        "--ckpt-step",
        metavar="N",
        help="with --to-hf or --to-megatron: step of the checkpoint, or best for the lowest validation loss; the "
        "newest checkpoint when not given. With --from-megatron: iteration of its folder",
    )
    parser.add_argument(
        "--no-save-optim",
        action="store_true",
        help="with --to-megatron: write only the weights, without the state of the optimizer",
    )
    parser.add_argument(
        "--target-expert-parallel-size",
        metavar="N",
        type=int,
        help="with --to-megatron: expert parallelism of Megatron's run, whose optimizers for experts "
        "are others above 1; that of the checkpoint's run when not given",
    )
    parser.add_argument(
        "--hf-config",
        metavar="FILE",
        help="with --to-hf: config.json of the original model; a new config.json is made from the "
        "options of the checkpoint when not given",
    )
    parser.add_argument(
        "--hf-base",
        metavar="DIR",
        help="with --to-hf: directory of the original model; its config.json is used, and its "
        "tensors of vision and of multi-token prediction are copied",
    )
    parser.add_argument(
        "--keep-base-template",
        action="store_true",
        help="with --hf-base or --hf-config: keep the chat template of the original, although the "
        "training had another one",
    )
    parser.add_argument(
        "--hf-family",
        metavar="NAME",
        help=f"with --to-hf: family of a new config.json ({', '.join(FAMILY_NAMES)}); the first family "
        "that can hold the model when not given",
    )
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="with --to-hf: present path of the tokenizer, if it is not the path of the training",
    )
    parser.add_argument(
        "--ignore-key",
        metavar="KEY",
        action="append",
        default=[],
        help="unknown key of config.json to ignore, because it does not change what the model "
        "computes; may be repeated",
    )


@command(
    "convert",
    "convert Hugging Face weights to a checkpoint, and export a checkpoint for transformers",
    _add_arguments,
)
def convert_command(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    if run_flags and not arguments.from_megatron:
        raise UsageError(
            f"{run_flags[0]} is not an option of convert; the options of a model come from its "
            "config.json or its checkpoint."
        )
    _check_options(arguments)
    from megatron_packed.checkpoint.errors import CheckpointError
    from megatron_packed.data.errors import BadLine, DataError

    conversion = _conversion(arguments, run_flags)
    try:
        conversion(arguments)
    except (CheckpointError, ConfigError) as error:  # a stored option may be unknown here
        raise UsageError(f"convert: {error}", EXIT_CHECKPOINT) from None
    except (DataError, BadLine) as error:
        moved = MOVED if arguments.to_hf and not arguments.tokenizer_model else ""
        raise UsageError(f"convert: {error}{moved}", EXIT_DATA) from None
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UsageError(f"convert: {said}", EXIT_CHECKPOINT) from None
    return 0


def _conversion(
    arguments: argparse.Namespace, run_flags: Sequence[str]
) -> Callable[[argparse.Namespace], None]:
    if arguments.from_megatron:
        return functools.partial(_from_megatron, run_flags=run_flags)
    if arguments.to_megatron:
        return _to_megatron
    if arguments.to_peft:
        return _to_peft
    if arguments.from_peft:
        return _from_peft
    if arguments.to_hf:
        return _to_huggingface if arguments.hf_config or arguments.hf_base else _export
    return _merge if arguments.merge else _from_huggingface


_NO_EFFECT = {
    "merge": "bf16 hf_config hf_base hf_family keep_base_template tokenizer_model ignore_key "
    "mtp_depths",
    "from_hf": "load hf_config hf_base hf_family keep_base_template tokenizer_model ckpt_step",
    "from_megatron": "load hf_config hf_base hf_family keep_base_template tokenizer_model "
    "ignore_key mtp_depths",
    "to_megatron": "save bf16 hf_config hf_base hf_family keep_base_template tokenizer_model "
    "ignore_key mtp_depths",
    "to_peft": "save bf16 hf_family mtp_depths",
    "from_peft": "bf16 hf_family keep_base_template tokenizer_model mtp_depths",
    "to_hf": "save bf16 mtp_depths",
}
"""Options without an effect, by the option that names the conversion; the last one given counts."""


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that are missing, or that have no effect in this conversion."""
    given = [name for name in _NO_EFFECT if getattr(arguments, name)]
    if not given:
        ways = " ".join(f"--{name.replace('_', '-')}" for name in _NO_EFFECT)
        raise UsageError(f"one of the arguments {ways} is required")
    option = given[-1]
    needed = {"from_peft": ["load", "save"], "merge": ["load", "save"]}.get(
        option, ["load" if option.startswith("to_") else "save"]
    )
    other = _NO_EFFECT[option].split()
    way = f"--{option.replace('_', '-')}"
    if arguments.to_hf:
        if arguments.hf_config or arguments.hf_base:
            way = "--hf-config" if arguments.hf_config else "--hf-base"
            other.append("hf_family")
        else:
            other.append("keep_base_template")
    if not arguments.to_megatron:
        other += ["no_save_optim", "target_expert_parallel_size"]
    if option != "to_peft":
        other.append("adapter_for")
    if not arguments.merge:
        other.append("pretrained_checkpoint")
    elif option not in ("merge", "to_hf"):
        other.append("merge")
    for name in needed:
        if not getattr(arguments, name):
            raise UsageError(f"--{name.replace('_', '-')} is required with {way}.")
    for name in other:
        if getattr(arguments, name):
            raise UsageError(f"--{name.replace('_', '-')} has no effect with {way}; leave it out.")
    _check_values(arguments)


def _check_values(arguments: argparse.Namespace) -> None:
    """Refuse values that no conversion has."""
    step = arguments.ckpt_step
    if step == "best" and arguments.from_megatron:
        raise UsageError("--ckpt-step best: is not known to Megatron; give the number of a folder.")
    if step not in (None, "best") and not step.isdecimal():
        raise UsageError(f"--ckpt-step {step}: is neither a number nor best; give one of the two.")
    size = arguments.target_expert_parallel_size
    if size is not None and size < 1:
        raise UsageError(f"--target-expert-parallel-size {size}: must be 1 or more.")
    if size is not None and arguments.no_save_optim:
        raise UsageError(
            "--target-expert-parallel-size has no effect with --no-save-optim; leave it out."
        )
    if arguments.hf_family not in (None, *FAMILY_NAMES):
        cure = f"give {' or '.join(FAMILY_NAMES)}."
        cure = did_you_mean(nearest(arguments.hf_family, FAMILY_NAMES), cure)
        raise UsageError(f"--hf-family {arguments.hf_family}: is not a supported family; {cure}")
    if arguments.adapter_for not in ("", *_PROGRAMS):
        cure = did_you_mean(nearest(arguments.adapter_for, _PROGRAMS), "give peft or vllm.")
        raise UsageError(f"--adapter-for {arguments.adapter_for}: is not a known program; {cure}")


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Show the progress of a conversion, which calls the yielded function."""
    from megatron_packed.data.progress_bar import ProgressBar

    with ProgressBar("converting", 1) as bar:
        yield lambda done, total: bar.update(done, total=total)


def _step(arguments: argparse.Namespace) -> Step:
    step = arguments.ckpt_step
    return step if step in (None, "best") else int(step)


def _from_huggingface(arguments: argparse.Namespace) -> None:
    from megatron_packed.data.sources.hub import local_path
    from megatron_packed.models.convert.import_huggingface import (
        TOKENIZER,
        from_huggingface,
    )

    if is_hub_name(arguments.from_hf):
        raise UsageError(
            f"--from-hf {arguments.from_hf}: does not exist; "
            f"{download_cure(arguments.from_hf, MODEL, '--from-hf')}.",
            EXIT_CHECKPOINT,
        )
    source = local_path(arguments.from_hf, MODEL, print, files=_MODEL_FILES)
    directory, root = Path(source).absolute(), Path(arguments.save).absolute()
    with _progress() as on_progress:
        done = from_huggingface(
            directory,
            root,
            bf16=arguments.bf16,
            ignored=arguments.ignore_key,
            depths=arguments.mtp_depths,
            on_progress=on_progress,
        )
    _print_imported(done, root)
    if not os.path.lexists(directory / TOKENIZER):
        show(f"{directory} has no {TOKENIZER}; choose a tokenizer with --tokenizer-type.")
    _print_command(root)


def _from_megatron(arguments: argparse.Namespace, run_flags: Sequence[str]) -> None:
    from megatron_packed.cli.plan import without_data
    from megatron_packed.config.parser.parse import parse_or_exit
    from megatron_packed.models.convert.megatron.import_megatron import from_megatron

    model, step = None, _step(arguments)
    assert step != "best"
    if run_flags:
        arguments_of_model = without_data(["--seq-length", "2", *run_flags], uses=("model",))
        model = parse_or_exit(arguments_of_model, launched=False, on_this_machine=False).model
    root = Path(arguments.save).absolute()
    with _progress() as on_progress:
        done = from_megatron(
            Path(arguments.from_megatron).absolute(),
            root,
            bf16=arguments.bf16,
            iteration=step,
            model=model,
            on_progress=on_progress,
        )
    _print_imported(done, root)
    show("Choose the tokenizer with --tokenizer-type.")
    if done.saved.step:
        quoted, args = shlex.quote(str(root)), shlex.quote(str(root / _ARGS_FILE))
        show(f"Continue with: @{args} --load {quoted} --save {quoted}")
    else:
        _print_command(root)


def _to_megatron(arguments: argparse.Namespace) -> None:
    from megatron_packed.cli.export_for_megatron import export_for_megatron

    directory = Path(arguments.to_megatron).absolute()
    with _progress() as on_progress:
        exported = export_for_megatron(
            Path(arguments.load),
            directory,
            step=_step(arguments),
            optimizer=not arguments.no_save_optim,
            expert_parallel=arguments.target_expert_parallel_size,
            on_progress=on_progress,
        )
    show(f"{directory}: written")
    state, load = exported.state, f"--load {shlex.quote(str(directory))}"
    if isinstance(state, str):
        if state:
            show(state)
        load += " --finetune"
    else:
        show(
            f"Moments, counters and schedule of iteration {state.iteration:,} are written "
            "(fully_reshardable), with masters in float32."
        )
        load += (
            f" --use-distributed-optimizer --lr {state.lr} --min-lr {state.min_lr} "
            f"--expert-model-parallel-size {state.arguments['expert_model_parallel_size']} "
            "--use-checkpoint-opt_param-scheduler"
        )
    show(f"Load it in Megatron with: {load} --dist-ckpt-strictness log_all")
    show(exported.tokenizer)


def _print_imported(done: Imported, root: Path) -> None:
    show(f"{done.saved.path}: {done.saved.num_bytes:,} bytes")
    for note in done.notes:
        show(note)
    if done.rounded:
        show(f"{len(done.rounded)} tensors were rounded to bf16, for example {done.rounded[0]}.")
    show(f"{root / _ARGS_FILE}, the flags of the model:\n\n{done.flags}")


def _print_command(root: Path) -> None:
    quoted = shlex.quote(str(root))
    show(f"Train with: @{shlex.quote(str(root / _ARGS_FILE))} --pretrained-checkpoint {quoted}")


def _original(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Return the directory of the original's weights and its config.json, as far as they are given."""
    from megatron_packed.data.sources.hub import local_path

    if arguments.hf_config:
        config = Path(local_path(arguments.hf_config, MODEL, print))
        if not arguments.hf_base:
            return None, config
    if not arguments.hf_base:
        return None, None
    base = Path(local_path(arguments.hf_base, MODEL, print, files=_MODEL_FILES))
    return base, config if arguments.hf_config else base / "config.json"


def _exported(arguments: argparse.Namespace) -> Path | WeightSource:
    """Return the weights to export: those in --load, or with --merge their sum with the base."""
    return _merged(arguments) if arguments.merge else Path(arguments.load)


def _merged(arguments: argparse.Namespace) -> MergedWeights:
    from megatron_packed.cli.adapter_files import merged_weights

    base = arguments.pretrained_checkpoint
    return merged_weights(
        Path(arguments.load), base=Path(base) if base else None, step=_step(arguments)
    )


def _merge(arguments: argparse.Namespace) -> None:
    from megatron_packed.cli.adapter_files import save_merged

    weights = _merged(arguments)
    root = Path(arguments.save).absolute()
    saved = save_merged(weights, root)
    show(f"{saved.path}: {saved.num_bytes:,} bytes")
    show(f"Load these weights with: --pretrained-checkpoint {shlex.quote(str(root))}")


def _to_peft(arguments: argparse.Namespace) -> None:
    from megatron_packed.cli.adapter_files import export_adapters

    directory = Path(arguments.to_peft).absolute()
    base, config = _original(arguments)
    written = export_adapters(
        Path(arguments.load),
        directory,
        config=config,
        base_name=_base_name(arguments, base, config),
        step=_step(arguments),
        program=arguments.adapter_for or _PROGRAMS[0],
        tokenizer=arguments.tokenizer_model,
        keep_base_template=arguments.keep_base_template,
        ignored=arguments.ignore_key,
    )
    show(f"{directory}: written")
    for sentence in written.sentences:
        show(sentence)
    if written.warning:
        show_aside(f"warning: {written.warning}")


def _base_name(arguments: argparse.Namespace, base: Path | None, config: Path | None) -> str | None:
    """Return the base in adapter_config.json: its name on the hub, or its folder."""
    given = arguments.hf_base or arguments.hf_config
    hub = parse_hub_path(given) if given else None
    if hub is not None:
        return hub.name
    folder = base or (config and config.parent)
    return str(folder.absolute()) if folder else None


def _from_peft(arguments: argparse.Namespace) -> None:
    from megatron_packed.cli.adapter_files import import_adapters

    root = Path(arguments.save).absolute()
    _, config = _original(arguments)
    saved, model, rounded = import_adapters(
        Path(arguments.from_peft),
        Path(arguments.load),
        root,
        config=config,
        step=_step(arguments),
        ignored=arguments.ignore_key,
    )
    show(f"{saved.path}: {saved.num_bytes:,} bytes")
    words = " ".join(map(shlex.quote, model.lora_target_modules))
    show(f"adapters of rank {model.lora_rank}, with --lora-target-modules {words}")
    if rounded:
        show(
            f"{len(rounded)} tensors were rounded to the data type of the base, such as {rounded[0]}."
        )
    base, adapters = shlex.quote(arguments.load), shlex.quote(str(root))
    show(f"Answer prompts with: megatron-packed generate --load {base} --load-adapter {adapters}")
    show(f"Train on with: --pretrained-checkpoint {base} --load-adapter {adapters}")


def _to_huggingface(arguments: argparse.Namespace) -> None:
    from megatron_packed.cli.export_tuned import export_tuned
    from megatron_packed.models.convert.huggingface_files import by_prefix

    directory = Path(arguments.to_hf).absolute()
    base, config = _original(arguments)
    assert config is not None
    with _progress() as on_progress:
        made, sentences, warning = export_tuned(
            _exported(arguments),
            directory,
            config,
            base=base,
            step=_step(arguments),
            ignored=arguments.ignore_key,
            tokenizer=arguments.tokenizer_model,
            keep_base_template=arguments.keep_base_template,
            on_progress=on_progress,
        )
    show(f"{directory}: written")
    for sentence in sentences:
        show(sentence)
    if warning:
        show_aside(f"warning: {warning}")
    if made.rounded:
        show(
            f"{len(made.rounded)} tensors were rounded to the dtype of the original, for example "
            f"{made.rounded[0]}."
        )
    if made.copied:
        show(f"Copied from {base}: {by_prefix(made.copied)}.")
    if made.dropped:
        show(
            f"Not written: {by_prefix(made.dropped)}. To copy them from the original, give --hf-base."
        )


def _export(arguments: argparse.Namespace) -> None:
    from megatron_packed.cli.export_trained import export_trained

    directory = Path(arguments.to_hf).absolute()
    with _progress() as on_progress:
        exported = export_trained(
            _exported(arguments),
            directory,
            step=_step(arguments),
            family=arguments.hf_family,
            tokenizer=arguments.tokenizer_model,
            on_progress=on_progress,
        )
    show(f"{directory}: written as a {exported.family.model_type} model for transformers")
    if exported.ends:
        show(f"Answers end at {' or '.join(exported.ends)} (eos_token_id).")
    for sentence in (exported.positions, exported.missing):
        if sentence:
            show(sentence)
    if exported.warning:
        show_aside(f"warning: {exported.warning}")
