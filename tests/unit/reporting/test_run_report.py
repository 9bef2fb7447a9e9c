"""Report page of a run: its parts, what was run, warnings, validations and escaping."""

import os
import re
import resource
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from megatron_packed.reporting.curves import Run
from megatron_packed.reporting.html_page import compact, duration, render, write_page
from megatron_packed.reporting.loss_warnings import rising_validation
from megatron_packed.reporting.run_report import outcome, write_report
from megatron_packed.reporting.run_warnings import warnings_of
from support.json_lines import write_lines
from support.step_records import record

EVIL = "<script>alert('&')</script>\u202e\x1b[31m"
HASH = "0123456789abcdef" * 4


def facts(**changes):
    return {
        "last_iteration": 4,
        "model": {
            "pattern": "M*-E",
            "layers": 4,
            "hidden_size": 64,
            "vocabulary": 260,
            "parameters": 1_234_567,
            "active_parameters": 900_000,
            "precision": "fp32",
        },
        "layout": {
            "processes": 4,
            "data_parallel": 2,
            "tensor_parallel": 2,
            "context_parallel": 1,
            "expert_parallel": 1,
            "tokens_per_pack": 256,
            "packs_per_step": 4,
            "seq_length": 256,
        },
        "files": {"training": [["a.jsonl", 0.75], ["b.jsonl", 0.25]], "validation": []},
        "machine": {
            "device": "NVIDIA H200",
            "devices": 4,
            "hosts": 2,
            "host": "node1",
            "cpu": "A processor",
            "cores": 96,
            "system": "Linux",
        },
        "versions": {"megatron_packed": "0.1.0", "torch": "2.9.1", "CUDA": "13.0"},
        "packing": ["271 packs of 256 slots."],
        "flags": ["--sft", "--lr 0.003"],
        **changes,
    }


def lines_of_a_run():
    """Return the log of a run of four steps that was started again after the second one."""
    steps = [
        {**record(number, loss=5.0 - number).as_dict(), "plan_hash": HASH} for number in range(1, 5)
    ]
    counts = {"documents_in": 100, "tokens_kept": 5000, "targets_in": 900, "targets_kept": 800}
    data = {"training": {**counts, "documents_without_targets": 3}}
    first = {"step": 0, "time": "2026-01-31T12:00:00+00:00"}
    again = {"step": 2, "time": "2026-01-31T13:00:00+00:00"}
    steps[0] |= {"run": facts(), "data": data, "kernels": {"scan": "mamba_ssm"}, "starts": [first]}
    steps[2] |= {"starts": [first, again]}
    saved = {"iteration": 2, "checkpoint": "run/step_2", "checkpoint_mib": 1.5}
    found = {
        "valid_loss": 2.5,
        "valid_target_tokens": 70,
        "valid_exact_match": 0.25,
        "valid_exact_match_count": 64,
    }
    end = {
        "time": "2026-01-31T13:02:05+00:00",
        "exit_code": 0,
        "notes": [["CUDA graphs", "4 replayed"]],
    }
    return [
        *steps[:2],
        {"iteration": 2, **found, "plan_hash": "v"},
        saved,
        *steps[2:],
        {"iteration": 4, **found, "valid_loss": 2.25, "plan_hash": "v"},
        {"iteration": 4, "end": end},
    ]


@pytest.fixture
def page(tmp_path):
    """Function that returns the page about the lines of a log."""

    def of(lines, **options):
        log = tmp_path / "log.jsonl"
        write_lines(log, lines)
        return write_report(log, tmp_path / "page.html", **options).read_text()

    return of


