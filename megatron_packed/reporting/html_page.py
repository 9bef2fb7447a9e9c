"""Writer of self-contained HTML pages, which load nothing from the network.

A page is readable from a window width of 360 pixels, in light and dark colours, and on paper.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_packed.files.written_files import resolve_output, write_file
from megatron_packed.reporting.charts import COLOURS, DARK_COLOURS


def _variables(values: Mapping[str, str], colours: Sequence[str]) -> str:
    """Return CSS that defines the colours of a page and of its charts."""
    lines = {**values, **{f"c{number}": colour for number, colour in enumerate(colours)}}
    return " ".join(f"--{name}: {value};" for name, value in lines.items())


_LIGHT = {
    "paper": "#ffffff",
    "panel": "#f6f8fa",
    "text": "#1f2328",
    "muted": "#59636e",
    "line": "#d1d9e0",
    "good": "#1a7f37",
    "bad": "#cf222e",
    "warn": "#9a6700",
    "warn-panel": "#fff8c5",
}
_DARK = {
    "paper": "#0d1117",
    "panel": "#161b22",
    "text": "#e6edf3",
    "muted": "#9198a1",
    "line": "#3d444d",
    "good": "#3fb950",
    "bad": "#f85149",
    "warn": "#d29922",
    "warn-panel": "#2b2111",
}
_STYLE = f"""
:root {{ color-scheme: light dark; {_variables(_LIGHT, COLOURS)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK, DARK_COLOURS)} }} }}
"""
_RULES = """
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 0 auto; padding: 1.5em 1em 3em;
  background: var(--paper); color: var(--text); overflow-wrap: anywhere }
h1 { font-size: 1.5em; line-height: 1.25; margin: 0 0 .4em }
h2 { font-size: 1.15em; margin: 2em 0 .6em; padding-bottom: .25em; border-bottom: 1px solid var(--line) }
h3 { font-size: 1em; margin: 1.4em 0 .4em }
small, .muted { color: var(--muted) }
.wide { overflow-x: auto; overflow-wrap: normal }
pre { background: var(--panel); border-radius: 6px; padding: .8em 1em; margin: .4em 0; font-size: .87em;
  white-space: pre-wrap; overflow-wrap: anywhere }
.wide > pre { white-space: pre }
table { border-collapse: collapse }
td, th { padding: .3em 1.2em .3em 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }
th { font-weight: 500 }
thead th { color: var(--muted); font-weight: 400 }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
details > summary { cursor: pointer; padding: .25em 0 }
@media (max-width: 600px) { td, th { padding-right: .7em } }
@media print {
  body { max-width: none; padding: 0; font-size: 11px }
  h2, h3, summary { break-after: avoid } figure, tr, .tile { break-inside: avoid }
  .wide { overflow: visible } details::details-content { content-visibility: visible; block-size: auto }
}
"""
CHARTS_STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1.2em 2em }
figure { margin: 0; min-width: 0 } figcaption span { display: inline-block; margin-left: 1em; font-size: .85em }
figure > svg { display: block; width: 100%; height: auto; fill: var(--muted) }
"""
"""CSS of charts, for pages that have a ``div`` of class ``charts``."""

_UNSAFE = dict.fromkeys(
    (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)),
    "\N{REPLACEMENT CHARACTER}",
)
"""Replacements of control characters, and of marks that reverse the direction of text. Prompts and
file names may contain them.
"""


def write_html(path: str | os.PathLike[str], title: str, body: str, style: str = "") -> Path:
    """Write a page and return its path.

    Args:
        path: file to write; missing folders are created.
        title: plain text; also the heading of the page.
        body: HTML below the heading. Content that may be wider than the window must be in a ``div``
            of class ``wide``, which scrolls.
        style: additional CSS, with the variables of the page for colours: ``var(--text)``.
    Raises:
        OSError: the page cannot be written, or the path is a device; an earlier page is unchanged.
    """
    page = Path(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    text = (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}{_RULES}{style}</style><h1>{html.escape(title)}</h1>{body}</html>\n"
    )
    # A title may be a path with bytes that are not valid text.
    data = text.translate(_UNSAFE).encode("utf-8", errors="backslashreplace")
    try:
        write_file(resolve_output(page), data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(page)) from error
    return page


def folded(heading: str, body: str, *, opened: bool = False) -> str:
    """Return HTML that shows ``body`` after a click on ``heading``, which is plain text."""
    return (
        f"<details{' open' if opened else ''}><summary>{html.escape(heading)}</summary>"
        f"{body}</details>"
    )


def named_rows(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table with a name and a value in each row, both plain text."""
    table_rows = (f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows)
    return f"<div class='wide'><table class='named'>{''.join(table_rows)}</table></div>"


def table(rows: Sequence[Mapping[str, object]], left: int = 1) -> str:
    """Return a table with a heading per column; a row maps the name of a column to its cell.

    Args:
        rows: at least one row; the first has all columns.
        left: number of columns at the left that hold text; the others hold numbers.
    """
    names = list(rows[0])
    kinds = ["" if place < left else " class='number'" for place in range(len(names))]
    head = "".join(f"<th{kind}>{html.escape(name)}</th>" for kind, name in zip(kinds, names))
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}>{html.escape(str(row.get(name, '')))}</td>"
            for kind, name in zip(kinds, names)
        )
        + "</tr>"
        for row in rows
    )
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def chart_html(title: str, remark: str, svg: str, names: str = "") -> str:
    """Return a chart with its heading.

    Args:
        title, remark: plain text.
        svg: the chart.
        names: HTML after the heading, with the names of runs.
    """
    heading = f"<b>{html.escape(title)}</b> <small>{html.escape(remark)}</small>"
    return f"<figure><figcaption>{heading} {names}</figcaption>{svg}</figure>"
