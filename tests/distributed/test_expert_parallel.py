"""Tests of expert parallelism: every layout and dispatcher gives the results of one process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_packed.layers.moe.dispatchers_between_ranks as dispatchers
import megatron_packed.layers.moe.parallel as moe_parallel
import megatron_packed.layers.moe.router as router_module
from megatron_packed.distributed.collectives import (
    all_gather_rows,
    all_reduce_sum,
    reduce_scatter_rows,
)
from megatron_packed.distributed.differentiable import linear_map
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.moe.global_balance import Balance
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.lm_head_and_loss import HybridOutput
from megatron_packed.packed.micro_batch import MicroBatch
from support import rank_models
from support.process_pools import WorkerPools
from support.rank_models import (
    asks,
    assert_small,
    cases,
    described,
    gathered_without_sum,
    mutated,
    only_own_rows,
    own_value,
    recorded_calls,
    two_packs,
    whole,
)
from support.row_products import experts_row_by_row

OVERFLOW = HybridOutput._fields.index("expert_overflow")
EXPERTS = 8
LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (2, {"ep_size": 2}),
    (2, {"tp_size": 2, "expert_tp_size": 1}),
    (2, {"tp_size": 2, "expert_tp_size": 1, "ep_size": 2}),
    (4, {"ep_size": 4}),
    (4, {"ep_size": 2}),
    (4, {"tp_size": 2, "ep_size": 2}),
    (4, {"tp_size": 2, "expert_tp_size": 1, "ep_size": 2}),
    (4, {"tp_size": 2, "expert_tp_size": 1, "ep_size": 4}),
    (4, {"tp_size": 4, "expert_tp_size": 1, "ep_size": 2}),
    (4, {"tp_size": 4, "expert_tp_size": 2}),
    (4, {"tp_size": 4, "expert_tp_size": 2, "ep_size": 2}),
    (4, {"cp_size": 2, "ep_size": 4}),
    (4, {"tp_size": 2, "cp_size": 2, "expert_tp_size": 1, "ep_size": 4}),
]
NAMES = [
    " ".join(f"{name[:-5]}{size}" for name, size in ({"world_size": w} | sizes).items())
    for w, sizes in LAYOUTS
]

TIED = {"untie_embeddings_and_output_weights": False}
SOFTMAX = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1, **TIED}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk": 3,
    "moe_shared_expert_intermediate_size": 24,
    "squared_relu": False,
    "swiglu": True,
    "moe_aux_loss_coeff": 0.1,
}
GATED = {**SIGMOID, "moe_shared_expert_gate": True}
ALLGATHER, ALLTOALL = (
    {"moe_token_dispatcher_type": "allgather"},
    {"moe_token_dispatcher_type": "alltoall", "moe_dispatch": "rows"},
)
TOKENS = {**ALLTOALL, "moe_dispatch": "tokens"}
IN_PARTS = {"moe_comm_overlap_parts": 3}
LATENT = {"moe_latent_size": 12, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
PER_DOCUMENT = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_per_document": True,
}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss"}
CAPACITY = {"moe_expert_capacity_factor": 0.6}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}


@dataclass(frozen=True)
class Run:
    """Model and options of one run."""

    changes: dict[str, Any] = field(default_factory=dict)
    pattern: str = "M*-E"
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float64
    favourite: int | None = None
    """Expert that every token selects first."""
    full_buffers: bool = False
    mutation: str | None = None
    replicas: int = 1
    """Data-parallel ranks of the layout, which decide the number of packs."""

    @property
    def of_one_process(self) -> Run:
        return replace(self, sequence_parallel=False, full_buffers=False, mutation=None)

    def __hash__(self) -> int:
        return hash(repr(self))


def build(run: Run, groups: ParallelGroups | None) -> HybridModel:
    model = rank_models.build(
        run.pattern,
        {"num_experts": EXPERTS, **run.changes},
        groups,
        dtype=run.dtype,
        sequence_parallel=run.sequence_parallel,
    )
    with torch.no_grad():
        for layer in model.moe_layers:
            expert_bias = layer.mixer.router.expert_bias
            if expert_bias is not None:
                expert_bias.copy_(torch.linspace(-0.1, 0.1, EXPERTS))
                if run.favourite is not None:
                    expert_bias[run.favourite] = 10
    return model


@lru_cache
def packs(replicas: int = 1) -> list[MicroBatch]:
    """Return two packs for one replica, otherwise four; one has no documents, only a tail."""
    count = 2 if replicas == 1 else 4
    every = [cases.make_documents(cases.AWKWARD, seed=seed) for seed in range(count - 1)]
    slots, targets = sum(cases.AWKWARD) + 13, sum(map(cases.count_targets, every))
    every.insert(count // 2, [])
    return [
        cases.make_pack(
            documents, slots - sum(len(tokens) for tokens, _ in documents), 2, 1 / count, targets
        )
        for documents in every
    ]


def train(run: Run, groups: ParallelGroups | None = None) -> dict[str, Any]:
    """Run this rank's packs; return their outputs and this rank's shards of all summed gradients."""
    rank, ranks = (groups.dp.rank, groups.dp.size) if groups else (0, 1)
    with mutated(PATCHES, run.mutation):
        model = build(run, groups)
        if groups is None and model.global_balance is not None:
            model.global_balance = PlainBalance(model, run.replicas)
        shared = model.shared_gradients()
        outputs = {}
        for number, pack in list(enumerate(packs(run.replicas)))[rank::ranks]:
            with model.full_expert_buffers() if run.full_buffers else nullcontext():
                output = model(pack)
            output.loss.backward()
            outputs[number] = of_pack(output, groups)
        shared.sum()
        sharded = model.sharded_parameters()
        for part in sharded.values():
            if groups is not None and not (
                part.is_expert and run.mutation == "weights of experts without a sum"
            ):
                group = groups.expert_dp.group if part.is_expert else groups.dp_cp.group
                all_reduce_sum(part.parameter.grad, group)
        return {
            "outputs": outputs,
            "shards": described(model),
            "parameters": {name: part.parameter.detach().clone() for name, part in sharded.items()},
            "gradients": {name: part.parameter.grad.clone() for name, part in sharded.items()},
        }


def of_pack(output: HybridOutput, groups: ParallelGroups | None) -> list[Tensor]:
    """Combine the outputs of all context-parallel ranks for a pack."""
    group = groups.cp.group if groups else None
    together = {
        name: all_gather_rows(value.detach(), group)
        if name == "per_token_loss_T"
        else value.detach().clone()
        for name, value in output._asdict().items()
        if name != "expert_rows"  # of this layout
    }
    return [
        value if name == "per_token_loss_T" else all_reduce_sum(value, group)
        for name, value in together.items()
    ]


class PlainBalance(torch.nn.Module):
    """Replacement for `GlobalBalance` in one process that runs the packs of all replicas in order.

    It first runs all packs once, because a loss needs the loads of packs that come later.
    """

    def __init__(self, model: HybridModel, replicas: int) -> None:
        """Put this object into ``model``, and count the loads of all packs."""
        super().__init__()
        self.replicas = replicas
        self.config = model.config
        self.counts: list[Tensor] = []
        self.number = -len(packs(replicas))
        model.global_balance = self
        for pack in packs(replicas):
            model(pack)

    def forward(self, loads: list[Balance]) -> Tensor:
        number, self.number = self.number, self.number + 1
        if number < 0:
            self.counts.append(torch.stack([load.count_E for load in loads]).double())
            return torch.zeros(())
        end = number // self.replicas * self.replicas + self.replicas
        topk, loss = self.config.moe_router_topk, torch.zeros(())
        for layer, load in enumerate(loads):
            tokens = sum(
                float(counts[layer].sum()) / topk for counts in self.counts[:end][-self.replicas :]
            )
            so_far = sum(counts[layer] for counts in self.counts[:end])
            share = so_far / (so_far.sum() / topk).clamp(min=1)
            loss = loss + (load.probability_E * share).sum() / max(tokens, 1.0)
        return loss * self.config.moe_aux_loss_coeff * EXPERTS / topk


def train_ranks(groups: ParallelGroups, runs: list[Run]) -> list[dict[str, Any]]:
    return [train(replace(run, replicas=groups.dp.size), groups) for run in runs]


def replicas_of(world_size: int, layout: dict[str, int]) -> int:
    return world_size // (layout.get("tp_size", 1) * layout.get("cp_size", 1))


@lru_cache
def reference(run: Run) -> dict[str, Any]:
    return train(run)


def errors(
    ranks: list[dict[str, Any]], expected: dict[str, Any], *, exact: bool = True
) -> dict[str, float]:
    """Return the relative error of each result of one process.

    Also check that parameters are equal bit for bit.
    """
    found = {}
    for rank in ranks:
        for number, outputs in rank["outputs"].items():
            for i, (value, other) in enumerate(
                zip(outputs, expected["outputs"][number], strict=True)
            ):
                if other.numel():
                    found[f"output {i} of pack {number}"] = cases.relative_error(value, other)
    for name, parameter in expected["parameters"].items():
        assert torch.equal(whole(ranks, "parameters", name, replicas=True), parameter), name
        gradient = expected["gradients"][name]
        found[name] = cases.relative_error(
            whole(ranks, "gradients", name, exact=exact, replicas=True), gradient
        )
        assert gradient.abs().max() > 0, f"{name}: a gradient that is 0 shows nothing"
    return found


def check(pools: WorkerPools, world_size: int, layout: dict[str, int], runs: list[Run]) -> None:
    results = pools.run(train_ranks, world_size, runs, layout=layout)
    replicas = replicas_of(world_size, layout)
    for i, run in enumerate(runs):
        ranks = [result[i] for result in results]
        assert all(
            not outputs[OVERFLOW] for rank in ranks for outputs in rank["outputs"].values()
        ), "no buffer overflows"
        numbers = {number for rank in ranks for number in rank["outputs"]}
        assert numbers == set(range(len(packs(replicas))))
        found = errors(ranks, reference(replace(run.of_one_process, replicas=replicas)))
        assert_small(found, run)


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=NAMES)
def test_ranks_compute_what_one_process_computes(
    pools: WorkerPools, world_size: int, layout: dict[str, int]
) -> None:
    """Each layout has every second run; layouts of one kind follow each other with other halves."""
    split = layout.get("tp_size", 1) > 1
    runs = [
        Run({**SOFTMAX, **ALLGATHER, **GLOBAL}),
        Run({**SOFTMAX, **ALLTOALL, **LATENT}, sequence_parallel=split),
        Run({**SOFTMAX, **ALLTOALL, **LATENT, FACTOR: 4.0}, "EE", sequence_parallel=split),
        Run({**GATED, **ALLGATHER, **LATENT}, "E*E", split),
        Run({**GATED, **ALLTOALL, **LATENT, **GLOBAL}, "E*E"),
        Run({**SIGMOID, **ALLGATHER, **PER_DOCUMENT}, "E", dtype=torch.float32),
        Run({**SIGMOID, **ALLTOALL}, "E", split, torch.float32),
        Run({**GATED, **ALLGATHER, "moe_router_load_balancing_type": "seq_aux_loss"}, "E*E", split),
        Run({**SOFTMAX, **ALLGATHER, "moe_router_force_load_balancing": True}, "E*E", split),
        Run({**GATED, **TOKENS, **LATENT}, "E*E", split),
        Run({**SIGMOID, **TOKENS, FACTOR: 4.0}, "EE", split),
        Run({**GATED, **ALLTOALL, **LATENT, **GLOBAL, **IN_PARTS}, "E*E", split),
        Run({**SOFTMAX, **TOKENS, **LATENT, FACTOR: 4.0, **IN_PARTS}, "E*E"),
    ]
    check(pools, world_size, layout, runs[LAYOUTS.index((world_size, layout)) % 2 :: 2])


def test_experts_shared_by_fewer_ranks_under_context_parallelism(pools: WorkerPools) -> None:
    """The tiny model has too few heads for these 8 ranks, so the pattern has none."""
    layout = {"tp_size": 4, "cp_size": 2, "expert_tp_size": 2, "ep_size": 2}
    runs = [Run({**SOFTMAX, **ALLGATHER}, "E-E"), Run({**GATED, **ALLTOALL}, "E-E", True)]
    check(pools, 8, layout, runs)


# -- extreme routings ------------------------------------------------------------------------------

FACTOR = "moe_expert_rank_capacity_factor"
FAVOURITE = {**SIGMOID, "moe_aux_loss_coeff": 0.0, "moe_router_topk": 1}


@pytest.mark.parametrize(("world_size", "layout"), [LAYOUTS[0], LAYOUTS[5], LAYOUTS[7]])
def test_all_tokens_to_one_expert(
    pools: WorkerPools, world_size: int, layout: dict[str, int]
) -> None:
    """Check that gradients stay finite if all tokens select one expert.

    The other experts then have no rows, and most ranks have no rows.
    """
    runs = [Run({**FAVOURITE, **kind}, "E", favourite=6) for kind in (ALLGATHER, ALLTOALL, TOKENS)]
    results = pools.run(train_ranks, world_size, runs, layout=layout)
    for i, run in enumerate(runs):
        replicas = replicas_of(world_size, layout)
        expected = reference(replace(run.of_one_process, replicas=replicas))
        ranks = [result[i] for result in results]
        for name, gradient in expected["gradients"].items():
            if name.endswith("experts.fc1"):
                assert gradient[6].abs().max() > 0 and not gradient[[0, 1, 2, 3, 4, 5, 7]].any()
            assert (
                cases.relative_error(whole(ranks, "gradients", name, replicas=True), gradient)
                <= 1e-9
            ), name


CAPACITY_LAYOUTS = [LAYOUTS[n] for n in (0, 4, 5, 6, 10)]


@pytest.mark.parametrize(("world_size", "layout"), CAPACITY_LAYOUTS)
def test_capacities(pools: WorkerPools, world_size: int, layout: dict[str, int]) -> None:
    """Check that the same tokens are dropped as in one process, with and without padding.

    The Mamba layer gives equal tokens other neighbours. Without it their probabilities would be equal
    up to rounding, and rounding, which differs between layouts on some CPUs, would choose.
    """
    pads = {"moe_pad_expert_input_to_capacity": True}
    kinds = (ALLGATHER, ALLTOALL, {**ALLTOALL, **pads}, TOKENS, {**TOKENS, **pads})
    runs = [
        Run(
            {
                **settings,
                **kind,
                "moe_expert_capacity_factor": 0.6,
                "moe_token_drop_policy": policy,
            },
            "ME*E",
        )
        for kind in kinds
        for settings, policy in ((SOFTMAX, "probs"), (SIGMOID, "position"))
    ]
    # Each layout has every kind with one of the two settings; the next layout has the others.
    half = CAPACITY_LAYOUTS.index((world_size, layout)) % 2
    check(pools, world_size, layout, [runs[2 * i + (i + half) % 2] for i in range(len(kinds))])
    dropped, every = (
        reference(replace(runs[0], changes=c)) for c in (runs[0].changes, {**SOFTMAX, **ALLGATHER})
    )
    assert cases.relative_error(dropped["outputs"][0][1], every["outputs"][0][1]) > 1e-4, (
        "nothing was dropped"
    )


def between(groups: ParallelGroups, runs: list[Run]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return the results of two inputs, run one after the other and run interleaved.

    Interleaved means that both are dispatched before the first is combined.
    """
    found = []
    for run in runs:
        mixer = build(run, groups).moe_layers[0].mixer
        generator = torch.Generator().manual_seed(groups.rank)
        routed = []
        for _ in range(2):
            x_TD = torch.randn(24, 32, generator=generator, dtype=torch.float64)
            routing = mixer.router(x_TD, packs()[0].packed)
            routed.append((x_TD, routing.topk_expert_ids_TK, routing.topk_weights_TK))
        send, send_back = mixer.dispatcher.send, mixer.dispatcher.send_back
        apart = []
        for arguments in routed:
            (there,) = (receive() for receive in send(*arguments))
            y_RD = mixer.experts(there.x_RD, there.offsets_E)
            apart.append(send_back(y_RD, there)().detach())
        both = [receive() for arguments in routed for receive in send(*arguments)]
        results = [mixer.experts(there.x_RD, there.offsets_E) for there in both]
        pairs = zip(results, both, strict=True)
        found.append((apart, [send_back(*pair)().detach() for pair in pairs]))
    return found


