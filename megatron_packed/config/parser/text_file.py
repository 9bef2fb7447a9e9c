"""Reader of small text files that a command line names: options, arguments, words of data paths."""

from __future__ import annotations

from megatron_packed.files.regular_files import open_regular

MOST_BYTES = 256 * 1024
"""Maximum size of a file of options or arguments, 20 times the output of --print-config."""


def read_text_file(path: str, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file, without a byte-order mark and with plain line ends.

    Raises:
        ValueError: a clause with the reason why the file cannot be read: missing, a pipe, too large,
            not text.
    """
    try:
        with open_regular(path) as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL, or half of a surrogate pair
        raise ValueError("cannot be read: this is not a valid file name") from None
    if len(data) > most_bytes:
        raise ValueError(f"cannot be read: it is larger than {most_bytes // 1024:,} KiB")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
