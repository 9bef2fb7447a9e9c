"""Tests of context parallelism: results equal those of one process, and documents stay isolated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_packed.layers.attention as attention
import megatron_packed.layers.contiguous_attention as contiguous_attention
import megatron_packed.layers.state_passing as state_passing
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.distributed.collectives import (
    all_reduce_sum,
    own_rows,
    pass_to_next,
    start_row_from_others,
)
from megatron_packed.distributed.differentiable import linear_map
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import Axis, ParallelGroups
from megatron_packed.distributed.tensor_parallel_shards import Shard, SplitSegment
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.contiguous_attention import EarlierKeys
from megatron_packed.layers.state_passing import StatePassing
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.micro_batch import MicroBatch
from support import rank_models
from support.process_pools import WorkerPools
from support.rank_models import (
    asks,
    assert_small,
    cases,
    gathered_without_sum,
    mutated,
    observe,
    own_value,
    recorded_calls,
)
from support.recorder import Recorder
from support.row_products import experts_row_by_row

COMM_TYPES = ("a2a", "all_gather", "p2p")
LAYOUTS = [(2, {"cp_size": 2}), (4, {"cp_size": 4}), (4, {"tp_size": 2, "cp_size": 2})]
"""World size and sizes of the axes."""
FOUR_RANKS = LAYOUTS[1:]
"""Layouts in which all options of models are tested; `test_a_missing_step_is_seen` has two ranks."""
ALIGNMENT = 8
"""Document alignment 2 x 4: valid for zigzag sharding over 4 ranks and over 2 ranks."""
TOKENS, SLOTS = 112, 128
"""Slots of a pack in the tests of isolation, and of a pack in training."""
AUX_SCALE = 0.5

TIED = {
    "untie_embeddings_and_output_weights": False,
    "mamba_num_heads": 8,
    "num_attention_heads": 8,
}
LOSSES = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_conv_kernel_dim": 3}
ROPE = {"position_embedding_type": "rope", "rotary_percent": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "groups and keys shared by ranks": {
        **TIED,
        **LOSSES,
        "mamba_num_groups": 1,
        "num_query_groups": 1,
    },
    "groups and keys for all ranks, rope, expert bias": {
        **TIED,
        **LOSSES,
        **ROPE,
        "mamba_num_groups": 8,
        "num_query_groups": 8,
        "squared_relu": False,
        "swiglu": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_per_document": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": 24,
    },
    "gate, norms of heads, window, scale": {
        **TIED,
        **ROPE,
        "window_size": "5,0",
        "softmax_scale": 0.4,
        "attention_output_gate": True,
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
    },
    "gated shared expert, multipliers, one norm group, no bias of the convolution": {
        **TIED,
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.7,
        "mamba_norm_groups": 1,
        "mamba_norm_epsilon": 0.1,
        "mamba_conv_bias": False,
    },
    "two groups, layer norm, biases": {
        **TIED,
        **ROPE,
        "normalization": "LayerNorm",
        "squared_relu": False,
        "add_bias_linear": True,
    },
}


@dataclass(frozen=True)
class Run:
    """Model and options of one run."""

    comm_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    pattern: str = "M*-EM"
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float64
    flat: bool = False
    """True stores gradients in flat buffers (``main_grad``); False leaves them to autograd."""
    mutation: str | None = None
    mamba: str = ParallelConfig.mamba_cp_comm_type
    """Communication of Mamba layers."""
    partition: str = "zigzag"
    """Rows of a rank in attention that exchanges keys and values."""
    linear: str = ParallelConfig.linear_cp_mode
    """Communication of gated delta nets."""

    @property
    def alignment(self) -> int:
        return 1 if self.comm_type == "a2a" or self.partition == "contiguous" else ALIGNMENT


def build(run: Run, groups: ParallelGroups | None) -> HybridModel:
    return rank_models.build(
        run.pattern,
        run.changes,
        groups,
        dtype=run.dtype,
        max_positions=SLOTS,
        cp_comm_type=run.comm_type,
        cp_partition_mode=run.partition,
        mamba_cp_comm_type=run.mamba,
        linear_cp_mode=run.linear,
        sequence_parallel=run.sequence_parallel,
    )


def pack(
    lengths: list[int], run: Run, *, seed: int = 0, slots: int = TOKENS, **options: Any
) -> MicroBatch:
    documents = cases.make_documents(lengths, seed=seed)
    return MicroBatch.build(
        documents,
        slots,
        len(lengths) + 2,
        (1 / cases.count_targets(documents), AUX_SCALE),
        alignment=run.alignment,
        **options,
    )


PACKS = [[1, 2, 3, 8, 9, 60, 4], [SLOTS]]
"""Lengths of the documents of two packs, each in 128 slots.

