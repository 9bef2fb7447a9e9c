"""Kernels and exchanges of a pass over the meta device, with the shapes that determine their time.

A kernel of an op counts once, when its forward pass allocates the result: its backward pass follows
from it. Products of the backward pass count when they run, except gradients of weights, which do not
run on the meta device. The kernels of an eager pass count; a graph has the same kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_packed.distributed.collectives import PlannedExchange
from megatron_packed.memory_purpose import op_now
from megatron_packed.ops.backend_dispatch import Request
from megatron_packed.torch_private import current_graph_task_id, tree_leaves

PRODUCT, LOSS_PRODUCT, ELEMENTWISE = "product", "product of the loss", "elementwise"
SECOND_GROUPED = "second grouped product"
GROUPED = ("grouped_mlp", SECOND_GROUPED)
"""Names of the products of experts."""
_PRODUCTS = {"mm": PRODUCT, "addmm": PRODUCT, "bmm": PRODUCT}


class TracedKernel(NamedTuple):
    """Kernels that run together: those of an op, of a matrix product, or of an elementwise operation."""

    name: str
    """Name of the op, or `PRODUCT`, `LOSS_PRODUCT` or `ELEMENTWISE`."""
    shape: tuple[int, ...]
    """Shape of the result; ``(M, N, K)`` of a product; bytes that an elementwise operation moves."""
    forward: bool
    """False in the backward pass, where recomputed kernels run too."""
    itemsize: int = 0
    """Bytes of an element of the result."""
    inputs: Any = None
    """Inputs, hashable, of the request to the op."""
    frozen: bool = False
    """True for a product with a weight that gets no gradient."""
    inner: int = 0
    """Columns of the rows that a grouped product of experts reads."""


Call = TracedKernel | PlannedExchange
Calls = Mapping[Call, int]


class TracedWork:
    """Counter of the kernels that operations on the meta device stand for.

    Args:
        frozen: weights that get no gradient.
        requests: requests of the model to its ops so far; see `planned`.
    """

    def __init__(self, frozen: Iterable[Tensor] = (), requests: Mapping[Request, int] = {}) -> None:
        self.calls: Counter[Call] = Counter()
        self._frozen = {tensor.untyped_storage()._cdata for tensor in frozen}
        self._requests = requests
        self._seen: dict[Request, int] = {}
        self._inputs: dict[str, Hashable] = {}

    def note(self, func: Any, args: tuple[Any, ...], result: object) -> None:
        """Count an operation that has run."""
        name = _name(func)
        op = op_now()
        if op:
            # The result of a forward pass is allocated like the first input.
            if name == "new_empty":
                assert isinstance(result, Tensor)
                asked = self._sees_request(op)
                # Experts ask for their products once, and then for the activation between them.
                products = self._inputs.get("grouped_mlp")
                if op == "activation" and products and not asked:
                    op, self._inputs[SECOND_GROUPED] = SECOND_GROUPED, products
                self._add(
                    op,
                    tuple(result.shape),
                    result.itemsize,
                    inputs=self._inputs.get(op),
                    inner=args[0].shape[-1] if op in GROUPED else 0,
                )
        elif name in _PRODUCTS:
            left, right = args[-2:]
            sizes = (left.shape[0], right.shape[1], left.shape[1])
            kind = LOSS_PRODUCT if func is torch.ops.aten.mm.out else PRODUCT
            self._add(kind, sizes, frozen=right.untyped_storage()._cdata in self._frozen)
        elif _moves(func):
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, Tensor)]
            if moved := sum(x.numel() * x.itemsize for x in tensors):
                self._add(ELEMENTWISE, (moved,))

    def _add(
        self,
        name: str,
        shape: tuple[int, ...],
        itemsize: int = 0,
        *,
        inputs: Hashable = None,
        frozen: bool = False,
        inner: int = 0,
    ) -> None:
        forward = current_graph_task_id() == -1
        self.calls[TracedKernel(name, shape, forward, itemsize, inputs, frozen, inner)] += 1

    def _sees_request(self, op: str) -> bool:
        """Return whether there was a request to the op since the last request that was seen."""
        new = [each for each, calls in self._requests.items() if self._seen.get(each) != calls]
        for request in new:
            self._seen[request] = self._requests[request]
            self._inputs[request.op.name] = request.inputs
        return any(request.op.name == op for request in new)


@lru_cache(maxsize=4096)
def _name(func: Any) -> str:
    """Return the name of an operation without its overload."""
    return str(func._schema.name).split("::")[-1]


@lru_cache(maxsize=4096)
def _moves(func: Any) -> bool:
    """Return whether an operation reads or writes values: not if it returns views or empty memory."""
    if "empty" in _name(func) or not func._schema.name.startswith("aten::"):
        return False
    views = any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in func._schema.arguments
    )
    return not views
