"""Tests of tensor and sequence parallelism: results equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_packed.distributed.sequence_parallel_products as products_module
import megatron_packed.layers.tensor_parallel as tensor_parallel
from megatron_packed.distributed.collectives import own_rows
from megatron_packed.distributed.differentiable import reduce_from
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import Axis, ParallelGroups
from megatron_packed.distributed.tensor_parallel_gradients import SharedGradients
from megatron_packed.distributed.tensor_parallel_shards import Shard, ShardPiece, SplitSegment
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.models import lm_head_and_loss
from megatron_packed.models.hybrid_model import HybridModel
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

LAYOUTS = [(2, 2), (4, 4), (4, 2)]
"""World size and tp_size; the third layout has two data-parallel replicas."""
TAIL = 13
AUX_SCALE = 0.5

ONE_GROUP = {"mamba_num_groups": 1, "num_query_groups": 1}
TIED = {"untie_embeddings_and_output_weights": False}
ROPE = {"position_embedding_type": "rope", "rotary_percent": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, layer norm, biases, gelu, rope": {
        **TIED,
        **ROPE,
        "normalization": "LayerNorm",
        "squared_relu": False,
        "add_bias_linear": True,
    },
    "one group for all, swiglu": {
        **ONE_GROUP,
        "squared_relu": False,
        "swiglu": True,
        "add_qkv_bias": True,
    },
    "ranks with padding rows only, tied": {**TIED, "make_vocab_size_divisible_by": 128},
    "rows that this layout alone has, untied": {"make_vocab_size_divisible_by": 61},
    "a group for each head": {"mamba_num_groups": 4, "num_query_groups": 4},
    "gate, norms of heads": {
        **ROPE,
        "attention_output_gate": True,
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
    },
    "gate, one norm for all heads that ranks share": {
        **ONE_GROUP,
        "attention_output_gate": True,
        "qk_layernorm": True,
        "qk_layernorm_scope": "all_heads",
        "attention_norm_placement": "output",
    },
    "multipliers, norm groups, no bias of the convolution": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.7,
        "mamba_norm_groups": 1,
        "mamba_norm_epsilon": 0.1,
        "mamba_conv_bias": False,
    },
}
WITH_REPLICAS = ("tied, layer norm, biases, gelu, rope", "one group for all, swiglu")
"""Cases of the layout with two replicas: the others split the model as two ranks do."""
SHARED = (
    "one group for all, swiglu",
    "ranks with padding rows only, tied",
    "gate, one norm for all heads that ranks share",
    "multipliers, norm groups, no bias of the convolution",
)
"""Cases with gradients that several of four ranks share, or with ranks that have padding only."""
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "linear_allow_neg_eigval": True,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "softmax router, losses": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1, **TIED},
    "sigmoid router, bias, gated shared expert, swiglu": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk": 3,
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
        "squared_relu": False,
        "swiglu": True,
        "moe_aux_loss_coeff": 0.1,
    },
}


@dataclass(frozen=True)
class Run:
    """Model and options of one run."""

    changes: dict[str, Any] = field(default_factory=dict)
    pattern: str = "M*-M"
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float64
    flat: bool = False
    """True stores gradients in flat buffers (``main_grad``); False leaves them to autograd."""
    mutation: str | None = None


def build(run: Run, groups: ParallelGroups | None) -> HybridModel:
    return rank_models.build(
        run.pattern, run.changes, groups, dtype=run.dtype, sequence_parallel=run.sequence_parallel
    )


def packs() -> list[Any]:
    first, second = (
        cases.make_documents(cases.AWKWARD),
        cases.make_documents(list(reversed(cases.AWKWARD)), seed=1),
    )
    targets = cases.count_targets(first) + cases.count_targets(second)
    return [
        cases.make_pack(documents, tail=TAIL, spare=2, aux_scale=AUX_SCALE, targets=targets)
        for documents in (first, second)
    ]


def train(run: Run, groups: ParallelGroups | None = None) -> dict[str, Any]:
    """Run two micro-batches; return losses, logits, and this rank's shards of all parameters and
    gradients.
    """
    with mutated(PATCHES, run.mutation):
        model = build(run, groups)
        buffers = FlatBuffers(model) if run.flat else None
        shared = model.shared_gradients()
        if run.mutation is not None and run.mutation.startswith("unsummed "):
            skip(shared, model, run.mutation.removeprefix("unsummed "))
        losses = []
        for number, batch in enumerate(packs()):
            if number == 0:
                output = model.forward_backward(batch)
            else:
                output = model(batch)
                (output.loss / 2).backward()
            outputs = (
                output.loss,
                output.aux_loss,
                output.per_token_loss_T,
                output.tokens_per_expert,
            )
            losses += [value.detach() for value in outputs]
        shared.sum()
        batch = packs()[0]
        with torch.no_grad():
            logits = model.logits(batch.tokens, batch.packed)
        gradients = {n: p.main_grad if buffers else p.grad for n, p in model.named_parameters()}
        return {
            "losses": losses,
            "logits": logits,
            "shards": described(model),
            "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
            "gradients": {n: g.detach().clone() for n, g in gradients.items()},
        }


def train_ranks(groups: ParallelGroups, runs: list[Run]) -> list[dict[str, Any]]:
    return [train(run, groups) for run in runs]


def errors(ranks: list[dict[str, Any]], reference: dict[str, Any]) -> dict[str, float]:
    """Return the relative error of each result of one process.

    Also check that parameters are equal bit for bit.
    """
    found = {}
    for rank in ranks:
        for i, (loss, expected) in enumerate(zip(rank["losses"], reference["losses"], strict=True)):
            if expected.numel():
                found[f"loss {i}"] = cases.relative_error(loss, expected)
        found["logits"] = cases.relative_error(rank["logits"], reference["logits"])
    for name, parameter in reference["parameters"].items():
        assert torch.equal(whole(ranks, "parameters", name), parameter), name
    return found


def gradient_errors(ranks: list[dict[str, Any]], reference: dict[str, Any]) -> dict[str, float]:
    expected = reference["gradients"]
    assert all(gradient.abs().max() > 0 for gradient in expected.values()), (
        "a gradient that is 0 shows nothing"
    )
    return {
        name: cases.relative_error(whole(ranks, "gradients", name), g)
        for name, g in expected.items()
    }


REFERENCES: dict[str, dict[str, Any]] = {}
"""Results of one process, shared by the layouts that are compared with them."""


def alone(run: Run) -> dict[str, Any]:
    """Return the results of `train` in one process, cached by its options."""
    plain = replace(run, sequence_parallel=False, flat=False, mutation=None)
    if (key := repr(plain)) not in REFERENCES:
        REFERENCES[key] = train(plain)
    return REFERENCES[key]


def check(pools: WorkerPools, world_size: int, tp_size: int, runs: list[Run]) -> None:
    results = pools.run(train_ranks, world_size, runs, layout={"tp_size": tp_size})
    for i, run in enumerate(runs):
        reference = alone(run)
        for first in range(0, world_size, tp_size):
            ranks = [results[first + r][i] for r in range(tp_size)]
            found = errors(ranks, reference) | gradient_errors(ranks, reference)
            assert_small(found, run)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp and sp"])
@pytest.mark.parametrize(("world_size", "tp_size"), LAYOUTS)
def test_ranks_compute_what_one_process_computes(
    pools: WorkerPools, world_size: int, tp_size: int, sequence_parallel: bool
) -> None:
    """Each case has sequence parallelism on two ranks and not on four ranks, or the reverse."""
    chosen = CASES if world_size == tp_size else WITH_REPLICAS
    runs = [Run(CASES[name], "M*-M", sequence_parallel) for name in chosen]
    if world_size == tp_size:
        runs = runs[(tp_size == 4) ^ sequence_parallel :: 2]
        runs.append(Run(DELTA, "G*G", sequence_parallel))
    check(pools, world_size, tp_size, runs)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp and sp"])
@pytest.mark.parametrize(("world_size", "tp_size"), LAYOUTS[:2])
def test_gradients_in_flat_buffers(
    pools: WorkerPools, world_size: int, tp_size: int, sequence_parallel: bool
) -> None:
    chosen = CASES if tp_size == 2 else SHARED
    runs = [Run(CASES[name], "M*-", sequence_parallel, torch.float32, True) for name in chosen]
    if tp_size == 2:
        runs = runs[sequence_parallel::2]
        runs.append(Run(DELTA, "G-", sequence_parallel, torch.float32, True))
    check(pools, world_size, tp_size, runs)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp and sp"])
@pytest.mark.parametrize(("world_size", "tp_size"), LAYOUTS[:2])
def test_experts(
    pools: WorkerPools, world_size: int, tp_size: int, sequence_parallel: bool
) -> None:
    runs = [Run(changes, "ME*E", sequence_parallel) for changes in EXPERTS.values()]
    if tp_size == 2:
        runs += [replace(run, dtype=torch.float32, flat=True) for run in runs]
    check(pools, world_size, tp_size, runs)


def after_a_rounding(groups: ParallelGroups) -> dict[str, Tensor]:
    """Return reduced gradients of parameters whose complete gradient every rank computes.

    Before the reduction the gradients differ between ranks, as if the kernels had rounded
    differently.
    """
    model = build(Run(BIASES, "M*-", dtype=torch.float32), groups)
    FlatBuffers(model)
    copies = {
        n: p
        for n, p in model.named_parameters()
        if n.endswith(("norm.weight", "norm.bias", "proj.bias"))
    }
    copies = {n: p for n, p in copies.items() if ".mixer.norm." not in n}
    for number, parameter in enumerate(copies.values()):
        parameter.main_grad.fill_(1.0 + number + 1e-3 * groups.tp.rank)
    model.shared_gradients().sum()
    return {name: parameter.main_grad.clone() for name, parameter in copies.items()}


def test_copies_do_not_drift_apart(pools: WorkerPools) -> None:
    one, other = pools.run(after_a_rounding, 2, layout={"tp_size": 2})
    assert len(one) >= 8
    for number, name in enumerate(one):
        assert torch.equal(one[name], other[name]), name
        torch.testing.assert_close(one[name], torch.full_like(one[name], 1.0 + number + 5e-4))


def saved_shapes(groups: ParallelGroups, pattern: str) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that autograd saves between forward and backward."""
    model, found = (
        build(Run(pattern=pattern, sequence_parallel=True, dtype=torch.float32), groups),
        [],
    )
    batch = packs()[0]
    packed = model.prepare(batch.packed)

    def note(x: Tensor) -> Tensor:
        found.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model.hidden_states(batch.tokens, packed)
    return found


