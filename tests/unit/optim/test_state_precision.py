"""Remainders of masters, stochastic rounding of moments, and the element numbers of its draws."""

import math

import pytest
import torch

from megatron_packed.distributed.tensor_parallel_shards import (
    ExpertRange,
    Shard,
    SplitSegment,
)
from megatron_packed.distributed.zero1_layout import round_up
from megatron_packed.optim.adamw import Control, Reference, Slices
from megatron_packed.optim.master_remainders import join_masters, split_masters
from megatron_packed.optim.stochastic_rounding import (
    key_of,
    round_stochastically,
    words_of,
)
from support.optimizer_states import numbers_of, replicated, sharded, slots_of


def finite_bits(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    floats = bits.view(torch.float32)
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 1.5 * 2**-133])
    return torch.cat([edges, floats[floats.isfinite() & (floats.abs() < 3e38)]])


def test_weight_and_remainder_hold_all_bits_of_a_master():
    """The weight is the nearest bf16, and of two that are equally near the one away from zero."""
    masters = finite_bits(200_000)
    weights, remainders = split_masters(masters)
    assert torch.equal(
        join_masters(weights, remainders).view(torch.int32), masters.view(torch.int32)
    )
    nearest = masters.bfloat16()
    error, least = (weights.double() - masters).abs(), (nearest.double() - masters).abs()
    assert torch.equal(error, least)
    ties = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8])
    assert split_masters(ties)[0].tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2**-6]