The first has awkward lengths, a document on three of four ranks, and a tail that fills the last
rank if documents are not aligned. In the second one document fills the pack.
"""


def train(run: Run, groups: ParallelGroups | None = None) -> dict[str, Any]:
    """Run some micro-batches; return losses and gradients of this rank.

    The gradients are this rank's shards, summed over the ranks of the pack.
    """
    with mutated(PATCHES, run.mutation):
        model = build(run, groups)
        buffers = FlatBuffers(model) if run.flat else None
        cp_group = None if groups is None else groups.cp.group
        sums, rows = [], []
        for seed, lengths in enumerate(PACKS):
            output = model(pack(lengths, run, seed=seed, slots=SLOTS))
            output.loss.backward()
            sums += [
                output.loss.detach(),
                output.loss_sum,
                output.aux_loss,
                output.tokens_per_expert.flatten(),
            ]
            rows.append(output.per_token_loss_T)
        model.shared_gradients().sum()
        if buffers is not None and groups is not None:
            buffers.all_reduce(groups)
        gradients = {n: p.main_grad if buffers else p.grad for n, p in model.named_parameters()}
        if buffers is None and groups is not None:
            experts = {n for n, p in model.sharded_parameters().items() if p.is_expert}
            for name, gradient in gradients.items():
                all_reduce_sum(gradient, groups.expert_dp.group if name in experts else cp_group)
    return {
        "sums": all_reduce_sum(torch.cat([value.double().view(-1) for value in sums]), cp_group),
        "rows": rows,
        "shards": {n: p.shard for n, p in model.sharded_parameters().items()},
        "gradients": {n: g.detach().clone() for n, g in gradients.items()},
    }


def train_ranks(groups: ParallelGroups, runs: list[Run]) -> list[dict[str, Any]]:
    return [train(run, groups) for run in runs]


def errors(ranks: list[dict[str, Any]], reference: dict[str, Any]) -> dict[str, float]:
    """Compute the relative error of each result of one process; return the worst of all ranks."""
    assert all(gradient.abs().max() > 0 for gradient in reference["gradients"].values()), (
        "0 shows nothing"
    )
    found: dict[str, float] = {}
    for rank in ranks:
        errors_of_rank = {
            "losses and counts": cases.relative_error(rank["sums"], reference["sums"])
        }
        for name, gradient in reference["gradients"].items():
            expected = rank["shards"][name].take(gradient)
            # The error is relative to the maximum of the unsplit tensor, because a rank's shard may
            # be all zeros.
            difference = (rank["gradients"][name].double() - expected.double()).abs().max()
            errors_of_rank[name] = float(difference / gradient.abs().max())
        found = {name: max(found.get(name, 0.0), error) for name, error in errors_of_rank.items()}
    return found


REFERENCES: dict[str, dict[str, Any]] = {}
"""Results of one process, shared by the layouts that are compared with them."""


def alone(run: Run) -> dict[str, Any]:
    """Return the results of `train` in one process, cached by its options."""
    key = f"{run.alignment} {run.changes} {run.pattern} {run.dtype}"
    if key not in REFERENCES:
        REFERENCES[key] = train(replace(run, sequence_parallel=False, flat=False, mutation=None))
    return REFERENCES[key]


def check(pools: WorkerPools, world_size: int, layout: dict[str, int], runs: list[Run]) -> None:
    results = pools.run(train_ranks, world_size, runs, layout=layout, timeout=120)
    for i, run in enumerate(runs):
        found = errors([rank[i] for rank in results], alone(run))
        assert_small(found, run)


def variants(layout: dict[str, int], number: int = 0, **options: Any) -> list[Run]:
    """Return a run of each way of communication of attention.

    With tensor parallelism every second run has sequence parallelism. The other ones have it in
    the variants of the next ``number``.
    """
    split = "tp_size" in layout
    return [
        Run(comm, sequence_parallel=split and (i + number) % 2 == 0, **options)
        for i, comm in enumerate(COMM_TYPES)
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("world_size", "layout"), FOUR_RANKS, ids=str)
def test_ranks_compute_what_one_process_computes(
    pools: WorkerPools, world_size: int, layout: dict[str, int], case: str
) -> None:
    """Check Mamba layers that pass states or exchange heads in turns.

    A case passes states in one of the two layouts if it exchanges heads in the other. Cases 0, 1, 4
    and cases 2, 3 begin with different ones, so both occur with and without sequence parallelism.
    """
    pattern = "M*-M" if CASES[case].get("add_bias_linear") else "M*-EM"  # Experts have no biases.
    number = list(CASES).index(case)
    runs = variants(layout, number, changes=CASES[case], pattern=pattern)
    first = number // 2 + FOUR_RANKS.index((world_size, layout))
    check(
        pools,
        world_size,
        layout,
        [replace(run, mamba="heads") if (first + i) % 2 else run for i, run in enumerate(runs)],
    )


WINDOWS = {
    "": {},
    "of some rows of one rank": {"window_size": "5,0"},
    "of one more than the rows of a rank": {"window_size": "32,0"},
    "of two ranks": {"window_size": "40,0"},
    "of the token itself": {"window_size": "0,0"},
    "in every second layer": {"window_size": "9,0", "window_attn_skip_freq": "2"},
}
"""Windows of attention; four ranks have 32 rows each."""
OF_ALL_KEYS = ("", "of some rows of one rank", "in every second layer")
"""Windows for ranks that gather all keys. With p2p the window also decides which rows arrive."""


@pytest.mark.shows(
    "eager",
    "CP contiguous",
    of=lambda world_size, layout: (world_size, layout, {"hybrid_layer_pattern": "*-*"}),
)
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_ranks_attend_over_contiguous_rows(
    pools: WorkerPools, world_size: int, layout: dict[str, int]
) -> None:
    """Check documents that borders cut anywhere, windows, and rows between all kinds of layers."""
    both = [
        replace(run, partition="contiguous")
        for run in variants(layout, changes={**TIED, **ROPE}, pattern="*-*")
        if run.comm_type != "a2a"
    ]
    runs = [
        replace(run, changes={**run.changes, **window})
        for run in both
        for name, window in WINDOWS.items()
        if len(window) < 2 or world_size == 4
        if run.comm_type == "p2p" or name in OF_ALL_KEYS
    ]
    changes = CASES["groups and keys for all ranks, rope, expert bias"]
    runs += [replace(run, changes={**changes, **DELTA}, pattern="MG*E") for run in both]
    runs[-1] = replace(runs[-1], mamba="heads", linear="headwise")
    runs += [replace(run, changes=TIED, pattern="M*-") for run in both]
    runs += [replace(run, dtype=torch.float32, flat=True) for run in runs[-2:]]
    check(pools, world_size, layout, runs)


@pytest.mark.parametrize(("world_size", "layout"), FOUR_RANKS, ids=str)
def test_ranks_exchange_the_heads_of_gated_delta_nets(
    pools: WorkerPools, world_size: int, layout: dict[str, int]
) -> None:
    """Check both orders of rows; the two zigzag communications differ in attention only."""
    runs = variants(layout, changes={**TIED, **DELTA}, pattern="G-G", linear="headwise")
    if "tp_size" in layout:
        runs += [replace(run, dtype=torch.float32, flat=True) for run in runs]
    runs = [run for run in runs if run.comm_type != "all_gather"]
    check(pools, world_size, layout, runs)


ODD = {"mamba_num_heads": 6, "mamba_num_groups": 2, "mamba_norm_groups": 2}
"""Heads and groups that neither 4 ranks nor 2 ranks of each of 2 tensor-parallel ranks can share."""


@pytest.mark.shows(
    "eager",
    "CP a2a",
    "CP all_gather",
    "CP p2p",
    "CP state",
    of=lambda world_size, layout: (world_size, layout, {"hybrid_layer_pattern": "M*-M"}),
)
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_ranks_pass_the_states_of_scans(
    pools: WorkerPools, world_size: int, layout: dict[str, int]
) -> None:
    """Check heads that no context-parallel ranks can share, in both precisions."""
    runs = variants(layout, changes=ODD, pattern="M*-M")
    runs += variants(layout, changes={**TIED, **DELTA}, pattern="*GM*", linear="headwise")[1:2]
    changes = CASES["groups and keys shared by ranks"]
    runs.append(Run("p2p", changes, "ME", dtype=torch.float32, flat=True))
    runs += [replace(run, dtype=torch.float32, flat=True) for run in runs[:2]]
    check(pools, world_size, layout, runs)


ODD_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
"""Key heads that neither 4 ranks nor 2 ranks of each of 2 tensor-parallel ranks can share."""


@pytest.mark.shows(
    "eager",
    "CP a2a",
    "CP p2p",
    "CP chunkwise",
    of=lambda world_size, layout: (world_size, layout, {"hybrid_layer_pattern": "G*-G"}),
)
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_ranks_pass_the_states_of_gated_delta_nets(
    pools: WorkerPools, world_size: int, layout: dict[str, int]
) -> None:
    """Check key heads that the ranks cannot share, in both precisions, and both widths of a halo."""
    changes = {**TIED, **ODD_DELTA}
    runs = variants(layout, changes=changes, pattern="G*-G")
    runs = [run for run in runs if run.comm_type != "all_gather"]
    runs += [replace(run, dtype=torch.float32, flat=True) for run in runs]
    short = {**changes, "linear_conv_kernel_dim": 2, "linear_allow_neg_eigval": True}
    runs.append(Run("p2p", short, "GE"))
    check(pools, world_size, layout, runs)


@pytest.mark.parametrize("mamba", ["heads", "state"])
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_layers_that_pass_states_and_that_exchange_heads_share_contiguous_rows(
    pools: WorkerPools, world_size: int, layout: dict[str, int], mamba: str
) -> None:
    changes = {**TIED, **DELTA, "mamba_num_groups": 1}
    options = {"dtype": torch.float32, "flat": True, "mamba": mamba}
    linear = ["chunkwise", "headwise"] if mamba == "state" else ["chunkwise"]
    runs = [
        Run(comm, changes, "M*-EG*", linear=mode, **options)
        for comm in ("a2a", "p2p")
        for mode in linear
    ]
    check(pools, world_size, layout, runs)


def halos(groups: ParallelGroups, width: int) -> tuple[list[float], list[float]]:
    """Return the halo of this rank's two rows, and their gradients from the halos of all ranks."""
    cp = ContextParallel.from_groups(groups, mamba_cp_comm_type="state")
    rows_T1 = (2 * cp.rank + torch.tensor([[1.0], [2.0]])).requires_grad_()
    joined_T1 = torch.cat([StatePassing(cp, width).halo_of(rows_T1), rows_T1])
    joined_T1[: width - 1].sum().backward()
    return joined_T1.detach().flatten().tolist(), rows_T1.grad.flatten().tolist()


