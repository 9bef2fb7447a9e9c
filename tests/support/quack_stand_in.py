"""Stand-in for the packages quack and cutlass, which need a GPU: products in plain torch.

It checks tensors and arguments as quack does, and writes only where quack writes. Backends imported
inside `quack_stand_in` use it.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_packed.config.run import RunConfig
from megatron_packed.explain.op_requests import op_requests, traced_requests
from megatron_packed.models.run_model import build_model
from megatron_packed.ops import quack_tiles
from megatron_packed.ops.backend_dispatch import Op
from megatron_packed.ops.dense_mlp import api as dense_mlp
from megatron_packed.ops.grouped_mlp import api as grouped_mlp
from megatron_packed.ops.grouped_mlp import grouped_linear
from megatron_packed.ops.residual_projection import api as residual_projection
from megatron_packed.packed.micro_batch import MicroBatch

OPS = "megatron_packed.ops."
BACKENDS = (
    OPS + "dense_mlp.quack",
    OPS + "grouped_mlp.quack",
    OPS + "grouped_mlp.quack_joined",
    OPS + "quack_epilogues",
    OPS + "residual_projection.quack",
)
"""Modules of this package that import quack or cutlass."""


class Quack:
    """Records of the calls, and the modules of both packages."""

    def __init__(self):
        self.launched = 0
        """Number of products."""
        self.tiles = []
        """Tile of each product."""
        self.threads = set()
        """Threads that have launched a kernel, and so have a context of the GPU."""
        names = ("quack", "quack.gemm", "quack.gemm_config", "quack.epilogue")
        names += ("cutlass", "cutlass.cute", "cutlass.cute.arch")
        self.modules = {name: ModuleType(name) for name in names}
        for name, module in self.modules.items():
            module.__spec__ = ModuleSpec(name, None)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(self.modules[parent], child, module)
        self.gemm_module = self.modules["quack.gemm"]
        self.gemm_module.gemm = self.gemm
        self.gemm_module._gemm_plan_cache = {}
        self.modules["quack.gemm_config"].GemmConfig = dict
        self.modules["quack.epilogue"].gemm_epilogue = self.gemm_epilogue
        self.modules["cutlass"].BFloat16 = torch.bfloat16
        self.modules["cutlass"].Float32 = torch.float32
        self.modules["cutlass.cute.arch"].fmax = fmax

    def gemm(
        self,
        A,
        B,
        D,
        C,
        tile_count_semaphore,
        tile_M,
        tile_N,
        cluster_M,
        cluster_N,
        pingpong=False,
        cu_seqlens_m=None,
        cu_seqlens_k=None,
        add_to_output=False,
    ):
        self.launched += 1
        self.tiles.append((tile_M, tile_N))
        self.gemm_module._gemm_plan_cache[A.shape, B.shape] = object()
        assert tile_count_semaphore is None and (cluster_M, cluster_N, pingpong) == (1, 2, True)
        if C is not None:
            assert cu_seqlens_m is None and cu_seqlens_k is None and not add_to_output
            for each in (A, B, C, D):
                assert each.is_contiguous() and each.data_ptr() % 16 == 0
            wide = torch.promote_types(A.dtype, torch.float32)
            D.copy_(C.to(wide) + A.to(wide) @ B.to(wide).t())
            return
        if cu_seqlens_k is None:
            assert A.stride(-1) == 1 and D.stride(-1) == 1
            for start, end, matrix in ranges(cu_seqlens_m, B):
                D[start:end] = A[start:end].float() @ matrix.float().t()
            return
        assert cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k.shape == (D.shape[0] + 1,)
        for expert, (start, end) in enumerate(pairwise(cu_seqlens_k.tolist())):
            if end > start:
                assert A.stride(-2) == 1 and B.stride(-2) == 1
                product = A[:, start:end].to(D.dtype) @ B[:, start:end].to(D.dtype).t()
                D[expert] = D[expert] + product if add_to_output else product

    def gemm_epilogue(self, outputs):
        return lambda function: Product(self, function, outputs)


class Product:
    """Product with a function of its fp32 sums, and the launch plans of its kernel."""

    def __init__(self, quack, function, outputs):
        self._quack = quack
        self._function = function
        self._outputs = outputs
        self._call_cache = {}
        self._plan_cache = {}

    def record(self, A, B, C, dynamic_scheduler, tuned, config):
        assert not dynamic_scheduler and not tuned
        assert threading.get_ident() in self._quack.threads, "this thread may have no context"
        for each in (A, B.mT if C is None else B, *([] if C is None else [C])):
            assert each.is_contiguous() and each.data_ptr() % 16 == 0
            assert each.dtype == torch.bfloat16
        self._quack.launched += 1
        self._quack.tiles.append((config["tile_m"], config["tile_n"]))
        self._call_cache[A.shape] = self._plan_cache[A.shape] = object()

    def __call__(self, A, B, C=None, *, cu_seqlens_m=None, dynamic_scheduler, tuned, config):
        self.record(A, B, C, dynamic_scheduler, tuned, config)
        found = {name: A.new_empty(A.shape[0], B.shape[-1]) for name in ("D", *self._outputs)}
        whole = [(0, A.shape[0], B)]
        for start, end, matrix in whole if cu_seqlens_m is None else ranges(cu_seqlens_m, B):
            more = [] if C is None else [C[start:end].float()]
            values = self._function(A[start:end].float() @ matrix.float(), *more)
            assert values.keys() == found.keys()
            for name, value in values.items():
                found[name][start:end] = value
        return found


def ranges(bounds, matrices):
    """Yield first row, row after the last one, and matrix of each expert."""
    assert bounds.dtype == torch.int32 and bounds.shape == (matrices.shape[0] + 1,)
    for (start, end), matrix in zip(pairwise(bounds.tolist()), matrices, strict=True):
        yield start, end, matrix


def fmax(value, other, nan):
    assert nan, "maxima of NaN must be NaN"
    return torch.maximum(value, torch.tensor(other))


@contextmanager
def quack_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Quack]:
    """Replace both packages, and pretend that this machine has a Hopper.

    Modules that were imported before are back afterwards, so none outlives the stand-in.
    """
    quack = Quack()
    zeros = torch.zeros

    def launch(*arguments, **options):
        quack.threads.add(threading.get_ident())
        return zeros(*arguments, **options)

    for api in (dense_mlp, grouped_mlp, residual_projection):
        # Backends and choices are cached, and must not outlive the stand-in.
        backends = tuple(replace(each, gpu_only=False) for each in api.OP.backends)
        monkeypatch.setattr(api, "OP", Op(api.OP.name, backends, on_meta=api.OP.on_meta))
    monkeypatch.setattr(torch, "zeros", launch)
    monkeypatch.setattr(quack_tiles, "_THREAD", threading.local())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    before = {name: sys.modules.pop(name, None) for name in (*quack.modules, *BACKENDS)}
    sys.modules.update(quack.modules)
    traced_requests.cache_clear()
    try:
        yield quack
    finally:
        traced_requests.cache_clear()
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def listed(config: RunConfig, op: Op, device: str) -> list[Any]:
    """Return the inputs of an op that a run lists for its layers."""
    return [inputs for one, _, inputs in op_requests(config, torch.device(device)) if one is op]


def asked(module: ModuleType, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Return the inputs for which the layers of a model ask a backend's module, in a pass."""
    found: set[Any] = set()
    monkeypatch.setattr(
        module, "not_supported_reasons", lambda inputs: found.add(inputs) or ["no kernel"]
    )
    pack = MicroBatch.build([(torch.arange(128).numpy(), None)], 128)
    build_model(config, 256, "cpu")(pack).loss.backward()
    return found


