"""Probes of packages and kernels, run in a separate process: ``python -m
megatron_packed.cli.doctor.probe NAME ...``.

Writes one line of JSON for each name to standard output, in order; output of libraries goes to
standard error. A name is ``import:MODULE``, ``kernels`` (the backend that each op would choose),
``kernel:OP.BACKEND`` (a small real call), or ``gpu``. An answer with ``error`` gives the reason of
a failure. After an answer with ``last`` the process ends.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron_packed.config.kinds.attention import SYMBOL as ATTENTION
from megatron_packed.config.kinds.layer_kind import KINDS

_TOKENS = 512
_FLAGS = shlex.split("""
    --hidden-size 256 --normalization RMSNorm --squared-relu --disable-bias-linear
    --vocab-size 512 --untie-embeddings-and-output-weights
    --lr 0 --train-iters 1 --data-path '(none)'""")
"""Flags of a small model, without those of its kinds of layers. Layers have the head and state sizes
of large models, which determine the choice of kernels.
"""
CLOSE = 0.05
"""Maximum relative difference of norms from the reference in the same precision. A correct kernel
in bfloat16 differs by about 0.01, a wrong kernel by about 1.
"""


def answer_probes(names: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in names:
        answer = answer_to(name)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer.get("last"):
            return


def answer_to(name: str) -> dict[str, Any]:
    """Return the answer of one probe; every exception becomes an answer."""
    kind, _, what = name.partition(":")
    probes: dict[str, Callable[..., dict[str, Any]]] = {
        "import": _import,
        "kernels": _kernels,
        "kernel": _kernel,
        "gpu": _gpu,
    }
    try:
        return probes[kind](*([what] if what else []))
    except Exception as error:  # a broken package may raise anything
        text = " ".join(str(error).split())[:400]
        return {"error": f"{type(error).__name__}: {text}", "last": kind == "kernel" and _on_gpu()}


def _on_gpu() -> bool:
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()


def _import(module: str) -> dict[str, Any]:
    if module == "apex":  # an unrelated apex is detected without running its code
        from megatron_packed.optim.adamw_multi_tensor import stranger_by_its_name

        stranger = stranger_by_its_name()
        if stranger is not None:
            return {"stranger": stranger}
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        if find_spec(".".join(parts[:length])) is None:
            return {"absent": True}
    begun = time.perf_counter()
    imported = import_module(module)
    version = getattr(imported, "__version__", None) or getattr(
        sys.modules[parts[0]], "__version__", None
    )
    where = getattr(imported, "__file__", None)
    if where is None:
        return {
            "error": f"{next(iter(imported.__path__))} is a directory without code that is "
            "imported instead of the package"
        }
    return {"version": str(version or ""), "where": where, "seconds": time.perf_counter() - begun}


@lru_cache(maxsize=1)
def _job() -> tuple[Any, Any, dict[str, Any]]:
    """Return the configuration, the device, and each op with the inputs that the model would
    request.
    """
    import torch

    from megatron_packed.config.parser.parse import parse_or_exit
    from megatron_packed.explain.op_requests import op_requests

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = ["--hybrid-layer-pattern", "".join(KINDS)]
    for kind in KINDS.values():
        layers += shlex.split(kind.example)
    flags = [
        *_FLAGS,
        *layers,
        "--seq-length",
        str(_TOKENS),
        *(["--bf16"] if device.type == "cuda" else []),
    ]
    config = parse_or_exit(flags, launched=False, on_this_machine=False)
    ops = {op.name: (op, inputs) for op, _, inputs in op_requests(config, device)}
    return config, device, ops


def _kernels() -> dict[str, Any]:
    """Return, for each op, the backend that 'auto' chooses on this machine, all backends in order,
    and the reasons why some cannot be used.
    """
    from megatron_packed.explain.kernel_reasons import choose, layer_reasons, without_module

    config, device, ops = _job()
    kernels: dict[str, Any] = {}
    for name, (op, inputs) in ops.items():
        kernel = choose(op, inputs)
        reasons = {
            backend: [without_module(why) for why in whys]
            for backend, whys in kernel.reasons.items()
        }
        kernels[name] = {"chosen": kernel.name, "reasons": reasons, "cost": kernel.cost}
    kernels["layers"] = {"chosen": "local", "reasons": layer_reasons(config, device)}
    return {"device": device.type, "ops": kernels}


def _kernel(name: str) -> dict[str, Any]:
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
    import numpy as np

    from megatron_packed.layers.backends import Backends
    from megatron_packed.models.isolation import VOCAB, observe
    from megatron_packed.packed.micro_batch import MicroBatch

    _, device, _ = _job()
    choice, symbol = ("transformer_impl", ATTENTION) if op == "layers" else (op, _layers_of()[op])
    draw = np.random.default_rng(0)
    documents = [(draw.integers(0, VOCAB, length), None) for length in (130, 3, 251)]
    pack = MicroBatch.build(documents, _TOKENS, scales=(1.0, 0.0)).to(device)
    observations = []
    for backends in (Backends.reference(), _but(Backends.reference(), choice, backend)):
        model = _one_layer(symbol, device, backends)
        observations.append({what: value.double() for what, value in observe(model, pack).items()})
    expected, got = observations
    return max(float((got[what] - value).norm() / value.norm()) for what, value in expected.items())


def _one_layer(symbol: str, device: Any, backends: Any) -> Any:
    """Return a model of one layer."""
    from megatron_packed.models.hybrid_model import HybridModel
    from megatron_packed.models.isolation import VOCAB, small_config
    from megatron_packed.models.run_model import dtype_of

    config, _, _ = _job()
    return HybridModel(
        small_config(symbol, config.model),
        vocab_size=VOCAB,
        max_positions=_TOKENS,
        device=device,
        dtype=dtype_of(config),
        backends=backends,
        seed=1,
    )


@lru_cache(maxsize=1)
def _layers_of() -> dict[str, str]:
    """Return the layer in which each op is tested: of those with the op, the first with the fewest
    ops.
    """
    import numpy as np

    from megatron_packed.layers.backends import Backends
    from megatron_packed.ops.backend_dispatch import planned
    from megatron_packed.packed.micro_batch import MicroBatch

    _, device, _ = _job()
    pack = MicroBatch.build([(np.zeros(_TOKENS, dtype=np.int64), None)], _TOKENS).to("meta")
    ops: dict[str, set[str]] = {}
    for symbol in KINDS:
        model = _one_layer(symbol, "meta", Backends.reference())
        with planned(device) as requests:
            model(pack)
        ops[symbol] = {request.op.name for request in requests}
    layer_of_op: dict[str, str] = {}
    for symbol in sorted(ops, key=lambda symbol: len(ops[symbol])):
        layer_of_op |= dict.fromkeys(ops[symbol] - layer_of_op.keys(), symbol)
    return layer_of_op


def _but(backends: Any, choice: str, backend: str) -> Any:
    from dataclasses import replace

    if choice == "transformer_impl":  # this implementation also provides attention
        return replace(backends, transformer_impl=backend, varlen_attention=backend)
    return replace(backends, **{choice: backend})


def _adamw_difference(backend: str) -> float:
    import torch

    from megatron_packed.optim import adamw
    from megatron_packed.optim.stochastic_rounding import ElementNumbers

    _, device, ops = _job()
    op, inputs = ops["adamw"]

    def number(value: float) -> Any:
        return torch.tensor(value, device=device)

    def updated(name: str) -> Any:
        draw = torch.Generator().manual_seed(0)
        lists = [[torch.rand(1024, generator=draw).to(device)] for _ in range(4)]
        run = torch.tensor([[0, 1024, 0, 0, 0, 0, 0, 0]], device=device)
        slices = adamw.Slices(
            weight_decay=0.1,
            params=lists[0],
            grads=lists[1],
            exp_avgs=lists[2],
            exp_avg_sqs=lists[3],
            numbers=[ElementNumbers(runs=run, listed=run[0, :0])],
        )
        control = adamw.Control(
            lr=number(0.1),
            step=number(3.0),
            skip=number(0.0),
            grad_divisor=number(2.0),
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
        )
        op.chosen[name, inputs].loaded.run([slices], control)
        return lists[0][0].double()

    expected = updated("reference")
    return float((updated(backend) - expected).norm() / expected.norm())


def _gpu() -> dict[str, Any]:
    from megatron_packed.cli.doctor.gpu import gpu_findings

    return {"findings": [finding.as_dict() for finding in gpu_findings()]}


if __name__ == "__main__":
    answer_probes(sys.argv[1:])
