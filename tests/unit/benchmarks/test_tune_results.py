"""Predictions of `tune` against runs on an H200, from the committed results. Nothing runs on a GPU."""

from pathlib import Path

from support.json_lines import read_json

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_predictions_are_within_a_tenth_and_nothing_fell_back() -> None:
    measured = read_json(RESULTS / "tune_prediction.json")
    assert "H200" in measured["device"]
    for rows in measured["results"].values():
        assert len({row["capacity"] for row in rows}) >= 3
        for row in rows:
            assert abs(row["predicted_ms"] / row["measured_ms"] - 1) <= 0.1
            assert (
                row["fallbacks"] == 0 and row["steps"] >= 20 and row["documents"] <= row["capacity"]
            )


def test_capacities_of_the_first_epoch_hold_whole_runs_on_real_documents() -> None:
    """The capacities of the first epoch suffice for three epochs, for each set and two pack sizes.

    `tune` recommends these capacities, and `auto` uses them.
    """
    runs = read_json(RESULTS / "graph_runs.json")["results"]["epochs"]
    assert set(runs) >= {
        f"{name} {slots}" for name in ("docs_longtail", "sgd_chat") for slots in (8192, 32768)
    }
    for run in runs.values():
        assert (
            len(run["fallbacks_by_epoch"]) >= 3
            and not any(run["fallbacks_by_epoch"])
            and run["replays"] > 0
        )