@pytest.mark.parametrize("pattern", ["-", "*", "M", "G"])
def test_sequence_parallel_ranks_keep_their_own_rows_of_the_hidden_state(
    pools: WorkerPools, pattern: str
) -> None:
    tokens, hidden = packs()[0].packed.total_tokens, 32
    for found in pools.run(saved_shapes, 2, pattern, layout={"tp_size": 2}):
        assert (tokens, hidden) not in found
        assert (tokens // 2, hidden) in found


def recorded_runs(groups: ParallelGroups, runs: list[Run]) -> list[list[Any]]:
    return [recorded_calls(build(run, groups), two_packs()) for run in runs]


def test_no_question_and_no_shape_depends_on_the_documents(pools: WorkerPools) -> None:
    """Check that host reads and shapes are the same for two packs with different documents.

    The model has no attention layer: the attention reference reads the offsets on a CPU to compute
    each document separately.
    """
    changes = ONE_GROUP | EXPERTS["softmax router, losses"]
    runs = [
        Run(changes, "MGE-", sequence_parallel, torch.float32)
        for sequence_parallel in (False, True)
    ]
    for rank in pools.run(recorded_runs, 2, runs, layout={"tp_size": 2}):
        for first, second in rank:
            assert first == second and not asks(first)


# -- tests fail if a sum over ranks is removed -----------------------------------------------------


def _identity(x: Tensor, *_: object) -> Tensor:
    return x


def _forward_sum_only(tp: TensorParallel, x: Tensor) -> Tensor:
    return reduce_from(x, tp.group)


PATCHES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "entering without a sum in backward": (tensor_parallel, "copy_to", _identity),
    "leaving without a sum": (tensor_parallel, "reduce_from", _identity),
    "gathering without a sum in backward": (tensor_parallel, "gather_rows", gathered_without_sum),
    "sums of rows of linear layers left out": (products_module, "reduce_scatter_rows", own_rows),
    "scattering without a sum": (tensor_parallel, "scatter_rows", only_own_rows),
    "norm of a group without a sum": (TensorParallel, "sum_over_ranks", own_value),
    "norm of a group without a sum in backward": (
        TensorParallel,
        "sum_over_ranks",
        _forward_sum_only,
    ),
    "auxiliary loss counted by each rank": (TensorParallel, "counted_once", own_value),
    "softmax without a sum": (lm_head_and_loss, "all_reduce_sum", _identity),
}


