"""The offloader's waits between streams: all are necessary, and together they are sufficient."""

import random
from contextlib import suppress

import pytest
import torch

from megatron_packed.memory.activation_offload import Offload
from support.late_streams import ORDERS, LateStreams, alias

WAITS = ["to_host", "release_sources", "from_host", "restored", "drop", "event_after_all"]
"""Functions of the offloader that contain a wait."""


def values(generator, number):
    """Return one to three tensors of random shapes and dtypes, some of them transposed."""
    random_numbers = torch.Generator().manual_seed(number)
    made = []
    for _ in range(generator.choice([1, 1, 2, 3])):
        rows, dtype = (
            generator.randint(1, 9),
            generator.choice([torch.float32, torch.bfloat16, torch.int32]),
        )
        tensor = torch.randint(-99, 99, (rows, 4), generator=random_numbers).to(dtype)
        made.append(tensor.t() if generator.random() < 0.2 else tensor)
    return made


def run_program(streams, seed, buffers):
    """Run forward and backward passes in a random order; return whether all restored values match."""
    generator = random.Random(seed)
    offload = Offload(torch.device("cpu"), forced_buffers=buffers, min_elements=5, streams=streams)
    found, number = [], 0
    in_flight = []
    for _ in range(12):
        if len(in_flight) < 2 or generator.random() < 0.5:
            layers = []
            for _ in range(generator.randint(1, 6)):
                wanted, number = values(generator, number), number + 1
                layers.append((wanted, offload.save([streams.tensor(value) for value in wanted])))
            in_flight.append(layers)
        if generator.random() < 0.2:  # drop a graph before or during its backward pass
            layers = in_flight.pop(generator.randrange(len(in_flight)))
            take_all(streams, layers, found, stop=generator.randint(0, len(layers)))
        elif generator.random() < 0.6:
            take_all(streams, in_flight.pop(generator.randrange(len(in_flight))), found)
        if generator.random() < 0.3:
            offload.join()
        if generator.random() < 0.2:
            streams.drain()
        if (
            generator.random() < 0.2
        ):  # groups that were saved before a failure may still be restored
            with suppress(KeyError), offload.whole_pass():
                kept = [offload.save([streams.tensor(torch.ones(8))]) for _ in range(3)]
                kept.pop().restore()
                raise KeyError
            del kept
    for layers in in_flight:
        take_all(streams, layers, found)
    streams.drain()
    return not streams.strayed and all(
        torch.equal(a, b) and a.stride() == b.stride() for a, b in found
    )


def take_all(streams, layers, found, stop=0):
    while len(layers) > stop:
        wanted, kept = layers.pop()
        for value, tensor in zip(wanted, kept.restore(), strict=True):
            assert (tensor.shape, tensor.stride(), tensor.dtype) == (
                value.shape,
                value.stride(),
                value.dtype,
            )
            seen, read = torch.empty_like(value), alias(tensor)
            found.append((seen, value))
            streams.compute(lambda seen=seen, read=read: seen.copy_(read))


@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_no_order_of_the_streams_changes_a_value(buffers):
    for order in ORDERS:
        for seed in range(4):
            assert run_program(LateStreams(order), seed, buffers), (order, seed)


@pytest.mark.parametrize("wait", WAITS)
def test_without_any_of_its_waits_values_are_wrong(wait):
    assert not all(
        run_program(LateStreams(order, without=wait), seed, 4)
        for seed in range(12)
        for order in ORDERS
    )
