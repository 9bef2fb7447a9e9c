"""Training in parallel layouts: steps, checkpoints and decisions equal those of one process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.rng import seed_all
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.layers import attention
from megatron_packed.layers.moe.capacity import expert_capacity
from megatron_packed.models.isolation import check_isolation
from megatron_packed.models.lm_head_and_loss import HybridOutput
from megatron_packed.ops.backend_dispatch import Choices
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.reporting.loss_warnings import bad_places
from megatron_packed.training.build_job import Job, build_job
from megatron_packed.training.replica_checks import ReplicaCheck, ReplicaMismatchError
from support.layouts import MODEL, VOCAB, Way, config_of, mine, packs_of, run_state, step_values
from support.process_pools import WorkerPools
from support.whole_state import Shards, assembled, assert_same_bits, everything, same_bits

NUMBERS = (
    "loss",
    "aux_loss",
    "grad_norm",
    "nonfinite",
    "stop_requested",
    "params_norm",
    "grad_zeros",
)


def train(
    groups: ParallelGroups, way: Way, count: int, model: dict[str, Any]
) -> tuple[Tensor, Shards, Shards]:
    """Run two steps of ``count`` packs; return metrics and the first and last state.

    After the first step the moments are gradients.
    """
    job = build_job(config_of(way, **model), groups, VOCAB)
    metrics, states = [], []
    for step in range(2):
        values = step_values(job.step(mine(groups, way, step, count), 1e-2).tolist())
        metrics.append(torch.tensor([float(getattr(values, name)) for name in NUMBERS]))
        states.append(everything(job))
    return torch.stack(metrics), states[0], states[-1]


@cache
def alone(count: int, dropout: float = 0.0) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    seed_all(0)  # The processes of a pool get the same seed.
    metrics, first, last = train(ParallelGroups.single(), Way(), count, {"hidden_dropout": dropout})
    return metrics, assembled([first]), assembled([last])


@pytest.mark.shows("eager", of=lambda way: (way.world_size, config_of(way)))
@pytest.mark.parametrize(
    "way",
    [
        Way(4, 2, True),
        Way(4, 1, False, True, 2),
        Way(4, 4, False, True, 2, 2),
        Way(2, ep_size=2),
        Way(4, cp_size=2, comm_type="p2p"),
    ],
    ids=str,
)
def test_steps_with_an_empty_pack_are_those_of_one_process(way: Way, pools: WorkerPools) -> None:
    """Check losses, norms, first moments and weights of steps with an empty pack.

    `test_covering_layouts.py` checks steps without empty packs.
    """
    packs = 3 * way.dp_size
    found = pools.run(train, way.world_size, way, packs, {}, layout=way.layout)
    compare(found, *alone(packs))


def compare(
    found: list[Any], expected: Tensor, first: dict[str, Tensor], last: dict[str, Tensor]
) -> None:
    for metrics, _, _ in found:
        assert torch.equal(metrics, found[0][0]), "ranks report different numbers"
        torch.testing.assert_close(metrics[:, :6], expected[:, :6], rtol=1e-5, atol=1e-7)
    assert (
        expected[:, 0].min() > 1
        and expected[:, 2].min() > 0.5
        and expected[:, 3:5].abs().max() == 0
    )
    assert expected[:, 5].min() > 1 and expected[:, 6].min() > 100, (
        "norms of parameters and zeros show nothing"
    )
    # The terms of a gradient may cancel exactly in one order of a sum and not in another.
    assert (found[0][0][:, 6:] - expected[:, 6:]).abs().max() <= 2
    for which, wanted, tolerance in ((1, first, 1e-5), (2, last, 1e-4)):
        for name, tensor in assembled([rank[which] for rank in found]).items():
            want = wanted[name]
            if "exp_avg_sq" in name:  # A square has twice the relative error of its root.
                tensor, want = tensor.sqrt(), want.sqrt()
            scale = want.abs().max().item()
            assert scale > 0 or "expert_bias" in name, f"{name} is zero and shows nothing"
            torch.testing.assert_close(
                tensor, want, rtol=0, atol=tolerance * scale, msg=f"{name} {which}"
            )


def test_without_sequence_parallelism_ranks_drop_what_one_process_drops(pools: WorkerPools) -> None:
    way = Way(2, 2)
    compare(pools.run(train, 2, way, 1, {"hidden_dropout": 0.2}, layout=way.layout), *alone(1, 0.2))
    assert not torch.allclose(alone(1, 0.2)[0], alone(1)[0])


def dropped(groups: ParallelGroups, way: Way) -> tuple[list[float], Tensor]:
    """Return the dropped assignments per layer: as a step reports them, and as counted here.

    The count compares the tokens per expert with the capacity.
    """
    job = build_job(config_of(way, moe_expert_capacity_factor=0.5), groups, VOCAB)
    forward, beyond = job.model.forward, torch.zeros(2)

    def counted(micro_batch: MicroBatch, **options: Any) -> HybridOutput:
        output = forward(micro_batch, **options)
        slots = micro_batch.tokens.numel() // way.cp_size
        room = expert_capacity(slots, MODEL.moe_router_topk, MODEL.num_experts or 0, 0.5)
        beyond.add_((output.tokens_per_expert - room).clamp(min=0).sum(1))
        return output

    job.model.forward = counted  # type: ignore[method-assign]
    job.step(mine(groups, way, 0, way.dp_size), 1e-2)
    counts = job.step.layout.counts_of(job.step.numbers.tolist())
    return list(counts["dropped_assignments"]), all_reduce_sum(beyond, groups.dp_cp.group)


@pytest.mark.parametrize(
    "way", [Way(4, ep_size=2, cp_size=2), Way(4, 2, True, True, 4, 1)], ids=str
)
def test_assignments_dropped_by_capacity_are_counted_once(way: Way, pools: WorkerPools) -> None:
    """Check that dropped assignments are counted once per token.

    Tensor-parallel ranks drop the same assignments. Context-parallel ranks each have a capacity for
    their own slice.
    """
    for found, expected in pools.run(dropped, way.world_size, way, layout=way.layout):
        assert found == expected.tolist() and min(found) > 10


# -- decisions -------------------------------------------------------------------------------------


EVENTS = ("gradient", "loss", "spike", "stop")
FEW_LAYERS = {"hybrid_layer_pattern": "*E/*E"}
"""Model of the tests of decisions, which do not depend on the kinds of layers."""


def spoilt(groups: ParallelGroups, way: Way) -> dict[str, dict[str, Any]]:
    """Run a step with each event on the last rank only: bad gradient, bad loss, spike and stop."""
    config = config_of(way, **FEW_LAYERS)
    training = dataclasses.replace(config.training, loss_spike_policy="skip", loss_spike_window=2)
    job = build_job(dataclasses.replace(config, training=training), groups, VOCAB)
    job.step(mine(groups, way, 0, way.dp_size), 1e-2)
    reduce, last = job.step._reduce_over_tp, groups.rank == groups.world_size - 1
    found = {}
    for where in EVENTS:
        before = everything(job)
        job.step._reduce_over_tp = partial(spoil, job, last, where, reduce)  # type: ignore[method-assign]
        packs = mine(groups, way, 1, way.dp_size)
        values = job.step(packs, 1e-2, stop_requested=last and where == "stop")
        after = everything(job)
        unchanged = all(same_bits(one[3], other[3]) for one, other in zip(before, after))
        found[where] = {"values": step_values(values.tolist()), "unchanged": unchanged}
    return found


def spoil(job: Job, last: bool, where: str, reduce: Callable[[], None]) -> None:
    """Make the gradients or the loss of the last rank bad, then reduce.

    Only one tensor-parallel rank has the loss of a spike, so it differs from the other rank's loss.
    """
    if last and where == "gradient":
        job.buffers.grads[3] = float("inf")
    if last and where == "loss":
        job.buffers.extras["loss"].fill_(float("nan"))
    if last and where == "spike":
        job.buffers.extras["loss"].add_(100)
    reduce()


@pytest.mark.parametrize(
    "way",
    [Way(2, 2), Way(4, 2, True), Way(4, 2, False, True), Way(4, ep_size=4), Way(4, cp_size=2)],
    ids=str,
)
def test_a_problem_of_one_rank_is_decided_by_all_ranks(way: Way, pools: WorkerPools) -> None:
    for rank in pools.run(spoilt, way.world_size, way, layout=way.layout):
        for where, found in rank.items():
            values = found["values"]
            assert values.nonfinite == (where in ("gradient", "loss")), where
            assert values.stop_requested == (where == "stop"), where
            assert [one.name for one in values.spikes] == ["loss"] * (where == "spike"), where
            assert found["unchanged"] == (where != "stop"), where


def poisoned(groups: ParallelGroups, way: Way) -> dict[int, int]:
    """Run a step with a non-finite gradient in the second micro-batch of the last replica.

    Only rows of the last rank contain the bad gradient.
    """
    job = build_job(config_of(way, **FEW_LAYERS), groups, VOCAB)
    if groups.rank == groups.world_size - 1:
        keep = job.step._keep_sum
        calls: list[int] = []

        def poison(grad_TD: Tensor) -> None:
            calls.append(1)
            # The table of words is used twice in a micro-batch, once for each depth.
            keep(grad_TD * float("nan") if len(calls) == 4 else grad_TD)

        job.step._keep_sum = poison  # type: ignore[method-assign]
    values = job.step(mine(groups, way, 0, 3 * way.dp_size), 1e-2)
    return step_values(values.tolist()).bad_micro_batches


@pytest.mark.parametrize("way", [Way(4, 2, True), Way(4, cp_size=2)], ids=str)
def test_all_ranks_learn_which_micro_batch_was_bad(way: Way, pools: WorkerPools) -> None:
    assert pools.run(poisoned, 4, way, layout=way.layout) == [{3: 1}] * 4
    assert bad_places({3: 1}, 2) == ["micro-batch 1 of ranks 2 to 3"]
    assert bad_places({2: 2, 3: 1, 0: 5}, 2) == [
        "micro-batch 1 of ranks 2 to 3",
        "micro-batch 5 of ranks 0 to 1",
    ]
    assert bad_places({2: 2, 0: 1}, 1) == ["micro-batch 2 of rank 2", "micro-batch 1 of rank 0"]


def replicas_checked(groups: ParallelGroups, way: Way) -> list[str]:
    """Return the reports of the check for sound weights and for flipped bits on the last rank.

    One bit is flipped in a weight outside the experts, and one in a weight of experts.
    """
    job = build_job(config_of(way), groups, VOCAB)
    job.step(mine(groups, way, 0, way.dp_size), 1e-2)
    said = [checked(job, groups)]
    parameters = job.model.sharded_parameters().values()
    for expert in (False, True):
        weight = next(one.parameter for one in parameters if one.is_expert is expert)
        if groups.rank == groups.world_size - 1:
            weight.data.view(torch.int32).view(-1)[-1] ^= 1
        said.append(checked(job, groups))
    return said


def checked(job: Job, groups: ParallelGroups) -> str:
    try:
        ReplicaCheck(job.model, job.optimizer, groups).weights()
    except ReplicaMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", [Way(4, 2, True), Way(4, ep_size=2), Way(4, cp_size=2)], ids=str)
def test_weights_that_differ_between_replicas_are_found(way: Way, pools: WorkerPools) -> None:
    [said] = {
        tuple(found)
        for found in pools.run(replicas_checked, way.world_size, way, layout=way.layout)
    }
    assert said[0] == ""
    assert "embedding.weight" in said[1] and "experts" not in said[1] and "experts.fc1" in said[2]
    for sentence, layout in (
        (said[1], f"tensor-parallel rank {way.tp_size - 1}"),
        (said[2], "expert-parallel rank"),
    ):
        assert (
            re.search(r"ranks? [0-9, ]*3(, without| than)", sentence)
            and sentence.count("embedding.weight") == 1
        )
        assert (layout in sentence) == (way.tp_size > 1 if "tensor" in layout else way.ep_size > 1)


# -- checkpoints -----------------------------------------------------------------------------------

WAYS = [
    Way(),
    Way(2, 2, True),
    Way(4, 4),
    Way(4, 2, True, True),
    Way(2, ep_size=2),
    Way(4, 2, True, True, 4, 1),
    Way(4, 4, True, True, 1, 2),
]
WAYS += [Way(4, 2, True, True, cp_size=2)]
ZIGZAGS = [
    Way(2, cp_size=2, comm_type="all_gather", mamba="heads", linear="headwise"),
    Way(2, ep_size=2, cp_size=2, comm_type="p2p", dispatcher="alltoall"),
]
"""Layouts that load each other's checkpoints and the checkpoint of one process."""


