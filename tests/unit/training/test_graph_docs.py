"""The example of ``docs/cuda_graphs.md`` does what the page says."""

import re
from pathlib import Path

import pytest
import torch

from support.stand_in import RecordingBackend

PAGE = Path(__file__).parents[3] / "docs" / "cuda_graphs.md"


def example():
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_module_of_somebody_else(device):
    backend = RecordingBackend() if device == "cpu" else None
    found = example()["gradients"](torch.device(device), backend)
    assert len(found) == 3
    for replayed, eager in found:
        assert eager.abs().max() > 0 and torch.allclose(
            replayed, eager, rtol=1e-5, atol=1e-5 * eager.abs().max()
        )
        assert device == "cuda" or torch.equal(replayed, eager)
    assert not torch.equal(found[0][0], found[1][0])


def test_every_graph_of_the_example_is_replayed_and_given_up():
    backend = RecordingBackend()
    example()["gradients"](torch.device("cpu"), backend)
    replays = [graph.replays for graph in backend.graphs]
    assert (
        replays == [1] * 5 + [2] * 5
    )  # the capture size of 16 documents has one pack, that of 4 has two
    assert all(graph.gone for graph in backend.graphs)