def skip(shared: SharedGradients, model: HybridModel, ending: str) -> None:
    """Exclude the parameters whose names end with ``ending`` from the reduction."""
    chosen = {id(p) for n, p in model.named_parameters() if n.endswith(ending)}
    kept = [place for place in shared._places if id(place.parameter) not in chosen]
    assert len(kept) < len(shared._places), f"no gradient of {ending} is summed"
    shared._places[:] = kept


BIASES = CASES["tied, layer norm, biases, gelu, rope"] | ONE_GROUP
LOSSES = EXPERTS["softmax router, losses"]
MUTATIONS = [
    *(Run(BIASES, "M*-", mutation=name) for name in list(PATCHES)[:2]),
    *(Run(BIASES, "M*-", True, mutation=name) for name in list(PATCHES)[2:5]),
    Run(ONE_GROUP, "M", mutation="norm of a group without a sum"),
    Run(ONE_GROUP, "M", mutation="norm of a group without a sum in backward"),
    Run(LOSSES, "E", mutation="auxiliary loss counted by each rank"),
    Run(DELTA, "G", mutation="unsummed mixer.norm.weight"),
    Run(DELTA, "G", True, mutation="unsummed mixer.norm.weight"),
    Run(TIED, "-", mutation="softmax without a sum"),
    Run(LOSSES, "E", mutation="unsummed router.weight"),
    Run(LOSSES, "E", True, mutation="unsummed router.weight"),
    *(
        Run(BIASES, "M*-", mutation=f"unsummed {name}")
        for name in ("in_proj.weight", "conv1d.weight", "conv1d.bias", "qkv.weight", "qkv.bias")
    ),
    *(
        Run(BIASES, "M*-", True, mutation=f"unsummed {name}")
        for name in (
            "0.norm.weight",
            "1.norm.bias",
            "final_norm.weight",
            "final_norm.bias",
            "proj.bias",
            "fc2.bias",
        )
    ),
]


