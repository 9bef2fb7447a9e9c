"""`benchmarks/beside_megatron.py`: differences of two curves, the check, and the image."""

import re
from xml.etree import ElementTree

import pytest

import harness
from beside_megatron import chart_of, compared, problems_of, rows_of, side


def steps(losses, milliseconds):
    return [
        {
            "loss": loss,
            "grad_norm": 2 * loss,
            "learning_rate": 0.1 * number,
            "step_time_ms": 1e4 if number < len(losses) // 4 else milliseconds,
        }
        for number, loss in enumerate(losses)
    ]


@pytest.fixture
def results():
    sides = {
        "megatron_packed": {
            **side(steps([8.0, 4.0, 2.002, 1.0], 5.0)),
            "replays": 8,
            "fallbacks": 0,
        },
        "megatron_core": side(steps([8.0, 4.004, 2.0, 1.0], 15.0)),
    }
    return {"plan_hash": "0123456789abcdef", **sides, **compared(sides)}


def test_difference_of_every_step_and_of_the_settled_times(results):
    assert results["loss_difference"] == [0.0, 0.000999, 0.001, 0.0]
    assert results["largest_loss_difference"] == pytest.approx(0.001)
    assert results["step_ratio"] == 3.0  # without the first step, which compiles
    assert problems_of(results) == []
    ours, theirs = rows_of(harness.plain(results))
    assert (ours["last loss"], ours["step ms"], theirs["step ms"]) == (
        1.0,
        "5 [5, 5]",
        "15 [15, 15]",
    )
    assert ours["loss differs by at most"] == "0.100 %" and theirs["plan"] == "0123456789ab"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("largest_loss_difference", 0.0031, "0.31%"),
        ("largest_loss_difference", float("nan"), "losses differ"),
        ("learning_rate", [0.0, 0.1, 0.2, 0.31], "learning rates"),
        ("fallbacks", 1, "and 1 ran eagerly"),
        ("replays", 0, "0 micro-batches were replayed"),
    ],
)
def test_the_check_fails(results, key, value, words):
    (results if key in results else results["megatron_packed"])[key] = value
    (problem,) = problems_of(results)
    assert words in problem


def test_sides_of_different_length_are_an_error(results):
    del results["megatron_core"]["loss"][-1]
    with pytest.raises(ValueError, match="shorter"):
        compared(results)


def test_image_draws_both_curves_within_its_limits(results):
    image = ElementTree.fromstring(chart_of(harness.plain(results)))
    *_, width, height = map(float, image.get("viewBox").split())
    curves = image.findall("{*}polyline")
    assert len({curve.get("stroke") for curve in curves}) == 2
    for curve in curves:
        points = [tuple(map(float, point.split(","))) for point in curve.get("points").split()]
        assert len(points) == 4 and points == sorted(points)  # a falling loss goes down the image
        assert all(50 <= x <= width - 10 and 10 <= y <= height - 40 for x, y in points)
    names = [text.text for text in image.findall("{*}text")]
    assert {"megatron_packed, graphs", "megatron-core, eager"} <= set(names)
    assert [text for text in names if re.fullmatch(r"\d\.\d\d", text)][::4] == ["1.00", "8.00"]
