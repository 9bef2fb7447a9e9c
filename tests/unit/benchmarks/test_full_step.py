"""`benchmarks/full_step.py` on the CPU, with a stand-in for capture: equal work on both paths."""

import torch

import full_step
import harness
from full_step import PATHS, QUICK, rows_of, steps_of
from support import stand_in
from support.benchmark_inputs import TINY

CPU = torch.device("cpu")


def test_every_measurement_runs_and_replay_equals_eager(without_profiler, capsys):
    saved, backends = [], []

    def backend():
        backends.append(stand_in.RecordingBackend())
        return backends[-1]

    result = full_step.run(
        TINY,
        (1, 2, 4),
        CPU,
        QUICK,
        skip_megatron=True,
        backend=backend,
        save=lambda found: saved.append(str(found)),
    )
    assert result["graphs"] == 2 + 1 and len(saved) == 3 and len(set(saved)) == 3
    for count, found in result["micro_batches"].items():
        assert len(found["comparisons"]) == full_step.PACKS // int(count)
        for one in found["comparisons"]:
            assert (
                one["loss_eager"] == one["loss_replay"] > 1
                and one["grad_norm_eager"] == one["grad_norm_replay"] > 0
            )
        assert list(found["sides"]) == ["eager", "full_iteration"]
        assert (
            found["sides"]["full_iteration"]["settled_row_over_busy"].median == 3.0
        )  # value of the replaced profiler
    assert (
        len({one["loss_eager"] for one in result["micro_batches"]["1"]["comparisons"]})
        == full_step.PACKS
    )
    rows = rows_of(harness.plain({"tiny": result}))
    assert [row["path"] for row in rows] == 3 * [PATHS["eager"], PATHS["full_iteration"]]
    assert [row["micro-batches"] for row in rows] == ["1", "1", "2", "2", "4", "4"]
    (memory,) = full_step.memory_rows_of(harness.plain({"tiny": result}))
    assert (memory["graphs"], memory["capacities"], memory["graphs hold MiB"]) == (3, "16 64", "3")
    assert len(backends) == 1 and all(graph.gone for graph in backends[0].graphs)


def test_steps_go_through_all_packs_and_scale_by_their_own_targets():
    lengths = [[100, 28], [128], [60, 60], [1, 127]]
    steps = steps_of(TINY, lengths, 2, None, CPU)
    assert [[one.packed.num_seqs for one in step] for step in steps] == [[2, 1], [2, 2]]
    for step in steps:
        targets = sum(one.num_target_tokens for one in step)
        assert all(one.scales.tolist() == [torch.tensor(1 / targets).item(), 0.5] for one in step)
