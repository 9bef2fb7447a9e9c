"""Facts about a run's data that need no tokenising: sizes of files, and what a cache contains."""

from __future__ import annotations

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data_parts.tokenizer import TRAINED_BPE
from megatron_packed.data.errors import DataError, NotTokenizedError
from megatron_packed.data.known_files import KnownData
from megatron_packed.data.tokenizers.base import vocabulary
from megatron_packed.data.tokenizers.bpe_training import MIN_VOCAB_SIZE
from megatron_packed.inputs.open_documents import build_tokenizer, open_documents
from megatron_packed.inputs.stored_files import files_of_start, with_stored_template


def known_data(config: RunConfig, *, given: bool = True) -> KnownData:
    """Return what is known of the training data without tokenising it.

    Args:
        given: False if the options name no data.
    """
    lengths, refusal = None, ""
    vocab_size, reason = config.model.vocab_size, "" if given else "no data is given"
    try:
        files = files_of_start(config)
    except CheckpointError:
        files = None  # the load reports the damage
    options = with_stored_template(config, files).data
    trained = None if files is None else files.trained_tokenizer(options)
    try:
        tokenizer = build_tokenizer(options, vocab_size, build_missing=False, trained=trained)
        vocab_size = vocabulary(tokenizer, vocab_size)
        if options.named.fault:  # the file may exist only on the training machine
            raise DataError(
                f"the file of --data-args-path or --per-split-data-args-path {options.named.fault}"
            )
        try:
            if given:
                documents = open_documents(
                    options,
                    tokenizer,
                    validates=False,
                    shorten_to=config.shorten_to,
                    made_from=config.made_from,
                    show=False,
                    build_missing=False,
                )
                lengths = documents.train.lengths
        finally:
            tokenizer.close()
    except NotTokenizedError as error:
        reason = str(error).rstrip(".")
    except (DataError, OSError) as error:
        reason = refusal = str(error).rstrip(".")
    if vocab_size is None and options.tokenizer_type == TRAINED_BPE:
        vocab_size = max(options.tokenizer_vocab_size, MIN_VOCAB_SIZE)
    return KnownData(vocab_size, lengths, reason, refusal)
