"""Answer prompts with the newest valid checkpoint of a run.

--load gives the checkpoints, and is all that is needed: model, length, tokenizer, chat template,
precision and seed are those of the checkpoint. Flags of the run, also from --config and @files,
replace them, for example the path of a tokenizer that was moved, or --device. A model or a precision
that is not that of the checkpoint is refused. --use-checkpoint-args takes the model of the
checkpoint in place of given flags. Flags of the optimizer, the training loop and the data have no
effect, except that a TrainedBPETokenizer of a checkpoint of an earlier version is found by its data.
For a run with --sft a prompt is a user's message, formatted with the chat template. Otherwise it is
the beginning of a text.

Adapters (LoRA) need their base: --load names it beside --load-adapter. With the adapters in --load
it is where they found it, or in --pretrained-checkpoint.

The next token is the most likely one. With --temperature it is drawn at random; the run's flag
--seed is the seed. In a terminal the answer to one prompt is shown token by token. Several answers
are shown in the order of the prompts. Outside a terminal each of them is one line of JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_packed.cli.command import (
    EXIT_CHECKPOINT,
    UsageError,
    command,
    input_failures,
    show_aside,
)
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.parser.precedence import gather
from megatron_packed.config.parser.stored_options import NO_DATA, TOKENIZER_CHOICE
from megatron_packed.config.run import STORED, RunConfig
from megatron_packed.config.sections.data_parts.tokenizer import (
    HUGGING_FACE,
    TRAINED_BPE,
)
from megatron_packed.resume.stored_options import stored_options

if TYPE_CHECKING:
    from megatron_packed.cli.answers import Answers
    from megatron_packed.inputs.prompts import GivenPrompt
    from megatron_packed.models.sampling import Sampling


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "megatron-packed generate --load DIR [--load-adapter DIR] --prompt TEXT [--prompts-file FILE] "
        "[--max-new-tokens N] [--temperature T] [--top-p P] [--verbose] [FLAGS_OF_THE_RUN]"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue, or for a run with --sft a user's message; may be given several times",
    )
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="file of prompts, - for standard input: one text per line, or JSONL with `prompt`, "
        "`messages` or lines of training data, whose last answer is left out",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of generated tokens per prompt (default 64)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="divide the logits by T and draw the next token (default 0: the most likely token)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the most likely tokens that together have probability P (default 1: all)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print the options that come from the checkpoint"
    )


@command("generate", "answer prompts with a run's checkpoint", _add_arguments)
def generate_command(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    _check(arguments, run_flags)
    config = parse_or_exit(
        run_flags,
        launched=False,
        on_this_machine=False,
        read_stored=_stored,
        infers=True,
        shows_taken=arguments.verbose,
    )
    apply_environment(config.training)  # must precede the import of torch
    from megatron_packed.inputs.prompts import read_prompts, texts

    sampling = _sampling(arguments, config.training.seed)
    with input_failures():
        prompts = texts(arguments.prompt, "--prompt")
        if arguments.prompts_file is not None:
            prompts += read_prompts(arguments.prompts_file, config.data.fields)
        # The line has the options as they were given, not the paths of copies in the checkpoint.
        contents = _contents(config)
        _answer(_with_files(config), contents, prompts, arguments.max_new_tokens, sampling)
    return 0


def _check(arguments: argparse.Namespace, run_flags: Sequence[str]) -> None:
    """Check the command's own options, before the checkpoint is read."""
    options = gather(run_flags)
    loads = not options.values.keys().isdisjoint(("checkpoint.load", "checkpoint.load_adapter"))
    if not loads and not options.actions and not options.problems:
        raise UsageError("--load is required: the directory of the run's checkpoints.")
    if not arguments.prompt and arguments.prompts_file is None and not options.actions:
        raise UsageError("--prompt or --prompts-file is required: the texts to answer.")
    for prompt in arguments.prompt:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"--prompt {prompt!a} is not UTF-8 text; give it in that encoding."
            ) from None
    if arguments.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {arguments.max_new_tokens}: must be at least 1.")


