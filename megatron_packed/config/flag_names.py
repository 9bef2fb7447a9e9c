"""Spellings of the flags that messages of lower layers name: ``SEQ_LENGTH`` is ``--seq-length``.

A test compares the names that the package uses with the options and with the flags of commands. It
also fails if those layers spell a flag elsewhere.
"""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if not name.isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return "--" + name.lower().replace("_", "-")