def test_words_are_those_of_splitmix64():
    """An implementation by Python's integers gives the same words."""
    mask = (1 << 64) - 1

    def mix(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return word ^ (word >> 31)

    keys = [key_of(1234, "layers.0.mixer.in_proj.weight"), -1, 2**62]
    elements = [0, 1, 2**40 + 3]
    found = words_of(torch.tensor(keys), torch.tensor(7.0), torch.tensor(elements))
    for word, key, element in zip(found.tolist(), keys, elements):
        step_word = mix(((key & mask) + 7 * 0xD1342543DE82EF95) & mask)
        assert word & mask == mix((step_word + element * 0x9E3779B97F4A7C15) & mask)


def test_words_differ_by_seed_name_step_and_element():
    elements = torch.arange(1000)
    draws = [
        words_of(torch.full((1000,), key_of(seed, name)), torch.tensor(float(step)), elements)
        for seed in (1, 2)
        for name in ("a", "b")
        for step in (1, 2)
    ]
    assert len(torch.cat(draws).unique()) == 8000


@pytest.mark.parametrize("value", [1 + 2**-10, -1 - 3 * 2**-10, 3e-20, 1e-39])
def test_stochastic_rounding_is_unbiased(value):
    """The mean of a million draws, both moments' bits, is within four standard deviations."""
    count = 1_000_000
    words = words_of(torch.zeros(count, dtype=torch.int64), torch.tensor(3.0), torch.arange(count))
    values = torch.full((count,), value)
    for bits in (words & 0xFFFF, (words >> 16) & 0xFFFF):
        rounded = round_stochastically(values, bits).double()
        low, high = rounded.min().item(), rounded.max().item()
        assert min(low, high) < values[0].item() < max(low, high)
        share = (values[0].item() - low) / (high - low)
        deviation = (high - low) * math.sqrt(share * (1 - share) / count)
        assert abs(rounded.mean().item() - values[0].item()) < 4 * deviation
    assert round_stochastically(
        torch.tensor([1.0, -0.0]), torch.tensor([65535, 65535])
    ).tolist() == [
        1.0,
        0.0,
    ]


LAYOUTS = {
    "segments of an input projection": (
        [
            SplitSegment(noun="z", count=4, width=6),
            SplitSegment(noun="B", count=2, width=5, shareable=True),
        ],
        (34, 7),
        0,
    ),
    "columns": ([SplitSegment(noun="channels", count=8, width=3)], (11, 24), 1),
    "gated columns": (
        [SplitSegment(noun="gate", count=8, width=2), SplitSegment(noun="up", count=8, width=2)],
        (5, 32),
        1,
    ),
    "segments of an inner dimension": (
        [SplitSegment(noun="gate", count=8, width=2), SplitSegment(noun="up", count=8, width=2)],
        (3, 32, 9),
        1,
    ),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_element_has_one_number_in_every_layout(layout, size):
    """Each rank's numbers, cut into shares at any place, are its part of the unsplit numbers."""
    segments, shape, dim = LAYOUTS[layout]
    whole = torch.arange(math.prod(shape)).view(shape)
    for rank in range(size):
        shard = Shard.from_segments(segments, rank, size, dim=dim)
        check_numbers(shard, shard.take(whole))


def test_experts_are_numbered_across_ranks():
    whole = torch.arange(8 * 6 * 4).view(8, 6, 4)
    for first in (0, 4):
        experts = ExpertRange(start=first, length=4, total=8)
        segments = [SplitSegment(noun="channels", count=6)]
        shard = Shard.from_segments(segments, 1, 2, dim=1)
        shard = Shard(dim=1, length=6, pieces=shard.pieces, first=experts)
        check_numbers(shard, shard.take(whole))


def test_a_shard_of_padding_has_runs_for_all_its_elements():
    shard = Shard.from_segments([SplitSegment(noun="rows", count=128)], 1, 2)
    shard = Shard(dim=0, length=128, pieces=shard.pieces, padding=64)
    keys, _ = numbers_of([sharded("weight", shard, torch.zeros(64, 8))], seed=5).of_slice(512)
    assert (keys == key_of(5, "weight")).all()


def check_numbers(shard: Shard, local: torch.Tensor) -> None:
    parameters = [replicated("before", 70), sharded("weight", shard, local)]
    slot = slots_of(parameters)[1]
    end = round_up(slot.end, 64)
    for cut in (slot.start, min(slot.start + 64, end)):
        for first, last in ((0, cut), (cut, end)):
            keys, found = numbers_of(parameters, first, last, seed=5).of_slice(last - first)
            low, high = max(first, slot.start), min(last, slot.end)
            if low < high:
                of_rank = local.flatten()[low - slot.start : high - slot.start]
                assert torch.equal(found[low - first : high - first], of_rank)
                assert (keys[low - first : high - first] == key_of(5, "weight")).all()


def test_remainders_are_the_masters_of_a_run_with_float32_masters():
    """1,000 steps with the same gradients, some of them skipped, change the same bits."""
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(257, generator=generator)
    weights, remainders = split_masters(masters)

    def state() -> dict[str, list[torch.Tensor]]:
        return {"exp_avgs": [torch.zeros(257)], "exp_avg_sqs": [torch.zeros(257)]}

    grads = torch.zeros(257)
    wide = Slices(weight_decay=0.1, params=[masters], grads=[grads], **state())
    narrow = Slices(
        weight_decay=0.1, params=[weights], remainders=[remainders], grads=[grads], **state()
    )
    step = torch.tensor(0.0)
    for number in range(1000):
        grads.copy_(torch.randn(257, generator=generator))
        skip = torch.tensor(float(number % 7 == 0))
        step += 1 - skip
        control = Control(
            lr=torch.tensor(1e-3),
            step=step,
            skip=skip,
            grad_divisor=torch.tensor(1.5),
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
        )
        Reference.run([wide], control)
        Reference.run([narrow], control)
    assert torch.equal(join_masters(weights, remainders), masters)
    assert torch.equal(weights, split_masters(masters)[0])


def test_small_changes_of_a_moment_are_kept_on_average():
    """A second moment of constant gradients falls towards their square; rounded to nearest it never does."""
    numbers = numbers_of([replicated("weight", 1024)])
    found = {}
    for stochastic in (True, False):
        exp_avg_sq = torch.full((1024,), 1.0, dtype=torch.bfloat16)
        one = Slices(
            weight_decay=0.0,
            params=[torch.zeros(1024)],
            grads=[torch.full((1024,), 0.5)],
            exp_avgs=[torch.zeros(1024)],
            exp_avg_sqs=[exp_avg_sq],
            numbers=[numbers],
            stochastic=stochastic,
        )
        for step in range(1, 400):
            Reference.run(
                [one],
                Control(
                    lr=torch.tensor(0.0),
                    step=torch.tensor(float(step)),
                    skip=torch.tensor(0.0),
                    grad_divisor=None,
                    beta1=0.9,
                    beta2=0.999,
                    eps=1e-8,
                ),
            )
        found[stochastic] = exp_avg_sq.double().mean().item()
    want = 0.25 + 0.75 * 0.999**399
    assert abs(found[True] - want) < 0.01 * want
    assert found[False] == 1.0
