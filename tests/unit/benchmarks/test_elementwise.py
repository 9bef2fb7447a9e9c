"""`benchmarks/elementwise.py` and `benchmarks/step_edge.py` on the CPU."""

import gzip
import json

import pytest
import torch

import elementwise
import step_edge
from step_edge import Gap, Span


def test_forward_counts_inputs_and_outputs_once():
    """The bytes of a case are those of its rows and outputs, and of the gradients in backward."""
    sizes, device = elementwise.TINY, torch.device("cpu")
    for name, case in elementwise.cases(sizes, device).items():
        if name in ("causal_conv1d, library", "softmax of the loss"):
            continue
        inputs = elementwise.Call(case, sizes, device).inputs(0)
        rows = sum(x.numel() for x in inputs.leaves[: len(case.rows)])
        outputs = sum(y.numel() for y in inputs.outputs if y is not inputs.leaves[0])
        if name == "rms_norm, residual":  # Its second output is x itself.
            outputs = inputs.outputs[0].numel()
        assert case.forward * sizes.tokens == rows + outputs, name
        if case.backward:
            upstream = sum(y.numel() for y in inputs.upstream)
            kept = 0 if name == "rope" else rows
            assert case.backward * sizes.tokens == kept + upstream + rows, name


SPANS = [Span(0, 10, "a"), Span(2, 5, "b"), Span(11, 20, "c"), Span(30, 31, "a"), Span(40, 41, "c")]


def test_gaps_lie_between_the_ends_and_starts_of_kernels(tmp_path):
    events = [
        {"cat": "kernel", "ts": span.start, "dur": span.end - span.start, "name": span.name}
        for span in reversed(SPANS)
    ]
    trace = tmp_path / "trace.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": [*events, {"cat": "cpu_op", "name": "host"}]}, file)
    assert step_edge.spans_of(trace) == SPANS
    busy, gaps = step_edge.busy_and_gaps(SPANS)
    assert busy == 10 + 9 + 1 + 1
    assert gaps == [Gap(1, "a", "c"), Gap(10, "c", "a"), Gap(9, "a", "c")]
    first, second = step_edge.by_pair(gaps, steps=2)
    assert (first["before"], first["us_per_step"], first["per_step"]) == ("a", 5.0, 1.0)
    assert second["longest_us"] == 10
    assert step_edge.by_name(SPANS, 1)[0] == ("a", 0.011, 2.0)


def test_gaps_of_a_profiled_run(tmp_path, monkeypatch):
    records = [{"lm_loss": 1.0, "iteration": n, "step_time_ms": 0.02} for n in range(1, 21)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, records)))
    run = {"kernels": None, "plan_hash": "p", "mfu": [0.5, 0.5, 0.5], "tokens_per_second": None}
    monkeypatch.setattr(step_edge.recipe_mfu, "run", lambda *arguments: run)
    monkeypatch.setattr(step_edge, "spans_of", lambda trace: SPANS)
    found = step_edge.measure(tmp_path, "set", "recipe", {})
    assert found["wall_over_busy"] == pytest.approx(20 * 3 / 21, abs=1e-4)
    assert [row["us a step"] for row in step_edge.gap_rows_of({"runs": {"local": found}})] == [
        3.3,
        3.0,
    ]
