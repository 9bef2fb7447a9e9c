"""``--tp-comm-overlap``: outputs and gradients with overlap are those without, in every combination.

The fused products need GPUs; a stand-in computes them in blocks as torch does. Collectives that run
under another product are the usual ones, so their results are compared bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_packed.distributed import collectives
from megatron_packed.distributed.collectives import Started
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.sequence_parallel_products import (
    NO_OVERLAP,
    SequenceParallelProducts,
    TensorOverlap,
)
from megatron_packed.distributed.symmetric_rows import connect, row_bytes
from megatron_packed.distributed.tensor_parallel_shards import SplitSegment
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.tensor_overlap import overlap_line
from megatron_packed.training.build_job import build_job
from support.layouts import MODEL, SLOTS, VOCAB, Way, config_of, mine, packs_of
from support.process_pools import WorkerPools
from support.recorder import Recorder
from support.shared_file_rows import SharedFileRows, stand_in_memory
from support.whole_state import assembled, assert_same_bits, everything

ROWS, WIDTH, INNER = 6, 10, 8
"""Rows of a rank, hidden size, and inner width of all ranks."""
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
BULK_GATHER, BULK_SCATTER = "start_gather", "start_scatter"
CASES: dict[str, tuple[TensorOverlap, dict[str, int]]] = {
    "fused all-gathers": (TensorOverlap(all_gather=True), {GATHER: 2}),
    "fused reduce-scatters": (TensorOverlap(reduce_scatter=True), {SCATTER: 1}),
    "fused dX": (TensorOverlap(reduce_scatter_dgrad=True), {SCATTER: 1}),
    "in bulk": (
        TensorOverlap(bulk_dgrad=True, bulk_wgrad=True),
        {BULK_GATHER: 1, BULK_SCATTER: 1},
    ),
    "bulk all-gather": (TensorOverlap(bulk_dgrad=True), {BULK_GATHER: 1}),
    "bulk reduce-scatter": (TensorOverlap(bulk_wgrad=True), {BULK_SCATTER: 1}),
    "Megatron's default": (
        TensorOverlap(all_gather=True, reduce_scatter=True, bulk_dgrad=True, bulk_wgrad=True),
        {GATHER: 2, SCATTER: 1, BULK_GATHER: 1, BULK_SCATTER: 1},
    ),
    "everything": (
        TensorOverlap(
            all_gather=True,
            reduce_scatter=True,
            reduce_scatter_dgrad=True,
            bulk_dgrad=True,
            bulk_wgrad=True,
        ),
        {GATHER: 2, SCATTER: 2, BULK_GATHER: 1},
    ),
}
"""Overlap, and the exchanges of forward and backward of a column- and a row-parallel layer."""


def tensor_parallel(
    groups: ParallelGroups, overlap: TensorOverlap, rows: int, *, memory: bool
) -> TensorParallel:
    tp = TensorParallel.from_groups(groups, sequence_parallel=True, overlap=overlap)
    assert tp.products is not None and groups.tp.group is not None
    if memory:
        needed = row_bytes(rows, WIDTH, torch.float64)
        tp.products.memory = SharedFileRows(groups.tp.group, needed)
    return tp


EVERYTHING = ("x", "column", "row")
TRAINED = {"all": EVERYTHING, "frozen": ("x",), "last": ("row",)}
"""Trained parts of the two layers: all, the input alone, or the last layer alone."""


def run_layers(
    groups: ParallelGroups,
    overlap: TensorOverlap,
    *,
    memory: bool,
    bias: bool = False,
    flat: bool = True,
    trained: tuple[str, ...] = EVERYTHING,
) -> dict[str, Any]:
    """Run a column- and a row-parallel layer; return the output, all gradients, and counts.

    Args:
        memory: exchange rows through the stand-in for symmetric memory.
        trained: the layers whose weights get a gradient, and ``x`` if the input gets one.
    """
    tp = tensor_parallel(groups, overlap, ROWS, memory=memory)
    segment = SplitSegment(noun="channels", count=INNER, width=1)
    build = Build(backends=Backends(), tp=tp, device="cpu", dtype=torch.float64)
    column = ColumnParallelLinear(WIDTH, tp.shard(segment), bias=bias, build=build)
    row = RowParallelLinear(tp.shard(segment, dim=1), WIDTH, bias=bias, build=build)
    generator = torch.Generator().manual_seed(groups.tp.rank)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parameters = {
        f"{name}.{part}": parameter
        for name, layer in (("column", column), ("row", row))
        for part, parameter in layer.named_parameters()
    }
    for name, parameter in parameters.items():
        parameter.data.copy_(drawn(*parameter.shape))
        parameter.requires_grad_(name.split(".")[0] in trained)
        if flat:
            parameter.main_grad = torch.ones_like(parameter)
    x = drawn(ROWS, WIDTH).requires_grad_("x" in trained)
    with torch.no_grad():
        evaluated = row(torch.relu(column(x)))
    before = dict(getattr(tp.products.memory, "calls", {}))
    y = row(torch.relu(column(x)))
    y.backward(drawn(ROWS, WIDTH))
    calls = dict(getattr(tp.products.memory, "calls", {}))
    grads = {
        name: parameter.main_grad if flat and parameter.grad is None else parameter.grad
        for name, parameter in parameters.items()
        if parameter.requires_grad
    }
    tensors = {"evaluated": evaluated, "y": y.detach(), **grads}
    if x.grad is not None:
        tensors["x.grad"] = x.grad
    return {
        "tensors": tensors,
        "calls": {name: count - before.get(name, 0) for name, count in calls.items()},
        "unfused": dict(tp.products.unfused),
    }


def run_all(groups: ParallelGroups) -> dict[str, Any]:
    """Run every case; the first entry of each list is the one without overlap."""
    found = {}
    variants = [(trained, {}) for trained in TRAINED]
    variants += [("all", {"flat": False}), ("all", {"bias": True})]
    for trained, options in variants:
        options = {"trained": TRAINED[trained], **options}
        plain = run_layers(groups, NO_OVERLAP, memory=False, **options)
        for name, (overlap, _) in CASES.items():
            for memory in (True,) if overlap.fuses else (True, False):
                overlapped = run_layers(groups, overlap, memory=memory, **options)
                found[name, trained, str(options), memory] = [plain, overlapped]
    return found


def calls_of(name: str, trained: str) -> dict[str, int]:
    """Return the exchanges through symmetric memory of a case with these trained parts."""
    overlap, calls = CASES[name]
    if trained == "all":
        return calls
    calls = {call: count for call, count in calls.items() if call in (GATHER, SCATTER)}
    if trained == "frozen" and overlap.reduce_scatter:
        # No product dW could hide the reduce-scatter of dX, so it is fused with its own product.
        return {**calls, SCATTER: 2}
    if trained == "last":  # The backward pass has no product dX.
        return dict.fromkeys(
            [call for call in calls if call != SCATTER or overlap.reduce_scatter], 1
        )
    return calls


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients_are_those_without_overlap(ranks: int, pools: WorkerPools) -> None:
    """Check all combinations; collectives in bulk change no bit, and no layer fuses twice."""
    for found in pools.run(run_all, ranks, layout={"tp_size": ranks}, timeout=TIMEOUT):
        complete = {name: pair[0]["tensors"] for name, pair in found.items() if "all" in name}
        for (name, trained, options, memory), (plain, overlapped) in found.items():
            assert plain["calls"] == {} and overlapped["unfused"] == {}
            calls = {call: count for call, count in overlapped["calls"].items() if count}
            barriers = calls.pop("barriers", 0)
            assert calls == (calls_of(name, trained) if memory else {}), (name, trained)
            if name == "Megatron's default":
                assert barriers == sum(calls.values())
            assert plain["tensors"].keys() == overlapped["tensors"].keys()
            if trained != "all":  # A frozen part changes no gradient of the other parts.
                whole = complete[name, "all", str({"trained": EVERYTHING}), memory]
                assert all(torch.equal(x, whole[what]) for what, x in plain["tensors"].items())
            for what, wanted in plain["tensors"].items():
                got = overlapped["tensors"][what]
                if memory:
                    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
                else:
                    assert torch.equal(got, wanted), (name, trained, options, what)


class Order(Recorder):
    """Recorder of products, collectives and the waits for started collectives, in one list."""

    def waited(self, started: Started | None) -> None:
        if started is not None:
            self.calls.append((f"c10d.wait {started.name}", []))
            started.work.wait()

    def words(self) -> list[str]:
        names = [name.removeprefix("c10d.").split(".")[0] for name, _ in self.calls]
        return [name for name in names if name != "aten"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.calls.append(("c10d.product", []))
        return super().__torch_dispatch__(func, types, args, kwargs)


def order_of_work(groups: ParallelGroups, overlap: TensorOverlap) -> list[str]:
    """Return the operations of the backward pass of a column-parallel layer, in order."""
    tp = tensor_parallel(groups, overlap, ROWS, memory=False)
    rows = tp.shard(SplitSegment(noun="channels", count=INNER, width=1))
    build = Build(backends=Backends(), tp=tp, device="cpu", dtype=torch.float64)
    layer = ColumnParallelLinear(WIDTH, rows, bias=False, build=build)
    layer.weight.data.normal_()
    y = layer(torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True))
    order = Order()
    with order, mock.patch.object(collectives, "wait_for", order.waited):
        y.backward(torch.ones_like(y))
    return order.words()


@pytest.mark.parametrize(
    "overlap, wanted",
    [
        (NO_OVERLAP, ["product", "_reduce_scatter_base_", "_allgather_base_", "product"]),
        (
            CASES["in bulk"][0],
            [
                "_allgather_base_",
                "product",
                "_reduce_scatter_base_",
                "wait all_gather",
                "product",
                "wait reduce_scatter",
            ],
        ),
        (
            CASES["bulk all-gather"][0],
            ["_allgather_base_", "product", "_reduce_scatter_base_", "wait all_gather", "product"],
        ),
        (
            CASES["bulk reduce-scatter"][0],
            [
                "product",
                "_reduce_scatter_base_",
                "_allgather_base_",
                "product",
                "wait reduce_scatter",
            ],
        ),
    ],
    ids=["plain", "in bulk", "bulk all-gather", "bulk reduce-scatter"],
)
def test_each_collective_starts_before_the_product_that_hides_it(
    overlap: TensorOverlap, wanted: list[str], pools: WorkerPools
) -> None:
    assert pools.run(order_of_work, 2, overlap, layout={"tp_size": 2}) == [wanted] * 2


def products_of_sizes(groups: ParallelGroups) -> dict[str, Any]:
    """Use products that do not fit, that have no rows, and that do not divide evenly."""
    overlap = TensorOverlap(all_gather=True, reduce_scatter=True)
    tp = tensor_parallel(groups, overlap, ROWS, memory=True)
    products = tp.products
    assert products is not None
    weight = torch.randn(WIDTH, INNER, dtype=torch.float64)
    large, empty = torch.randn(ROWS + 1, WIDTH).double(), torch.randn(0, WIDTH).double()
    plain = SequenceParallelProducts(products.group)
    same = [
        torch.equal(products.gather_multiply(x, weight)[1], plain.gather_multiply(x, weight)[1])
        for x in (large, empty)
    ]
    try:
        products.multiply_scatter(torch.randn(3, WIDTH).double(), weight)
        error = ""
    except ValueError as raised:
        error = str(raised)
    products.close()
    after = products.gather_multiply(large, weight)[1]
    return {
        "same": same,
        "after": torch.equal(after, plain.gather_multiply(large, weight)[1]),
        "unfused": dict(products.unfused),
        "error": error,
    }


def test_products_that_cannot_be_fused_are_computed_and_counted(pools: WorkerPools) -> None:
    for found in pools.run(products_of_sizes, 2, layout={"tp_size": 2}):
        assert found["same"] == [True, True] and found["after"]
        assert found["unfused"] == {
            "7 rows of 10 channels do not fit in the symmetric memory": 1,
            "0 rows of 10 channels do not fit in the symmetric memory": 1,
            "no symmetric memory was set up": 1,
        }
        assert found["error"].startswith("3 rows cannot be split evenly among the 2 ranks")


PATTERNS = ("ME", "*E", "-E", "GE", "E", "M*-EG/E")
"""One layer of each kind, and all kinds with a depth of multi-token prediction."""
TIMEOUT = 300.0


def gradients_of(
    groups: ParallelGroups, pattern: str, overlap: TensorOverlap
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the losses and gradients of a model for one pack, and counts of the stand-in."""
    way = Way(groups.tp.size, groups.tp.size, True)
    model = HybridModel(
        dataclasses.replace(MODEL, hybrid_layer_pattern=pattern, mtp_num_layers=pattern.count("/")),
        vocab_size=VOCAB,
        max_positions=SLOTS,
        groups=groups,
        sequence_parallel=True,
        tp_overlap=overlap,
    ).train()
    products, calls = model.tp.products, {}
    assert products is not None
    if overlap != NO_OVERLAP:
        rows = SLOTS // groups.tp.size
        needed = row_bytes(rows, MODEL.hidden_size, torch.float32)
        products.memory = SharedFileRows(products.group, needed)
        calls = products.memory.calls
    (pack,) = packs_of(way, 1, 1)
    output = model(pack)
    output.loss.backward()
    assert not products.unfused
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), **grads}, dict(calls)


