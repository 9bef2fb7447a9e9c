"""Requirements of CUDA graphs: no device value is read on the host, and shapes are constant."""

import pytest
import torch

from support import hybrid_cases as cases
from support.rank_models import asks, two_packs
from support.recorder import Recorder


def record(model, batch):
    with Recorder() as recorder:
        output = model(batch)
        output.loss.backward()
        model.update_expert_bias(output.tokens_per_expert, skip=~torch.isfinite(output.loss))
    return recorder.calls


@pytest.mark.parametrize(
    "variant",
    [
        "plain",
        "layer norm, gelu, tied",
        "sigmoid router",
        "gated shared expert",
        "multipliers, one norm group",
    ],
)
def test_no_question_and_no_shape_depends_on_the_documents(variant):
    """Check layers without attention: its CPU reference reads the offsets of the documents."""
    options = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01} | cases.VARIANTS[variant]
    model = cases.tiny_model("MEG-", **options)
    first, second = two_packs()
    assert first.layout == second.layout
    record(model, first)  # allocates the gradients
    calls = record(model, first)
    assert len(calls) > 100
    assert not asks(calls, alone=True)
    assert calls == record(model, second)


def test_the_recorder_sees_a_question_and_a_shape_made_of_values():
    recorded = []
    for mask in ([True, False, True], [True, False, False]):
        with Recorder() as recorder:
            torch.ones(3).sum().item()
            torch.arange(3)[torch.tensor(mask)]
        recorded.append(recorder.calls)
    assert asks(recorded[0], alone=True) and recorded[0] != recorded[1]
