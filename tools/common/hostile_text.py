"""Texts and bytes of hostile files, by a name: templates, JSON, YAML, pickles, streams."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import struct
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

ESCAPE = "\x1b[31m"
"""Control characters that colour a terminal's text."""
SECRET_NAME = "PAYLOAD_SECRET"
"""Environment variable whose value no output may contain."""


class Canary(NamedTuple):
    """Traces of a payload that ran or that read what it must not read."""

    file: Path
    """File that code of a payload makes."""
    outside: Path
    """Folder next to the files of the case, with `secret.txt` and sound copies of other files."""
    secret: str
    """Text in `secret.txt` and in the environment variable `SECRET_NAME`."""


class Runs:
    """Object whose pickle calls a function when pickle loads it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def pickles(canary: Canary) -> dict[str, bytes]:
    """Return pickles that make the canary's file if something loads them."""
    import os
    import subprocess

    path = str(canary.file)
    touch = f"open({path!r}, 'w')"
    return {
        "os.system": pickle.dumps(Runs(os.system, f"touch {path}")),
        "subprocess": pickle.dumps(Runs(subprocess.check_call, ["touch", path])),
        "eval": pickle.dumps(Runs(eval, touch)),
        "exec in protocol 0": f"cbuiltins\nexec\n(S{touch!r}\ntR.".encode(),
        "nested reduce": pickle.dumps(Runs(eval, f"__import__('os').system('touch {path}')"), 5),
        "operator.attrgetter": (
            f"coperator\nattrgetter\n(S'system'\ntR(cimportlib\nimport_module\n(S'os'\ntRtR"
            f"(S'touch {path}'\ntR."
        ).encode(),
        "torch.load again": (
            f"ctorch.serialization\nload\n(S{str(canary.outside / 'pickle.pt')!r}\ntR."
        ).encode(),
        "_rebuild of eval": f"ctorch._utils\n_rebuild_tensor_v2\n(cbuiltins\neval\n(S{touch!r}\ntR"
        "I0\n(t(tI00\n}tR.".encode(),
        "persistent id": f"(S'storage'\ncbuiltins\neval\n(S{touch!r}\ntRS'0'\nS'cpu'\nI1\ntQ.".encode(),
        "stack_global of posix": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c"
        + bytes([len(f"touch {path}")])
        + f"touch {path}".encode()
        + b"\x85R."
        if len(path) < 240
        else b"",
    }


def archive(content: bytes) -> bytes:
    """Return an archive of ``torch.save`` with another pickle."""
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("archive/data.pkl", content)
        out.writestr("archive/version", b"3\n")
        out.writestr("archive/byteorder", b"little")
    return file.getvalue()


def templates(canary: Canary) -> dict[str, str]:
    """Return chat templates that leave their sandbox, never end or fill the memory."""
    words = {
        "COMMAND": f"touch {canary.file}",
        "SECRET": str(canary.outside / "secret.txt"),
        "VARIABLE": SECRET_NAME,
        "ESCAPE": ESCAPE,
    }
    filled = {}
    for name, text in TEMPLATES.items():
        for word, value in words.items():
            text = text.replace(word, value)
        filled[name] = text
    return filled


