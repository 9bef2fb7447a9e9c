"""Reader of files of numbers: one number per line, or a number and its count."""

from __future__ import annotations

import codecs
import re
from array import array
from typing import TYPE_CHECKING

from megatron_packed.cli.command import EXIT_DATA, UsageError
from megatron_packed.files.regular_files import limited_lines, open_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LINE_BYTES = 1 << 16
"""Maximum bytes of a line, because a file without line ends would fill the memory."""
MOST = 2**31
"""Maximum count of numbers in a file, with each number of a histogram counted as often as it
occurs.
"""


def read_numbers(flag: str, file: str, of: str = "a number of tokens") -> NDArray[np.int64]:
    """Return the numbers of a file in their order, each repeated by its count.

    A line is ``120`` or, in a histogram, ``120 3``, ``120,3`` or ``120<tab>3`` for three times 120.
    Empty lines, lines that begin with ``#``, and one line of headings are skipped.

    Args:
        flag: flag that named the file, for errors.
        of: meaning of each number, for errors.
    Raises:
        UsageError: the file cannot be read or has no number or too many numbers, a line has another form,
            or a number is below 1.
    """
    import numpy as np

    values, repeats = (
        array("q"),
        array("q"),
    )  # arrays need a tenth of the memory of the text
    try:
        with open_regular(file, pipes=True) as lines:
            texts = codecs.iterdecode(limited_lines(lines, _LINE_BYTES), "utf-8-sig")
            written = ((number, line.strip()) for number, line in enumerate(texts, start=1))
            rows = ((number, line) for number, line in written if line and not line.startswith("#"))
            for at, (number, line) in enumerate(rows):
                if at == 0 and not re.match(r"[+-]?\d", line):
                    continue
                columns = re.split(r"[\s,;]+", line)
                if (
                    len(columns) > 2
                    or not all(re.fullmatch(r"\d{1,18}", word) for word in columns)
                    or int(columns[0]) < 1
                ):
                    raise UsageError(
                        f"{flag} {file}, line {number}: {line[:60]!r}; every line must be {of}, at least 1, and in a "
                        "histogram its count.",
                        EXIT_DATA,
                    )
                values.append(int(columns[0]))
                repeats.append(int(columns[1]) if len(columns) == 2 else 1)
    except UnicodeDecodeError:
        raise UsageError(
            f"{flag} {file}: it is not a text file; give a file with one number per line."
        ) from None
    except ValueError as error:
        raise UsageError(
            f"{flag} {file}: {error}; give a file with one number per line.", EXIT_DATA
        ) from None
    except OSError as error:
        raise UsageError(
            f"{flag} {file}: {error.strerror}; give a file with one number per line."
        ) from None
    if not sum(repeats):
        raise UsageError(
            f"{flag} {file}: every line must be {of}, at least 1, and there must be at least one "
            "line.",
            EXIT_DATA,
        )
    if sum(repeats) > MOST:
        raise UsageError(
            f"{flag} {file}: {sum(repeats):,} numbers, but at most {MOST:,} are allowed.", EXIT_DATA
        )
    return np.repeat(np.frombuffer(values, np.int64), np.frombuffer(repeats, np.int64))