def gradients_of_kinds(groups: ParallelGroups) -> dict[str, Any]:
    overlap = CASES["Megatron's default"][0]
    return {
        pattern: [gradients_of(groups, pattern, each) for each in (NO_OVERLAP, overlap)]
        for pattern in PATTERNS
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind_of_layer_has_the_gradients_without_overlap(
    ranks: int, pools: WorkerPools
) -> None:
    """Check all gradients; projections of every kind but of experts overlap in both passes."""
    layout = {"tp_size": ranks}
    for found in pools.run(gradients_of_kinds, ranks, layout=layout, timeout=TIMEOUT):
        for pattern, ((plain, _), (overlapped, calls)) in found.items():
            assert plain.keys() == overlapped.keys() and len(plain) > 3
            for name, wanted in plain.items():
                scale = float(wanted.abs().max())
                torch.testing.assert_close(
                    overlapped[name], wanted, rtol=1e-5, atol=1e-5 * scale + 1e-9, msg=name
                )
            layers = sum(symbol in "M*-G" for symbol in pattern)
            barriers = calls.pop("barriers", 0)
            per_layer = {GATHER: 2, SCATTER: 1, BULK_GATHER: 1, BULK_SCATTER: 1}
            if "/" not in pattern:
                assert calls == {name: n * layers for name, n in per_layer.items() if layers}
            # One for each product, and one more for the first exchange.
            assert barriers == sum(calls.values()) + bool(calls)


def train(groups: ParallelGroups, way: Way, bf16: bool, flags: dict[str, bool]) -> dict[str, Any]:
    config = config_of(way, bf16=bf16)
    parallel = dataclasses.replace(config.parallel, **flags)
    job = build_job(dataclasses.replace(config, parallel=parallel), groups, VOCAB)
    metrics = [job.step(mine(groups, way, step, 2), 1e-2).clone() for step in range(3)]
    memory = None if job.model.tp.products is None else job.model.tp.products.memory
    job.close()
    return {
        "metrics": torch.stack(metrics),
        "state": everything(job),
        "line": overlap_line(job.model),
        "unfused": job.unfused,
        "calls": dict(getattr(memory, "calls", {})),
    }


def train_both(groups: ParallelGroups, way: Way, bf16: bool) -> list[dict[str, Any]]:
    """Train without overlap, with what the CPU can overlap, and with the stand-in."""
    off = dict.fromkeys(("tp_comm_overlap_ag", "tp_comm_overlap_rs"), False)
    found = [train(groups, way, bf16, {"tp_comm_overlap": on}) for on in (False, True)]
    with stand_in_memory():
        found.append(train(groups, way, bf16, {"tp_comm_overlap": True, **off}))
        found.append(train(groups, way, bf16, {"tp_comm_overlap": True}))
    return found


@pytest.mark.shows("eager", of=lambda way: (way.world_size, config_of(way)))
@pytest.mark.parametrize(
    "way",
    [
        Way(2, 2, True, tp_overlap=True),
        Way(4, 4, True, tp_overlap=True),
        Way(4, 2, True, True, 2, 1, tp_overlap=True),
    ],
    ids=str,
)
def test_steps_are_those_without_overlap(way: Way, pools: WorkerPools) -> None:
    """Check three steps: bulk collectives bit for bit, also where fusion is refused.

    Through symmetric memory the sums of four ranks have another order.
    """
    ranks = pools.run(
        train_both,
        way.world_size,
        way,
        way.distributed_optimizer,
        layout=way.layout,
        timeout=TIMEOUT,
    )
    plain, refused, bulk, fused = zip(*ranks)
    for one, other in ((plain, refused), (plain, bulk))[: 2 if way.tp_size == 2 else 1]:
        assert_same_bits(
            assembled([rank["state"] for rank in other]), assembled([rank["state"] for rank in one])
        )
        assert all(torch.equal(a["metrics"], b["metrics"]) for a, b in zip(one, other))
    tolerance = 2e-2 if way.distributed_optimizer else 1e-5
    for one, other in (*zip(plain, fused), *zip(plain, bulk)):
        torch.testing.assert_close(
            other["metrics"][:, :2], one["metrics"][:, :2], rtol=tolerance, atol=tolerance
        )
    for other in fused:
        assert other["calls"][GATHER] > 0 and other["calls"][SCATTER] > 0 and not other["unfused"]
    for one, without, other in zip(plain, refused, bulk):
        assert one["line"] == "" and one["unfused"] == [] == other["unfused"]
        reason = "symmetric memory needs CUDA GPUs, but the device is cpu"
        assert without["line"].endswith(f"because {reason}")
        (line,) = without["unfused"]
        assert line.endswith(f"not fused with their collective: {reason}")
        assert other["line"] == (
            "tensor-parallel collectives: under another product: all-gather for dW, "
            "reduce-scatter of dX"
        )


def connected_on_the_cpu(groups: ParallelGroups) -> object:
    assert groups.tp.group is not None
    return connect(groups.tp.group, groups, torch.bfloat16, 1024)


def test_a_cpu_has_no_symmetric_memory(pools: WorkerPools) -> None:
    reason = "symmetric memory needs CUDA GPUs, but the device is cpu"
    assert pools.run(connected_on_the_cpu, 2, layout={"tp_size": 2}) == [reason] * 2
