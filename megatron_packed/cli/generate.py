"""Answer prompts with the newest valid checkpoint of a run.

Takes the flags of the run, also from --config and @files; --load gives the checkpoints. Flags of
the optimizer and the training loop may be left out. The data may also be left out or be in another
place, except for a TrainedBPETokenizer, which is trained on the data. --use-checkpoint-args takes
model, length and tokenizer from the checkpoint. With --sft a prompt is a user's message, formatted
with the chat template. Without --sft it is the beginning of a text.

The next token is the most likely one. With --temperature it is drawn at random; the run's flag
--seed is the seed. In a terminal the answer to one prompt is shown token by token. Several answers
are shown in the order of the prompts. Outside a terminal each of them is one line of JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_packed.cli.errors import EXIT_CHECKPOINT, EXIT_DATA, UsageError
from megatron_packed.cli.output import show_aside
from megatron_packed.cli.plan import NO_DATA, without_data
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data_parts.tokenizer import TRAINED_BPE
from megatron_packed.training.stored_options import stored_options

if TYPE_CHECKING:
    from megatron_packed.cli.answers import Answers
    from megatron_packed.models.sampling import Sampling
    from megatron_packed.training.prompts import GivenPrompt

NAME = "generate"
HELP = "answer prompts with a run's checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "megatron-packed generate FLAGS_OF_THE_RUN --prompt TEXT [--prompts-file FILE] [--max-new-tokens N] "
        "[--temperature T] [--top-p P]"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue, or with --sft a user's message; may be given several times",
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


def run(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    config = parse_or_exit(
        without_data(run_flags, uses=("model",)),
        launched=False,
        here=False,
        read_stored=_stored,
    )
    if config.checkpoint.load is None:
        raise UsageError("--load is required: the directory of the run's checkpoints.")
    if config.data.tokenizer_type == TRAINED_BPE and config.data.train_paths == NO_DATA[1:]:
        raise UsageError(f"--data-path is required: {TRAINED_BPE} is trained on it.")
    if not arguments.prompt and arguments.prompts_file is None:
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
    apply_environment(config.training)  # must precede the import of torch
    from megatron_packed.checkpoint.errors import CheckpointError
    from megatron_packed.data.errors import DataError
    from megatron_packed.training.prompts import read_prompts, texts

    sampling = _sampling(arguments, config.training.seed)
    try:
        prompts = texts(arguments.prompt, "--prompt")
        if arguments.prompts_file is not None:
            prompts += read_prompts(arguments.prompts_file, config.data.fields)
        _answer(config, prompts, arguments.max_new_tokens, sampling)
    except DataError as error:
        raise UsageError(f"data error: {error}", EXIT_DATA) from None
    except CheckpointError as error:
        raise UsageError(f"checkpoint error: {error}", EXIT_CHECKPOINT) from None
    return 0


def _stored(given: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the configuration in the checkpoint that is loaded.

    Raises:
        ConfigError: the directory has no checkpoint, or its checkpoint cannot be read.
    """
    found = stored_options(given)
    if found is None:
        folder = str(given.get("checkpoint.load", ""))
        cure = "give the directory of a run's checkpoints"
        raise ConfigError([Problem("--load", folder, "has no checkpoint", cure)])
    return found


def _sampling(arguments: argparse.Namespace, seed: int) -> Sampling:
    from megatron_packed.models.sampling import Sampling

    try:
        return Sampling(temperature=arguments.temperature, top_p=arguments.top_p, seed=seed)
    except ValueError as error:
        raise UsageError(f"--{str(error).replace('top_p', 'top-p')}") from None


def _answer(
    config: RunConfig, prompts: Sequence[GivenPrompt], max_new_tokens: int, sampling: Sampling
) -> None:
    """Load the model, and print the answers."""
    from megatron_packed.cli.answers import JsonAnswers, LabelledAnswers, LiveAnswer
    from megatron_packed.models.generate import generate
    from megatron_packed.training.load_for_inference import load_model
    from megatron_packed.training.open_documents import build_tokenizer
    from megatron_packed.training.prompts import encode_prompts
    from megatron_packed.training.trained_model import inference_device

    try:
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
    model = load_model(config, tokenizer, device, warn=_warn)
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
