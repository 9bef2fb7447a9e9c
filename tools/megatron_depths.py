"""Compare multi-token prediction and latent experts with megatron-core: losses and every gradient.

megatron-core runs one document at a time on the CPU, with stand-ins for kernels that need a GPU.
See ``common/megatron_core.py``. Its weights, and its gradients in the place of weights, are converted
like a checkpoint. This project runs all documents in one pack.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.megatron_core import ARGS, ROWS, OnCpu, layer_specs, stand_ins, their_config
from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.megatron.import_megatron import from_megatron
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.micro_batch import MicroBatch
from support import hybrid_cases as cases

TOLERANCE = 1e-5
"""Largest difference of losses, and of gradients relative to the largest of a tensor."""
FACTOR = 0.3
LENGTH, DOCUMENTS = 11, 3
"""Documents have equal lengths, so that the mean over documents is the mean over targets."""
CASES: dict[str, dict[str, Any]] = {
    "one depth": {"hybrid_layer_pattern": "M*-E/*E"},
    "two depths": {"hybrid_layer_pattern": "M*E/*E/*E", "moe_latent_size": 20},
    "two repeated depths": {
        "hybrid_layer_pattern": "E*/ME/ME",
        "mtp_use_repeated_layer": True,
        "moe_latent_size": 12,
        "num_experts": 8,
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
}


def arguments_of(case: str) -> dict[str, Any]:
    """Return the options that a checkpoint of Megatron stores."""
    pattern = CASES[case]["hybrid_layer_pattern"]
    return {
        **{name: value for name, value in ARGS.items() if not name.startswith("linear_")},
        "mtp_num_layers": pattern.count("/"),
        "mtp_loss_scaling_factor": FACTOR,
        "mtp_use_repeated_layer": False,
        **CASES[case],
    }


class Latent(nn.Module):
    """Latent projection of Transformer Engine, which exists once on every rank."""

    def __init__(self, width: int, outputs: int, *, init_method: Any, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, width))
        init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


def their_model(args: dict[str, Any]) -> nn.Module:
    """Build megatron-core's model, whose depths consist of layers of torch, too."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel as TheirModel
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    moe_layer.HAVE_TE, moe_layer.TELinear = True, Latent
    pattern = args["hybrid_layer_pattern"]
    config = their_config({**args, "num_layers": pattern.index("/")}, {}, torch.float32)
    options = ("moe_latent_size", "moe_router_num_groups", "moe_router_group_topk")
    config = replace(
        config,
        **{name: value for name, value in args.items() if name in options or "mtp_" in name},
    )
    norm = WrappedTorchNorm
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear
    )
    specs = layer_specs()
    specs.submodules.mtp_block_spec = ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(
            layer_specs=[ModuleSpec(module=MultiTokenPredictionLayer, submodules=parts)]
        ),
    )
    return TheirModel(
        config,
        specs,
        vocab_size=ROWS,
        max_sequence_length=64,
        hybrid_layer_pattern=pattern,
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )


def documents() -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return list(torch.randint(0, ROWS, (DOCUMENTS, LENGTH), generator=draw))


def on_rank(rank: int, case: str, folder: str) -> None:
    """Save the losses of each document, the weights, and the gradients as other weights."""
    os.environ.update(MASTER_ADDR="127.0.0.1")
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{folder}.store", rank=rank, world_size=1)
    stand_ins()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossAutoScaler,
        MTPLossLoggingHelper,
    )

    parallel_state.initialize_model_parallel()
    args = arguments_of(case)
    torch.manual_seed(1)
    with OnCpu(), contextlib.redirect_stdout(None):
        model = their_model(args).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        losses = [0.0] * (1 + args["mtp_num_layers"])

        def keep(loss: Tensor, correct: Any, total: Any, depth: int, *_: Any, **__: Any) -> None:
            losses[1 + depth] += float(loss) / DOCUMENTS

        MTPLossLoggingHelper.save_metrics_to_tracker = keep
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
        loss_mask = torch.ones(1, LENGTH)
        loss_mask[0, -1] = 0
        # megatron-core adds the losses of the depths in the backward pass.
        MTPLossAutoScaler.set_loss_scale(torch.tensor(1 / DOCUMENTS))
        for tokens in documents():
            found = model(
                tokens[None],
                torch.arange(LENGTH)[None],
                mask,
                labels=tokens.roll(-1)[None],
                loss_mask=loss_mask,
            )
            loss = (found * loss_mask).sum() / loss_mask.sum() / DOCUMENTS
            losses[0] += float(loss.detach())
            loss.backward()
        about = {"args": argparse.Namespace(**args, consumed_train_samples=0), "iteration": 0}
        for name in ("weights", "gradients"):
            if name == "gradients":
                with torch.no_grad():
                    for parameter in model.parameters():
                        grad = parameter.grad
                        parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
            state = {"model": model.sharded_state_dict(), "checkpoint_version": 3.0, **about}
            os.makedirs(f"{folder}/{name}")
            dist_checkpointing.save(state, f"{folder}/{name}")
    torch.save(losses, f"{folder}.pt")
    dist.destroy_process_group()


def converted(folder: Path, name: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    found = from_megatron(folder / name, folder / f"our_{name}")
    manifest = read_manifest(found.saved.path)
    return found.model, {
        key.removeprefix("model/"): read_tensor(found.saved.path, key, manifest)
        for key in manifest.tensors
        if key.startswith("model/")
    }


def check(case: str, folder: Path) -> tuple[bool, str]:
    """Return whether a case agrees, and its largest errors in words."""
    torch.multiprocessing.spawn(on_rank, (case, str(folder)), nprocs=1)
    theirs = torch.load(f"{folder}.pt")
    config, weights = converted(folder, "weights")
    _, wanted = converted(folder, "gradients")
    model = HybridModel(
        replace(config, mtp_loss_scaling_factor=FACTOR), vocab_size=ROWS, max_positions=64
    ).train()
    # Repeated depths have one set of weights, which the model also names for the second depth.
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    assert weights.keys() >= dict(model.named_parameters()).keys()
    masked = [(tokens.numpy(), np.ones(LENGTH, bool)) for tokens in documents()]
    pack = MicroBatch.build(masked, DOCUMENTS * LENGTH + 5, DOCUMENTS)
    output = model(pack)
    output.loss.backward()
    scales = (pack.scales[0], *pack.depth_scales)
    sums = (output.loss_sum, *output.depth_loss_sums)
    losses = [float(total.detach() * scale) for total, scale in zip(sums, scales)]
    of_losses = max(abs(found - want) for found, want in zip(losses, theirs, strict=True))
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in wanted.values())
    errors = {
        name: float(
            (gradient - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=least)
        )
        for name, gradient in cases.gradients(model).items()
    }
    worst = max(errors, key=lambda name: errors[name])
    good = max(of_losses, errors[worst]) <= TOLERANCE
    return good, (
        f"{case}: {len(losses)} losses, error {of_losses:.1e}; {len(errors)} gradients, "
        f"largest error {errors[worst]:.1e} ({worst})"
    )


def main(names: list[str]) -> int:
    """Return the exit code."""
    good = 0
    for case in names:
        with tempfile.TemporaryDirectory() as name:
            agrees, text = check(case, Path(name) / "case")
        good += agrees
        print(text, flush=True)
    print(f"{good} of {len(names)} models agree")
    return int(good != len(names))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES), help=f"from {list(CASES)}")
    sys.exit(main(parser.parse_args().names))