def _stored(values: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the configuration in the checkpoint that is loaded.

    Raises:
        UsageError: the directory has no checkpoint, or its checkpoint cannot be read.
        ConfigError: the checkpoint names no tokenizer, and none is given.
    """
    adapters = values.get("checkpoint.load_adapter")
    if adapters is not None:  # model, tokenizer and chat template are those of the adapters
        values = {**values, "checkpoint.load": adapters, "checkpoint.ckpt_step": None}
    folder, step = str(values["checkpoint.load"]), values.get("checkpoint.ckpt_step")
    try:
        stored = stored_options(values)
    except ConfigError as error:
        [problem] = error.problems
        raise UsageError(
            f"checkpoint error: {problem.rule}; {problem.cure}.", EXIT_CHECKPOINT
        ) from None
    if stored is None:
        from megatron_packed.checkpoint.load import no_checkpoint

        raise UsageError(f"checkpoint error: {no_checkpoint(folder, step, None)}", EXIT_CHECKPOINT)
    if "data" not in stored and values.keys().isdisjoint(TOKENIZER_CHOICE):
        cure = f"give --tokenizer-type {HUGGING_FACE} --tokenizer-model with its tokenizer.json"
        rule = "holds converted weights, which name no tokenizer"
        raise ConfigError([Problem("--load", folder, rule, cure)])
    return stored


def _with_files(config: RunConfig) -> RunConfig:
    """Return the configuration with the paths of the checkpoint's tokenizer and chat template."""
    from megatron_packed.inputs.stored_files import stored_files

    # The load of the model checks the files again, and reports damaged ones.
    folder, step = config.checkpoint.answers_with
    files = stored_files(str(folder), step, warn=lambda line: None)
    assert files is not None  # the configuration was read from a checkpoint
    of_checkpoint = (config.origins or {}).get("data.chat_template") == STORED
    data = files.for_inference(config.data, prefers_stored=of_checkpoint)
    if data.tokenizer_type == TRAINED_BPE and data.train_paths == NO_DATA:
        raise UsageError(
            f"--data-path is required: {TRAINED_BPE} is trained on it, and {files.checkpoint} "
            "contains none of this size."
        )
    return replace(config, data=data)


def _contents(config: RunConfig) -> str:
    """Return a clause with tokenizer, precision and chat format of the checkpoint."""
    data = config.data
    parts = [data.tokenizer_type, "bf16" if config.training.bf16 else "float32"]
    if config.model.has_adapters:
        parts.append(f"adapters of rank {config.model.lora_rank}")
    if data.sft:
        prompt_format = data.sft_tokenizer_prompt_format or "of the tokenizer"
        parts.append(f"chat template {data.chat_template or prompt_format}")
    return ", ".join(parts)


def _sampling(arguments: argparse.Namespace, seed: int) -> Sampling:
    from megatron_packed.models.sampling import Sampling

    try:
        return Sampling(temperature=arguments.temperature, top_p=arguments.top_p, seed=seed)
    except ValueError as error:
        raise UsageError(f"--{str(error).replace('top_p', 'top-p')}") from None


def _answer(
    config: RunConfig,
    contents: str,
    prompts: Sequence[GivenPrompt],
    max_new_tokens: int,
    sampling: Sampling,
) -> None:
    """Load the model, print the checkpoint with its ``contents`` in one line, and the answers."""
    from megatron_packed.cli.answers import JsonAnswers, LabelledAnswers, LiveAnswer
    from megatron_packed.inputs.open_documents import build_tokenizer
    from megatron_packed.inputs.prompts import encode_prompts
    from megatron_packed.models.generate import generate
    from megatron_packed.resume.load_for_inference import load_model
    from megatron_packed.training.trained_model import (
        inference_device,
        with_layers_of_this_machine,
    )

    try:
        config = with_layers_of_this_machine(config)
        device = inference_device(config)
    except ValueError as error:
        raise UsageError(str(error)) from None
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    encoded = encode_prompts(config, tokenizer, prompts)
    _check_lengths(config, prompts, encoded.tokens, max_new_tokens)
    printer = (tokenizer, prompts, encoded.ends, max_new_tokens)
    answers: Answers
    if len(prompts) == 1:
        answers = LiveAnswer(*printer, live=sys.stdout.isatty())
    else:
        answers = (LabelledAnswers if sys.stdout.isatty() else JsonAnswers)(*printer)

    def say_loaded(path: Path) -> None:
        show_aside(f"{path}: {contents}")

    model = load_model(config, tokenizer, device, warn=_warn, on_loaded=say_loaded)
    generate(
        model,
        encoded.tokens,
        max_new_tokens,
        ends=encoded.ends,
        sampling=sampling,
        on_token=answers,
    )


def _warn(sentence: str) -> None:
    show_aside(f"warning: {sentence}")


def _check_lengths(
    config: RunConfig,
    prompts: Sequence[GivenPrompt],
    tokens: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> None:
    """Check that prompts and answers fit into the rotary tables, before the model is loaded."""
    positions = config.max_positions
    for prompt, prompt_tokens in zip(prompts, tokens, strict=True):
        needed = len(prompt_tokens) + max_new_tokens
        if config.model.position_embedding_type == "rope" and needed > positions:
            raise UsageError(
                f"{prompt.name} has {len(prompt_tokens)} tokens, which with --max-new-tokens {max_new_tokens} exceed "
                f"the {positions} positions of the rotary tables; shorten one of them."
            )