def loading(way: Way) -> list[Way]:
    """Return the layouts that load the checkpoint of a layout: itself, one process, and another.

    Every layout loads the checkpoint of one process.
    """
    if way in ZIGZAGS:
        return [Way(), *ZIGZAGS]
    at = WAYS.index(way)
    return WAYS if way == Way() else list(dict.fromkeys([Way(), way, WAYS[at - 3]]))


def save(groups: ParallelGroups, way: Way, folder: str) -> dict[str, Any]:
    """Run a step, save, and run one more step."""
    job = build_job(config_of(way, bf16=True), groups, VOCAB)
    job.step(mine(groups, way, 1, 2), 1e-2)
    saved = run_state(job, groups, way).save(CheckpointConfig(save=folder))
    sizes = [file.stat().st_size for file in sorted(saved.path.glob("rank_*"))]
    state = everything(job)
    loss = float(job.step(mine(groups, way, 2, 2), 1e-2)[0])
    return {"state": state, "loss": loss, "later": everything(job), "sizes": sizes}


def load(groups: ParallelGroups, way: Way, folder: str, goes_on: bool) -> dict[str, Any]:
    """Load a checkpoint into a job with other weights; return its state.

    With ``goes_on`` the job runs a step, and its loss and new state are returned too.
    """
    job = build_job(config_of(way, bf16=True, seed=2), groups, VOCAB)
    run_state(job, groups, way).load(CheckpointConfig(load=folder))
    state = everything(job)
    if not goes_on:
        return {"state": state}
    loss = float(job.step(mine(groups, way, 2, 2), 1e-2)[0])
    return {"state": state, "loss": loss, "later": everything(job)}


