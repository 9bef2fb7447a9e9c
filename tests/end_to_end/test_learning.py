"""A small model learns from dialogues (answers only) and from documents of very unequal lengths.

Each validation loss has an upper and a lower bound around the loss that was reached, which the
comment next to the bounds gives. A higher loss means that the model learned too little. A lower
loss means that targets leak, because names, numbers and invented words cannot be guessed.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.runs import run, steps
from support.samples import REAL_DATA, Sample, dialogues, documents, real_dialogues, real_documents

MODEL: dict[str, Any] = {
    "hybrid_layer_pattern": "M*-E",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "position_embedding_type": "rope",
    "mamba_head_dim": 32,
    "mamba_state_dim": 16,
    "mamba_num_groups": 1,
    "mamba_chunk_size": 64,
    "ffn_hidden_size": 128,
    "num_experts": 4,
    "moe_ffn_hidden_size": 64,
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
}
TRAINING: dict[str, Any] = {
    "device": "cpu",
    "train_iters": 90,
    "seq_length": 512,
    "global_batch_size": 2,
    "lr": 5e-3,
    "min_lr": 5e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 8,
    "tokenizer_type": "TrainedBPETokenizer",
    "tokenizer_vocab_size": 512,
    "eval_interval": 45,
    "eval_iters": 6,
}
WINDOW = 15
"""Number of steps of the running median."""


class Case(NamedTuple):
    make: Callable[[Path], Sample]
    options: dict[str, Any]
    bounds: tuple[float, float]
    """Bounds of the final validation loss, in nats per target token."""


SFT, TEXT = {"sft": True}, {"overlong_policy": "split"}
SHORTENED = {**SFT, "max_document_length": 256}
"""Options that shorten long dialogues.

Two of three dialogues are longer than the limit, and keep their last answer.
"""
CASES = {
    "dialogues": Case(dialogues, SHORTENED, (0.52, 0.78)),  # measured: 0.63
    "documents": Case(documents, TEXT, (2.60, 2.87)),  # measured: 2.76
    "real dialogues": Case(real_dialogues, SFT, (3.48, 3.83)),  # measured: 3.68
    "real documents": Case(real_documents, TEXT, (4.37, 4.67)),  # measured: 4.55
}


def spikes(losses: list[float]) -> list[int]:
    """Return the steps whose loss is NaN or above 1.5 times the running median.

    The median covers the finite losses of the previous `WINDOW` steps.
    """
    found = []
    for at in range(1, len(losses)):
        before = [loss for loss in losses[max(0, at - WINDOW) : at] if math.isfinite(loss)]
        if not losses[at] <= 1.5 * statistics.median(before):
            found.append(at + 1)
    return found


def test_spikes_are_seen() -> None:
    calm = [6.0 - 0.02 * step for step in range(90)]
    assert spikes(calm) == []
    assert spikes([*calm[:50], 8.0, *calm[51:]]) == [51]
    assert spikes([*calm[:50], math.nan, *calm[51:]]) == [51]


@pytest.mark.parametrize("name", CASES)
def test_a_small_model_learns(name: str, tmp_path: Path) -> None:
    if name.startswith("real") and REAL_DATA is None:
        pytest.skip("MEGATRON_PACKED_TEST_DATA names no folder with real data (samples.py)")
    case = CASES[name]
    sample = case.make(tmp_path / "data")
    options = {
        **MODEL,
        **TRAINING,
        **case.options,
        "train_data_path": sample.train,
        "valid_data_path": sample.valid,
        "log_jsonl": tmp_path / "log.jsonl",
    }
    finished = run(options, tmp_path, 2)
    assert finished.exit_code == 0, finished.console
    assert ("of them were shortened so that they keep their last answer" in finished.console) == (
        "max_document_length" in options
    )
    lines = steps(tmp_path / "log.jsonl")
    losses = [line["lm_loss"] for line in lines if "lm_loss" in line]
    validations = [line["valid_loss"] for line in lines if "valid_loss" in line]
    print(f"{name}: losses {losses[0]:.3f} -> {losses[-1]:.3f}, validations {validations}")
    assert len(losses) == TRAINING["train_iters"] and spikes(losses) == []
    assert losses[0] > 0.95 * math.log(
        TRAINING["tokenizer_vocab_size"]
    )  # An untrained model predicts uniformly.
    assert case.bounds[0] < validations[-1] < case.bounds[1]
    assert validations[-1] < validations[0]
