"""Probes of kernels: the backend that each op chooses on this machine, and small real calls."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_packed.config.kinds.attention import SYMBOL as ATTENTION
from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.run import RunConfig
from megatron_packed.explain.kernel_reasons import Kernel, layer_reasons, without_module
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.layers.backends import Backends
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.isolation import VOCAB, observe, small_config
from megatron_packed.models.run_model import dtype_of
from megatron_packed.models.trace import calls_of_ops
from megatron_packed.optim import adamw
from megatron_packed.optim.stochastic_rounding import ElementNumbers
from megatron_packed.packed.micro_batch import MicroBatch

_TOKENS = 512
_FLAGS = f"""
    --hidden-size 256 --normalization RMSNorm --squared-relu --disable-bias-linear
    --vocab-size 512 --untie-embeddings-and-output-weights --seq-length {_TOKENS}
    --lr 0 --train-iters 1 --data-path '(none)'"""
"""Flags of a small model, without those of its kinds of layers. Layers have the head and state sizes
of large models, which determine the choice of kernels.
"""
CLOSE = 0.05
"""Maximum relative difference of norms from the reference in the same precision. A correct kernel
in bfloat16 differs by about 0.01, a wrong kernel by about 1.
"""


@lru_cache(maxsize=1)
def _job() -> tuple[RunConfig, torch.device, dict[str, Any]]:
    """Return the configuration, the device, and each op with the inputs that the model would
    request.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flags = [_FLAGS, f"--hybrid-layer-pattern {''.join(KINDS)}", "--bf16" * (device.type == "cuda")]
    flags += [kind.example for kind in KINDS.values()]
    argv = shlex.split(" ".join(flags))
    config = parse_or_exit(argv, launched=False, on_this_machine=False)
    return config, device, {op.name: (op, inputs) for op, _, inputs in op_requests(config, device)}


def choices() -> dict[str, Any]:
    """Return, for each op, the backend that 'auto' chooses on this machine, all backends in order,
    and the reasons why some cannot be used.
    """
    config, device, requests = _job()
    kernels = [Kernel(op, inputs, op.select(inputs).name) for op, inputs in requests.values()]
    ops: dict[str, Any] = {
        kernel.op.name: {
            "chosen": kernel.name,
            "reasons": {
                backend: [without_module(reason) for reason in reasons]
                for backend, reasons in kernel.reasons.items()
            },
            "cost": kernel.cost,
        }
        for kernel in kernels
    }
    layers = {"chosen": "local", "reasons": layer_reasons(config, device)}
    return {"device": device.type, "ops": {**ops, "layers": layers}}


def compare(name: str) -> dict[str, Any]:
    """Run a kernel and its reference, and return their relative difference and the seconds."""
    op, _, backend = name.partition(".")
    begun = time.perf_counter()
    difference = _adamw_difference(backend) if op == "adamw" else _layer_difference(op, backend)
    if not difference <= CLOSE:
        return {
            "error": "it runs, but the relative difference of its results to the reference is "
            f"{difference:.1e}"
        }
    return {"difference": difference, "seconds": time.perf_counter() - begun}


def _layer_difference(op: str, backend: str) -> float:
    """Return the largest relative difference of loss and input gradients of one layer, between the
    backend and the references.
    """
    config, device, _ = _job()
    changes: dict[str, Any] = {op: backend}
    symbol = ATTENTION
    if op == "layers":  # this implementation also provides attention
        changes = {"transformer_impl": backend, "varlen_attention": backend}
    else:
        symbol = _layer_of_each_op()[op]
    draw = np.random.default_rng(0)
    documents = [(draw.integers(0, VOCAB, length), None) for length in (130, 3, 251)]
    pack = MicroBatch.build(documents, _TOKENS, scales=(1.0, 0.0)).to(device)

    def observed(backends: Backends) -> dict[str, Tensor]:
        model = HybridModel(
            small_config(symbol, config.model),
            vocab_size=VOCAB,
            max_positions=_TOKENS,
            device=device,
            dtype=dtype_of(config),
            backends=backends,
            seed=1,
        )
        return observe(model, pack)

    reference = Backends.reference()
    expected, got = observed(reference), observed(replace(reference, **changes))
    return max(_difference(got[what], value) for what, value in expected.items())


def _difference(got: Tensor, expected: Tensor) -> float:
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm())


@lru_cache(maxsize=1)
def _layer_of_each_op() -> dict[str, str]:
    """Return the layer in which each op is tested: of those with the op, the first with the fewest
    ops.
    """
    model = _job()[0].model
    ops = {
        symbol: {op.name for op, _, _ in calls_of_ops(small_config(symbol, model), VOCAB)}
        for symbol in KINDS
    }
    fewest_first = sorted(ops, key=lambda symbol: len(ops[symbol]))
    return {op: symbol for symbol in reversed(fewest_first) for op in ops[symbol]}


def _adamw_difference(backend: str) -> float:
    _, device, ops = _job()
    op, inputs = ops["adamw"]

    lr, step, skip, divisor = torch.tensor([0.1, 3.0, 0.0, 2.0], device=device)
    control = adamw.Control(
        lr=lr, step=step, skip=skip, grad_divisor=divisor, beta1=0.9, beta2=0.95, eps=1e-8
    )

    def updated(name: str) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        params, grads, averages, squares = (
            [torch.rand(1024, generator=draw).to(device)] for _ in range(4)
        )
        run = torch.tensor([[0, 1024, 0, 0, 0, 0, 0, 0]], device=device)
        slices = adamw.Slices(
            weight_decay=0.1,
            params=params,
            grads=grads,
            exp_avgs=averages,
            exp_avg_sqs=squares,
            numbers=[ElementNumbers(runs=run, listed=run[0, :0])],
        )
        op.chosen[name, inputs].loaded.run([slices], control)
        return params[0]

    return _difference(updated(backend), updated("reference"))
