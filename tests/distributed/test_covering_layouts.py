"""Steps of training in layouts that cover every pair of choices: all compute what one process
computes.

`LAYOUTS` is a pairwise covering list: whatever two choices can occur together, of two columns, do
so in one of its rows (`test_the_list_covers_every_pair_that_can_exist` counts them). Every row
trains a tied ``M*-E`` model through the plan, `TrainStep` and its optimizer, in float64 and in
float32, against one process on the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.testing import WorkerPools
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_job import build_model, job_of_model
from support import hybrid_cases as cases
from support.whole_state import Shards, assembled, everything

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
SLOTS, ALIGNMENT, STEPS, VOCAB = 64, 8, 2, 211
LENGTHS = [1, 2, 3, 40, 8, 9, 5, 64, 17, 30, 33, 12, 1, 25, 50, 7, 16, 21, 3, 11] * 2
"""Of documents: shorter than the convolution, cut on borders of ranks and inside, and over four of
them.
"""
BETA1 = 0.9


class Way(NamedTuple):
    """A layout and how it is used: a row of the list."""

    processes: int
    tp: int
    tokens: str
    """Between the layers, of tensor-parallel ranks: ``whole`` or ``shared`` (sequence parallelism)."""
    cp: int
    comm: str
    ep: int
    dispatcher: str
    matrices: str
    """Of an expert: ``whole``, or ``shared`` by the tensor-parallel ranks."""
    optimizer: str
    """``copied``, or ``shared`` (ZeRO-1)."""
    sums: str
    """Of gradients over ranks: ``after`` the passes or ``beside`` them; a shared optimizer's
    weights likewise.
    """
    accumulate: int
    """Micro-batches of a rank in one step."""

    @property
    def dp(self) -> int:
        return self.processes // (self.tp * self.cp)

    @property
    def packs(self) -> int:
        """Of a step, over all ranks."""
        return self.dp * self.accumulate

    @property
    def choices(self) -> dict[str, object]:
        """What the list covers the pairs of; `NONE` where there is nothing to choose."""
        return {**self._asdict(), "dp": self.dp}

    def __str__(self) -> str:
        return "-".join(
            f"{name}_{value}" for name, value in self._asdict().items() if value != NONE
        )


NONE = "none"
ALONE = Way(1, 1, NONE, 1, NONE, 1, "allgather", NONE, "copied", "after", 1)
LAYOUTS = [
    Way(
        int(p),
        int(tp),
        tokens,
        int(cp),
        comm,
        int(ep),
        dispatcher,
        matrices,
        optimizer,
        sums,
        int(accumulate),
    )
    for p, tp, tokens, cp, comm, ep, dispatcher, matrices, optimizer, sums, accumulate in (
        row.split()
        for row in """
        2 1 none   1 none       1 alltoall  none   shared beside 1
        2 1 none   2 all_gather 1 allgather none   copied beside 1
        2 1 none   2 a2a        1 allgather none   shared beside 1
        2 1 none   2 p2p        2 alltoall  none   copied beside 1
        2 2 shared 1 none       1 allgather shared copied after  3
        2 2 whole  1 none       1 allgather whole  shared beside 1
        4 1 none   1 none       1 allgather none   shared after  1
        4 1 none   1 none       2 alltoall  none   copied beside 3
        4 1 none   1 none       4 allgather none   copied beside 3
        4 1 none   2 all_gather 1 alltoall  none   shared after  1
        4 1 none   2 a2a        2 allgather none   shared after  1
        4 1 none   2 p2p        4 alltoall  none   copied after  3
        4 1 none   4 all_gather 1 allgather none   copied after  3
        4 1 none   4 p2p        2 alltoall  none   copied beside 1
        4 1 none   4 a2a        4 allgather none   shared beside 1
        4 2 whole  1 none       2 allgather shared shared beside 1
        4 2 shared 1 none       4 allgather whole  copied beside 1
        4 2 whole  2 p2p        1 allgather whole  shared after  1
        4 2 shared 2 a2a        1 alltoall  shared shared after  1
        4 2 shared 2 p2p        1 allgather shared shared beside 3
        4 2 shared 2 all_gather 2 alltoall  shared shared beside 1
        4 2 whole  2 a2a        2 allgather whole  copied after  3
        4 2 whole  2 all_gather 4 alltoall  whole  copied after  3
        4 4 shared 1 none       1 allgather shared copied after  1
        4 4 whole  1 none       2 alltoall  whole  copied beside 1
        4 4 whole  1 none       4 alltoall  whole  shared beside 3
        """.strip().splitlines()
    )
]


def config_of(way: Way) -> RunConfig:
    model = ModelConfig(
        hybrid_layer_pattern="M*-E",
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        mamba_head_dim=8,
        mamba_num_heads=8,
        mamba_state_dim=8,
        mamba_num_groups=2,
        mamba_chunk_size=8,
        add_bias_linear=False,
        normalization="RMSNorm",
        squared_relu=True,
        position_embedding_type="rope",
        num_experts=8,
        moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=16,
        moe_aux_loss_coeff=1e-2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_token_dispatcher_type=way.dispatcher,
        make_vocab_size_divisible_by=16,
        init_method_std=0.1,
        untie_embeddings_and_output_weights=False,
    )
    return RunConfig(
        model=model,
        data=DataConfig(train_data_path=("absent.jsonl",)),
        packing=PackingConfig(
            seq_length=SLOTS, global_batch_size=way.packs, pad_packed_seq_alignment=ALIGNMENT
        ),
        # An epsilon far above all gradients: steps have their direction and size, as SGD's with
        # momentum.
        optim=OptimizerConfig(
            lr=1.0, clip_grad=0.5, adam_beta1=BETA1, adam_eps=1.0, weight_decay=0.01
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=way.tp,
            sequence_parallel=way.tokens == "shared",
            context_parallel_size=way.cp,
            cp_comm_type="a2a" if way.comm == NONE else way.comm,
            expert_model_parallel_size=way.ep,
            expert_tensor_parallel_size=way.tp if way.matrices == "shared" else 1,
            use_distributed_optimizer=way.optimizer == "shared",
            overlap_grad_reduce=way.sums == "beside",
            overlap_param_gather=way.sums == "beside" and way.optimizer == "shared",
            ddp_bucket_size=4000,
        ),
        training=TrainingConfig(train_iters=STEPS, device="cpu"),
    )


def micro_batches(config: RunConfig, groups: ParallelGroups, step: int) -> list[MicroBatch]:
    """This rank's, by the plan."""
    documents = cases.make_documents(LENGTHS)
    plan = PackPlan(
        Pieces.cut(np.array(LENGTHS), SLOTS),
        np.array([np.count_nonzero(mask[1:]) for _, mask in documents]),
        packer=Packer.from_config(config.packing, config.document_alignment),
        packs_per_step=config.packs_per_step(),
        dp_size=groups.dp_size,
    ).step(step)
    return [
        MicroBatch.build(
            [documents[n] for n in pieces],
            SLOTS,
            scales=plan.scales,
            alignment=config.document_alignment,
        )
        for pieces in plan.packs[groups.dp_rank]
    ]


