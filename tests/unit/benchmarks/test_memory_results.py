"""Estimated memory against peaks that the benchmarks measured on an H200. Nothing runs on a GPU."""

import sys
from pathlib import Path
from unittest import mock

import pytest

import memory_peaks
import real_sizes
import tables
from memory_peaks import results
from support import commands

ROOT = Path(__file__).parents[3]
TOLERANCE = 0.10
"""Largest relative error that `megatron-packed plan` promises.

The largest differences are -4.5 and +6.1 %. The estimate does not include fragmentation.
"""


@pytest.fixture(scope="module")
def read_and_rows():
    """Yield the names of result files that the table reads, and its rows, which cost seconds."""
    with mock.patch.object(memory_peaks, "results", side_effect=results) as reader:
        rows = memory_peaks.peaks()
    return {call.args[0] for call in reader.call_args_list}, rows


@pytest.fixture(scope="module")
def rows(read_and_rows):
    """Name, estimated and measured peak of each result."""
    return read_and_rows[1]


def test_estimates_are_within_ten_percent(rows):
    wrong = [row for row in rows if row[1] != pytest.approx(row[2], rel=TOLERANCE)]
    assert wrong == []


def test_a_plan_for_a_named_gpu_is_that_of_the_run_on_it(capsys):
    """The run on four H200 had the estimate `planned_gib` of itself."""
    (found,) = [name for name in real_sizes.RESULTS if name.endswith("_4_8b")]
    _, words, run = next(real_sizes.measured_runs(results(found), ""))
    planned = commands.report(capsys, "plan", *words, "--world-size", 4, "--gpu", "H200")
    allocated = planned["ranks"]["every rank"]["bytes"]["peak in torch's allocator"]
    assert allocated / 2**30 == pytest.approx(run["planned_gib"], abs=0.01)
    assert allocated / 2**30 == pytest.approx(run["peak_gib"], rel=TOLERANCE)


def has_peak(value):
    if not isinstance(value, dict):
        return False
    return any(
        "peak" in key or key == "memory_gib" or has_peak(inner) for key, inner in value.items()
    )


def test_every_result_with_a_peak_is_in_the_table(read_and_rows):
    files = {
        path.stem
        for path in (ROOT / "benchmarks/results").glob("*.json")
        if has_peak(results(path.stem))
    }
    assert files <= {*memory_peaks.RESULTS} == read_and_rows[0]


def test_committed_pages_are_what_the_committed_results_give(rows, monkeypatch, capsys):
    """`python benchmarks/tables.py --check` passes on the repository."""
    monkeypatch.setattr(memory_peaks, "peaks", lambda: rows)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    tables.main()
    assert capsys.readouterr().out == "out of date: nothing\n"


def test_readme_and_guide_have_the_largest_differences(rows):
    errors = [100 * (estimated / measured - 1) for _, estimated, measured in rows]
    sentence = (
        f"[{min(errors):+.1f} % to {max(errors):+.1f} %](docs/measurements/memory_peaks.md) "
        f"from {len(rows)} measured peaks."
    )
    assert sentence in (ROOT / "README.md").read_text()
    range_of_guide = (
        f"from {len(rows)} peaks measured on H200 by {min(errors):+.1f} to {max(errors):+.1f} %"
    )
    assert range_of_guide in (ROOT / "docs/memory.md").read_text()
