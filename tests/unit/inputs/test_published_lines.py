"""Instruction sets in published shapes train with flags only: documents and targets are counted."""

from pathlib import Path

import numpy as np
import pytest

from megatron_packed.config.parser.parse import parse
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.inputs.open_documents import open_documents
from support.published_sets import SETS

MODEL = (
    "--hybrid-layer-pattern - --hidden-size 8 --num-attention-heads 1 --lr 1 --train-iters 1 "
    "--seq-length 512 --sft"
)


@pytest.mark.parametrize("of", SETS, ids=lambda of: of.__name__)
def test_every_answer_of_a_published_set_is_learned(of, tmp_path: Path) -> None:
    """The targets of each document are its answers, and empty answers are left out and counted."""
    data = of(tmp_path)
    words = [*MODEL.split(), "--train-data-path", str(data.path)]
    words += ["--data-fields", data.data_fields] if data.data_fields else []
    train = open_documents(parse(words).data, ByteTokenizer(), validates=False, show=False).train
    report = train.report
    assert (len(train), report.good) == (len(data.answers), len(data.answers))
    assert (report.num_empty, report.num_bad, report.blank) == (data.empty, 0, 0)
    tokenizer = ByteTokenizer()
    for number, answers in enumerate(data.answers):
        tokens, targets = train.document(number)
        learned = tokenizer.decode(tokens[np.flatnonzero(targets)], skip_special=True)
        assert learned == "".join(answers)
