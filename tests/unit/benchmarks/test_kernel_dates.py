"""Figures that are older than a default kernel say with which kernels they were measured."""

import json
import re
from datetime import datetime
from pathlib import Path

import pytest

import harness
import kernel_dates
import tables

ROOT = Path(__file__).parents[3]
GUIDES = sorted(
    path
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    # The list of benchmarks and the generated matrix quote no figure.
    if path.parent.name != "measurements"
    and path.name not in ("benchmarks.md", "support_matrix.md")
)
LINK = re.compile(r"\]\((?:docs/)?(?:\.\./)*measurements/(\w+)\.md")
FIGURE = re.compile(r"\d+(\.\d+)?( ms|%| %| GiB| lines/s|\b)")
SINCE = kernel_dates.table()["ssd"]["defaults"][-1]["since"]


def document(name):
    return json.loads((harness.RESULTS / f"{name}.json").read_text())


def results_of(page):
    """Return the result files of a page that exist, by name."""
    names = tables.tables_of(tables.TEMPLATES / f"{page}.md")
    files = {file for name in names for file in tables.TABLES[name].files}
    return {name: document(name) for name in files if (harness.RESULTS / f"{name}.json").exists()}


def blocks_of(text):
    """Yield the paragraphs, items of lists and rows of tables of a page, without code."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.S)):
        yield from re.split(r"\n(?=\||- )", paragraph.strip())


def has_date(text, date):
    """Return whether a text has the date of a result, as 2026-11-21 or 21 November."""
    day = datetime.strptime(date.split()[0], "%Y-%m-%d")
    return date.split()[0] in text or re.search(rf"\b{day.day} {day:%B}\b", text) is not None


def problem_of(text, results):
    """Return what a text lacks that quotes a figure from a page with these results; "" if nothing."""
    if not any(kernel_dates.old_kernels(*result) for result in results.items()):
        return ""
    text = " ".join(text.split())
    dated = {name: one for name, one in results.items() if has_date(text, one["date"])}
    if not dated:
        return f"no date of {sorted({one['date'] for one in results.values()})}"
    old = [kernel_dates.old_kernels(*result) for result in dated.items()]
    named = {one.kernels for kernels in old for one in kernels}
    if all(old) and not any(kernels in text for kernels in named):
        return f"kernels of that time, one of {sorted(named)}"
    return ""


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_quoted_figure_is_of_todays_kernels_or_names_its_own(guide):
    problems = []
    for block in blocks_of(guide.read_text()):
        pages = {page for page in LINK.findall(block) if page != "README"}
        prose = re.sub(r"`[^`]*`|\([^()]*\)|\b\d{4}-\d\d-\d\d\b", "", block)
        if pages and FIGURE.search(prose):
            problems += [
                f"{block[:90]!r} lacks {problem}"
                for page in sorted(pages)
                if (problem := problem_of(block, results_of(page)))
            ]
    assert problems == []


@pytest.mark.parametrize(
    "template", sorted(tables.TEMPLATES.glob("*.md")), ids=lambda path: path.stem
)
def test_pages_of_measurements_name_kernels_that_are_no_longer_the_default(template):
    """The page and its row in the list of pages say that a result has older kernels."""
    page = (tables.DOCS / template.name).read_text()
    row = next(
        line
        for line in (tables.DOCS / "README.md").read_text().splitlines()
        if f"]({template.name})" in line
    )
    for name, result in results_of(template.stem).items():
        old = kernel_dates.old_kernels(name, result)
        item = page.partition(f"\n- `{name}.json`")[2].partition("\n- ")[0].partition("\n\n")[0]
        if "{{circumstances}}" in template.read_text():
            assert [one.kernels for one in old if one.kernels not in item] == []
        else:
            assert not old, f"{template.name} has no {{{{circumstances}}}}"
        assert not old or f"{result['date'].split()[0]} with older kernels" in row


def test_every_result_says_which_kernels_it_measures():
    for table in tables.TABLES.values():
        for name in table.files:
            kernel_dates.parts_of(name)
    with pytest.raises(KeyError, match="which kernels new_result"):
        kernel_dates.parts_of("new_result")


VERSIONS = {"quack-kernels": "1", "flash-attn-4": "1", "mamba-ssm": "1"}


@pytest.mark.parametrize(
    ("date", "versions", "kernels"),
    [
        ("2026-11-22 09:00 UTC", VERSIONS, "mamba-ssm's scan"),
        (f"{SINCE} UTC", VERSIONS, ""),
        ("2026-11-22 09:00 UTC", {}, "the reference scan"),
    ],
)
def test_kernels_of_a_result_follow_from_its_date_and_its_packages(date, versions, kernels):
    result = {"device": "NVIDIA H200", "date": date, "versions": versions}
    assert [one.kernels for one in kernel_dates.old_kernels("ssd", result)] == [kernels] * bool(
        kernels
    )
    assert kernel_dates.old_kernels("ssd", result | {"device": "CPU (x86_64)"}) == []


def test_a_default_of_today_needs_its_package():
    """A result made without flash-attn 4 is not one of the default attention."""
    result = {"device": "NVIDIA H200", "date": "2027-01-01 00:00 UTC", "versions": {}}
    old = kernel_dates.old_kernels("capacity_cost", result)
    assert ("TransformerEngine's attention", "flash-attn 4") in [one[1:] for one in old]


OLD = {"full_step": {"device": "NVIDIA H200", "date": "2026-11-22 09:26 UTC", "versions": VERSIONS}}
NEW = {"full_step": OLD["full_step"] | {"date": "2026-11-28 09:26 UTC"}}


@pytest.mark.parametrize(
    ("text", "results", "problem"),
    [
        ("A step takes 62.4 ms", NEW, ""),
        ("A step takes 62.4 ms", OLD, "no date of"),
        ("A step takes 62.4 ms (2026-11-22)", OLD, "kernels of that time"),
        ("A step takes 62.4 ms (22 November, with mamba-ssm's scan)", OLD, ""),
        ("A step takes 62.4 ms (2 November, with mamba-ssm's scan)", OLD, "no date of"),
        # A page has results of two dates, and the text quotes the one with today's kernels.
        ("A step takes 50 ms (2026-11-28)", OLD | {"model_step": NEW["full_step"]}, ""),
    ],
)
def test_what_a_text_must_say(text, results, problem):
    found = problem_of(text, results)
    assert found.startswith(problem) and bool(found) == bool(problem)


KINDS = "layouts_kinds_hybrid1b_graphs"
SPEEDS = {
    "data": [(KINDS, "dp2 zero")],
    "expert": [("layouts_kinds_hybrid1b_moe_graphs", "ep2 allgather")],
    "context": [(KINDS, "cp2 state zero overlap"), (KINDS, "cp2 a2a zero overlap")],
    "tensor": [(KINDS, "tp2 sp"), (KINDS, "tp2 sp overlap")],
}
"""Kind of parallelism -> newest measurements of its speed: table and layout."""


@pytest.mark.parametrize("kind", SPEEDS)
def test_the_table_of_layouts_has_the_newest_speeds(kind):
    text = (ROOT / "docs" / "launching.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| [{kind}]"))
    results = tables.Results(harness.RESULTS)
    graphs = "graphs=full_iteration (full)"
    measured = [
        results.cell(table, f"layout={layout}", graphs, "of one GPU's")
        for table, layout in SPEEDS[kind]
    ]
    assert re.findall(r"\b0\.\d{3}\b", row) == measured
