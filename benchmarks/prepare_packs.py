r"""Tokenises conversations and stores those of the first packs, for `real_sizes.py`.

    python benchmarks/prepare_packs.py runs/packs chat.jsonl questions.jsonl \
        --vocab-file encoder.json --merge-file vocab.bpe

The files are JSONL conversations that ``pretrain_hybrid.py --sft`` can read, and the tokenizer is a
BPE tokenizer of GPT-2's format. The conversations are mixed and packed as a run does it. Those of the
first packs become a data set of Megatron's format (``PREFIX.bin``, ``PREFIX.idx``,
``PREFIX.crc32c``) with 2 bytes per token, so that 512 packs of 8,192 tokens take 8 MB.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import harness  # noqa: F401  (makes the package importable)
from megatron_packed.config.parser.parse import parse
from megatron_packed.data.index.indexed_writer import IndexedWriter
from megatron_packed.data.loader import Loader
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.run_data import build_data

MODEL = "--hybrid-layer-pattern - --hidden-size 64"
"""Model of a configuration that is used only for its data."""


def conversations(words: list[str], packs: int) -> Iterator[NDArray[np.integer]]:
    """Yield the tokens of each conversation in the first packs of a run, in the run's order.

    Args:
        words: command line of the run, with one pack in each step.
        packs: number of packs.
    """
    config = parse(words, 1)
    data = build_data(config, ParallelGroups.single(), print)
    stream, tokens = data.train, config.packing.tokens_per_pack
    with Loader(
        stream.dataset, stream.plan, dp_rank=0, total_tokens=tokens, device=torch.device("cpu")
    ) as loader:
        for step in range(packs):
            (pack,) = loader.micro_batches(step)
            ends = pack.packed.cu_seqlens_cpu.numpy()[: pack.packed.num_seqs + 1]
            for start, end in pairwise(ends.tolist()):
                yield pack.tokens.numpy()[start:end]
    data.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix", type=Path, help="path of the data set, without .bin")
    parser.add_argument("files", nargs="+", help="JSONL or JSONL.gz files of conversations")
    parser.add_argument("--vocab-file", required=True, help="vocabulary of the tokenizer")
    parser.add_argument("--merge-file", required=True, help="merges of the tokenizer")
    parser.add_argument("--packs", type=int, default=512)
    parser.add_argument("--slots", type=int, default=8192, help="tokens of a pack")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as cache,
        IndexedWriter(arguments.prefix, np.uint16) as writer,
    ):
        options = {
            "tokenizer-type": "GPT2BPETokenizer",
            "vocab-file": arguments.vocab_file,
            "merge-file": arguments.merge_file,
            "data-cache-path": cache,
            "chat-template": "chatml",
            "seq-length": arguments.slots,
            "train-iters": arguments.packs,
            "lr": 1e-3,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        count = 0
        for tokens in conversations(
            [*MODEL.split(), "--sft", "--data-path", *arguments.files, *words], arguments.packs
        ):
            writer.add_document(tokens)
            count += len(tokens)
        documents = writer.num_documents
    print(f"{arguments.prefix}: {documents:,} conversations, {count:,} tokens")


if __name__ == "__main__":
    main()
