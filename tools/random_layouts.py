"""Train random models in random parallel layouts, and compare with one process, in float64.

Each case draws a model, its packs, a layout of 2 to 4 processes, recomputation, offload and graphs. In half
of the cases another layout continues from the checkpoint of the first step. Two steps of the optimizer
must have the losses, gradient norms, weights and moments of one process without any of these.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from typing import NamedTuple

import torch
from torch import Tensor

from common.layout_cases import STEPS, Found, LayoutCase, draw_case, draw_other_layout, train
from megatron_packed.config.errors import ConfigError
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.rng import seed_all
from support.process_pools import WorkerPools
from support.whole_state import assembled

TOLERANCE = 1e-9
RETRIES = 30
"""Number of draws of a second layout."""
NORM_TOLERANCE = 1e-6
"""Gradient norms are float32."""
SMALL = 1e-5
"""A tensor below this share of the largest of its kind is compared with that share. It may contain only
rounding, like the gradient of a key's bias."""


class Drawn(NamedTuple):
    """A case that the configuration accepts."""

    case: LayoutCase
    other: LayoutCase | None
    """The case in the layout that continues from a checkpoint; None without one."""
    alignment: int
    """Alignment of documents that suits both layouts."""
    refused: int
    """Number of cases that were drawn before and refused."""


def draw_accepted(draw: random.Random, seed: str) -> Drawn:
    refused = 0
    while True:
        case = draw_case(draw, seed)
        try:
            alignment = alignment_of(case)
            case.alone().config()
        except ConfigError:
            refused += 1
            continue
        for _ in range(RETRIES if draw.random() < 0.5 else 0):
            try:
                if other := draw_other_layout(draw, case):
                    both = math.lcm(alignment, alignment_of(other))
                    return Drawn(case, other, both, refused)
            except ConfigError:
                refused += 1
        return Drawn(case, None, alignment, refused)


def alignment_of(case: LayoutCase) -> int:
    """Return the alignment of documents.

    Raises:
        ConfigError: the options or the number of processes do not fit.
    """
    config = case.config()
    config.layout(case.processes)
    return config.document_alignment


def steps_in_layouts(pools: WorkerPools, drawn: Drawn) -> list[list[Found]]:
    """Return the results of all ranks, for each step."""
    case, other, alignment, _ = drawn

    def run(case: LayoutCase, *arguments: object) -> list[Found]:
        return pools.run(
            train, case.processes, case, alignment, *arguments, layout=case.layout, timeout=120
        )

    if other is None:
        ranks = run(case)
        return [
            [rank._replace(losses=rank.losses[step], states=[rank.states[step]]) for rank in ranks]
            for step in range(STEPS)
        ]
    with tempfile.TemporaryDirectory() as folder:
        first = run(case, [0], folder)
        second = run(other, [1], None, folder)
    return [[rank._replace(losses=rank.losses[0]) for rank in ranks] for ranks in (first, second)]


def differences(steps: list[list[Found]], alone: Found) -> list[str]:
    """Return the quantities that differ from those of one process."""
    found = []
    for number, ranks in enumerate(steps):
        when = f"in step {number + 1}"
        if not all(torch.equal(rank.losses, ranks[0].losses) for rank in ranks):
            found.append(f"ranks report different losses {when}")
        got, want = ranks[0].losses, alone.losses[number]
        errors = (got - want).abs() / want.abs().clamp(min=1e-12)
        for name, error, tolerance in (
            ("losses", errors[:-1].max().item(), TOLERANCE),
            ("gradient norm", errors[-1].item(), NORM_TOLERANCE),
        ):
            if not error <= tolerance:
                numbers = f"{got.tolist()} and {want.tolist()}"
                found.append(f"{name} {when} differ by {error:.1e}: {numbers}")
        try:
            together = assembled([rank.states[0] for rank in ranks])
        except AssertionError as error:
            found.append(f"{error} {when}")
            continue
        found += [
            f"{text} {when}" for text in other_tensors(together, assembled([alone.states[number]]))
        ]
    return found


def other_tensors(together: dict[str, Tensor], whole: dict[str, Tensor]) -> list[str]:
    """Return the names and differences of tensors that differ."""
    if together.keys() != whole.keys():
        return [f"only in one of both: {sorted(together.keys() ^ whole.keys())[:4]}"]
    largest: dict[str, float] = {}
    for name, want in whole.items():
        kind = name.rpartition("/")[0]
        largest[kind] = max(largest.get(kind, 0.0), float(want.abs().max()))
    found = []
    for name, want in whole.items():
        scale = max(float(want.abs().max()), SMALL * largest[name.rpartition("/")[0]], 1e-300)
        error = float((together[name] - want).abs().max()) / scale
        if not error <= TOLERANCE:
            found.append(f"{name} differs by {error:.1e}")
    return found


def main(cases: int, seed: int, first: int = 0) -> int:
    """Return the exit code."""
    equal = refused = 0
    with WorkerPools() as pools:
        for number in range(first, first + cases):
            drawn = draw_accepted(random.Random(f"{seed} {number}"), f"{seed} {number}")
            case, refused = drawn.case, refused + drawn.refused
            seed_all(0)  # processes of a pool have the same seed
            try:
                alone = train(ParallelGroups.single(), case.alone(), drawn.alignment)
                found = differences(steps_in_layouts(pools, drawn), alone)
            except Exception as error:
                found = [f"{type(error).__name__}: {str(error)[:3000]}"]
            equal += not found
            layouts = ", then ".join(str(each) for each in (case, drawn.other) if each)
            words = f"{case.model['hybrid_layer_pattern']} by {layouts}"
            status = "differs" if found else "equal"
            print(f"case {number} of seed {seed} {status}: {words}", flush=True)
            for text in found[:6]:
                print(f"  {text}", flush=True)
            if found:
                print(f"  {case!r}, then {drawn.other!r}", flush=True)
    print(f"{refused} drawn cases were refused by the configuration")
    print(f"{equal} of {cases} cases equal one process")
    return int(equal < cases)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    sys.exit(main(**vars(parser.parse_args())))