class Outline(HTMLParser):
    """Elements of a page, and whether they are closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.found = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


class Tables(HTMLParser):
    """Rows of each table of a page by its class; a cell is a list of its elements and texts."""

    def __init__(self, page):
        super().__init__()
        self.found, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self.open.append((dict(attributes).get("class"), []))
            self.found.append(self.open[-1])
        elif self.open and tag == "tr":
            self.open[-1][1].append([])
        elif self.open and tag in ("td", "th"):
            self.open[-1][1][-1].append([])
        elif self.open and tag not in ("thead", "tbody"):
            self.add(f"<{tag}>")

    def handle_endtag(self, tag):
        if tag == "table":
            self.open.pop()

    def handle_data(self, text):
        if self.open and text.strip():
            self.add(text)

    def add(self, text):
        self.open[-1][1][-1][-1].append(text)


def tables_after(page, heading):
    """Return the rows of the tables of a section, with the cells as text."""
    section = page.partition(f"<h2>{heading}</h2>")[2].partition("<h2>")[0]
    return [[["".join(cell) for cell in row] for row in rows] for _, rows in Tables(section).found]


def test_the_page_has_all_parts_in_order_and_loads_nothing(page):
    """The verdict comes first, and everything that is long is folded."""
    text = page(lines_of_a_run())
    outline = Outline(text)
    assert outline.open == []
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "Curves",
        "Validation",
        "What was run",
        "Numbers",
        "Details",
    ]
    assert re.findall("<summary>(.*?)</summary>", text) == [
        f"{HASH[:12]}...",
        "Flags as given (2)",
        "Packing",
        "CUDA graphs",
    ]
    assert text.index("Finished: 4 steps.") < text.index("class='tiles'") < text.index("<h2>")
    tags = {tag for tag, _ in outline.found}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    loaded = [a[name] for _, a in outline.found for name in ("src", "href") if name in a]
    assert all(address.startswith("#") for address in loaded) and "http" not in text
    assert "prefers-color-scheme: dark" in text and "@media print" in text


def test_the_page_says_what_was_run(page):
    rows = dict(re.findall("<tr><th>(.*?)</th><td>(.*?)</td></tr>", page(lines_of_a_run())))
    expected = {
        "model": "M*-E: 4 layers, hidden size 64, vocabulary 260",
        "parameters": "1,234,567 (1.23 M), 900,000 active per token; fp32",
        "parallel layout": "4 processes: data 2, tensor 2, context 1, expert 1",
        "training data": "a.jsonl (75 % of the tokens); b.jsonl (25 % of the tokens): 100 documents, 5,000 tokens, "
        "800 targets",
        "machine": "4 x NVIDIA H200, A processor, 96 cores; host node1 and 1 more; Linux",
        "versions": "megatron_packed 0.1.0 · torch 2.9.1 · CUDA 13.0",
        "kernels": "scan mamba_ssm",
        "checkpoints": "saved at step 2; newest run/step_2 (1.5 MiB)",
        "best validation": "step 4, loss 2.2500, which was not saved",
        "started": "2026-01-31 12:00:00 +0000",
        "restarted": "2026-01-31 13:00:00 +0000 after step 2",
        "ended": "2026-01-31 13:02:05 +0000, 2 min 5 s since the last start",
        "plan hash": f"<details title='{HASH}'><summary>{HASH[:12]}...</summary>{HASH}</details>",
    }
    assert {name: rows.get(name) for name in expected} == expected


def test_the_page_says_what_adapters_train(page):
    lines = lines_of_a_run()
    lines[0]["run"]["model"]["trained"] = {"attention": 12_000, "experts": 3_000, "broken": "x"}
    rows = dict(re.findall("<tr><th>(.*?)</th><td>(.*?)</td></tr>", page(lines)))
    assert rows["trained"].startswith(
        "15,000 of 1,234,567 parameters (1.2 %): attention 12,000, experts 3,000"
    )
    assert "trained" not in dict(
        re.findall("<tr><th>(.*?)</th><td>(.*?)</td></tr>", page(lines_of_a_run()))
    )


def test_main_numbers(page):
    tile = "<div class='tile'><span>(.*?)</span><b>(.*?)</b><small>(.*?)</small></div>"
    found = re.findall(tile, page(lines_of_a_run()))
    assert {name: (value, remark) for name, value, remark in found} == {
        "training loss": ("4.000 → 1.000", "first and last step"),
        "best validation loss": ("2.250", "perplexity 9.488, step 4"),
        "tokens": ("3,600", "2,000 of them targets"),
        "time": ("2.0 s", "in steps, 1 restart"),
        "tokens per second": ("1,800", "median, without padding"),
        "parameters": ("1.23 M", "M*-E, 900 k active"),
    }
    assert [compact(value) for value in (0, 9999, 12_345, 1.5e9)] == [
        "0",
        "9,999",
        "12.3 k",
        "1.5 B",
    ]
    assert [duration(value) for value in (3.21, 60, 3750, 90_061)] == [
        "3.2 s",
        "1 min",
        "1 h 2 min",
        "1 d 1 h",
    ]
    # A damaged line of a log may have any number.
    assert [duration(value) for value in (1e300, float("inf"), float("nan"))] == [
        "1e+300 s",
        "inf s",
        "nan s",
    ]


@pytest.mark.parametrize(
    ("end", "planned", "kind", "sentence"),
    [
        ({"exit_code": 0}, 4, "good", "Finished: 4 steps."),
        ({"exit_code": 0}, 9, "open", "Stopped after step 4 of 9."),
        ({"exit_code": 0, "stopped_early": True}, 9, "good", "Finished: validations stopped the"),
        ({"exit_code": 75}, 9, "open", "Stopped on request after step 4 of 9."),
        ({"exit_code": 20}, 9, "bad", "Stopped at step 4 of 9 by a non-finite loss"),
        ({"exit_code": 24}, 9, "bad", "Ended after step 4 of 9 with exit code 24."),
        (None, 9, "open", "Not finished: the log ends at step 4 of 9."),
    ],
)
def test_the_verdict_says_how_the_run_ended(end, planned, kind, sentence):
    lines = lines_of_a_run()[:-1]
    lines[0]["run"] = facts(last_iteration=planned)
    found = outcome(Run("a", [*lines, *([{"iteration": 4, "end": end}] if end else [])]))
    assert found[0] == kind and found[1].startswith(sentence)


def test_an_end_before_a_restart_does_not_count():
    """A run that is going on after a stop is not finished, whatever its first part logged."""
    lines = lines_of_a_run()
    stopped = {"iteration": 2, "end": {"exit_code": 75}}
    assert outcome(Run("a", [*lines[:2], stopped, *lines[2:-1]]))[0] == "open"
    assert Run("a", lines).restarts == [2]


def test_validations_are_a_table_with_changes_and_metrics(page):
    [rows] = tables_after(page(lines_of_a_run()), "Validation")
    assert rows == [
        ["step", "loss", "change", "perplexity", "targets", "exact match", ""],
        ["2", "2.5000", "", "12.18", "70", "25.0 % of 64", ""],
        ["4", "2.2500", "-0.2500", "9.488", "70", "25.0 % of 64", "best"],
    ]
    many = [{"iteration": step, "valid_loss": 3.0} for step in range(30)]
    text = page([record(1).as_dict(), *many])
    assert "<summary>18 earlier validations</summary>" in text
    assert [len(rows) for rows in tables_after(text, "Validation")] == [1 + 18, 1 + 12]
    assert "no validation" in page([record(1).as_dict()])


def test_answers_are_shown_with_the_expected_and_earlier_ones(page):
    """The last answers are open, earlier answers to the same prompt are folded."""
    samples = [
        [{"prompt": "a?", "answer": "x", "expected": "y"}, {"prompt": "b?", "answer": "old"}],
        [{"prompt": "a?", "answer": "y", "expected": "y"}, {"prompt": "b?", "answer": "z"}],
    ]
    records = [{"iteration": 5, "samples": samples[0]}, {"iteration": 7, "samples": samples[0]}]
    records += [{"iteration": 10, "samples": samples[1]}]
    step = record(1).as_dict()
    text = page([step, *records])
    answers, *earlier = tables_after(text, "Answers at step 10")
    folded = "<details><summary>Earlier answers<div>"
    assert answers == [
        ["prompt", "answer", "expected"],
        ["<p>a?", f"<p>y{folded}", "<p>as expected"],
        ["<p>b?", f"<p>z{folded}", ""],
    ]
    assert earlier == [
        [["steps", "answer"], ["5 to 7", "x"]],
        [["steps", "answer"], ["5 to 7", "old"]],
    ]
    assert text.count("<p class='same'>as expected</p>") == 1
    changed = [
        {"iteration": 15, "samples": [{"prompt": "c?", "answer": "q", "expected": "r"}] * 30}
    ]
    text = page([step, *records, *changed])
    [answers] = tables_after(text, "Answers at step 15")
    assert answers[1:] == [["<p>c?", "<p>q", "<p>r"]] * 20
    assert "Earlier" not in text and "answers to 10 more prompts" in text
    assert "Answers" not in page([step])
    alone = page([step, {"iteration": 1, "samples": [{"prompt": "a", "answer": "b"}]}])
    assert "expected" not in alone


def test_nothing_from_a_log_becomes_html(page):
    """Paths, flags, names and notes may hold any text; the page shows it unchanged."""
    lines = lines_of_a_run()
    lines[0]["run"] = facts(
        flags=[f"--save {EVIL}"],
        packing=[EVIL],
        files={"training": [[EVIL, None]]},
        machine={**facts()["machine"], "host": EVIL, "cpu": EVIL},
        versions={EVIL: EVIL},
    )
    lines[0]["run"]["model"] |= {"pattern": EVIL, "precision": EVIL}
    lines[0] |= {"kernels": {EVIL: EVIL}}
    lines[3]["checkpoint"] = EVIL
    lines[-1]["end"]["notes"] = [[EVIL, EVIL]]
    asked = {"prompt": EVIL, "answer": EVIL, "expected": "no"}
    lines += [{"iteration": 4, "samples": [{**asked, "answer": "x"}]}] * 2
    lines += [{"iteration": 4, "samples": [asked]}, {"iteration": 4, "samples": [asked]}]
    text = page(lines, title=EVIL, levels={"<b>": 2.0}, answers=[asked])
    assert "<script" not in text and "<b></text>" not in text
    assert "\u202e" not in text and "\x1b" not in text and "\ufffd[31m" in text
    assert text.count("&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;") >= 19
    assert Outline(text).open == []


def test_nothing_from_a_packing_becomes_html():
    """Names in tables, flags and text are shown unchanged, and a template without them is refused."""
    rows = {EVIL: [{EVIL: EVIL, "packs": EVIL}]}
    report = SimpleNamespace(flags=[EVIL], tables=lambda: rows, lines=lambda: [EVIL])
    chart = {"title": EVIL, "remark": EVIL, "names": [("red", EVIL)], "svg": "<svg></svg>"}
    text = render("sizing_page.html", title=EVIL, report=report, figures=[chart])
    assert "<script" not in text and text.count("&lt;script&gt;") == 11 and "<svg></svg>" in text
    assert Outline(text).open == []
    with pytest.raises(ValueError, match="'report' is undefined"):
        render("sizing_page.html", title="a")


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FRAME = """<iframe id=f width=400 height=900 src=page.html></iframe><script>
f.onload = () => {
  const page = f.contentDocument
  page.querySelectorAll("details").forEach(part => part.open = true)
  document.title = page.documentElement.scrollWidth <= f.contentWindow.innerWidth ? "fits" : "too wide"
}</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_fits_a_phone(page, tmp_path):
    """At a width of 400 pixels nothing but wide tables scrolls sideways, even with long words."""
    lines = lines_of_a_run()
    lines[0]["run"] = facts(packing=["x" * 300], flags=[f"--save {'y' * 300}"])
    lines += [{"iteration": 4, "samples": [{"prompt": "z" * 300, "answer": "z" * 300}]}]
    page(lines, title="t" * 300)
    (tmp_path / "frame.html").write_text(FRAME)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    command = [BROWSER, *flags, (tmp_path / "frame.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert "<title>fits</title>" in shown, shown


def warned(changes=(), validations=(), data=None):
    """Return the warnings about a run of 30 steps with some other fields, step -> fields."""
    steps = [{**record(n, loss=5.0 - n / 10).as_dict(), "data_wait_ms": 1.0} for n in range(1, 31)]
    for number, fields in dict(changes).items():
        steps[number - 1] |= fields
    if data:
        steps[0]["data"] = data
    checked = [
        {"iteration": number, "valid_loss": loss, "valid_target_tokens": targets}
        for number, loss, targets in validations
    ]
    return warnings_of(Run("a", steps + checked))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"changes": {7: {"skipped": True, "skip_reason": "non-finite", "lm_loss": "nan"}}},
            "1 (7)",
        ),
        (
            {"changes": {7: {"skipped": True, "skip_reason": "no targets"}}},
            "without target tokens: 1",
        ),
        (
            {"changes": {7: {"skipped": True, "skip_reason": "spike", "loss_median": 2}}},
            "1 of these",
        ),
        ({"changes": {7: {"grad_norm_median": 2}}}, "--loss-spike-policy skip would"),
        ({"changes": {7: {"lm_loss": 0.0}}}, "The loss of step 7 is exactly 0"),
        ({"changes": {n: {"lm_loss": 9.0} for n in range(28, 31)}}, "loss did not fall"),
        ({"validations": [(5, "nan", 0)]}, "validation at step 5 had no target tokens"),
        ({"validations": [(5, "inf", 9)]}, "validation loss at step 5 is not finite"),
        ({"changes": {7: {"graph_replays": 3, "graph_fallbacks": 1}}}, "1 of 4 micro-batches ran"),
        ({"changes": {n: {"data_wait_ms": 250.0} for n in range(1, 31)}}, "50.0 % of their time"),
        (
            {"data": {"training": {"documents_in": 9, "documents_without_targets": 4}}},
            "4 of 9 training documents keep no target",
        ),
    ],
)
def test_each_problem_is_one_warning(options, words):
    [sentence] = warned(**options)
    assert words in sentence, sentence
    assert warned() == []