TEMPLATES = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('COMMAND').read() }}",
    "globals of lipsum": "{{ lipsum.__globals__['os'].popen('COMMAND').read() }}",
    "globals of namespace": "{{ namespace.__init__.__globals__['sys'] }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "builtins": "{{ self.__init__.__globals__.__builtins__.open('SECRET').read() }}",
    "attr filter": "{{ (messages | attr('__class__') | attr('__base__')) }}",
    "format string": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "format kept": "{% set f = '{0.__init__.__globals__}'.format %}{{ f(cycler) }}",
    "format by attr": "{{ ('{0.__init__.__globals__}' | attr('format'))(cycler) }}",
    "format by map": (
        "{{ (['{0.__init__.__globals__[os].environ}'] | map('attr', 'format') | list)[0](cycler) }}"
    ),
    "format_map": "{{ ('{a.__class__}' | attr('format_map'))({}) }}",
    "environment": "{{ environ['VARIABLE'] }}{{ os.environ }}",
    "include": "{% include 'SECRET' %}",
    "import": "{% import 'os' as os %}{{ os.system('COMMAND') }}",
    "extends": "{% extends 'SECRET' %}",
    "reduce_ex": "{{ messages.__reduce_ex__(2) }}",
    "append": "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
    "code object": "{{ raise_exception.__code__.co_consts }}",
    "generator frame": "{{ messages | map(attribute='gi_frame.f_builtins') | list | first }}",
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless power": "{{ (messages | length + 8) ** (10 ** 10) }}",
    "constant power": "{{ 10 ** (10 ** 10) }}",
    "endless recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "doubling macro": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(80) }}",
    "huge text": "{{ messages[0].content * 10 ** 10 }}",
    "large text": "{{ messages[0].content * 10 ** 8 }}",
    "huge list": "{{ ([messages] * 10 ** 9) | length }}",
    "huge indent": "{{ 'a' | indent(10 ** 10) }}{{ 'a' | center(10 ** 10) }}",
    "huge format width": "{{ '%999999999d' | format(1) }}",
    "control characters": "{{ raise_exception('ESCAPE') }}",
    "does not compile": "{{ ESCAPE messages",
    "very deep": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "50 MB": "{# " + "x" * 50_000_000 + " #}",
}
"""Chat templates, in which `templates` replaces the words COMMAND, SECRET, VARIABLE and ESCAPE."""
DEEP = "[" * 200_000 + "]" * 200_000
"""JSON that is nested deeper than a recursive reader can follow."""
JSON: dict[str, str] = {
    "deep": DEEP,
    "deep in a key": '{"a": ' + DEEP + "}",
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "a number of 10^6 digits": '{"a": 1' + "0" * 10**6 + "}",
    "NUL": "\0" * 1000,
    "half of a surrogate pair": '{"\\ud800": "\\ud800"}',
    "no object": "[1, 2]",
    "null": "null",
    "cut": '{"a": 1',
    "twice": '{"a": 1, "a": 2}',
}
"""Texts that JSON readers should refuse, if an object with known keys is expected."""
YAML: dict[str, str] = {
    "object/apply": "!!python/object/apply:os.system ['touch COMMAND_FILE']\n",
    "object/new": "model: !!python/object/new:os.system ['touch COMMAND_FILE']\n",
    "name": "model: !!python/name:os.system\n",
    "billion laughs": "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{b}: &{b} [" + ", ".join([f"*{a}"] * 10) + "]\n" for a, b in zip("abcdefgh", "bcdefghi")
    ),
    "itself": "a: &a\n  b: *a\n",
    "deep": "[" * 100_000,
    "control characters": f"model: '{ESCAPE.encode('unicode_escape').decode()}'\n",
    "merge": "a: &a {hidden_size: 1}\nmodel: {<<: *a}\n",
    "a number of 10^5 digits": "model: {hidden_size: 1" + "0" * 10**5 + "}\n",
    "no mapping": "- a\n- b\n",
    "two documents": "model: {}\n---\nmodel: {}\n",
    "NaN": "optimizer: {lr: .nan}\n",
    "base 60": "model: {hidden_size: 1:1:1}\n",
}


def gzip_bomb(size: int = 1 << 30) -> bytes:
    """Return a compressed stream of ``size`` spaces."""
    packed = BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        for _ in range(size >> 20):
            file.write(b" " * (1 << 20))
    return packed.getvalue()


def xz_of_much_memory() -> bytes:
    """Return a stream that needs 1.5 GiB to be decompressed."""
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": (1 << 30) + (1 << 29)}]
    return lzma.compress(b"a", filters=filters)


BOMBS: dict[str, Callable[[], bytes]] = {
    "gzip": gzip_bomb,
    "gzip of gzip": lambda: gzip.compress(gzip_bomb()),
    "bzip2": lambda: bz2.compress(b" " * (8 << 20)) * 128,
    "xz of 1.5 GiB": xz_of_much_memory,
}
"""Compressed streams of 1 GiB, and a stream that needs much memory."""


def safetensors_file(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    """Return a safetensors file with any header, and with another length of it if ``size`` is given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data
