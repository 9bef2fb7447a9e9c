"""Layout of the metrics vector: written values are read back for any number of ranks."""

import torch

from megatron_packed.models.metrics_layout import MetricsLayout, Reduction, Spike, StepValues
from megatron_packed.optim.clipping import ZEROS_UNIT


def test_what_is_written_is_read() -> None:
    layout = MetricsLayout(world_size=3, counters={"expert_counts": 4, "dropped_assignments": 2})
    extras, out = torch.arange(20.0), torch.empty(layout.size)
    computed = {
        "grad_norm": torch.tensor(2.5),
        "nonfinite": torch.tensor(0.0),
        "held": torch.tensor([1.0]),
        "params_norm": torch.tensor(7.5),
        "grad_zeros": torch.tensor([2.0, 3.0]),
        "spikes": torch.tensor([0.0, 0.5]),
    }
    layout.write(extras, computed, out)
    assert StepValues.from_list(out.tolist()) == StepValues(
        loss=0.0,
        aux_loss=2.0,
        grad_norm=2.5,
        nonfinite=False,
        stop_requested=True,
        bad_micro_batches={0: 4, 1: 5, 2: 6},
        held=True,
        weights_moved=True,
        params_norm=7.5,
        grad_zeros=2 * ZEROS_UNIT + 3,
        no_targets=False,
        spikes=(Spike("grad_norm", 0.5),),
    )
    numbers = [*out.tolist(), *range(6)]
    assert layout.counts_of(numbers) == {
        "expert_counts": [0, 1, 2, 3],
        "dropped_assignments": [4, 5],
    }


def test_signs_of_all_ranks_lie_side_by_side_in_the_extras() -> None:
    layout = MetricsLayout(world_size=2)
    signs = [m for m in layout.metrics if m.reduction is Reduction.ALL_RANKS]
    assert layout.signs == slice(3, 3 + sum(metric.size for metric in signs))
    assert list(layout.extras)[3:6] == [metric.name for metric in signs]
    assert list(layout.slots)[: len(layout.extras)] == list(layout.extras)
