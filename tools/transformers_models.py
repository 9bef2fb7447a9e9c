"""Compare random models with transformers: logits, loss and every gradient.

The models of transformers run one document at a time.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import common  # noqa: F401  paths of helpers
from megatron_packed.models.convert.import_huggingface import open_model
from megatron_packed.models.hybrid_model import HybridModel
from support import hybrid_cases as cases
from support.huggingface_models import FAMILIES

TOLERANCE = 2e-4
"""Largest relative error: float32 with another order of summation."""


def as_ours(theirs: Any, folder: Path) -> tuple[HybridModel, dict[str, Tensor]]:
    """Return a `HybridModel` with the sizes of ``theirs``, and the tensors of ``theirs``.

    The tensors have the names of `HybridModel`. They are parameters, or values put in their place.
    """
    theirs.save_pretrained(folder, max_shard_size="100KB")
    config, files, weights = open_model(folder, bf16=False)
    model = HybridModel(config, vocab_size=config.vocab_size, max_positions=256)
    return model, {name: weight.join(files.read) for name, weight in weights.items()}


def error(mine: Tensor, theirs: Tensor, least: float = 1e-6) -> float:
    """Return the largest difference, relative to the largest value or at least to ``least``."""
    mine, theirs = mine.detach(), theirs.detach()
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=least))


def errors(theirs: Any, folder: Path, draw: random.Random) -> dict[str, float]:
    ours, state = as_ours(theirs, folder / "weights")
    ours.load_state_dict(state)
    lengths = [draw.choice([1, 2, 3, 7, 8, 9, 17, 33]) for _ in range(draw.randint(2, 8))]
    documents = cases.make_documents(lengths)
    batch = cases.make_pack(documents, tail=draw.randint(0, 9), spare=draw.randint(0, 3))
    output, logits = ours(batch), ours.logits(batch.tokens, batch.packed)
    loss_sum, worst = torch.zeros(()), 0.0
    for number, (tokens, mask) in enumerate(documents):
        tokens, mask = torch.as_tensor(tokens), torch.as_tensor(mask)
        expected = theirs(input_ids=tokens[None], use_cache=False).logits[0]
        worst = max(worst, error(logits[batch.packed.seq_idx[0] == number], expected.detach()))
        loss_sum = (
            loss_sum
            + (F.cross_entropy(expected[:-1], tokens[1:], reduction="none") * mask[1:]).sum()
        )
    found = {"logits": worst, "loss": error(output.loss_sum.detach(), loss_sum.detach())}
    if not batch.num_target_tokens:
        return found
    output.loss.backward()
    (loss_sum / batch.num_target_tokens).backward()
    return {**found, **gradient_errors(theirs, ours, folder)}


def gradient_errors(theirs: Any, ours: HybridModel, folder: Path) -> dict[str, float]:
    """Compare gradients.

    Gradients of transformers are saved and imported like weights, which gives them the
    names of `HybridModel`.
    """
    gradients = copy.deepcopy(theirs)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            held = gradients.get_parameter(name)
            held.copy_(torch.zeros_like(held) if parameter.grad is None else parameter.grad)
    _, expected = as_ours(gradients, folder / "gradients")
    # Gradients that are nearly zero everywhere contain only rounding, so their errors are
    # relative to the other gradients.
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in expected.values())
    return {
        name: error(torch.zeros_like(one) if one.grad is None else one.grad, expected[name], least)
        for name, one in ours.named_parameters()
    }


def main(models: int, seed: int, families: list[str]) -> int:
    """Return the exit code."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    good = 0
    for number in range(models):
        family = families[number % len(families)]
        draw = random.Random(f"{seed} {number}")
        theirs = FAMILIES[family](draw, number // len(families))
        with tempfile.TemporaryDirectory() as name:
            found = errors(theirs, Path(name), draw)
        worst = max(found, key=lambda key: found[key])
        good += found[worst] <= TOLERANCE
        print(
            f"model {number}, {family}: largest error {found[worst]:.1e} ({worst}), "
            f"{len(found)} compared",
            flush=True,
        )
    print(f"{good} of {models} models agree")
    return int(good != models)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=20, help="number of models of all families")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="may be repeated")
    arguments = parser.parse_args()
    sys.exit(main(arguments.models, arguments.seed, arguments.family or list(FAMILIES)))