def test_a_halo_may_be_longer_than_the_part_of_a_rank(pools: WorkerPools) -> None:
    """Check a convolution of 6 rows over parts of 2 rows, where a row is in up to three halos."""
    joined, gradients = zip(*pools.run(halos, 4, 6, layout={"cp_size": 4}))
    assert joined == (
        [0, 0, 0, 0, 0, 1, 2],
        [0, 0, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6],
        [2, 3, 4, 5, 6, 7, 8],
    )
    assert gradients == ([2, 3], [2, 2], [1, 1], [0, 0])


def rows_from_others(groups: ParallelGroups) -> list[list[list[float]]]:
    """Return the rows that this rank receives forward and back; rank r sends r + 1 and 10 (r + 1)."""
    assert groups.cp.group is not None
    own_12 = torch.tensor([[1.0, 10.0]]) * (
        ContextParallel.from_groups(groups, mamba_cp_comm_type="state").rank + 1
    )
    return [
        start_row_from_others(own_12, groups.cp.group, back=back).wait().tolist()
        for back in (False, True)
    ]


def place_in_pack(groups: ParallelGroups) -> tuple[int, int, list[int] | None]:
    """Return the part of this rank in a pack of documents of 2, 3, 2 and 1 tokens."""
    packed: Any = SimpleNamespace(
        total_tokens=8, seq_idx=torch.tensor([[0, 0, 1, 1, 1, 2, 2, 3]], dtype=torch.int32)
    )
    part = StatePassing(ContextParallel.from_groups(groups, mamba_cp_comm_type="state"), 4).part(
        packed
    )
    before = part.document_before_1
    return part.number, part.parts, None if before is None else before.tolist()


