"""Report how training data is packed; tokenise the data first if it is not in the cache.

Takes the flags of pretrain_hybrid.py, also from --config and @files; pretrain_hybrid.py --help-all
lists them. Flags of data, tokenizer and packing and --seed affect the result. Flags of the model,
the optimizer and the training loop may be left out. --load DIR --use-checkpoint-args takes length,
tokenizer and chat template of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence

from megatron_packed.cli.command import command, input_failures, show
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.parser.precedence import gather
from megatron_packed.resume.stored_options import stored_options

_UNUSED = {
    "model": ("--hybrid-layer-pattern", "-", "--hidden-size", "1", "--num-attention-heads", "1"),
    "optim.lr": ("--lr", "0"),
    "training.train_iters": ("--train-iters", str(2**31 - 1)),
}
"""Values for flags that a run requires and this command may not use. They are added unless the user
gives the option, or an option of the section, that is the key.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "megatron-packed packing FLAGS_OF_A_RUN [--json]"
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@command("packing", "tokenise data and report how it is packed", _add_arguments)
def packing_command(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    config = parse_or_exit(with_unused_flags(run_flags), launched=False, read_stored=stored_options)
    from megatron_packed.data.tokenizers.base import vocabulary
    from megatron_packed.inputs.data_messages import packing_sentences
    from megatron_packed.inputs.open_documents import open_run_documents
    from megatron_packed.inputs.plan_packs import plan_data
    from megatron_packed.inputs.stored_files import with_tokenizer
    from megatron_packed.models.estimate.run_estimate import with_partition

    with input_failures():
        config, tokenizer = with_tokenizer(config)
        entries = vocabulary(tokenizer, config.model.vocab_size)
        documents = open_run_documents(config, tokenizer)
        config, _ = with_partition(config, entries, documents.train.lengths)
        plans = plan_data(config, documents, show_progress=True)
    if arguments.json:
        evaluations = {name: plan.pieces.as_dict() for name, plan in plans.evaluations.items()}
        print(json.dumps({"training": plans.packing.as_dict(), **evaluations}))
    else:
        show("\n".join([*documents.sentences, *packing_sentences(config, plans)]))
    return 0


def with_unused_flags(run_flags: Sequence[str], uses: Collection[str] = ()) -> list[str]:
    """Return the flags of a run, with missing required flags added in front.

    Args:
        uses: sections whose required flags the command uses; those are not added.
    """
    gathered = gather(run_flags)
    values = gathered.values
    sections = {
        key.partition(".")[0] for key in values if key != "model.vocab_size"
    }  # --vocab-size may also be given for the tokenizer, without a model
    present = {*uses, *values, *sections}
    if gathered.uses_checkpoint:
        present.add("model")
    # These options set the number of iterations.
    if {"training.train_samples", "training.train_epochs"} & values.keys():
        present.add("training.train_iters")
    unused = [
        word for key, arguments in _UNUSED.items() if key not in present for word in arguments
    ]
    return [*unused, *run_flags]
