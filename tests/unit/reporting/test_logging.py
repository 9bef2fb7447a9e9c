"""Log records, writers, the console line and the report page."""

import json
import math
import re
import resource
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_packed.config.sections.logging import LoggingConfig
from megatron_packed.cuda_graphs.fallback_reasons import GraphCounters
from megatron_packed.memory.offload_figures import OffloadFigures
from megatron_packed.models.flops import peak_of
from megatron_packed.reporting.console import Console
from megatron_packed.reporting.curves import read_jsonl
from megatron_packed.reporting.log_file import JsonlWriter, LogFile, Origin, RunIdentity
from megatron_packed.reporting.run_report import write_report
from megatron_packed.reporting.step_record import ExpertFigures, GraphFigures
from megatron_packed.reporting.tensorboard import TensorBoardWriter
from support.json_lines import read_lines, write_lines
from support.step_records import record


def opened(path, first_iteration, opening=None):
    """Return the writer of a run that begins, or that resumes before ``first_iteration``."""
    identity = RunIdentity("0123456789ab", "/runs/a")
    done = first_iteration - 1
    file = LogFile(path, patience=0)
    earlier = file.begin(identity, Origin(iteration=done, consumed_tokens=0) if done else None)
    run = {"id": identity.run_id, "folder": identity.folder}
    return JsonlWriter(file, {"run": run, **(opening or {})}, earlier)


def test_rates_follow_from_facts():
    made = record(3)
    assert made.tokens_per_second == 1800
    assert made.tflops_per_gpu == 4.0  # 4e12 FLOP in half a second on two GPUs
    assert made.mfu == 0.25
    assert made.pack_fill == 0.9
    assert made.docs_per_pack == 3.0
    assert made.step_time_ms == 500


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_that_of_the_very_device(name, tera):
    assert peak_of(name) == (None if tera is None else tera * 1e12)


@pytest.mark.parametrize("torn", [b'{"iteration": 4, "lm_lo', b'{"iteration": 2}'])
def test_jsonl_of_a_resumed_run_reads_like_one_run(tmp_path, torn):
    path = tmp_path / "log.jsonl"
    writer = opened(path, first_iteration=1)
    for iteration in (1, 2, 3):
        writer.write(record(iteration).as_dict())
    writer.close()
    with open(path, "ab") as file:
        file.write(torn)  # a killed run left an unfinished line
    writer = opened(path, first_iteration=3)  # resumed from the checkpoint of step 2
    writer.write(record(3, loss=math.nan).as_dict())
    writer.close()
    lines = read_lines(path)
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert lines[-1]["lm_loss"] == "nan"


def test_the_opening_of_a_log_is_said_again_only_when_it_changes(tmp_path):
    """A resumed run writes the opening fields again only if a value has changed."""
    path = tmp_path / "log.jsonl"
    for first, kernel in ((1, "mamba_ssm"), (3, "mamba_ssm"), (5, "reference")):
        opening = {"data": {"training": {"documents_in": 3}}, "kernels": {"scan": kernel}}
        writer = opened(path, first_iteration=first, opening=opening)
        for iteration in (first, first + 1):
            writer.write(record(iteration).as_dict())
        writer.close()
    lines = read_lines(path)
    assert [line["iteration"] for line in lines if "kernels" in line] == [1, 5]
    assert [line["iteration"] for line in lines if "data" in line] == [1]
    page = write_report(path, tmp_path / "page.html").read_text()
    assert "<th>kernels</th><td>scan reference</td>" in page


def test_every_start_is_in_the_log_also_one_whose_steps_are_lost(tmp_path):
    """A run that was killed before a checkpoint leaves the time of its start. A finished run that is
    started again changes nothing.
    """
    path = tmp_path / "log.jsonl"
    for first, time in ((1, "noon"), (1, "one"), (3, "two")):
        start = {"step": first - 1, "time": time}
        writer = opened(path, first_iteration=first, opening={"starts": [start]})
        for iteration in (first, first + 1):
            writer.write(record(iteration).as_dict())
        writer.note({"iteration": first + 1, "end": {"exit_code": 0}})
        writer.close()
    lines = read_jsonl(path)
    assert [len(line["starts"]) for line in lines if "starts" in line] == [2, 3]
    assert [line["iteration"] for line in lines if "end" in line] == [2, 4]
    assert [start["time"] for start in lines[3]["starts"]] == ["noon", "one", "two"]
    before = path.read_bytes()
    writer = opened(path, first_iteration=5, opening={"starts": [{"step": 4, "time": "x"}]})
    writer.note({"iteration": 4, "end": {"exit_code": 0}})
    writer.close()
    assert path.read_bytes() == before


