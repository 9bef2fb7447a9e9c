"""Pretraining on a blend of an indexed data set and text, with --split, as Megatron users run it."""

import random
from pathlib import Path

import numpy as np

from megatron_packed.data.index.indexed_writer import IndexedWriter
from megatron_packed.data.tokenizers.base import ByteTokenizer
from support.json_lines import write_texts
from support.runs import (
    WORDS,
    Data,
    assert_same_state,
    in_folder,
    run,
    start,
    steps,
    tiny_options,
    trained,
)

LAST = 6


def test_a_blend_killed_and_resumed(data: Data, tmp_path: Path) -> None:
    """A killed and resumed run equals the uninterrupted run bit for bit, into the second epoch.

    The second epoch draws other documents.
    """
    draw, tokenizer = random.Random(5), ByteTokenizer()
    texts = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 12))) for _ in range(60)]
    with IndexedWriter(tmp_path / "indexed_text_document", "<u2") as writer:
        for text in texts[:40]:
            writer.add_document(np.append(tokenizer.encode(text), tokenizer.eod_id))
    write_texts(tmp_path / "text.jsonl", texts[40:])
    blend = ("0.7", tmp_path / "indexed_text_document", "0.3", tmp_path / "text.jsonl")
    options = tiny_options(
        data,
        train_iters=LAST,
        hidden_dropout=0.1,
        sft=False,
        train_data_path=None,
        data_path=blend,
        split="90,10",
        eval_interval=3,
        eval_iters=1,
        save_interval=2,
        dataloader_inter_document_masking=True,
        reset_position_ids=True,
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = trained(whole, 1, options)
    assert (
        "54 documents train, 6 validate, 0 are left out" in said
        and "indexed_text_document: 70.00%" in said
    )
    started = start({**options, **in_folder(parts)}, parts)
    started.wait_for_line(3, parts / "log.jsonl")
    started.kill()
    started.wait()
    said = trained(parts, 1, options)
    assert "resuming from" in said or "nothing left" in said
    assert steps(parts / "log.jsonl") == steps(whole / "log.jsonl")
    assert_same_state(parts / "checkpoints", whole / "checkpoints", LAST)
    assert max(record.get("epoch", 0) for record in steps(whole / "log.jsonl")) == 1
    other = run({**options, **in_folder(parts), "split": "80,20"}, parts)
    assert other.exit_code == 4 and "was trained on other data" in other.console