@pytest.mark.shows("Precision", "bf16")
@pytest.mark.shows("checkpoint", of=lambda way: (way.world_size, config_of(way)))
@pytest.mark.parametrize("way", WAYS + ZIGZAGS, ids=str)
def test_a_checkpoint_of_one_layout_loads_into_others(
    way: Way, tmp_path: Path, pools: WorkerPools
) -> None:
    written = pools.run(save, way.world_size, way, str(tmp_path), layout=way.layout)
    expected = assembled([rank["state"] for rank in written])
    # 224 is the padded vocabulary size for one process.
    assert expected["model/embedding.weight"].shape == (224, 32)
    assert any(
        tensor.any() for name, tensor in expected.items() if name.startswith("optimizer/exp_avg/")
    )
    sizes = written[0]["sizes"]
    assert len(sizes) == way.world_size and max(sizes) < 3 * min(sizes)  # All ranks write.
    for into in loading(way):
        goes_on = into in (way, Way())
        found = pools.run(load, into.world_size, into, str(tmp_path), goes_on, layout=into.layout)
        assert_same_bits(assembled([rank["state"] for rank in found]), expected)
        if not goes_on:
            continue
        # In bf16 a different order of summation sends some tokens to other experts.
        assert found[0]["loss"] == pytest.approx(written[0]["loss"], abs=5e-3)
        if into == way:
            later = (assembled([rank["later"] for rank in ranks]) for ranks in (written, found))
            assert found[0]["loss"] == written[0]["loss"]
            assert_same_bits(*later)