class Found(NamedTuple):
    losses: Tensor
    """``(STEPS, 3)``: of tokens, of the routers' balance, and the norm of gradients."""
    first: Shards
    """After one step: first moments are gradients."""
    last: Shards


def train(groups: ParallelGroups, way: Way) -> dict[torch.dtype, Found]:
    return {dtype: train_in(dtype, groups, way) for dtype in TOLERANCES}


def train_in(dtype: torch.dtype, groups: ParallelGroups, way: Way) -> Found:
    config = config_of(way)
    model = build_model(config, VOCAB, "cpu", groups, dtype=dtype).train()
    with torch.no_grad():
        for layer in model.moe_layers:
            layer.mixer.router.weight.mul_(4)  # clear choices: rounding must not flip one
        for (
            parameter
        ) in model.parameters():  # those that stay float32 too: all are compared as closely
            parameter.data = parameter.data.to(dtype)
    job = job_of_model(model, config, groups)
    assert (job.step.overlapped is not None) == (way.sums == "beside") and len(
        job.buffers.layout.buckets
    ) > 3
    losses, states = [], []
    for step in range(STEPS):
        norm = job.step(micro_batches(config, groups, step), config.optim.lr)[2:3]
        extras = job.buffers.extras
        losses.append(torch.cat([extras["loss"], extras["aux_loss"], norm.to(dtype)]))
        states.append(everything(job))
    return Found(torch.stack(losses), states[0], states[-1])