def accept(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **changes: Any) -> None:
    """Let a backend's module take the tensors of a CPU as those of a GPU."""
    reasons, changes = module.not_supported_reasons, {"device_type": "cuda", **changes}
    monkeypatch.setattr(
        module, "not_supported_reasons", lambda inputs: reasons(replace(inputs, **changes))
    )


def clear_by_torch(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Write the zeros of unused rows and experts without Triton, in these modules too."""

    def cleared(rows: Tensor, offsets: Tensor) -> Tensor:
        rows[int(offsets[-1]) :] = 0
        return rows

    def used(weights: Tensor, offsets: Tensor) -> Tensor:
        weights[torch.diff(offsets, prepend=offsets.new_zeros(1)) == 0] = 0
        return weights

    for module in (grouped_linear, *modules):
        monkeypatch.setattr(module, "zero_rows_after_", cleared)
    monkeypatch.setattr(grouped_linear, "zero_unused_experts_", used)


def assert_few_plans(monkeypatch, run, counts):
    """Check that calls of ``run`` with other numbers of rows keep few plans of the joined products."""
    epilogues = import_module("megatron_packed.ops.quack_epilogues")
    monkeypatch.setattr(quack_tiles, "_PLANS_KEPT", 3)
    for rows in counts:
        run(rows)
        for product in (epilogues._squared_relu, epilogues._squared_relu_gradient):
            assert 0 < len(product._call_cache) <= 3 and 0 < len(product._plan_cache) <= 3


OLDER = "has no ['config', 'dynamic_scheduler', 'tuned']; 0.6.5 works"
OTHER_GPU = "the tiles are those of compute capability 9.x, found (10, 0)"


def other_machine(monkeypatch):
    """Install an older version of the stand-in, on a GPU that is no Hopper."""
    older = type(import_module("megatron_packed.ops.quack_epilogues")._squared_relu)
    monkeypatch.setattr(older, "__call__", lambda self, A, B, C=None, *, cu_seqlens_m: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))


def saved_shapes(call):
    """Return the shapes of the tensors that autograd saves in a call."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: found.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
    ):
        call()
    return found


def assert_a_row_is_alone(run, x, dy):
    """Check that another token changes no other row of the output and of dx."""
    before = run(x, dy)
    x[7], dy[7] = 3.0, torch.nan
    after = run(x, dy)
    others = torch.arange(len(x)) != 7
    for name in ("y", "x"):
        assert torch.equal(before[name][others], after[name][others])
        assert not torch.equal(before[name][7], after[name][7])


def assert_equal(got, want):
    assert all(torch.equal(got[name], want[name]) for name in want)
