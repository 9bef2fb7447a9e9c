"""Shards: requirements of a view, and the division of replicated tensors."""

import pytest
import torch

from megatron_packed.checkpoint.tensor_shard import TensorShard, split_replicated, whole_tensors


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_replicated_tensors_are_divided_once_and_evenly(tools, world_size):
    state = tools.make_state()
    owners = {
        name: torch.zeros(tensor.numel(), dtype=torch.int64) for name, tensor in state.items()
    }
    sizes = []
    for rank in range(world_size):
        shards = split_replicated(state, rank, world_size)
        for shard in shards:
            owners[shard.name][shard.start : shard.end] += 1
            assert shard.tensor.data_ptr() == state[shard.name].view(-1)[shard.start :].data_ptr()
        assert ("nothing" in {shard.name for shard in shards}) == (rank == 0)
        sizes.append(sum(shard.tensor.nbytes for shard in shards))
    assert all((count == 1).all() for count in owners.values())
    # Allow one element of the widest dtype, plus one byte for the rounding of the division.
    assert max(sizes) - min(sizes) <= 8 + 1


def test_the_division_does_not_depend_on_the_order_of_the_dict(tools):
    state = tools.make_state()
    backwards = dict(reversed(state.items()))
    for rank in range(3):
        keys = [shard.key for shard in split_replicated(state, rank, 3)]
        assert keys == [shard.key for shard in split_replicated(backwards, rank, 3)]


def test_example_of_the_docstring():
    shards = [split_replicated({"x": torch.zeros(10)}, rank, 4)[0] for rank in range(4)]
    assert [(shard.start, shard.end) for shard in shards] == [(0, 3), (3, 5), (5, 8), (8, 10)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a[0:1]"}, "letters, digits"),
        ({"name": "a b"}, "letters, digits"),
        ({"name": ""}, "letters, digits"),
        ({"start": 3, "end": 3}, r"tensor w .*\[3:3\) is empty or not within the 6 elements"),
        ({"start": -1}, "is empty or not within"),
        ({"end": 7}, "is empty or not within"),
        ({"tensor": torch.zeros(5)}, "6 elements"),
        ({"tensor": torch.zeros(2, 3)}, "1-D"),
        ({"tensor": torch.zeros(12)[::2]}, "contiguous"),
        ({"tensor": torch.zeros(6, dtype=torch.complex64)}, "complex64"),
    ],
)
def test_wrong_shards_are_refused(fields, message):
    good = {"name": "w", "global_shape": (2, 3), "start": 0, "end": 6, "tensor": torch.zeros(6)}
    TensorShard(**good)
    with pytest.raises(ValueError, match=message):
        TensorShard(**{**good, **fields})


def test_only_contiguous_tensors_are_taken_and_parameters_are_detached():
    with pytest.raises(ValueError, match=r"tensor w of shape \(3, 2\) is not contiguous"):
        whole_tensors({"w": torch.zeros(2, 3).T})
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    [shard] = whole_tensors({"w": parameter})
    assert not shard.tensor.requires_grad and shard.tensor.data_ptr() == parameter.data_ptr()
    assert shard.global_shape == (2, 3) and shard.key == "w[0:6]"