def test_two_inputs_may_be_between_dispatch_and_combine(pools: WorkerPools) -> None:
    """Check that ``send`` and ``send_back`` share no state except the arrived part."""
    runs = [
        Run({**SOFTMAX, **kind}, "E")
        for kind in (ALLGATHER, ALLTOALL, {**ALLTOALL, **PADDED}, TOKENS)
    ]
    for rank in pools.run(between, 2, runs, layout={"ep_size": 2}):
        for apart, together in rank:
            assert not torch.equal(*apart)
            assert all(map(torch.equal, apart, together))


# -- static buffers --------------------------------------------------------------------------------


def overflows(groups: ParallelGroups, runs: list[Run]) -> list[list[float]]:
    """Return the overflow flags of this rank's packs for each run of four packs."""
    return [
        [float(outputs[OVERFLOW]) for outputs in found["outputs"].values()]
        for found in (train(replace(run, replicas=4), groups) for run in runs)
    ]


@pytest.mark.parametrize(("world_size", "layout"), [LAYOUTS[0], LAYOUTS[3], LAYOUTS[5], LAYOUTS[8]])
def test_a_buffer_that_is_too_small_is_known_to_all_who_share_it(
    pools: WorkerPools, world_size: int, layout: dict[str, int]
) -> None:
    """Check that all ranks of the group see the overflow of one rank's buffer.

    All tokens of a pack select one expert, so only the rank of that expert overflows. A repeated
    run with sufficient buffers has no overflow.
    """
    runs, repeated = [], []
    for dispatcher in (ALLGATHER, ALLTOALL, TOKENS):
        small, enough = (
            Run({**FAVOURITE, **dispatcher, FACTOR: factor}, "E", favourite=6)
            for factor in (1.0, float(layout["ep_size"]))
        )
        runs += [small, enough, replace(small, full_buffers=True)]
        repeated.append(Run({**SOFTMAX, **dispatcher, FACTOR: 0.3}, full_buffers=True))
    results = pools.run(overflows, world_size, runs, layout=layout)
    for rank, found in enumerate(results):
        for flags, *without in (found[:3], found[3:6], found[6:]):
            assert any(flags) and set(flags) <= {0.0, 1.0}, f"rank {rank} does not know"
            assert not any(flag for other in without for flag in other)
    for first in range(0, world_size, layout.get("tp_size", 1)):
        assert all(results[first] == results[first + r] for r in range(layout.get("tp_size", 1)))
    check(pools, world_size, layout, repeated)


