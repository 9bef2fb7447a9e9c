"""Small files of text that a command line names: options, arguments, words of data paths."""

from __future__ import annotations

import os
import stat

MOST_BYTES = 256 * 1024
"""Limit of a file of options or arguments, 20 times what --print-config writes."""


def read_text_file(path: str, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file, without a byte-order mark and with plain line ends.

    Raises:
        ValueError: a clause that says why there is none: missing, a pipe, too large, no text.
    """
    try:
        # A pipe without a writer would block; opened without waiting, it is refused below.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL, or half of a surrogate pair
        raise ValueError("cannot be read: no file has such a name") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = "directory" if stat.S_ISDIR(mode) else "pipe or a device"
            raise ValueError(f"cannot be read: it is a {kind}, and no regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(data) > most_bytes:
        raise ValueError(f"cannot be read: it is larger than {most_bytes // 1024:,} KiB")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise ValueError("is no text in UTF-8") from None