def test_a_missing_sum_is_seen(pools: WorkerPools) -> None:
    sound = {repr(run): run for run in (replace(run, mutation=None) for run in MUTATIONS)}
    check(pools, 2, 2, list(sound.values()))
    results = pools.run(train_ranks, 2, MUTATIONS, layout={"tp_size": 2})
    for i, run in enumerate(MUTATIONS):
        assert worst_error([rank[i] for rank in results], alone(run)) > 1e-4, run


def worst_error(ranks: list[dict[str, Any]], reference: dict[str, Any]) -> float:
    """Return the largest of all `errors`, including the error of each rank's own gradient shard.

    So copies that differ count as an error too.
    """
    found = list(errors(ranks, reference).values())
    for rank in ranks:
        for name, gradient in reference["gradients"].items():
            shard = rank["shards"][name][0]
            found.append(cases.relative_error(rank["gradients"][name], shard.take(gradient)))
    return max(found)


# -- isolation -------------------------------------------------------------------------------------

LENGTHS = [5, cases.CHUNK + 3, 1, 2 * cases.CHUNK, 4]
"""37 tokens and a tail of 7; the row boundaries of the ranks are inside documents."""


def leaks(groups: ParallelGroups, runs: list[Run]) -> list[dict[str, float]]:
    batch = cases.make_pack(cases.make_documents(LENGTHS), tail=7, spare=2)
    at = LENGTHS[0] + 4
    return [rank_models.leaks(build(run, groups), batch, at, groups) for run in runs]


