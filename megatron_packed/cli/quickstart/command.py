"""Train a small model on questions about Python's standard library, and let the model answer ten.

The first call takes about three minutes on two CPU cores. It writes the folder runs/quickstart:
questions, flags, checkpoints, a log and a report page. Another call continues a run that was
stopped. Flags of a run after the command override those of runs/quickstart/sft.args.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from megatron_packed.cli.command import EXIT_DATA, UsageError, command
from megatron_packed.cli.quickstart.questions import write_questions
from megatron_packed.config.kernel_options import count_gpus
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.run import RunConfig
from megatron_packed.files.written_files import write_file

_FOLDER = Path("runs/quickstart")
QUESTIONS = 10
MARGIN = 0.5
"""Nats by which the validation loss must be lower than that of single tokens."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "megatron-packed quickstart [--nproc-per-node N] [--prepare] [FLAGS_OF_A_RUN]"
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="processes; default: 2, or one per GPU if the machine has a single GPU",
    )
    parser.add_argument(
        "--prepare", action="store_true", help="only write the questions and the flags"
    )


@command(
    "quickstart", "train a small model in three minutes, with or without a GPU", _add_arguments
)
def quickstart_command(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    processes = arguments.nproc_per_node
    if processes is None:
        processes = min(2, count_gpus(os.environ) or 2)
    if processes < 1:
        raise UsageError(f"--nproc-per-node {processes}: must be at least 1.")
    try:
        flags_file = _prepare()
    except OSError as error:
        raise UsageError(
            f"{_FOLDER} cannot be written: {error.strerror}; change to another directory."
        ) from None
    if arguments.prepare:
        return 0
    from megatron_packed.launch.launcher import launch
    from megatron_packed.launch.local_ranks import LaunchOptions

    flags = [f"@{flags_file}", *run_flags]
    code = launch(LaunchOptions(processes=processes), flags)
    return code or answer_and_report(parse_or_exit(flags, launched=False))


def _prepare() -> Path:
    """Write the questions and the flags if they are missing; return the file of flags."""
    if not (_FOLDER / "data" / "valid.jsonl").exists():
        library = Path(sysconfig.get_paths()["stdlib"])
        try:
            objects, questions = write_questions(library, _FOLDER / "data")
        except ValueError as error:
            raise UsageError(str(error), EXIT_DATA) from None
        print(
            f"{_FOLDER / 'data'}: {questions} questions about {objects} objects of Python's standard "
            "library, and their answers"
        )
    flags_file = _FOLDER / "sft.args"
    if not flags_file.exists():
        write_file(flags_file, Path(__file__).with_name("sft.args").read_bytes())
        print(f"{flags_file}: the flags of the run")
    return flags_file


def answer_and_report(config: RunConfig) -> int:
    """Answer questions, write the report, and check that the model has learned."""
    from megatron_packed.reporting.curves import number_in, read_jsonl
    from megatron_packed.reporting.run_report import write_report

    log = config.logging.log_jsonl
    assert log is not None
    answers = _answers(config)
    for question, expected, answer in answers:
        print(f"\nQuestion: {question}\nAnswer:   {answer}")
        print("          as expected" if answer == expected else f"Expected: {expected}")
    right = sum(answer == expected for _, expected, answer in answers)
    print(f"\n{right} of {len(answers)} answers are as expected.")

    guessing = _loss_of_single_tokens(config)
    losses = [
        number_in(record, "valid_loss") for record in read_jsonl(log) if "valid_loss" in record
    ]
    print(
        f"validation loss {losses[0]:.4f} -> {losses[-1]:.4f} "
        f"({guessing:.3f} if each token were guessed by its frequency)"
    )
    page = write_report(
        log,
        Path(log).with_name("report.html"),
        title="Quickstart: Python's standard library, answered by a small hybrid model",
        levels={"frequencies of single tokens": guessing},
        answers=[
            {"prompt": question, "answer": answer, "expected": expected}
            for question, expected, answer in answers
        ],
    )
    print(f"report: {page}")
    if losses[-1] > guessing - MARGIN:
        print(
            f"The validation loss is not {MARGIN} nats below the loss of single tokens: the model "
            "did not learn."
        )
        return 1
    return 0


def _answers(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return questions that the seed draws from the validation data, expected and given answers."""
    import numpy as np

    from megatron_packed.cli.quickstart.questions import read_questions
    from megatron_packed.inputs.open_documents import build_tokenizer
    from megatron_packed.inputs.prompts import encode_prompts, texts
    from megatron_packed.models.generate import generate
    from megatron_packed.resume.load_for_inference import load_model

    questions = read_questions(Path(config.data.valid_data_path[0]))
    generator = np.random.default_rng(config.training.seed)
    numbers = generator.permutation(len(questions))[:QUESTIONS]
    drawn = [questions[number] for number in numbers]
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    model = load_model(config, tokenizer, warn=print)
    prompts, ends = encode_prompts(config, tokenizer, texts([question for question, _ in drawn]))
    answers = generate(model, prompts, 48, ends=ends)
    return [
        (question, expected, tokenizer.decode(answer, skip_special=True).strip())
        for (question, expected), answer in zip(drawn, answers)
    ]


def _loss_of_single_tokens(config: RunConfig) -> float:
    """Return the entropy of single target tokens of the validation data, in nats."""
    from megatron_packed.data.sources.tokenized_dataset import open_dataset
    from megatron_packed.data.tokenizers.chat_format import chat_format
    from megatron_packed.inputs.open_documents import build_tokenizer

    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    chat = chat_format(tokenizer)
    dataset = open_dataset(
        config.data.valid_data_path,
        tokenizer,
        chat,
        sft=True,
        shorten_to=config.shorten_to,
        cache_root=config.data.data_cache_path,
        show=False,
    )
    chat.close()
    return dataset.target_entropy()
