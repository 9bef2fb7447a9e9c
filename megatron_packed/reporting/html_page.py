"""A page of HTML that is one file: it needs a browser, and nothing from the network. From 360
pixels of width on.
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
    """Writes the page and returns its path. What may be wider than a window stands in a ``div`` of
    class ``wide``.

    Args:
        title: plain text, the page's heading too.
        body: HTML below the heading.
        style: CSS of this page alone.
    Raises:
        OSError: it cannot be written.
    """
    page = Path(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}{style}</style><h1>{html.escape(title)}</h1>{body}</html>\n",
        encoding="utf-8",
        errors="backslashreplace",  # a title may be a path whose bytes are no text
    )
    return page
