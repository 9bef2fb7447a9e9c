"""Training steps in parallel layouts that cover every pair of options, compared with one process.

`LAYOUTS` is a pairwise covering list: each possible pair of options occurs in one of its rows
(`test_the_list_covers_every_pair_that_can_exist` counts the pairs). Every row trains a tied
``M*-EG/*E/*E`` model with the plan, `TrainStep` and its optimizer, in float64. Some rows take a step
in float32 too, and every option occurs in one of these rows. One process on the same plan is the
reference. `test_training_layouts.py` has ranks with more than two micro-batches in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_packed.config.errors import ConfigError
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.run_model import build_model
from megatron_packed.training.build_job import job_of_model
from support.covering_layouts import (
    NONE,
    STEPS,
    VOCAB,
    Way,
    config_of,
    micro_batches,
)
from support.process_pools import WorkerPools
from support.whole_state import Shards, assembled, everything

LOSSES = ("loss", "aux_loss", "mtp_losses")
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}


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
        2 2 shared 1 none       1 allgather shared copied after  2
        2 2 whole  1 none       1 allgather whole  shared beside 1
        4 1 none   1 none       1 allgather none   shared after  1
        4 1 none   1 none       2 alltoall  none   copied beside 2
        4 1 none   1 none       4 allgather none   copied beside 2
        4 1 none   2 all_gather 1 alltoall  none   shared after  1
        4 1 none   2 a2a        2 allgather none   shared after  1
        4 1 none   2 p2p        4 alltoall  none   copied after  2
        4 1 none   4 all_gather 1 allgather none   copied after  2
        4 1 none   4 p2p        2 alltoall  none   copied beside 1
        4 1 none   4 a2a        4 allgather none   shared beside 1
        4 2 whole  1 none       2 allgather shared shared beside 1
        4 2 shared 1 none       4 allgather whole  copied beside 1
        4 2 whole  2 p2p        1 allgather whole  shared after  1
        4 2 shared 2 a2a        1 alltoall  shared shared after  1
        4 2 shared 2 p2p        1 allgather shared shared beside 2
        4 2 shared 2 all_gather 2 alltoall  shared shared beside 1
        4 2 whole  2 a2a        2 allgather whole  copied after  2
        4 2 whole  2 all_gather 4 alltoall  whole  copied after  2
        4 4 shared 1 none       1 allgather shared copied after  1
        4 4 whole  1 none       2 alltoall  whole  copied beside 1
        4 4 whole  1 none       4 alltoall  whole  shared beside 2
        """.strip().splitlines()
    )
]


def rows_of_every_choice() -> list[Way]:
    """Return rows in which every value of every option occurs, found greedily."""
    missing = set().union(*(way.choices.items() for way in LAYOUTS))
    found: list[Way] = []
    while missing:
        found.append(max(LAYOUTS, key=lambda way: len(missing & way.choices.items())))
        missing -= found[-1].choices.items()
    return found


FLOAT32 = rows_of_every_choice()


def dtypes_of(way: Way) -> list[torch.dtype]:
    return list(TOLERANCES) if way.processes == 1 or way in FLOAT32 else [torch.float64]


class Found(NamedTuple):
    losses: Tensor
    """``(steps, 5)``: token loss, load-balance loss of the routers, loss of each depth of multi-token
    prediction, gradient norm.
    """
    first: Shards
    """State after the first step, where the first moments still show the gradients."""
    last: Shards


def train(groups: ParallelGroups, way: Way) -> dict[torch.dtype, Found]:
    return {dtype: train_in(dtype, groups, way) for dtype in dtypes_of(way)}


def train_in(dtype: torch.dtype, groups: ParallelGroups, way: Way) -> Found:
    config = config_of(way)
    model = build_model(config, VOCAB, "cpu", groups, dtype=dtype).train()
    with torch.no_grad():
        for layer in model.moe_layers:
            # Enlarge differences between router scores, so that rounding changes no expert choice.
            layer.mixer.router.weight.mul_(4)
        for (
            parameter
            # Convert also parameters that usually stay in float32, so that all parameters are
            # compared with the same tolerance.
        ) in model.parameters():
            parameter.data = parameter.data.to(dtype)
    job = job_of_model(model, config, groups)
    assert (job.step.overlapped is not None) == (way.sums == "beside") and len(
        job.buffers.layout.buckets
    ) > 3
    losses, states = [], []
    for step in range(STEPS if dtype == torch.float64 else 1):
        metrics = job.step(micro_batches(config, groups, step), config.optim.lr)
        norm = metrics[job.step.layout.slots["grad_norm"]]
        extras = job.buffers.extras
        losses.append(torch.cat([*map(extras.get, LOSSES), norm.to(dtype)]))
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
    for dtype in dtypes_of(way):
        tolerance = TOLERANCES[dtype]
        expected = alone(way.packs)[dtype]
        assert all(torch.equal(rank[dtype].losses, ranks[0][dtype].losses) for rank in ranks)
        torch.testing.assert_close(
            ranks[0][dtype].losses[:, :-1], expected.losses[:, :-1], rtol=tolerance, atol=0
        )
        # The gradient norm is stored in float32 for all dtypes, so its tolerance is that of float32.
        torch.testing.assert_close(
            ranks[0][dtype].losses[:, -1], expected.losses[:, -1], rtol=1e-6, atol=0
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
    """Return the error relative to the maximum of ``wanted``, which must not be zero."""
    scale = wanted.abs().max().item()
    assert scale > 0
    return (found - wanted).abs().max().item() / scale


def test_one_process_takes_steps_that_show_something() -> None:
    """Check that gradients are clipped and that weights change enough for a useful comparison.

    A step moves every weight a thousand times further than the float64 tolerance.
    """
    found = alone(4)[torch.float64]
    first, last = assembled([found.first]), assembled([found.last])
    assert found.losses[:, -1].min() > 0.5 and found.losses[:, :-1].min() > 0
    moved = {
        name: relative_error(first[name], last[name]) for name in last if name.startswith("model/")
    }
    assert min(moved.values()) > 1000 * TOLERANCES[torch.float64], moved


# -- the list --------------------------------------------------------------------------------------


def every_way() -> Iterator[Way]:
    """Yield all combinations of options that are possible."""
    for processes, tp, cp, ep in product((2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        for tokens, comm, dispatcher, matrices, optimizer, sums, accumulate in product(
            ["whole", "shared"] if tp > 1 else [NONE],
            ["a2a", "all_gather", "p2p"] if cp > 1 else [NONE],
            ["allgather", "alltoall"],
            ["whole", "shared"] if tp > 1 else [NONE],
            ["copied", "shared"],
            ["after", "beside"],
            [1, 2],
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
            if processes % (tp * cp) == 0 and is_possible(way._replace(accumulate=1)):
                yield way


@cache
def is_possible(way: Way) -> bool:
    try:
        config_of(way).layout(way.processes)
    except ConfigError:
        return False
    return True


def pairs_of(way: Way) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    return set(combinations(way.choices.items(), 2))


def test_the_list_covers_every_pair_that_can_exist() -> None:
    possible = set().union(*map(pairs_of, every_way()))
    missing = possible - set().union(*map(pairs_of, LAYOUTS))
    assert not missing, sorted(map(str, missing))
    assert len(LAYOUTS) == len(set(LAYOUTS)) >= 24 and set(LAYOUTS) <= set(every_way())
    assert all(
        way.choices.items() <= {c for row in FLOAT32 for c in row.choices.items()}
        for way in LAYOUTS
    )
    # If the number of pairs is smaller, some combinations have become impossible.
    assert len(possible) == 422