def test_tensorboard_shows_steps_that_are_done_again_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for run, (first, last) in enumerate([(1, 4), (3, 5)]):  # resumed from the checkpoint of step 2
        writer = TensorBoardWriter(str(tmp_path), first)
        for iteration in range(first, last + 1):
            writer.write(record(iteration, loss=10.0 * run + iteration).as_dict())
        writer.close()
        # Names of event files begin with their time in seconds, so two quick runs would collide.
        for file in tmp_path.glob("events.*"):
            file.rename(tmp_path / f"{run}.tfevents")
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert shown == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0)]


def test_tensorboard_gets_the_first_step_of_a_run(monkeypatch):
    made = []
    module = SimpleNamespace(SummaryWriter=lambda folder, **options: made.append((folder, options)))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    TensorBoardWriter("board", 3)
    assert made == [("board", {"purge_step": 3})]


def test_a_disk_that_becomes_full_leaves_whole_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    writer = opened(path, first_iteration=1)
    writer.write({"iteration": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(OSError):
            writer.write({"iteration": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write({"iteration": 3})
    assert [line["iteration"] for line in read_lines(path)] == [1, 3]


def test_console_line_names_everything_and_only_rank_0_speaks(capsys):
    Console(rank=1, total_steps=10).step(record(3))
    assert capsys.readouterr().out == ""
    Console(rank=0, total_steps=10).step(record(3, skip_reason="no targets"))
    line = capsys.readouterr().out
    for part in (
        "step  3/10",
        "ETA 0:00:04",
        "loss 2.0000",
        "lr 1.00e-03",
        "grad norm 1.000",
        "500 ms",
        "1,800 tok/s",
        "MFU 25.0 %",
        "fill 90.0 %",
        "3.0 docs/pack",
        "1.5 GiB",
        "SKIPPED: no targets",
    ):
        assert part in line, part


def figures(replays: int, fallbacks: int) -> GraphFigures:
    """Return the figures of a step that began after 100 replays and 7 fallbacks."""
    counters = GraphCounters(
        replays=100 + replays,
        fallbacks=Counter({"a": 4, "b": 3 + fallbacks}),
        captures=18,
        memory_mib=312.0,
    )
    return GraphFigures.since((100, 7), counters)


def test_figures_of_graphs_are_of_the_step_and_absent_without_graphs(capsys):
    line = record(3, graphs=figures(6, 2)).as_dict()
    found = {name: value for name, value in line.items() if name.startswith("graph")}
    assert found == {
        "graph_replays": 6,
        "graph_fallbacks": 2,
        "graph_captures": 18,
        "graph_memory_mib": 312.0,
        "graph_hit_rate": 0.75,
    }
    assert figures(0, 0).hit_rate == 0.0
    assert not any("graph" in name for name in record(3).as_dict())
    for graphs, shown in ((figures(6, 2), True), (None, False)):
        Console(rank=0, total_steps=10).step(record(3, graphs=graphs))
        assert ("| replayed 6/8" in capsys.readouterr().out) == shown


def test_loads_of_experts_are_shares_of_the_mean_of_their_layer():
    made = ExpertFigures.from_counts([1.0, 3.0, 0.0, 4.0, 4.0, 4.0], 2, iteration=7)
    assert made == ExpertFigures(
        load_max=2.25, load_min=0.0, load=[[0.75, 2.25, 0.0], [1.0, 1.0, 1.0]]
    )
    assert record(7, experts=made).as_dict()["expert_load"][0][1] == 2.25
    many = [ExpertFigures.from_counts([1.0] * 1200, 3, iteration) for iteration in (6, 7)]
    assert many[0].load is not None and "expert_load" not in record(7, experts=many[1]).as_dict()
    assert ExpertFigures.from_counts([], 0, 7) is None and not any(
        "expert" in name for name in record(7).as_dict()
    )


def test_norm_of_parameters_and_zeros_are_shown_if_requested(capsys, tmp_path):
    made = replace(record(3), params_norm=12.5, num_zeros=34_567)
    line = made.as_dict()
    assert (line["params_norm"], line["num_zeros"]) == (12.5, 34_567)
    assert not {"params_norm", "num_zeros"} & record(3).as_dict().keys()
    for shown, text in (
        (made, " | params norm 12.500 | 34,567 zero gradients | "),
        (record(3), "grad norm 1.000 | 500 ms"),
    ):
        Console(rank=0, total_steps=10).step(shown)
        assert text in capsys.readouterr().out
        write_lines(tmp_path / "log.jsonl", [shown.as_dict()])
        page = write_report(tmp_path / "log.jsonl", tmp_path / "page.html").read_text()
        assert ("Parameter norm" in page) == ("Zeros in the gradient" in page) == (shown is made)


def test_figures_of_offload(capsys):
    known = OffloadFigures(buffers=2, moved_mib=64.0, loaded_mib=56.0)
    timed = OffloadFigures(
        buffers=2, moved_mib=64.0, loaded_mib=56.0, put_ms=2.0, load_ms=1.0, hidden=0.875
    )
    line = record(3, offload=known).as_dict()
    assert (line["offload_buffers"], line["offload_moved_mib"], line["offload_hidden"]) == (
        2,
        64.0,
        None,
    )
    assert not any("offload" in name for name in record(3).as_dict())
    for offload, shown in (
        (known, "| offloaded 64 MiB\n"),
        (timed, "| offloaded 64 MiB, 88% hidden"),
    ):
        Console(rank=0, total_steps=10).step(record(3, offload=offload))
        assert shown in capsys.readouterr().out


def test_report_sums_the_replays_of_all_steps(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [record(1, graphs=figures(6, 2)), record(2, graphs=figures(1_995, 0))]
    write_lines(log, (line.as_dict() for line in lines))
    page = write_report(log, tmp_path / "graphs.html").read_text()
    assert "2,001 micro-batches replayed, 2 eager (hit rate 99.9 %), 312 MiB" in page
    write_lines(log, [record(1).as_dict()])
    assert "CUDA graphs" not in write_report(log, tmp_path / "none.html").read_text()


def test_console_shows_no_control_characters(capsys):
    Console(rank=0, total_steps=1).say("path \x1b[31mred")
    assert "\x1b" not in capsys.readouterr().out


def test_details_are_left_out_of_a_brief_start(capsys):
    """Console.detail prints unless the console is brief; other lines are always printed."""
    for brief in (False, True):
        console = Console.of_run(0, LoggingConfig(brief_start=brief))
        console.detail("details")
        console.say("facts")
    assert capsys.readouterr().out == "details\nfacts\nfacts\n"


def test_a_terminal_shows_the_newest_step_in_a_line_that_is_overwritten(capsys, monkeypatch):
    """Steps between two printed lines share one terminal line; the next text erases this line."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    console = Console.of_run(0, LoggingConfig(log_interval=4))
    console.total_steps = 10
    for iteration in (1, 2, 3):
        console.step(record(iteration))
    console.say("saved")
    console.step(record(4))
    output = capsys.readouterr().out
    first, second, third = re.findall(r"(step +\d+/10[^\r\n]*)\r", output)
    assert len(first) == len(second) == len(third) == 59
    assert output.startswith(f"{first}\r\033[K{second}\r\033[K{third}\r\033[Ksaved\n")
    assert output.rstrip().rsplit("\n", 1)[1].startswith("step  4/10 | ")
    silent = Console(rank=1, total_steps=10, log_interval=4)
    silent.step(record(1))
    assert capsys.readouterr().out == ""


def test_a_read_log_keeps_the_last_loads_of_experts(tmp_path):
    lines = [
        {"step": 1, "expert_load": [[1, 1]]},
        {"step": 2, "expert_load": [[0, 2]]},
        {"step": 3},
    ]
    log = tmp_path / "log.jsonl"
    write_lines(log, lines)
    assert read_jsonl(log) == [{"step": 1}, *lines[1:]]


def test_report_holds_curves_summary_and_escaped_answers(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [record(i, loss=5 - 0.3 * i).as_dict() for i in range(1, 11)]
    lines.insert(5, {"iteration": 5, "valid_loss": 3.25})
    lines.append({"iteration": 10, "test_loss": 2.75})
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + "torn")
    assert len(read_jsonl(log)) == 12
    page = write_report(
        log,
        tmp_path / "r" / "report.html",
        levels={"unigram entropy": 4.5},
        answers=[{"prompt": "Why?", "answer": "<b>&"}],
    ).read_text()
    for part in (
        "<svg",
        "4.7000 → 2.0000",
        "unigram entropy 4.50",
        "&lt;b&gt;&amp;",
        "3.2500",
        "2.7500 at step 10",
    ):
        assert part in page, part


def test_report_says_what_became_of_the_targets(tmp_path):
    counts = {
        "targets_in": 12000,
        "targets_kept": 9000,
        "documents_in": 100,
        "documents_without_targets": 30,
    }
    writer = opened(
        tmp_path / "log.jsonl", first_iteration=1, opening={"data": {"training": counts}}
    )
    for iteration in (1, 2):
        writer.write(record(iteration).as_dict())
    writer.close()
    page = write_report(tmp_path / "log.jsonl", tmp_path / "page.html").read_text()
    assert (
        "<th>training targets</th><td>9,000 of 12,000 kept; 30 of 100 documents have none left</td>"
        in page
    )


def test_report_says_rates_and_how_long_steps_waited(tmp_path):
    """Medians leave out the first five steps; the share of waiting counts only steps that log
    it.
    """
    lines = [
        {**record(i).as_dict(), "tokens_per_second": 100.0 * i, "step_time_ms": 10.0 * i}
        for i in range(1, 11)
    ]
    for line in lines[:6]:
        line.pop("data_wait_ms", None)
    for line in lines[6:]:
        line["data_wait_ms"] = 0.25 * line["step_time_ms"]
    write_lines(tmp_path / "log.jsonl", lines)
    page = write_report(tmp_path / "log.jsonl", tmp_path / "page.html").read_text()
    assert "<td>800 real tokens/s</td>" in page and "<td>80.0 ms</td>" in page
    assert "<td>25.0 % of step time</td>" in page


def test_report_of_a_run_that_ended_in_nan(tmp_path):
    writer = opened(tmp_path / "log.jsonl", first_iteration=1)
    for made in (record(1), record(2, loss=math.nan, skip_reason="non-finite")):
        writer.write(made.as_dict())
    writer.close()
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write("[1]\n")  # valid JSON, but no record
    assert (
        "2.0000 → nan" in write_report(tmp_path / "log.jsonl", tmp_path / "report.html").read_text()
    )


def test_report_of_an_empty_log_is_refused(tmp_path):
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match="no training step"):
        write_report(tmp_path / "log.jsonl", tmp_path / "r.html")


def test_steps_that_were_not_taken_are_counted_by_their_reason_and_named(tmp_path):
    reasons = {2: "non-finite", 3: "no targets", 5: "no targets"}
    lines = [record(number, skip_reason=reasons.get(number)).as_dict() for number in range(1, 7)]
    assert lines[2]["skipped"] and lines[2]["skip_reason"] == "no targets"
    assert not lines[0]["skipped"] and "skip_reason" not in lines[0]
    del lines[1]["skip_reason"]  # as in logs of older versions
    write_lines(tmp_path / "log.jsonl", lines)
    page = write_report(tmp_path / "log.jsonl", tmp_path / "page.html").read_text()
    assert "<th>steps skipped as non-finite</th><td>1 (2)</td>" in page
    assert "<th>steps skipped without target tokens</th><td>2 (3, 5)</td>" in page