def test_a_rising_validation_loss_is_a_warning_after_two_worse_values():
    """One higher value may be noise, and a falling loss is no problem."""
    assert rising_validation([(1, 3.0), (2, 2.0), (3, 2.3)]) == ""
    assert rising_validation([(1, 3.0), (2, 2.0), (3, 2.3), (4, 2.01)]) == ""
    assert rising_validation([(1, 3.0), (2, 2.5), (3, 2.4), (4, float("nan"))]) == ""
    text = rising_validation([(1, 3.0), (2, 2.0), (3, 2.3), (4, 2.4)])
    assert "best at step 2 (2.0000) and is 2.4000 at step 4" in text


@pytest.mark.parametrize("data", [{"training": 7}, {"training": {"targets_in": 1}}])
def test_a_damaged_log_is_refused_with_one_sentence(page, data):
    lines = lines_of_a_run()
    lines[0]["data"] = data
    with pytest.raises(ValueError, match=r"log.jsonl: a field of the log has a wrong value \("):
        page(lines)


def test_a_log_of_an_older_version_has_a_page(page):
    text = page([record(1).as_dict()])
    assert "The log ends at step 1." in text and "older version" in text


def test_templates_are_read_only_for_a_page():
    """A run without a page imports no jinja2 for its report."""
    code = "import sys, megatron_packed.reporting.run_report; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_full_disk_keeps_the_earlier_page(tmp_path):
    """The error names the page, and no temporary file is left."""
    page = write_page(tmp_path / "run.html", "first")
    before = page.read_bytes()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*run\.html"):
            write_page(page, "the second page")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in tmp_path.iterdir()] == ["run.html"]
    assert page.read_bytes() == before


def test_a_page_replaces_no_device_and_follows_only_the_users_link(tmp_path):
    """A link under a temporary name is another user's; a link at the page is the user's own."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".run.html.tmp").symlink_to(tmp_path / "victim")
    (tmp_path / "run.html").symlink_to(tmp_path / "page.html")
    write_page(tmp_path / "run.html", "title")
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "run.html").is_symlink() and "title" in (tmp_path / "page.html").read_text()
    # A pipe stands for a device: without the check, the page would replace it.
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe.html").symlink_to(tmp_path / "pipe")
    with pytest.raises(OSError, match="it names a device, a pipe"):
        write_page(tmp_path / "pipe.html", "title")
    assert (tmp_path / "pipe").is_fifo()
