"""Reader of small text files that a command line names: options, arguments, words of data paths."""

from __future__ import annotations

import os
import stat

MOST_BYTES = 256 * 1024
"""Maximum size of a file of options or arguments, 20 times the output of --print-config."""


def read_text_file(path: str, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file, without a byte-order mark and with plain line ends.

    Raises:
        ValueError: a clause with the reason why the file cannot be read: missing, a pipe, too large,
            not text.
    """
    try:
        # Opening a pipe that has no writer would block; O_NONBLOCK prevents this, and the pipe is
        # refused below.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL, or half of a surrogate pair
        raise ValueError("cannot be read: this is not a valid file name") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = "directory" if stat.S_ISDIR(mode) else "pipe or a device"
            raise ValueError(f"cannot be read: it is a {kind}, not a regular file")
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
        raise ValueError("is not UTF-8 text") from None
