"""Charts of report pages: numbers, labels, size of the SVG, and pages without matplotlib."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import megatron_packed
from megatron_packed.reporting import run_charts
from megatron_packed.reporting.charts import (
    COLOURS,
    DARK_COLOURS,
    Frame,
    Line,
    as_svg,
    heat_map,
    line_chart,
)
from megatron_packed.reporting.curves import PANELS, Run, limit_of, smoothed
from megatron_packed.reporting.html_page import render


def curves_html(runs: list[Run], levels: dict[str, float] | None = None) -> str:
    """Return the curves of runs as the page shows them."""
    return render("curves.html", **run_charts.curves(runs, levels or {})).strip()


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter("text")]


def numbers_beside_the_axis(svg: str) -> list[str]:
    return re.findall(r'text-anchor: end"[^>]*>(.*?)</text>', svg)


@pytest.mark.parametrize(
    "low, high, numbers",
    [
        (0, 1.5e7, ["0", "5 M", "10 M", "15 M"]),
        (9e5, 1.6e6, ["1.0 M", "1.2 M", "1.4 M", "1.6 M"]),
        (2.1e9, 6e9, ["2 G", "3 G", "4 G", "5 G", "6 G"]),
        (8000, 14_000, ["8,000", "10,000", "12,000", "14,000"]),
        (99.5, 100, ["99.6", "99.8", "100.0"]),
        (0, 3e-5, ["0", "1e-05", "2e-05", "3e-05"]),
    ],
)
def test_ticks_are_short_and_tell_neighbours_apart(low, high, numbers):
    chart = line_chart([Line([(1, low), (2, high)], "#000000")])
    assert numbers_beside_the_axis(as_svg(chart, "a")) == numbers


def test_cells_hold_their_values_where_there_is_room():
    def values(rows: list[list[float]]) -> list[str]:
        svg = as_svg(heat_map(rows, row="layer", column="expert"), "a")
        return [word for word in words(svg) if re.fullmatch(r"\d\.\d\d", word)]

    assert values([[1.5, 0.5]]) == ["1.50", "0.50"]
    for rows in ([[1.0] * 128], [[1.5, 0.5]] * 60):
        assert values(rows) == []


def test_cells_are_transparent_at_the_mean_and_named_under_the_mouse():
    """A cell at the mean has the colour of the page, and a text of the colour of the page's text."""
    svg = as_svg(heat_map([[0.0, 1.0, 2.0, 9.0]], row="layer", column="expert"), "a")
    cells = [
        (group.findtext("title"), path.get("style"))
        for group in ElementTree.fromstring(svg).iter("g")
        for path in group.findall("path")
        if group.find("title") is not None
    ]
    assert cells == [
        ("layer 0, expert 0: 0.00", "fill: var(--c0); fill-opacity: 0.7"),
        ("layer 0, expert 1: 1.00", "fill: var(--c0); fill-opacity: 0.01"),
        ("layer 0, expert 2: 2.00", "fill: var(--c1); fill-opacity: 0.7"),
        ("layer 0, expert 3: 9.00", "fill: var(--c1); fill-opacity: 0.7"),
    ]
    assert "fill: var(--text)" in svg


def test_a_chart_is_the_same_text_each_time_and_shares_no_id_with_another():
    def svg(title: str) -> str:
        long = Line([(x, x % 7) for x in range(2000)], COLOURS[0], "training")
        few = Line([(1, 2.0), (2000, 1.0)], COLOURS[1], "validation", "6 3", dots=True)
        frame = Frame(levels=[("entropy", 4.5)], marks=[3], restarts=[900], names_restarts=True)
        return as_svg(line_chart([long, few], frame), title)

    def ids(text: str) -> list[str]:
        return re.findall(r'id="(.*?)"', text)

    one, other = svg("Loss <a>"), svg("Memory")
    assert one == svg("Loss <a>") and "http" not in one
    assert ids(one) and len({*ids(one), *ids(other)}) == len(ids(one) + ids(other))
    used = re.findall(r"url\(#(.*?)\)", one) + re.findall(r'href="#(.*?)"', one)
    assert set(used) == set(ids(one))
    root = ElementTree.fromstring(one)
    assert root.findtext("title") == root.get("aria-label") == "Loss <a>"
    shown = {"training", "validation", "entropy 4.50", "no update", "restart"}
    assert root.get("width") is None and shown < set(words(one))


