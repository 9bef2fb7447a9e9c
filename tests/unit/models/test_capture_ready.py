"""Requirements of CUDA graphs: no device value is read on the host, and shapes are constant."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support import hybrid_cases as cases

QUESTIONS = {
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.bincount",
    "aten._unique2",
}


class Recorder(TorchDispatchMode):
    """Recorder of every operation and the shapes of its results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else [result]
        name = str(func).removesuffix(".default")
        self.calls.append(
            (name, [tuple(value.shape) for value in outputs if isinstance(value, torch.Tensor)])
        )
        return result


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
    first = cases.make_pack(cases.make_documents([5, 20, 3, 1, 30]), tail=5, spare=2)
    second = cases.make_pack(cases.make_documents([40, 2]), tail=22, spare=5)
    assert first.layout == second.layout
    record(model, first)  # allocates the gradients
    calls = record(model, first)
    assert len(calls) > 100
    assert not QUESTIONS & {name for name, _ in calls}
    assert calls == record(model, second)


def test_the_recorder_sees_a_question_and_a_shape_made_of_values():
    recorded = []
    for mask in ([True, False, True], [True, False, False]):
        with Recorder() as recorder:
            torch.ones(3).sum().item()
            torch.arange(3)[torch.tensor(mask)]
        recorded.append(recorder.calls)
    assert "aten._local_scalar_dense" in dict(recorded[0])
    assert recorded[0] != recorded[1]
