"""Compare random models in bf16 with plain PyTorch: loss, outputs and every gradient.

Each model runs three times with the same weights: with the kernels that ``auto`` chooses in bf16, and
with plain PyTorch in bf16 and in float32. Errors are differences from float32. The error of the
kernels may be a small multiple of the error of plain bf16, whose attention rounds where flash attention
does. A sum whose terms cancel has by chance a small error. So a model that exceeds the bound is compared
with the largest error of plain bf16 for several similar weights. Then one document gets other tokens,
and the results of the other documents must stay the same.

All runs of a model use the experts that the float32 run chooses, because rounding would change
some choices. Captured graphs, several ranks, multi-token prediction, recomputation and offload are
not part of this check.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
import traceback
from collections import Counter, defaultdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.kernel_errors import compare, parts_of
from common.random_models import Case, draw_case
from common.rounded_attention import rounded_attention
from common.worker_processes import run_in_processes
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.isolation import observe
from megatron_packed.ops.backend_dispatch import Op
from megatron_packed.packed.micro_batch import MicroBatch

ULPS_OF_UNORDERED_SUMS = 4
"""Difference of input gradients that attention kernels on a GPU may have between equal runs."""
NOISE_FACTOR = 4
"""The same difference as a multiple of the one observed."""

DRAWS, NUDGE = 6, 2**-7
"""Number of similar weights, and the largest relative difference of a weight (1 ulp of bf16)."""

PATIENCE = 240.0
"""Longest time of one model, most of which compiles kernels, in seconds."""


class Result(NamedTuple):
    """Result of one model."""

    number: int
    status: str
    """``good``, ``failed`` or ``refused``."""
    text: str
    kernels: tuple[str, ...] = ()
    """Kernels that ``auto`` chose, such as ``ssd triton``."""


class HeldExperts:
    """Choice of experts by the first run of a router, which the next runs repeat.

    It takes the place of `ExpertGroups` in a router, and closes all experts but the chosen ones.
    """

    def __init__(self, groups: object) -> None:
        self.groups = groups
        self.closed_TE: Tensor | None = None

    def limit(self, values_TE: Tensor, topk: int) -> Tensor:
        """Return the values with -inf for each expert that the first run did not choose."""
        if self.closed_TE is None:
            open_TE = values_TE if self.groups is None else self.groups.limit(values_TE, topk)
            closed_TE = torch.ones_like(values_TE, dtype=torch.bool)
            self.closed_TE = closed_TE.scatter_(1, open_TE.topk(topk, dim=-1).indices, False)
        return values_TE.masked_fill(self.closed_TE, -torch.inf)


def build(case: Case, dtype: torch.dtype, backends: Backends, device: str) -> HybridModel:
    return HybridModel(
        ModelConfig(**case.model),
        vocab_size=case.vocab,
        max_positions=case.slots,
        dtype=dtype,
        device=device,
        backends=backends,
    )


@torch.no_grad()
def spread(model: HybridModel, seed: int) -> None:
    """Give parameters that start equal or at zero random values, and states slow and fast decays."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        if name.endswith("A_log"):
            parameter.copy_(noise - 1)
        elif parameter.dim() == 1 and not name.endswith("dt_bias"):
            parameter.add_(noise, alpha=0.2)
    for layer in model.moe_layers:
        bias_E = layer.mixer.router.expert_bias
        if bias_E is not None:
            bias_E.copy_(torch.linspace(-0.1, 0.1, len(bias_E)))


def three_models(case: Case, seed: int, device: str) -> tuple[HybridModel, ...]:
    """Return models with the same weights: float32, plain bf16, and bf16 with kernels."""
    plain = Backends.reference()
    kinds = ((torch.float32, plain), (torch.bfloat16, plain), (torch.bfloat16, Backends()))
    models = tuple(build(case, dtype, backends, device) for dtype, backends in kinds)
    spread(models[-1], seed)
    for model in models[:-1]:
        model.load_state_dict(models[-1].state_dict())
    for layers in zip(*(model.moe_layers for model in models)):
        held = HeldExperts(layers[0].mixer.router.groups)
        for layer in layers:
            layer.mixer.router.groups = held
    return models


def fill_free_memory(device: str) -> None:
    """Fill memory that torch will allocate with NaN, which a kernel may read by mistake.

    Allocations of less than 1 MiB have blocks of their own.
    """
    if device == "cuda":
        sizes = [2**17] * 64 + [2**24] * 4
        blocks = [torch.full((size,), torch.nan, device=device) for size in sizes]
        del blocks


def run(model: HybridModel, batch: MicroBatch, main_grad: bool) -> dict[str, Tensor]:
    """Return loss, outputs and gradients as float32 tensors of rows.

    Args:
        main_grad: give every parameter a float32 buffer for its gradient, as in training.
    """
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    fill_free_memory(batch.tokens.device.type)
    if main_grad:
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    handles = [each.register_forward_hook(keep) for each in (model.embedding, model.final_norm)]
    output = model.forward_backward(batch)
    for handle in handles:
        handle.remove()
    real_T = batch.packed.valid
    found = {
        "loss": output.loss.view(1, 1),
        "token losses": output.per_token_loss_T[real_T, None],
        "outputs": kept[1].detach()[real_T],
        "input gradients": kept[0].grad[real_T],
    }
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter, dtype=torch.float32)
        for each in (parameter.grad, getattr(parameter, "main_grad", None)):
            gradient += 0 if each is None else each
        found |= parts_of(model, name, gradient)
    return {name: value.float() for name, value in found.items()}


