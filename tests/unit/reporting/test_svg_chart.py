"""Charts as SVG: what stands at their axes, and in the cells of a heat map."""

import re

import pytest

from megatron_packed.reporting.svg_chart import Line, heat_map, line_chart


@pytest.mark.parametrize(
    "low, high, words",
    [
        (0, 1.5e7, ["0", "5 M", "10 M", "15 M"]),
        (9e5, 1.6e6, ["1.0 M", "1.2 M", "1.4 M", "1.6 M"]),
        (2.1e9, 6e9, ["2 G", "3 G", "4 G", "5 G", "6 G"]),
        (8000, 14_000, ["8,000", "10,000", "12,000", "14,000"]),
        (99.5, 100, ["99.6", "99.8", "100.0"]),
        (0, 3e-5, ["0", "1e-05", "2e-05", "3e-05"]),
    ],
)
def test_ticks_are_short_and_tell_neighbours_apart(low, high, words):
    chart = line_chart("a", "b", [Line([(1, low), (2, high)], "#000")])
    assert re.findall(r'text-anchor="end">(.*?)</text>', chart) == words


def test_cells_hold_their_values_where_there_is_room():
    written = r'text-anchor="middle">(\d\.\d\d)</text>'
    assert re.findall(written, heat_map("a", "b", [[1.5, 0.5]], row="layer", column="expert")) == [
        "1.50",
        "0.50",
    ]
    for rows in ([[1.0] * 128], [[1.5, 0.5]] * 60):
        assert not re.findall(written, heat_map("a", "b", rows, row="layer", column="expert"))
