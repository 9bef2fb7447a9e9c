"""The training loop of ``docs/model.md`` trains like the trainer."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[3] / "docs" / "model.md"
STEPS, PACKS = 12, 4


def example():
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def trainers_losses(names, device):
    """Return the losses with ``forward_backward`` and packs scaled for the complete step."""
    model = names["HybridModel"](
        names["CONFIG"], vocab_size=names["VOCAB"], max_positions=names["SLOTS"], device=device
    ).train()
    buffers = names["FlatBuffers"](model)
    optimizer, losses = names["Optimizer"](buffers), []
    for step in range(STEPS):
        buffers.zero_grad()
        batches = names["packs"](step, PACKS)
        for batch in batches:
            batch.scales.div_(PACKS)
        losses.append(
            sum(model.forward_backward(batch.to(device)).loss for batch in batches).item()
        )
        optimizer.step(lr=1e-2)
    return losses


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_loop_of_the_page_learns_what_the_trainer_learns(device):
    names, device = example(), torch.device(device)
    losses = names["train"](device, STEPS, PACKS)
    assert losses[-1] < 0.6 * losses[0]
    assert losses == pytest.approx(trainers_losses(names, device), rel=1e-3)