def plain_results(
    models: tuple[HybridModel, ...], batch: MicroBatch, main_grad: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the results of the float32 model and of the plain bf16 model."""
    for model in models[:2]:
        model.zero_grad(set_to_none=True)
    exact = run(models[0], batch, False)
    with rounded_attention():
        return exact, run(models[1], batch, main_grad)


@torch.no_grad()
def nudge(models: tuple[HybridModel, ...], generator: torch.Generator) -> None:
    """Give the float32 and the plain bf16 model weights similar to those of the last model."""
    for name, parameter in models[-1].named_parameters():
        noise = 2 * torch.rand(parameter.shape, generator=generator) - 1
        for model in models[:2]:
            model.get_parameter(name).copy_(parameter * (1 + NUDGE * noise.to(parameter)))


def leaks(model: HybridModel, case: Case, seed: int, device: str, changed: int) -> list[str]:
    """Give one document other tokens; return the quantities of other documents that change."""
    before, again, after = (
        observe(model, case.batch(seed, other, aux_scale=0).to(device))
        for other in (None, None, changed)
    )
    others_T = case.batch(seed).to(device).packed.seq_idx[0] != changed
    unordered = device == "cuda" and "*" in case.model["hybrid_layer_pattern"]
    found = []
    for name, value in before.items() if others_T.any() else ():
        scale = max(float(value[others_T].abs().max()), 1e-30)
        noise, moved = (
            float((other[others_T].float() - value[others_T].float()).abs().max()) / scale
            for other in (again[name], after[name])
        )
        ulps = ULPS_OF_UNORDERED_SUMS * (unordered and name == "input gradients")
        allowed = max(ulps * torch.finfo(model.dtype).eps, NOISE_FACTOR * noise)
        if not moved <= allowed:
            found.append(
                f"{name} of other documents changed by {moved:.2g}, allowed {allowed:.2g}, "
                f"when document {changed} changed"
            )
    return found


def all_ops() -> list[Op]:
    """Return the ops for which a model on one GPU chooses kernels."""
    names = vars(Backends.reference()).keys()
    names -= {"deterministic", "transformer_impl", "context_parallel_attention"}
    return [import_module(f"megatron_packed.ops.{name}.api").OP for name in names]


def check(number: int, seed: int, device: str) -> Result:
    """Draw a model, run it and compare."""
    case, ops = draw_case(random.Random(f"{seed} {number}")), all_ops()
    for op in ops:
        op.chosen.clear()
    found: list[str] = []
    best = "nothing"
    try:
        models = three_models(case, seed, device)
        batch = case.batch(seed).to(device)
        draws = [plain_results(models, batch, case.main_grad)]
        kernels = run(models[2], batch, case.main_grad)
        shares = compare(draws, kernels)
        if not shares[0][0] <= 1:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(DRAWS):
                nudge(models, generator)
                draws.append(plain_results(models, batch, case.main_grad))
            shares = compare(draws, kernels)
        found += [text for share, text in shares if not share <= 1]
        best = f"{shares[0][0]:.2f} of the allowed error, {shares[0][1]}; {len(shares)} compared"
        changed = random.Random(number).randrange(len(case.lengths))
        found += leaks(models[-1], case, seed, device, changed)
    except ConfigError as refusal:
        return Result(number, "refused", str(refusal).splitlines()[0])
    except Exception as error:
        # CUDA's errors have the cause in the first line, those of compilers in the last.
        lines = [line for line in str(error).splitlines() if line.strip()] or ["no message"]
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        words = " ... ".join(dict.fromkeys((lines[0], lines[-1])))
        found.append(f"{type(error).__name__} at {place}: {words}")
    used = {
        f"{op.name} {backend.name}"
        for op in ops
        for (requested, _), backend in op.chosen.items()
        if requested == "auto"
    }
    chosen = tuple(sorted(used))
    if not found:
        return Result(number, "good", f"{case.model['hybrid_layer_pattern']}: {best}", chosen)
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    text = f"{'; '.join(found[:3])}{more} | kernels {', '.join(chosen)} | {case}"
    return Result(number, "failed", text, chosen)


def lost(seed: int, number: int, why: str) -> Result:
    """Return the result of a model whose process ended."""
    case = draw_case(random.Random(f"{seed} {number}"))
    return Result(number, "failed", f"the process {why} | {case}")


def main(
    models: int,
    seed: int,
    device: str,
    *,
    first: int = 0,
    processes: int = 0,
    seconds: float = float("inf"),
) -> int:
    """Return the exit code."""
    if device == "cuda":
        apply_environment(TrainingConfig(train_iters=1))
    until = time.monotonic() + seconds
    numbers = itertools.takewhile(lambda _: time.monotonic() < until, range(first, first + models))
    task = partial(check, seed=seed, device=device)
    results = map(task, numbers)
    if processes:
        results = run_in_processes(task, numbers, processes, PATIENCE, partial(lost, seed))
    counts: Counter[str] = Counter()
    kernels: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        counts[result.status] += 1
        for op, kernel in map(str.split, result.kernels):
            kernels[op][kernel] += 1
        print(f"model {result.number} of seed {seed} {result.status}: {result.text}", flush=True)
    print("\nop, kernels, and number of models with each")
    for op, used in sorted(kernels.items()):
        print(f"{op:<22}" + ", ".join(f"{kernel} {count}" for kernel, count in used.items()))
    tried = counts["good"] + counts["failed"]
    print(f"{counts['refused']} refused by the configuration")
    print(f"{counts['good']} of {tried} models agree")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first model")
    parser.add_argument("--processes", type=int, default=0, help="0 for this process")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="draw no models later")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    sys.exit(main(**vars(parser.parse_args())))
