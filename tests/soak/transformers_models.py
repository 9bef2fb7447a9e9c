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

import _paths  # noqa: F401  helpers of the tests
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from megatron_packed.models.convert.import_huggingface import open_model
from megatron_packed.models.hybrid_model import HybridModel
from support import hybrid_cases as cases

TOLERANCE = 2e-4
"""Largest relative error: float32 with another order of summation."""


def nemotron_h(draw: random.Random) -> Any:
    pattern = "".join(draw.choices("M*-E", k=draw.randint(1, 6)))
    heads = draw.choice([2, 4, 6])
    config = transformers.NemotronHConfig(
        vocab_size=cases.VOCAB,
        hidden_size=draw.choice([16, 24, 40]),
        layers_block_type=None,
        hybrid_override_pattern=pattern,
        num_attention_heads=4,
        num_key_value_heads=draw.choice([1, 2, 4]),
        head_dim=draw.choice([4, 8, 10]),
        intermediate_size=draw.choice([12, 48]),
        ssm_state_size=draw.choice([4, 16]),
        mamba_num_heads=heads,
        mamba_head_dim=draw.choice([4, 8]),
        n_groups=draw.choice([1, 2]),
        chunk_size=draw.choice([4, 8, 16]),
        n_routed_experts=draw.choice([4, 5, 8]),
        moe_intermediate_size=draw.choice([8, 16]),
        moe_shared_expert_intermediate_size=24,
        num_experts_per_tok=draw.randint(2, 4),
        routed_scaling_factor=draw.choice([1.0, 2.5]),
        time_step_min=1e-12,  # transformers clamps the step from below, Megatron's kernels do not
    )
    model = filled(transformers.NemotronHForCausalLM(config), draw)
    for layer, symbol in zip(model.model.layers, pattern):
        if symbol == "E":
            bias = layer.mixer.gate.e_score_correction_bias
            bias.copy_(torch.linspace(-0.3, 0.3, bias.numel()))
    return pattern, model


def common(draw: random.Random) -> dict[str, Any]:
    return {
        "vocab_size": cases.VOCAB,
        "hidden_size": draw.choice([16, 24, 40]),
        "num_attention_heads": 4,
        "num_key_value_heads": draw.choice([1, 2, 4]),
        "head_dim": draw.choice([4, 8, 12]),
        "intermediate_size": draw.choice([12, 48]),
        "num_hidden_layers": draw.randint(1, 3),
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def llama(draw: random.Random) -> Any:
    config = transformers.LlamaConfig(**common(draw), rope_theta=draw.choice([1e4, 5e5]))
    return f"llama of {config.num_hidden_layers}", filled(
        transformers.LlamaForCausalLM(config), draw
    )


def mixtral(draw: random.Random) -> Any:
    config = transformers.MixtralConfig(
        **common(draw),
        num_local_experts=draw.randint(3, 6),
        num_experts_per_tok=2,
        sliding_window=None,
    )
    return f"mixtral of {config.num_hidden_layers}", filled(
        transformers.MixtralForCausalLM(config), draw
    )


def filled(model: Any, draw: random.Random) -> Any:
    """Fill every parameter with random values large enough to show every part of the model."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model.eval()


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


def main(models: int, seed: int) -> int:
    """Return the exit code."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    good = 0
    for number in range(models):
        draw = random.Random(f"{seed} {number}")
        label, theirs = [nemotron_h, nemotron_h, llama, mixtral][number % 4](draw)
        with tempfile.TemporaryDirectory() as name:
            found = errors(theirs, Path(name), draw)
        worst = max(found, key=lambda key: found[key])
        good += found[worst] <= TOLERANCE
        print(
            f"model {number}, {label}: largest error {found[worst]:.1e} ({worst}), {len(found)} compared",
            flush=True,
        )
    print(f"{good} of {models} models agree")
    return int(good != models)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    sys.exit(main(arguments.models, arguments.seed))
