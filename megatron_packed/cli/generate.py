"""Continue a prompt with the newest valid checkpoint of a run, by greedy decoding.

Takes the flags of the run, also from --config and @files; --load gives the checkpoints. Flags of
the optimizer and the training loop may be left out. The data may also be left out or be in another
place, except for a TrainedBPETokenizer, which is trained on the data. With --sft the prompt is a
user's message, formatted with the chat template. Without --sft it is the beginning of a text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_packed.cli.errors import EXIT_CHECKPOINT, EXIT_DATA, UsageError
from megatron_packed.cli.plan import NO_DATA, without_data
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data import TRAINED_BPE

NAME = "generate"
HELP = "continue a prompt with a run's checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "megatron-packed generate FLAGS_OF_THE_RUN --prompt TEXT [--max-new-tokens N]"
    parser.add_argument(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="text to continue, or with --sft a user's message",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of generated tokens (default 64)",
    )


def run(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    config = parse_or_exit(without_data(run_flags, uses=("model",)), launched=False, here=False)
    if config.checkpoint.load is None:
        raise UsageError("--load is required: the directory of the run's checkpoints.")
    if config.data.tokenizer_type == TRAINED_BPE and config.data.train_paths == NO_DATA[1:]:
        raise UsageError(f"--data-path is required: {TRAINED_BPE} is trained on it.")
    try:
        arguments.prompt.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"--prompt {arguments.prompt!a} is not UTF-8 text; give it in that encoding."
        ) from None
    if arguments.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {arguments.max_new_tokens}: must be at least 1.")
    apply_environment(config.training)  # must precede the import of torch
    from megatron_packed.checkpoint.errors import CheckpointError
    from megatron_packed.data.errors import BadLine, DataError
    from megatron_packed.training.console import Console

    try:
        answer = _answer(config, arguments.prompt, arguments.max_new_tokens)
    except (DataError, BadLine) as error:
        raise UsageError(f"data error: {error}", EXIT_DATA) from None
    except CheckpointError as error:
        raise UsageError(f"checkpoint error: {error}", EXIT_CHECKPOINT) from None
    Console(rank=0, total_steps=0).say(answer)
    return 0


def _answer(config: RunConfig, prompt: str, max_new_tokens: int) -> str:
    from megatron_packed.data.tokenizers.base import vocabulary
    from megatron_packed.models.generate import generate
    from megatron_packed.training.load_for_inference import load_model
    from megatron_packed.training.open_documents import build_tokenizer
    from megatron_packed.training.trained_model import encode_prompt, inference_device

    try:
        device = inference_device(config)
    except ValueError as error:
        raise UsageError(str(error)) from None
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    tokens, ends = encode_prompt(config, tokenizer, prompt)
    if not tokens:
        raise UsageError("--prompt is empty; give at least one character.")
    positions = config.max_positions
    if config.model.position_embedding_type == "rope" and len(tokens) + max_new_tokens > positions:
        raise UsageError(
            f"a prompt of {len(tokens)} tokens and --max-new-tokens {max_new_tokens} exceed the "
            f"{positions} positions of the rotary tables; shorten one of them."
        )
    model = load_model(config, vocabulary(tokenizer, config.model.vocab_size), device)
    [new] = generate(model, [tokens], max_new_tokens, ends=ends)
    text = tokenizer.decode(new, skip_special=True).strip()
    if not text:
        print(
            f"no text: the model generated only white space and special tokens ({len(new)} in "
            "all).",
            file=sys.stderr,
        )
    return text