def test_a_part_knows_its_place_and_the_document_before_it(pools: WorkerPools) -> None:
    found = pools.run(place_in_pack, 4, layout={"cp_size": 4})
    assert found == [(0, 4, None), (1, 4, [0]), (2, 4, [1]), (3, 4, [2])]


def test_states_go_to_later_parts_and_their_gradients_to_earlier_ones(pools: WorkerPools) -> None:
    rows = [[1, 10], [2, 20], [3, 30], [4, 40]]
    found = pools.run(rows_from_others, 4, layout={"cp_size": 4})
    assert found == [[rows[:rank], rows[rank + 1 :]] for rank in range(4)]


EXPERTS = [
    (2, {"cp_size": 2, "ep_size": 2}),
    (4, {"cp_size": 4, "ep_size": 2}),
    (4, {"tp_size": 2, "cp_size": 2, "ep_size": 2}),
    (4, {"tp_size": 2, "cp_size": 2, "ep_size": 4, "expert_tp_size": 1}),
]


@pytest.mark.shows(
    "eager",
    "CP a2a",
    "CP p2p",
    "EP allgather",
    "EP alltoall",
    lambda world_size: "CP all_gather" if world_size == 2 else "CP p2p",
    of=lambda world_size, layout: (world_size, layout, {"hybrid_layer_pattern": "E*E"}),
)
@pytest.mark.parametrize(("world_size", "layout"), EXPERTS, ids=str)
def test_slices_of_a_pack_share_experts(
    pools: WorkerPools, world_size: int, layout: dict[str, int]
) -> None:
    """Check experts of a group whose ranks have different slices of one pack, including its tail."""
    runs = [
        run
        for number, (name, dispatcher) in enumerate(
            (
                ("groups and keys shared by ranks", "alltoall"),
                ("groups and keys for all ranks, rope, expert bias", "allgather"),
            )
        )
        for run in variants(
            layout,
            number,
            changes={**CASES[name], "num_experts": 8, "moe_token_dispatcher_type": dispatcher},
            pattern="E*E",
        )
        if run.comm_type != "all_gather" or world_size == 2
    ]
    check(pools, world_size, layout, runs)


def rows_of_ranks(groups: ParallelGroups, runs: list[Run]) -> list[Tensor]:
    """Return the losses of all tokens of the first pack, in the order of its slots."""
    found = []
    for run in runs:
        model = build(run, groups)
        batch = pack(PACKS[0], run, slots=SLOTS)
        packed = model.prepare(batch.packed)
        mine_T = model(batch).per_token_loss_T
        assert mine_T.shape[0] == SLOTS // groups.cp.size
        found.append(model.cp.gather(mine_T, packed))
    return found


def test_losses_are_those_of_a_rank_s_own_tokens(pools: WorkerPools) -> None:
    runs = [
        Run(comm_type, CASES["two groups, layer norm, biases"], "M*-M") for comm_type in COMM_TYPES
    ]
    results = pools.run(rows_of_ranks, 4, runs, layout={"cp_size": 4})
    for i, run in enumerate(runs):
        expected_T = train(run)["rows"][0]
        assert all(cases.relative_error(rank[i], expected_T) <= 1e-9 for rank in results)


def test_padding_of_documents_changes_nothing_but_their_places() -> None:
    changes = CASES["groups and keys for all ranks, rope, expert bias"]
    dense, padded = train(Run("a2a", changes)), train(Run("p2p", changes))
    assert cases.relative_error(padded["sums"], dense["sums"]) <= 1e-9
    for name, gradient in dense["gradients"].items():
        assert cases.relative_error(padded["gradients"][name], gradient) <= 1e-9, name


