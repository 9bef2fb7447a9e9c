"""Hash of weights: the same for any division, and another for any other weights."""

import pytest
import torch

from megatron_packed.checkpoint import weights_hash as module
from megatron_packed.checkpoint.tensor_shard import (
    TensorShard,
    split_replicated,
    whole_tensors,
)
from megatron_packed.checkpoint.weights_hash import sums_of, weights_hash

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def state() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    made = {str(dtype)[6:]: torch.randn(7, 6, generator=draw).to(dtype) for dtype in DTYPES}
    return {**made, "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}


def whole(tensors: dict[str, torch.Tensor]) -> str:
    return weights_hash([sums_of(whole_tensors(tensors))])


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_may_divide_the_weights_in_any_way(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(state())
    assert len(expected) == 32
    monkeypatch.setattr(module, "_WORDS", 5)
    shares = [split_replicated(state(), rank, ranks) for rank in range(ranks)]
    assert weights_hash([sums_of(reversed(share)) for share in shares]) == expected


def test_columns_of_a_matrix_are_hashed_by_their_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.arange(12.0).view(3, 4)
    halves = [
        TensorShard(
            name="w",
            global_shape=(3, 4),
            start=first,
            end=first + 2,
            rows=3,
            stride=4,
            tensor=weight[:, first : first + 2].contiguous().view(-1),
        )
        for first in (0, 2)
    ]
    monkeypatch.setattr(module, "_WORDS", 7)
    assert weights_hash([sums_of([half]) for half in halves]) == whole({"w": weight})


def test_each_change_of_the_weights_changes_the_hash() -> None:
    """A flipped bit of any element, two swapped elements, another name, shape or data type."""
    found = {whole(state())}
    for name, tensor in state().items():
        for at in range(tensor.numel()):
            changed = state()
            words = changed[name].view(-1).view(torch.uint8)
            words[at * tensor.itemsize] ^= 1
            found.add(whole(changed))
    changes = sum(tensor.numel() for tensor in state().values())
    assert len(found) == changes + 1
    one = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    others = [one.flip(1), one.view(2, 2), one.double(), one.view(torch.int32), one[:, :3]]
    found = {whole({"w": each}) for each in (one, *others)} | {whole({"v": one})}
    assert len(found) == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_tensors_may_be_divided_at_any_element(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of words are summed in float64, and parts of blocks word by word."""
    words = torch.randint(-(1 << 15), 1 << 15, (30_011 * dtype.itemsize // 2,), dtype=torch.int16)
    words[:5000] = -(1 << 15)  # the largest magnitude
    tensor = words.view(dtype)
    expected = whole({"w": tensor})
    for ranks in (2, 3, 7):
        shares = [split_replicated({"w": tensor}, rank, ranks) for rank in range(ranks)]
        assert weights_hash([sums_of(share) for share in shares]) == expected
    rows = TensorShard(
        name="w", global_shape=(30_011,), start=0, end=1, rows=30_011, stride=1, tensor=tensor
    )
    assert weights_hash([sums_of([rows])]) == expected
    monkeypatch.setattr(module, "_WORDS", 5_000)
    assert whole({"w": tensor}) == expected
