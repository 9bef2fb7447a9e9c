"""`benchmarks/graph_step.py` on the CPU, with a stand-in for capture: equal work, and all tables."""

import pytest
import torch

import graph_step
import harness
from graph_step import (
    QUICK,
    memory_rows_of,
    packs_of,
    rows_of,
    size_rows_of,
)
from support import stand_in
from support.benchmark_inputs import TINY

LENGTHS = [[60, 68], [1, 2, 3, 50], [128], [40, 40, 40]]
CPU = torch.device("cpu")


def test_every_measurement_runs_and_replay_equals_eager(without_profiler, capsys):
    saved = []
    result = graph_step.run(
        TINY,
        LENGTHS,
        (2, 16),
        CPU,
        QUICK,
        skip_megatron=True,
        backend=stand_in.RecordingBackend,
        save=lambda found: saved.append(sorted(found)),
    )
    assert [one["capacity"] for one in result["comparisons"]] == [
        2,
        4,
        2,
        4,
    ]  # the smallest capacity that is large enough for each pack
    assert all(
        one["loss_replay"] == one["loss_eager"] and one["finite"] for one in result["comparisons"]
    )
    assert max(one["grad_difference"] for one in result["comparisons"]) == 0.0
    assert result["hit_rate"] == 1.0 and result["fallbacks"] == {}
    # capacities that are large enough for all packs
    assert [size["capacity"] for size in result["cells"]] == [4, 16]
    assert (
        result["cells"][0]["wall_over_busy"].median == 2.0
        and result["cells"][0]["busy_over_exact"].median == 1.0
    )
    assert (
        result["cells"][1]["row_over_busy"].median,
        result["cells"][1]["span_over_busy"].median,
    ) == (3.0, 2.5)
    assert result["memory"]["capacities"] == [2, 4, 16] and result["memory"]["captures"] == 3 * (
        1 + 2 * 3
    )
    # saved after each of five measurements
    assert len(saved) == 5 and len(saved[0]) < len(saved[-1])
    plain = harness.plain({"tiny": result})
    assert [row["path"] for row in rows_of(plain)] == [
        graph_step.PATHS["eager"],
        graph_step.PATHS["graphs"],
    ]
    assert [row["capacity"] for row in size_rows_of(plain)] == [4, 16]
    (memory,) = memory_rows_of(plain)
    assert (
        memory["losses that differ"] == "0 of 4"
        and memory["replayed"] == "100.0 %"
        and memory["graphs"] == 21
    )


def test_the_comparison_sees_a_replay_of_other_metadata():
    class Stale(stand_in.RecordingBackend):
        """Graphs whose replay does nothing, so that each replay gives the results of the capture."""

        def capture(self, function):
            graph, result = super().capture(function)
            graph.replay = lambda: None
            return graph, result

    ours = graph_step.Ours(TINY, CPU)
    capture_sizes = graph_step.CaptureSizes.from_capacities([4], TINY["T"])
    ours.capture(capture_sizes, LENGTHS, Stale())
    batches = [
        [graph_step.host_batch(TINY, row, n, size, CPU) for n, row in enumerate(LENGTHS)]
        for size in (capture_sizes.sizes[0], None)
    ]
    found = graph_step.comparisons(ours, *batches)
    assert (
        all(one["grad_difference"] > 0.1 for one in found)
        and max(one["eager_against_eager"] for one in found) == 0
    )


def test_packs_of_real_lengths_are_cut_and_filled(tmp_path):
    (tmp_path / "lengths.txt").write_text("\n".join(["30"] * 60 + ["500"] * 3 + ["0"]))
    packs = packs_of(TINY, 8, tmp_path / "lengths.txt")
    assert (
        len(packs) == 8
        and all(0 < sum(pack) <= 128 for pack in packs)
        and max(map(max, packs)) <= 128
    )
    with pytest.raises(SystemExit, match=r"fills .* packs of 128 tokens"):
        packs_of(TINY, 1000, tmp_path / "lengths.txt")
    assert packs_of({"T": 4096}, 2, None) == graph_step.packings(4096, 2)