@cache
def alone(packs: int) -> dict[torch.dtype, Found]:
    return train(ParallelGroups.single(), ALONE._replace(accumulate=packs))


@pytest.mark.shows("Precision", "float32")
@pytest.mark.shows("eager", of=lambda way: (way.processes, config_of(way)))
@pytest.mark.parametrize("way", LAYOUTS, ids=str)
def test_steps_are_those_of_one_process(way: Way, pools: WorkerPools) -> None:
    layout = {"tp_size": way.tp, "cp_size": way.cp, "ep_size": way.ep}
    layout["expert_tp_size"] = way.tp if way.matrices == "shared" else 1
    ranks = pools.run(train, way.processes, way, layout=layout)
    for dtype, tolerance in TOLERANCES.items():
        expected = alone(way.packs)[dtype]
        assert all(torch.equal(rank[dtype].losses, ranks[0][dtype].losses) for rank in ranks)
        # The norm is kept in float32, whatever it is made of.
        torch.testing.assert_close(
            ranks[0][dtype].losses[:, :2], expected.losses[:, :2], rtol=tolerance, atol=0
        )
        torch.testing.assert_close(
            ranks[0][dtype].losses[:, 2], expected.losses[:, 2], rtol=1e-6, atol=0
        )
        for when in ("first", "last"):
            wanted = assembled([getattr(expected, when)])
            found = assembled([getattr(rank[dtype], when) for rank in ranks])
            assert found.keys() == wanted.keys()
            worst = max(wanted, key=lambda name: relative_error(found[name], wanted[name]))
            error = relative_error(found[worst], wanted[worst])
            assert error <= tolerance, (
                f"{dtype}, {worst} after the {when} step differs by {error:.1e}"
            )


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Of the tensor's maximum, which is not zero: zeros would show nothing."""
    scale = wanted.abs().max().item()
    assert scale > 0
    return (found - wanted).abs().max().item() / scale


def test_one_process_takes_steps_that_show_something() -> None:
    """Gradients are clipped, and a step moves every weight a thousand times further than float64 is
    compared.
    """
    found = alone(6)[torch.float64]
    first, last = assembled([found.first]), assembled([found.last])
    assert found.losses[:, 2].min() > 0.5 and found.losses[:, :2].min() > 0
    moved = {
        name: relative_error(first[name], last[name]) for name in last if name.startswith("model/")
    }
    assert min(moved.values()) > 1000 * TOLERANCES[torch.float64], moved


# -- the list --------------------------------------------------------------------------------------


def every_way() -> Iterator[Way]:
    """All rows that can exist."""
    for processes, tp, cp, ep in product((2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        for tokens, comm, dispatcher, matrices, optimizer, sums, accumulate in product(
            ["whole", "shared"] if tp > 1 else [NONE],
            ["a2a", "all_gather", "p2p"] if cp > 1 else [NONE],
            ["allgather", "alltoall"],
            ["whole", "shared"] if tp > 1 else [NONE],
            ["copied", "shared"],
            ["after", "beside"],
            [1, 3],
        ):
            way = Way(
                processes,
                tp,
                tokens,
                cp,
                comm,
                ep,
                dispatcher,
                matrices,
                optimizer,
                sums,
                accumulate,
            )
            try:
                if processes % (tp * cp) == 0:
                    config_of(way).layout(processes)
                    yield way
            except ConfigError:
                continue


def pairs_of(way: Way) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    return set(combinations(way.choices.items(), 2))


def test_the_list_covers_every_pair_that_can_exist() -> None:
    possible = set().union(*map(pairs_of, every_way()))
    missing = possible - set().union(*map(pairs_of, LAYOUTS))
    assert not missing, sorted(map(str, missing))
    assert len(LAYOUTS) == len(set(LAYOUTS)) >= 24 and set(LAYOUTS) <= set(every_way())
    assert len(possible) == 422  # a smaller number of pairs: choices have become impossible