def test_charts_have_only_colours_of_the_page():
    """Every colour is a CSS variable, so a chart can be read in light and dark mode."""
    line = Line([(1, 2.0), (2, 1.0)], COLOURS[7], "training")
    frame = Frame(levels=[("entropy", 4.5)], marks=[1], restarts=[1], names_restarts=True)
    assert len(COLOURS) == len(DARK_COLOURS)
    for chart in (line_chart([line], frame), heat_map([[0.2, 1.9]], row="layer", column="expert")):
        assert "#" not in re.sub(r"(?:url\(|href=.)#", "", as_svg(chart, "a"))


@pytest.mark.parametrize(
    "panel, first_and_last",
    [("Throughput", ("0", "8,000")), ("Pack fill", ("0", "100")), ("Memory", ("0.0", "1.0"))],
)
def test_axes_begin_at_zero_and_shares_end_at_100(panel, first_and_last):
    """A small change of a large number does not fill the chart."""
    steps = [
        {
            "iteration": step,
            "lm_loss": 2.0,
            "tokens_per_second": 8000 + step,
            "pack_fill": 0.99,
            "memory_gib": 1.2 + step / 1000,
        }
        for step in (1, 2)
    ]
    svg = re.search(f'<svg[^>]*aria-label="{panel}".*?</svg>', curves_html([Run("a", steps)]))
    labels = numbers_beside_the_axis(svg[0])
    assert (labels[0], labels[-1]) == first_and_last


def test_a_long_loss_is_smoothed_and_its_raw_values_are_pale():
    """The first and last means are the values themselves, and few values are not smoothed."""
    points = [(step, float(step % 2)) for step in range(400)]
    window, means = smoothed(points)
    assert window == 11 and means[0] == points[0] and means[-1] == points[-1]
    assert means[200][1] == pytest.approx(6 / 11)
    assert smoothed(points[:19]) == (1, points[:19])
    run = Run("a", [{"iteration": int(x), "lm_loss": y} for x, y in points])
    raw, smooth = run_charts.lines_of(PANELS[0], [run])
    assert raw.pale and list(raw.points) == points and smooth.points == means
    assert smooth.legend == "training, mean of 11 steps"


def test_a_few_very_high_values_are_left_out_and_counted():
    """A spike does not flatten a curve, but a loss that begins high is shown."""
    values = [1.0 + step / 1000 for step in range(50)]
    assert limit_of([list(enumerate(values))], keeps_first=True) is None
    spike = list(enumerate([*values, 90.0]))
    assert limit_of([spike], keeps_first=True) == pytest.approx(1.1 * 1.049)
    start = list(enumerate([9.0, *values]))
    assert limit_of([start], keeps_first=True) is None
    assert limit_of([start], keeps_first=False) == pytest.approx(1.1 * 1.049)
    assert limit_of([spike, [(1, 50.0)]], keeps_first=True) == 50.0  # another run is no outlier
    run = Run("a", [{"iteration": step, "lm_loss": loss} for step, loss in spike])
    assert "1 value above 1.15 not shown" in curves_html([run])


def svg_of(page: str, title: str = "Loss") -> str:
    """Return the chart with a title."""
    found = re.search(f'<svg[^>]*aria-label="{title}".*?</svg>', page)
    assert found is not None
    return found[0]


def losses(*values: float, name: str = "a") -> Run:
    return Run(name, [{"iteration": at, "lm_loss": loss} for at, loss in enumerate(values, 1)])


@pytest.mark.parametrize(
    "values, labels",
    [
        ([5.0, 0.3, 0.049], ["0.05", "0.1", "0.2", "0.5", "1", "2", "5"]),
        ([5.0, 0.3, 0.051], None),
        ([9.0, 1e-5], ["1e-05", "0.001", "0.1"]),
    ],
)
def test_a_loss_over_more_than_a_factor_of_100_has_a_logarithmic_axis(values, labels):
    page = curves_html([losses(*values)])
    shown = words(svg_of(page))
    assert ("logarithmic" in shown) == ("logarithmic axis" in page) == (labels is not None)
    if labels is not None:
        assert set(labels) <= set(shown)


