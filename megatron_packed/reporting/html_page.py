"""Writer of self-contained HTML pages from the templates beside this module."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_packed.files.written_files import resolve_output, write_file
from megatron_packed.reporting.charts import COLOURS, DARK_COLOURS
from megatron_packed.reporting.page_filters import FILTERS

_UNSAFE = dict.fromkeys(
    (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)),
    "\N{REPLACEMENT CHARACTER}",
)
"""Replacements of control characters, and of marks that reverse the direction of text. Prompts and
file names may contain them.
"""


def render(template: str, **values: object) -> str:
    """Return the HTML of a template with the given values, which are escaped.

    Args:
        template: name of a file beside this module.
        values: variables of the template; every page has a ``title``.
    Raises:
        ValueError: a value that the template needs is missing.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    environment.globals |= {"colours": COLOURS, "dark_colours": DARK_COLOURS}
    try:
        return environment.get_template(template).render(values)
    except jinja2.TemplateError as error:
        raise ValueError(error.message) from error


def write_page(path: str | os.PathLike[str], html: str) -> Path:
    """Write a page and return its path.

    Args:
        path: file to write; missing folders are created.
        html: the page, from `render`.
    Raises:
        OSError: the page cannot be written, or the path is a device; an earlier page is unchanged.
    """
    page = Path(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    # A title may be a path with bytes that are not valid text.
    data = html.translate(_UNSAFE).encode("utf-8", errors="backslashreplace")
    try:
        write_file(resolve_output(page), data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(page)) from error
    return page
