"""The adapter of torch's private names, with the installed torch and with names missing."""

import importlib

import pytest
import torch

from megatron_packed import torch_private


@pytest.fixture
def reloaded(monkeypatch):
    """Return a function that imports the adapter again with some names missing from torch.

    The adapter is restored after the test.
    """

    def reload(*missing: tuple[object, str]):
        for owner, name in missing:
            monkeypatch.delattr(owner, name)
        return importlib.reload(torch_private)

    yield reload
    monkeypatch.undo()
    importlib.reload(torch_private)


def test_a_missing_name_is_an_error_of_the_call_that_needs_it(reloaded) -> None:
    module = reloaded((torch, "_foreach_copy_"), (torch.cuda.memory, "_dump_snapshot"))
    for call in (lambda: module.foreach_copy_([], []), lambda: module.dump_memory_snapshot("")):
        with pytest.raises(RuntimeError, match=r"_\w+'.* 2\.11 or 2\.13"):
            call()
    values = [torch.ones(2)]
    module.foreach_zero_(values)
    assert values[0].tolist() == [0, 0]


def test_a_name_that_every_run_needs_is_an_error_of_the_import(reloaded) -> None:
    with pytest.raises(ImportError, match=r"tree_leaves.* 2\.11 or 2\.13"):
        reloaded((torch.utils._pytree, "tree_leaves"))


def test_hooks_in_force_are_the_innermost() -> None:
    def pack(tensor):
        return tensor

    def unpack(tensor):
        return tensor

    assert torch_private.saved_tensors_hooks_in_force() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert torch_private.saved_tensors_hooks_in_force() == (pack, unpack)


def test_number_of_the_backward_pass() -> None:
    x, seen = torch.ones(1, requires_grad=True), []
    x.register_hook(lambda _: seen.append(torch_private.current_graph_task_id()))
    x.sum().backward()
    assert seen[0] >= 0 and torch_private.current_graph_task_id() == -1