# -- the start of a run ----------------------------------------------------------------------------


def self_test(groups: ParallelGroups, way: Way, leaking: int | None) -> list[bool]:
    """Return whether each isolation check passes.

    On rank ``leaking`` attention ignores the boundaries of documents.
    """
    sound: Callable[..., Tensor] = attention.varlen_attention

    def leak(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, **more: Any
    ) -> Tensor:
        whole = torch.tensor([0, *[len(q)] * (len(cu_seqlens) - 1)], dtype=torch.int32)
        return sound(
            q,
            k,
            v,
            whole,
            len(q),
            **{**more, "seq_idx_1T": torch.zeros(1, len(q), dtype=torch.int32)},
        )

    with mock.patch.object(
        attention, "varlen_attention", leak if groups.rank == leaking else sound
    ):
        results = check_isolation(
            MODEL,
            "cpu",
            torch.float32,
            groups=groups,
            cp_comm_type=way.comm_type,
            mamba_cp_comm_type=way.mamba,
            linear_cp_mode=way.linear,
            sequence_parallel=way.sequence_parallel,
        )
    return [result.passed for result in results]


@pytest.mark.shows("isolation", of=lambda way: (way.world_size, config_of(way)))
@pytest.mark.parametrize(
    "way",
    [
        Way(4, 4),
        Way(4, 2, True, cp_size=2),
        Way(2, cp_size=2, comm_type="p2p", mamba="heads", linear="headwise"),
        Way(4, cp_size=4, comm_type="p2p", linear="headwise"),
        Way(4, cp_size=4, comm_type="p2p"),
    ],
    ids=str,
)
def test_the_isolation_self_test(way: Way, pools: WorkerPools) -> None:
    ranks = pools.run(self_test, way.world_size, way, None, layout=way.layout)
    assert all(len(passed) == 17 and all(passed) for passed in ranks)
    # Only the kernel of a2a can be replaced by a leaking kernel in this test. Four tensor-parallel
    # ranks agree on the result as two do.
    if way.comm_type == "a2a" and way.tp_size < 4:
        ranks = pools.run(self_test, way.world_size, way, way.world_size - 1, layout=way.layout)
        assert not any(all(passed) for passed in ranks)