@pytest.mark.shows(
    "isolation", "TP + SP", of=lambda world_size, tp_size: (world_size, {"tp_size": tp_size})
)
@pytest.mark.parametrize(("world_size", "tp_size"), LAYOUTS[:2])
def test_other_documents_do_not_change_by_a_bit(
    pools: WorkerPools, world_size: int, tp_size: int
) -> None:
    runs = [
        Run(changes, pattern, sequence_parallel, torch.float32)
        for changes, pattern in ((CASES["plain"], "M*-M"), (BIASES, "M*-M"), (DELTA, "G*-G"))
        for sequence_parallel in (False, True)
    ]
    for rank in pools.run(leaks, world_size, runs, layout={"tp_size": tp_size}):
        for changes in rank:
            assert changes.pop("own") > 0
            assert set(changes.values()) == {0.0}


# -- arithmetic and refusals, in one process -------------------------------------------------------


def test_pieces_of_segments() -> None:
    B = SplitSegment(noun="groups", count=2, width=16, shareable=True)
    x = SplitSegment(noun="heads", count=8, width=4)
    shard = Shard.from_segments([x, B], rank=3, size=4)
    assert shard.pieces == (
        ShardPiece(start=24, length=8),
        ShardPiece(start=32 + 16, length=16, shared_by=2),
    )
    assert (shard.length, shard.local_length) == (64, 24)
    values = torch.arange(64)
    assert shard.take(values).tolist() == [*range(24, 32), *range(48, 64)]


def test_ranges_along_an_inner_dimension() -> None:
    shard = Shard.from_segments([SplitSegment(noun="channels", count=6)], rank=1, size=2, dim=1)
    assert shard.global_shape((2, 3, 5)) == (2, 6, 5)
    assert torch.equal(
        shard.take(torch.arange(60).view(2, 6, 5)), torch.arange(60).view(2, 6, 5)[:, 3:]
    )


@pytest.mark.parametrize(
    ("pattern", "changes", "tp_size", "message"),
    [
        ("*", {}, 8, r"tp_size \(8\) does not fit the number of attention heads \(4\)"),
        ("M", {}, 8, r"tp_size \(8\) does not fit the number of Mamba heads \(4\)"),
        (
            "G",
            {},
            4,
            r"tp_size \(4\) does not fit the number of key heads .* net \(2\); choose a divisor of",
        ),
        (
            "-",
            {"ffn_hidden_size": 50},
            4,
            r"tp_size \(4\) does not fit the number of inner channels of an MLP \(50\)",
        ),
        (
            "*",
            {"num_attention_heads": 12, "num_query_groups": 3},
            4,
            r"key-value heads \(3\); choose a divisor or a",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    pattern: str, changes: dict[str, Any], tp_size: int, message: str
) -> None:
    groups = ParallelGroups(
        device=torch.device("cpu"), tp=Axis(size=tp_size), expert_tp=Axis(size=tp_size)
    )
    with pytest.raises(ValueError, match=message):
        HybridModel(
            cases.tiny_config(pattern, **changes),
            vocab_size=cases.VOCAB,
            max_positions=8,
            groups=groups,
        )