# -- collectives -----------------------------------------------------------------------------------


def collectives_of_layers(groups: ParallelGroups, runs: list[Run]) -> list[dict[str, list[str]]]:
    """Record the collectives of a model with one layer: in prepare, forward and backward."""
    found = []
    for run in runs:
        model = build(run, groups)
        with Recorder() as preparing:
            packed = model.prepare(pack(PACKS[0], run, slots=SLOTS).packed)
        hidden_TD = torch.randn(SLOTS // groups.cp.size, 32, dtype=run.dtype, requires_grad=True)
        with Recorder() as forward:
            output_TD = model.layers[0](hidden_TD, packed)
        with Recorder() as backward:
            output_TD.sum().backward()
        recorders = {"prepare": preparing, "forward": forward, "backward": backward}
        found.append({name: recorder.collectives() for name, recorder in recorders.items()})
        assert not any("scatter" in name for name, _ in forward.calls), (
            "the order of rows is found once for a pack"
        )
    return found


def test_number_of_collectives(pools: WorkerPools) -> None:
    """Check that M and G layers have one all-to-all before the convolution and one after the scan."""
    options: Any = {"pattern": "M", "mamba": "heads", "linear": "headwise"}
    mamba = [Run(comm_type, {**TIED, **DELTA}, **options) for comm_type in COMM_TYPES]
    delta, attend = ([replace(run, pattern=symbol) for run in mamba] for symbol in "G*")
    runs = mamba + delta + attend
    for rank in pools.run(collectives_of_layers, 4, runs, layout={"cp_size": 4}):
        for sent in rank[:6]:
            assert sent == {
                "prepare": [],
                "forward": ["alltoall_base_"] * 2,
                "backward": ["alltoall_base_"] * 2,
            }
        a2a, all_gather, p2p = rank[6:]
        assert a2a == {
            "prepare": [],
            "forward": ["alltoall_base_"] * 2,
            "backward": ["alltoall_base_"] * 2,
        }
        assert (len(all_gather["forward"]), len(all_gather["backward"])) == (1, 1)
        assert sorted(p2p["forward"]) == sorted(p2p["backward"]) == ["recv_"] * 3 + ["send"] * 3


def test_passed_states_need_two_messages_and_attention_two_exchanges_for_each_reordering(
    pools: WorkerPools,
) -> None:
    """Check the halo and the states of M and G layers, and the moves before and after attention."""
    runs = [Run(comm, TIED, pattern="M*") for comm in ("a2a", "p2p")]
    runs.append(Run("p2p", {**TIED, **ODD_DELTA}, pattern="G*"))
    runs.append(Run("all_gather", TIED, pattern="*M"))
    gathers = ["_allgather_base_"] * 2
    scatters = ["_reduce_scatter_base_"] * 2
    moves = ["alltoall_base_"] * 2
    for *passing, attend in pools.run(collectives_of_layers, 4, runs, layout={"cp_size": 4}):
        for found in passing:
            assert found == {"prepare": [], "forward": gathers, "backward": scatters}
        assert attend == {
            "prepare": [],
            "forward": moves + gathers[:1] + moves,
            "backward": moves + scatters[:1] + moves,
        }


def recorded_runs(groups: ParallelGroups, runs: list[Run]) -> list[list[Any]]:
    return [
        recorded_calls(
            build(run, groups),
            (pack(lengths, run) for lengths in ([5, 20, 3, 1, 30], [40, 2, 1, 1, 1])),
        )
        for run in runs
    ]


def test_no_question_and_no_shape_depends_on_the_documents(pools: WorkerPools) -> None:
    """Check that host reads and shapes are the same for two packs with different documents.

    With ``a2a`` the model has no attention layer, because the attention reference reads the offsets
    on a CPU.
    """
    changes = CASES["groups and keys shared by ranks"]
    runs = [
        Run(comm_type, changes, "MGE-" if comm_type == "a2a" else "M*E-", dtype=torch.float32)
        for comm_type in COMM_TYPES
    ]
    runs += [
        Run(comm, changes, "ME", mamba="heads", dtype=torch.float32) for comm in ("a2a", "p2p")
    ]
    runs.append(Run("p2p", changes, "GE", linear="headwise", dtype=torch.float32))
    for rank in pools.run(recorded_runs, 2, runs, layout={"cp_size": 2}):
        for first, second in rank:
            assert first == second and not asks(first)


# -- isolation -------------------------------------------------------------------------------------

CUT = {
    "inside documents": [20, 20, 30, 30, 12],
    "on borders": [28, 28, 28, 20],
    "a document three ranks long": [20, 40, 30, 6],
    "shorter than the convolution, across a border": [27, 2, 26, 1, 2, 25, 3, 20],
    "single tokens on both sides of a border": [27, 1, 1, 26, 1, 1, 30],
    "one document and a tail over three ranks": [5],
}
"""Documents in 112 slots on 4 ranks, where contiguous slices end at multiples of 28."""
CUT_ALIGNED = {
    "chunks of one token": [8, 8, 8, 8, 8, 8, 8, 8],
    "padded to chunks of one token": [1, 2, 3, 5, 7, 8, 1, 2, 4],
    "chunks as long as the convolution, and one long document": [32, 40, 30],
    "one document and a tail": [5],
}
"""Documents for zigzag sharding, where every document has rows on all ranks."""
FEWER_CUTS = {
    "inside documents",
    "shorter than the convolution, across a border",
    "one document and a tail over three ranks",
    "padded to chunks of one token",
    "chunks as long as the convolution, and one long document",
    "one document and a tail",
}
"""Packs for two context-parallel ranks; four ranks have all packs."""


def without_boundaries(batch: MicroBatch) -> MicroBatch:
    """Return the same tokens, labels and mask as one document that fills the pack."""
    joined = MicroBatch.build([(batch.tokens.numpy(), None)], TOKENS, batch.layout.capacity)
    for name in ("labels", "loss_mask", "scales"):
        getattr(joined, name).copy_(getattr(batch, name))
    return joined


@experts_row_by_row()
def leaks(groups: ParallelGroups, runs: list[Run], joined: bool = False) -> list[dict[str, float]]:
    """Return the largest change in the other documents when every second document changes.

    The change in these documents is returned too, to show that the test sees changes. With
    ``joined`` all documents are one document, without boundaries.
    """
    found = []
    for run in runs:
        model = build(run, groups)
        moved = {"loss": 0.0, "input gradients": 0.0, "own": 0.0}
        cuts = CUT if run.alignment == 1 else CUT_ALIGNED
        if groups.world_size == 2 or groups.tp.size > 1:
            cuts = {name: lengths for name, lengths in cuts.items() if name in FEWER_CUTS}
        for lengths in cuts.values():
            batch = pack(lengths, run)
            seen = without_boundaries(batch) if joined else batch
            before = observe(model, seen)
            numbers_T = batch.packed.seq_idx[0]
            changed_T = (numbers_T >= 0) & (numbers_T < len(lengths)) & (numbers_T % 2 == 0)
            other = batch.with_buffer(batch.buffer.clone())
            other.tokens.add_(changed_T.int()).remainder_(cases.VOCAB)
            after = observe(model, without_boundaries(other) if joined else other)
            changed_T = model.cp.own(changed_T, seen.packed)
            for name, value in before.items():
                own_T = changed_T
                if name == "input gradients" and run.sequence_parallel:
                    own_T = own_rows(changed_T, groups.tp.group)
                difference_T = (value - after[name]).abs().view(len(own_T), -1).amax(dim=1)
                for key, rows_T in ((name, ~own_T), ("own", own_T)):
                    moved[key] = max(moved[key], float((difference_T * rows_T).max()))
        found.append(moved)
    return found


ISOLATED = [
    (2, {"cp_size": 2}, False),
    (4, {"cp_size": 4}, False),
    (4, {"tp_size": 2, "cp_size": 2}, True),
]
"""World size, sizes of the axes, sequence parallelism."""


@pytest.mark.shows(
    "isolation",
    "CP a2a",
    "CP all_gather",
    "CP p2p",
    "CP contiguous",
    "CP state",
    "CP chunkwise",
    of=lambda world_size, layout, sequence_parallel: (
        world_size,
        layout,
        {"sequence_parallel": sequence_parallel},
    ),
)
@pytest.mark.parametrize(("world_size", "layout", "sequence_parallel"), ISOLATED, ids=str)
def test_other_documents_do_not_change_by_a_bit(
    pools: WorkerPools, world_size: int, layout: dict[str, int], sequence_parallel: bool
) -> None:
    """Check each kind of layer with each exchange, over rows in the order of slots and in zigzags.

    A model has several exchanges, because any layer that mixes documents changes its results.
    """
    changes = {**TIED, **ROPE, **DELTA, "mamba_num_groups": 1}
    a2a, all_gather, p2p = (
        Run(comm, changes, "M*-EG", sequence_parallel, torch.float32) for comm in COMM_TYPES
    )
    runs = [a2a, p2p]
    runs += [
        replace(a2a, pattern="MG", mamba="heads", linear="headwise"),
        replace(all_gather, pattern="MG*", mamba="heads", linear="headwise"),
        replace(p2p, pattern="GM*M", mamba="heads"),
    ]
    every_second = {**changes, "window_size": "9,0", "window_attn_skip_freq": "2"}
    runs += [
        replace(run, pattern="**", partition="contiguous", changes=every_second)
        for run in (all_gather, p2p)
    ]
    results = pools.run(leaks, world_size, runs, layout=layout, timeout=120)
    for i, run in enumerate(runs):
        for rank in results:
            assert (rank[i]["loss"], rank[i]["input gradients"]) == (0.0, 0.0), run
        assert max(rank[i]["own"] for rank in results) > 0


def test_a_removed_boundary_is_seen(pools: WorkerPools) -> None:
    runs = [
        Run(comm, TIED, pattern, dtype=torch.float32)
        for comm in COMM_TYPES
        for pattern in ("M", "G", "*")
    ]
    runs += [replace(run, mamba="heads", linear="headwise") for run in runs if run.pattern in "MG"]
    runs += [
        replace(run, partition="contiguous")
        for run in runs
        if run.pattern == "*" and run.comm_type != "a2a"
    ]
    for rank in pools.run(leaks, 2, runs, True, layout={"cp_size": 2}, timeout=120):
        for moved in rank:
            assert min(moved["loss"], moved["input gradients"]) > 1e-6


# -- tests fail if a step of the algorithm is removed ----------------------------------------------


def _passed_without_return(x: Tensor, group: Any) -> Tensor:
    return linear_map(x, group, pass_to_next, lambda dy, _: dy)


def _own_keys(keys: EarlierKeys, packed: Any) -> Tensor:
    rows = packed.total_tokens // keys.cp.size
    return packed.cu_seqlens.clamp(keys.cp.rank * rows, (keys.cp.rank + 1) * rows)


_reach = EarlierKeys.reach


def _one_row_less(keys: EarlierKeys, rows: int) -> int:
    return _reach(keys, rows) - 1


def _unsorted(cp: ContextParallel, x: Tensor, packed: Any) -> Tensor:
    return x


def _unmoved(x: Any, cp: ContextParallel, packed: Any) -> Any:
    return x


def _first_rows(cp: ContextParallel, x: Tensor, packed: Any) -> Tensor:
    return x[: x.shape[0] // cp.size]


def _without_halo(passing: StatePassing, x_TC: Tensor) -> Tensor:
    return torch.zeros_like(x_TC[:1]).repeat(passing.halo, 1)


def _no_state(passing: StatePassing, state: Tensor, log: Tensor, packed: Any) -> Tensor:
    return torch.zeros_like(state)


def _no_messages(passing: StatePassing, message_1X: Tensor) -> Tensor:
    return torch.zeros_like(message_1X).repeat(passing.cp.size, 1)


def _first_part(num_segments: int) -> Callable[..., Shard]:
    """Return a `ContextParallel.part` that takes the first items of ``num_segments`` segments."""
    sound = ContextParallel.part

    def part(cp: ContextParallel, *segments: SplitSegment) -> Shard:
        shard = sound(cp, *segments)
        if len(segments) != num_segments:
            return shard
        return replace(shard, pieces=tuple(replace(piece, start=0) for piece in shard.pieces))

    return part


PATCHES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "gathering keys without a sum in backward": (attention, "gather_rows", gathered_without_sum),
    "gathering earlier keys without a sum": (
        contiguous_attention,
        "gather_rows",
        gathered_without_sum,
    ),
    "passing earlier keys on without a way back": (
        contiguous_attention,
        "pass_on",
        _passed_without_return,
    ),
    "keys of a rank's own rows": (EarlierKeys, "offsets", _own_keys),
    "one row too few": (EarlierKeys, "reach", _one_row_less),
    "passing keys on without a way back": (attention, "pass_on", _passed_without_return),
    "counts of a rank's own tokens": (ContextParallel, "sum_of_statistics", own_value),
    "rows left in the order of ranks": (ContextParallel, "in_order_of_slots", _unsorted),
    "rows sent back in the order of slots": (ContextParallel, "in_order_of_ranks", _unsorted),
    "contiguous rows in attention": (attention, "to_zigzag", _unmoved),
    "rows of attention left in a zigzag": (attention, "from_zigzag", _unmoved),
    "no halo": (StatePassing, "halo_of", _without_halo),
    "no entering state": (StatePassing, "entering", _no_state),
    "no messages": (StatePassing, "gather", _no_messages),
    "states without a way back": (state_passing, "gather_rows", gathered_without_sum),
    "everybody's first tokens": (ContextParallel, "own", _first_rows),
    "everybody's first heads": (ContextParallel, "part", _first_part(1)),
    "everybody's first channels": (ContextParallel, "part", _first_part(3)),
}


MUTATIONS = [
    Run("all_gather", TIED, "*", mutation="gathering keys without a sum in backward"),
    Run("p2p", TIED, "*", mutation="passing keys on without a way back"),
    *(
        Run(
            comm,
            {**TIED, "window_size": "9,0"},
            "*",
            partition="contiguous",
            mutation=mutation,
        )
        for comm, mutation in (
            ("all_gather", "gathering earlier keys without a sum"),
            ("all_gather", "keys of a rank's own rows"),
            ("p2p", "passing earlier keys on without a way back"),
            ("p2p", "one row too few"),
        )
    ),
    Run("a2a", {**TIED, **LOSSES}, "E", mutation="counts of a rank's own tokens"),
    Run("p2p", TIED, "M", mamba="heads", mutation="rows left in the order of ranks"),
    Run("p2p", TIED, "M", mamba="heads", mutation="rows sent back in the order of slots"),
    Run("a2a", TIED, "M", mutation="everybody's first tokens"),
    Run("a2a", TIED, "M", mamba="heads", mutation="everybody's first heads"),
    Run("a2a", TIED, "M", mamba="heads", mutation="everybody's first channels"),
    Run("a2a", TIED, "M", mutation="no halo"),
    Run("p2p", TIED, "M*", mutation="no entering state"),
    Run("a2a", TIED, "M", mutation="states without a way back"),
    Run("p2p", TIED, "M*", mutation="contiguous rows in attention"),
    Run("p2p", TIED, "M*", mutation="rows of attention left in a zigzag"),
    Run("a2a", DELTA, "G", mutation="no halo"),
    Run("p2p", {**TIED, **DELTA}, "G*", mutation="no messages"),
    Run("a2a", DELTA, "G", mutation="states without a way back"),
    Run("p2p", DELTA, "G", linear="headwise", mutation="rows left in the order of ranks"),
    Run("p2p", DELTA, "G", linear="headwise", mutation="rows sent back in the order of slots"),
    Run("a2a", DELTA, "G", linear="headwise", mutation="everybody's first heads"),
    Run("a2a", DELTA, "G", linear="headwise", mutation="everybody's first channels"),
]


def test_a_missing_step_is_seen(pools: WorkerPools) -> None:
    sound = {repr(run): run for run in (replace(run, mutation=None) for run in MUTATIONS)}
    check(pools, 2, {"cp_size": 2}, list(sound.values()))
    results = pools.run(train_ranks, 2, MUTATIONS, layout={"cp_size": 2})
    for i, run in enumerate(MUTATIONS):
        assert max(errors([rank[i] for rank in results], alone(run)).values()) > 1e-4, run


# -- refusals, in one process ----------------------------------------------------------------------


def model_of(
    comm_type: str = "a2a", pattern: str = "M*", cp_size: int = 2, **changes: Any
) -> HybridModel:
    groups = ParallelGroups(device=torch.device("cpu"), cp=Axis(size=cp_size))
    return HybridModel(
        cases.tiny_config(pattern, **changes),
        vocab_size=cases.VOCAB,
        max_positions=8,
        groups=groups,
        cp_comm_type=comm_type,
        mamba_cp_comm_type="heads",
        linear_cp_mode="headwise",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comm_type": "a2a+p2p"}, "cp_comm_type is 'a2a\\+p2p'; choose a2a, all_gather .* or p2p"),
        (
            {"pattern": "M", "cp_size": 3},
            r"cp_size \(3\) does not fit the number of Mamba heads \(4\)",
        ),
        (
            {"pattern": "G", "cp_size": 4},
            r"cp_size \(4\) does not fit the number of key heads of a gated delta net \(2\)",
        ),
        (
            {"pattern": "*", "cp_size": 3},
            r"cp_size \(3\) does not fit the number of attention heads \(4\)",
        ),
        (
            {"pattern": "*", "cp_size": 2, "num_attention_heads": 6, "num_query_groups": 3},
            "number of key-value heads",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(**options)


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("cp_partition_mode", "zigzag or contiguous"),
        ("mamba_cp_comm_type", "heads or state"),
        ("linear_cp_mode", "headwise or chunkwise"),
    ],
)
def test_an_unknown_communication_is_refused(option: str, choices: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is 'other'; choose {choices}"):
        ContextParallel.from_groups(None, **{option: "other"})


def test_keys_travel_between_any_number_of_ranks_whatever_the_heads() -> None:
    model_of("p2p", "*", cp_size=3)
    assert model_of("allgather", "*", cp_size=3).cp.comm_type == "all_gather"


def test_states_pass_between_any_number_of_ranks_whatever_the_heads() -> None:
    groups = ParallelGroups(device=torch.device("cpu"), cp=Axis(size=3))
    options: Any = {"mamba_cp_comm_type": "state", "linear_cp_mode": "chunkwise"}
    for pattern, kinds in (("MG", "MG"), ("M-", "M"), ("G-", "G"), ("-", "")):
        model = HybridModel(
            cases.tiny_config(pattern),
            vocab_size=cases.VOCAB,
            max_positions=8,
            groups=groups,
            **options,
        )
        assert model.cp.state_passing == set(kinds)


def test_packs_that_do_not_divide_and_logits_are_refused() -> None:
    packed = cases.make_pack(cases.make_documents([3, 4])).packed
    with pytest.raises(
        ValueError, match="7 token slots, which do not divide among cp_size = 2 ranks"
    ):
        model_of().prepare(packed)
    packed = cases.make_pack(cases.make_documents([3, 5])).packed
    with pytest.raises(ValueError, match=r"document 0 has 3 token slots.* use --cp-comm-type a2a"):
        model_of("p2p").prepare(packed)
    with pytest.raises(
        ValueError, match="cp_size is 2, so no rank has the logits of a complete pack"
    ):
        model_of().logits(torch.zeros(8, dtype=torch.int32), packed)


@pytest.mark.parametrize("comm_type", ["a2a", "p2p"])
def test_a_tail_beyond_the_rotary_tables_stays_inside_them(comm_type: str) -> None:
    """Check that padding and tail use position 0, with tables of 8 positions and 32 slots."""
    model = model_of(comm_type, "*", position_embedding_type="rope")
    assert model.rotary is not None
    packed = MicroBatch.build(cases.make_documents([7, 8]), 32, alignment=4).packed
    own_T = model.prepare(packed).tables.rope_position_ids
    assert len(own_T) == 16 and own_T.max() < model.rotary.max_positions


def test_a_gpu_without_transformer_engine_is_refused_with_a_cure() -> None:
    from megatron_packed.ops.backend_dispatch import NoBackendError

    model = model_of("p2p", "*")
    batch = MicroBatch.build(cases.make_documents([4, 4]), 8)
    model.backends = replace(model.backends, context_parallel_attention="transformer_engine")
    model.layers[0].mixer.core_attn.backends = model.backends
    with pytest.raises(
        NoBackendError,
        match=r"transformer_engine.*Use --cp-comm-type a2a, which works with every attention backend",
    ):
        model(batch)