def asked(groups: ParallelGroups, way: Way) -> bool:
    """Return whether ``--explain`` queries the ops with the same inputs as the model."""
    config = config_of(way)
    model = build_job(config, groups, 32_768).model
    seen: dict[str, set[Any]] = {}

    def noted(self: Choices, key: tuple[str, Any]) -> Any:
        seen.setdefault(self._choose.__self__.name, set()).add(key[1])
        return dict.__getitem__(self, key)

    with mock.patch.object(Choices, "__getitem__", noted):
        model(packs_of(way, 0, 1)[0]).loss.backward()
    told = {
        op.name: inputs
        for op, _, inputs in op_requests(config, torch.device("cpu"))
        if op.name != "adamw"
    }
    return set(told) == set(seen) and all(inputs in seen[name] for name, inputs in told.items())


@pytest.mark.parametrize(
    "way",
    [
        Way(2, 2),
        Way(4, 4, True),
        Way(4, 2, True, ep_size=2),
        Way(4, 2, True, cp_size=2),
        Way(4, cp_size=4, comm_type="p2p", mamba="heads", linear="headwise"),
        Way(4, 2, True, cp_size=2, mamba="heads"),
        Way(4, 2, True, cp_size=2, linear="headwise"),
    ],
    ids=str,
)
def test_explain_asks_for_the_sizes_of_a_rank(way: Way, pools: WorkerPools) -> None:
    assert all(pools.run(asked, way.world_size, way, layout=way.layout))
