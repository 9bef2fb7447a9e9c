"""Layout and views of several tensors in one byte buffer."""

import pytest
import torch

from megatron_packed.packed.host_to_device_buffer import ALIGNMENT, BufferLayout

FIELDS = [
    ("a", torch.int32, (3,)),
    ("b", torch.bool, (5,)),
    ("c", torch.float32, (2, 3)),
    ("d", torch.int32, (0,)),
]


def test_sections_are_aligned_and_do_not_overlap():
    layout = BufferLayout.from_fields(FIELDS)
    end = 0
    for section, (name, dtype, shape) in zip(layout.sections, FIELDS):
        assert (section.name, section.dtype, section.shape) == (name, dtype, shape)
        assert section.start % ALIGNMENT == 0
        assert section.start >= end
        end = section.start + section.num_bytes
    assert [section.num_bytes for section in layout.sections] == [12, 5, 24, 0]
    assert layout.num_bytes == 16 + 16 + 32


def test_views_alias_the_buffer_and_keep_their_values_through_one_copy():
    layout = BufferLayout.from_fields(FIELDS)
    source, target = layout.allocate(), layout.allocate()
    views, copies = layout.views(source), layout.views(target)
    views["a"][:] = torch.tensor([1, -2, 3])
    views["b"][:] = torch.tensor([True, False, True, True, False])
    views["c"][:] = torch.arange(6.0).reshape(2, 3)
    target.copy_(source)
    for name in views:
        assert torch.equal(copies[name], views[name])
        assert copies[name].shape == views[name].shape
    assert copies["c"].sum() == 15


@pytest.mark.parametrize(
    "buffer", [torch.zeros(63, dtype=torch.uint8), torch.zeros(64, dtype=torch.int8)]
)
def test_another_buffer_is_refused(buffer):
    with pytest.raises(ValueError, match=r"uint8 buffer of shape \(64,\)"):
        BufferLayout.from_fields(FIELDS).views(buffer)