def test_the_size_of_the_buffer_is_reported(pools: WorkerPools) -> None:
    T, K, D = packs()[0].packed.total_tokens, 2, 32
    single = build(Run(pattern="E"), None).expert_buffer(T)
    assert single is not None and (single.rows, single.worst_rows, single.bytes_per_row) == (
        T * K,
        T * K,
        8 * D,
    )
    assert cases.tiny_model("-").expert_buffer(T) is None
    runs = [
        Run(changes, "E") for changes in ({}, {"moe_expert_rank_capacity_factor": 1.25}, CAPACITY)
    ]
    for sizes in pools.run(buffer_sizes, 4, runs, layout={"ep_size": 4}):
        worst, smaller, bounded = sizes
        assert worst == (4 * T * K, 4 * T * K)
        assert smaller == (T * K * 5 // 4, 4 * T * K)
        assert bounded == (
            4 * 2 * 10,
            4 * 2 * 10,
        )  # Each rank sends 10 tokens (ceil(0.6 * 64 * 2 / 8)) to each of 2 experts.


def buffer_sizes(groups: ParallelGroups, runs: list[Run]) -> list[tuple[int, int]]:
    buffers = [build(run, groups).expert_buffer(packs()[0].packed.total_tokens) for run in runs]
    return [(buffer.rows, buffer.worst_rows) for buffer in buffers if buffer is not None]


# -- operations of every rank ----------------------------------------------------------------------


def recorded_runs(groups: ParallelGroups, runs: list[Run]) -> list[list[Any]]:
    return [recorded_calls(build(run, groups), two_packs()) for run in runs]


def test_no_question_and_no_shape_depends_on_the_routing(pools: WorkerPools) -> None:
    kinds = [
        {**SOFTMAX, **ALLGATHER, "moe_expert_rank_capacity_factor": 1.0},
        {**SOFTMAX, **ALLTOALL, "moe_expert_rank_capacity_factor": "auto"},
        {**SIGMOID, **ALLGATHER, **CAPACITY},
        {**SOFTMAX, **ALLTOALL, **PADDED},
        {**SOFTMAX, **TOKENS, "moe_expert_rank_capacity_factor": "auto"},
        {**SOFTMAX, **TOKENS, **PADDED},
        {**SIGMOID, **ALLTOALL, "moe_expert_rank_capacity_factor": "auto", **IN_PARTS},
        {**SOFTMAX, **TOKENS, "moe_expert_rank_capacity_factor": 1.0, **IN_PARTS},
        {**SOFTMAX, **ALLTOALL},
        {**SOFTMAX, **TOKENS},
    ]
    runs = [Run(changes, "E-", dtype=torch.float32) for changes in kinds]
    for layout in ({"ep_size": 2}, {"tp_size": 2, "expert_tp_size": 1, "ep_size": 2}):
        for rank in pools.run(recorded_runs, 2, runs, layout=layout):
            for run, (first, second) in zip(runs, rank):
                exact_splits = run.changes in kinds[-2:]
                assert asks(first) == exact_splits, run
                assert exact_splits or first == second, run


# -- isolation -------------------------------------------------------------------------------------


@experts_row_by_row()
def leaks(groups: ParallelGroups, runs: list[Run]) -> list[dict[str, float]]:
    at = sum(cases.AWKWARD) - 10
    return [rank_models.leaks(build(run, groups), packs()[0], at, groups) for run in runs]


@pytest.mark.shows(
    "isolation", "EP allgather", "EP alltoall", of=lambda world_size, layout: (world_size, layout)
)
@pytest.mark.parametrize(("world_size", "layout"), [LAYOUTS[0], LAYOUTS[5], LAYOUTS[7]])
def test_other_documents_do_not_change_by_a_bit(
    pools: WorkerPools, world_size: int, layout: dict[str, int]
) -> None:
    """Check that no other document changes, in the same pack and in packs of other ranks.

    The same experts process the tokens of all these packs.
    """
    runs = [
        Run(kind, "M*-E", sequence_parallel, torch.float32)
        for kind in (ALLGATHER, ALLTOALL, TOKENS, {**ALLTOALL, **IN_PARTS})
        for sequence_parallel in (False, True)[: layout.get("tp_size", 1)]
    ]
    results = pools.run(leaks, world_size, runs, layout=layout)
    for rank, found in enumerate(results):
        for changes in found:
            assert (changes.pop("own") > 0) == (rank < layout.get("tp_size", 1))
            assert set(changes.values()) == {0.0}


# -- tests fail if a sum over ranks is removed -----------------------------------------------------


def _split_without_gather(x: Tensor, group: Any) -> Tensor:
    rows = x.shape[0] // torch.distributed.get_world_size(group)
    return x.narrow(0, torch.distributed.get_rank(group) * rows, rows)


def _joined_with_sum(x: Tensor, group: Any) -> Tensor:
    return linear_map(x, group, all_gather_rows, reduce_scatter_rows)


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "gathering tokens without a sum in backward": (
        dispatchers,
        "gather_rows",
        gathered_without_sum,
    ),
    "bringing rows back without a sum": (dispatchers, "scatter_rows", only_own_rows),
    "splitting rows without a gather in backward": (
        moe_parallel,
        "split_rows",
        _split_without_gather,
    ),
    "joining rows with a sum in backward": (moe_parallel, "join_rows", _joined_with_sum),
    "gathering logits without a sum in backward": (
        router_module,
        "gather_rows",
        gathered_without_sum,
    ),
    "auxiliary loss counted by each rank": (TensorParallel, "counted_once", own_value),
}


EP2, FOLDED, REPLICAS = LAYOUTS[0][1], LAYOUTS[2][1], LAYOUTS[1][1]
MUTATIONS = {
    "gathering tokens without a sum in backward": EP2,
    "bringing rows back without a sum": EP2,
    "splitting rows without a gather in backward": FOLDED,
    "joining rows with a sum in backward": FOLDED,
    "gathering logits without a sum in backward": FOLDED,
    "auxiliary loss counted by each rank": FOLDED,
    "weights of experts without a sum": REPLICAS,
}


def test_a_missing_sum_is_seen(pools: WorkerPools) -> None:
    for name, layout in MUTATIONS.items():
        expected = reference(Run(SOFTMAX, "E", replicas=replicas_of(2, layout)))
        results = pools.run(
            train_ranks, 2, [Run(SOFTMAX, "E"), Run(SOFTMAX, "E", mutation=name)], layout=layout
        )
        sound, mutant = ([rank[i] for rank in results] for i in range(2))
        assert max(errors(sound, expected).values()) <= 1e-9, name
        assert max(errors(mutant, expected, exact=False).values()) > 1e-4, name