def test_a_logarithmic_axis_leaves_out_zeros_and_counts_them(tmp_path):
    page = curves_html([losses(5.0, 0.0, 0.01)], levels={"none": 0.0, "entropy": 2.0})
    assert "logarithmic axis · 1 value of 0 not shown" in page
    assert "entropy 2.00" in words(svg_of(page)) and "none 0.00" not in words(svg_of(page))
    runs = [losses(5.0, 0.01), losses(0.0, 0.0, name="b")]
    assert "logarithmic axis · 2 values of 0 not shown" in curves_html(runs)
    assert "logarithmic" not in curves_html([losses(0.0, 0.0)])
    run_charts.write_runs_png(runs, tmp_path / "a.png")


def test_a_spike_that_is_left_out_makes_no_logarithmic_axis():
    values = [1.0 + step / 1000 for step in range(50)]
    page = curves_html([losses(*values, 900.0)])
    assert "1 value above 1.15 not shown" in page and "logarithmic" not in page


def test_only_losses_have_logarithmic_axes():
    steps = [{"iteration": at, "lm_loss": 2.0, "grad_norm": 10.0**at} for at in range(5)]
    assert "logarithmic" not in curves_html([Run("a", steps)])


def test_a_single_curve_has_no_legend():
    """The heading names the curve instead; two curves need a legend."""
    alone = curves_html([losses(*[2.0] * 30)])
    assert not [word for word in words(svg_of(alone)) if "training" in word]
    assert "nats per target token · training, mean of 5 steps" in alone
    both = Run("a", [{"iteration": 1, "lm_loss": 2.0}, {"iteration": 1, "valid_loss": 2.5}])
    page = curves_html([both])
    assert {"training", "validation"} <= set(words(svg_of(page)))
    assert "nats per target token · training" not in page
    skipped = Run("a", [{"iteration": 1, "lm_loss": 2.0, "skipped": True}])
    shown = words(svg_of(curves_html([skipped])))
    assert "no update" in shown and "training" not in shown


def test_runs_have_colours_and_their_curves_dashes():
    both = {"iteration": 1, "lm_loss": 2.0, "valid_loss": 2.5}
    runs = [Run("a", [both]), Run("b", [{"iteration": 1, "lm_loss": 3.0}])]
    loss = PANELS[0]
    assert [(line.colour, line.dash) for line in run_charts.lines_of(loss, runs)] == [
        (COLOURS[0], ""),
        (COLOURS[0], "6 3"),
        (COLOURS[1], ""),
    ]
    alone = run_charts.lines_of(loss, runs[:1])
    assert [(line.colour, line.dash) for line in alone] == [(COLOURS[0], ""), (COLOURS[1], "")]
    page = curves_html(runs)
    assert all(f'var(--c{at})">&#9679;</b> {name}<' in page for at, name in enumerate("ab"))


def test_each_validation_set_has_a_curve():
    """Sets beyond the number of colours differ by their dashes."""
    names = [f"set {number}" for number in range(len(COLOURS) + 1)]
    of_sets = {f"valid_loss_{name}": 2.0 + at for at, name in enumerate(names)}
    step = {"iteration": 1, "lm_loss": 2.0}
    run = Run("a", [step, {"iteration": 1, "valid_loss": 2.5, **of_sets}])
    loss, sets = run_charts.panels_of([run])
    assert [line.legend for line in run_charts.lines_of(loss, [run])] == ["training", "validation"]
    lines = run_charts.lines_of(sets, [run])
    assert [(line.legend, line.points) for line in lines] == [
        (name, [(1.0, 2.0 + at)]) for at, name in enumerate(names)
    ]
    assert len({(line.colour, line.dash) for line in lines}) == len(names)
    page = curves_html([run])
    assert "Loss of validation sets" in page and all(f">{name}<" in page for name in names)
    assert "Loss of validation sets" not in curves_html([Run("b", [step])])


def test_without_matplotlib_a_page_has_a_sentence_and_an_image_is_refused(tmp_path, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs = [Run("a", [{"iteration": 1, "lm_loss": 2.0}])]
    assert curves_html(runs).endswith(
        "pip install matplotlib, then write the page again with megatron-packed report or plot.</p>"
    )
    with pytest.raises(ValueError, match="a PNG needs matplotlib: pip install matplotlib"):
        run_charts.write_runs_png(runs, tmp_path / "a.png")


def test_no_module_imports_matplotlib_before_it_draws():
    files = Path(megatron_packed.__file__).parent.rglob("*.py")
    drawing = {
        file.stem: re.findall(r"^(?:from|import) matplotlib", text, re.MULTILINE)
        for file in files
        if "import matplotlib" in (text := file.read_text()) or "from matplotlib" in text
    }
    assert drawing == {"charts": [], "sizing_page": []}
