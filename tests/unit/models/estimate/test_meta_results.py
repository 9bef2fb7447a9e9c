"""Remembered results of operations on the meta device."""

from unittest import mock

import torch

from megatron_packed.models.estimate.meta_results import new_results

aten = torch.ops.aten


def called(func, args):
    """Return the result of an operation, and whether PyTorch computed it."""
    with mock.patch.object(
        type(func), "__call__", autospec=True, side_effect=type(func).__call__
    ) as run:
        return new_results(func, args, {}), run.call_count > 0


def meta(*shape):
    return torch.empty(*shape, device="meta")


def test_a_product_in_place_is_computed_once():
    sizes = (3, 7), (3, 5), (5, 7)
    computed = []
    for _ in range(2):
        tensors = [meta(*size) for size in sizes]
        result, was_computed = called(aten.addmm_.default, tensors)
        assert result is tensors[0]
        computed.append(was_computed)
    assert computed == [True, False]
    tensors[2] = meta(4, 7)
    try:
        called(aten.addmm_.default, tensors)
    except RuntimeError:
        return
    raise AssertionError("sizes that do not fit were accepted")


def test_new_results_are_remembered_with_their_shapes():
    results = [called(aten.mm.default, (meta(9, 11), meta(11, 13))) for _ in range(2)]
    assert [was_computed for _, was_computed in results] == [True, False]
    assert results[0][0] is not results[1][0]
    assert {(tuple(x.shape), x.stride()) for x, _ in results} == {((9, 13), (13, 1))}


def test_operations_that_change_a_shape_or_return_a_view_always_run():
    for _ in range(2):
        x = meta(2, 3)
        assert called(aten.t_.default, (x,)) == (x, True) and x.shape == (3, 2)
        assert called(aten.resize_.default, (x, [4])) == (x, True) and x.shape == (4,)
        assert called(aten.as_strided_.default, (x, [4], [1], 2)) == (x, True)
        assert x.storage_offset() == 2
        view, was_computed = called(aten.view.default, (x, [2, 2]))
        assert was_computed and view.untyped_storage()._cdata == x.untyped_storage()._cdata
