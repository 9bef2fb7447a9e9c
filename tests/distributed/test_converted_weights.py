"""Training from Hugging Face weights in parallel layouts: exact weights and the first loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import section_to_dict
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.convert.import_huggingface import from_huggingface, open_model
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.resume.compared_runs import AskedRun
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.build_job import build_job
from support.converted_model import FIELDS, write_model
from support.layouts import SLOTS, Way, config_of
from support.process_pools import WorkerPools
from support.whole_state import Shards, assembled, everything, same_bits

DOCUMENTS = [
    np.random.default_rng(0).integers(0, FIELDS["vocab_size"], length) for length in (19, 8, 3, 1)
]
WAYS = [
    ("nemotron_h", Way(2, 2, sequence_parallel=True)),
    ("nemotron_h", Way(2, cp_size=2, ep_size=2)),
    ("qwen3_5_moe_text", Way(2, 2, sequence_parallel=True)),
    ("qwen3_5_moe_text", Way(2, cp_size=2, ep_size=2)),
]


def begin(
    groups: ParallelGroups, way: Way, model: dict[str, Any], root: str
) -> tuple[Shards, float]:
    """Return this rank's weights from ``--pretrained-checkpoint`` and the loss of the first step."""
    config = config_of(way, **model)
    job = build_job(config, groups, FIELDS["vocab_size"])
    state = RunState(job.model, job.optimizer, groups, AskedRun(config=config))
    state.load(CheckpointConfig(load=root, finetune=True))
    held = everything(job)
    targets = sum(len(tokens) - 1 for tokens in DOCUMENTS)
    documents = [(tokens, None) for tokens in DOCUMENTS]
    pack = MicroBatch.build(
        documents, SLOTS, scales=(1 / targets, 1), alignment=config.document_alignment
    )
    return held, float(job.step([pack], 1e-3)[0])


def their_loss(directory: Path) -> float:
    """Return the mean loss of the Hugging Face model over all targets, one document at a time."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    total = 0.0
    with torch.no_grad():
        for document in DOCUMENTS:
            tokens = torch.as_tensor(document)
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            total += float(
                torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
            )
    return total / sum(len(tokens) - 1 for tokens in DOCUMENTS)


class Converted(NamedTuple):
    """Converted model."""

    hf: Path
    root: Path
    model: ModelConfig


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Converted]:
    """Return a function that converts a small model of a family, once."""

    @cache
    def convert(family: str) -> Converted:
        hf, root = tmp_path_factory.mktemp("hf"), tmp_path_factory.mktemp("ours")
        # The Hugging Face model clamps the time step from below.
        limits = {"time_step_min": 1e-12} if family == "nemotron_h" else {}
        write_model(hf, family, **limits)
        return Converted(hf, root, from_huggingface(hf, root).model)

    return convert


@pytest.mark.parametrize(("family", "way"), WAYS, ids=str)
def test_training_begins_with_their_weights_and_their_loss(
    family: str, way: Way, converted: Callable[[str], Converted], pools: WorkerPools
) -> None:
    hf, root, model = converted(family)
    ranks = pools.run(
        begin, way.world_size, way, section_to_dict(model), str(root), layout=way.layout
    )
    _, files, weights = open_model(hf, bf16=False)
    found = assembled([shards for shards, _ in ranks])
    for name, weight in weights.items():
        assert same_bits(found[f"model/{name}"], weight.join(files.read)), name
    expected = their_loss(hf)
    for _, loss in ranks:
        assert abs(loss - expected) <= 1e-4 * expected
