"""Writer of self-contained HTML pages, which load nothing from the network.

A page is readable from a window width of 360 pixels.
"""

from __future__ import annotations

import html
import os
from pathlib import Path

_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2em auto; padding: 0 1em; background: #fff;
  color: #222; overflow-wrap: anywhere }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
.wide, pre { overflow-x: auto; overflow-wrap: normal }
pre { background: #f5f5f5; padding: 1em }
table { border-collapse: collapse }
td, th { padding: .25em .9em .25em 0; text-align: left; vertical-align: top }
"""


def write_html(path: str | os.PathLike[str], title: str, body: str, style: str = "") -> Path:
    """Write a page and return its path.

    Args:
        path: file to write; missing folders are created.
        title: plain text; also the heading of the page.
        body: HTML below the heading. Content that may be wider than the window must be in a ``div``
            of class ``wide``, which scrolls.
        style: additional CSS.
    Raises:
        OSError: the page cannot be written.
    """
    page = Path(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}{style}</style><h1>{html.escape(title)}</h1>{body}</html>\n",
        encoding="utf-8",
        errors="backslashreplace",  # a title may be a path with bytes that are not valid text
    )
    return page
