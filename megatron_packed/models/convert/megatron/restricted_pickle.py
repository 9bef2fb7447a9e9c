"""Unpickler that only builds plain values, and calls and imports nothing.

Each name in a pickle becomes a subclass of `Made`, which has only the name. A call in the pickle
becomes an instance with its arguments, unless it builds a plain container, for example
``OrderedDict()``. Names outside of the tables below are refused, and so are opcodes that neither
torch nor Megatron writes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from functools import cache
from typing import Any, cast

CLASSES = {
    "argparse.Namespace",
    "collections.OrderedDict",
    "collections.defaultdict",
    "builtins.dict",
    "builtins.list",
    "builtins.set",
    "__builtin__.set",
    "_codecs.encode",
    "signal.Signals",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",  # by Python 3.13
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
    "torch._utils._rebuild_tensor_v2",
}
"""Names that a checkpoint of Megatron contains, besides data types and Megatron's own options."""
STORAGE_DTYPES = {
    "Float": "float32",
    "BFloat16": "bfloat16",
    "Half": "float16",
    "Double": "float64",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
"""Data type of the elements of each class of storage, ``torch.<key>Storage``."""
_TORCH = {f"torch.{key}Storage" for key in STORAGE_DTYPES} | {
    f"torch.{name}" for name in STORAGE_DTYPES.values()
}
_BEGINNINGS = (
    "megatron.",
    *(f"torch.distributed.checkpoint.{name}." for name in ("metadata", "planner", "filesystem")),
)
"""Beginnings of further names: enumerations among the options, and the classes of ``.metadata``."""
MEMBER = "builtins.getattr"
"""Function by which Python 3.11.0 to 3.11.3 writes a member of an enumeration. It is never called."""


_LITERALS = """
    NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
    BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
"""
_CONTAINERS = """
    MARK EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS
    EMPTY_SET ADDITEMS EMPTY_DICT SETITEM SETITEMS
"""
_OBJECTS = """
    PROTO FRAME STOP MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
    GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID
"""
_OPCODES = frozenset(f"{_LITERALS} {_CONTAINERS} {_OBJECTS}".split())
"""Opcodes that torch and Megatron write."""


class RefusedPickle(Exception):
    """Error for a pickle that is damaged, or that contains what no checkpoint of Megatron does."""


class Made:
    """Object that a pickle describes, with its arguments and its state.

    A name of a class or function in a pickle is a subclass with nothing but the name.
    """

    name = ""
    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> Made:
        if cls.name in _PLAIN:
            # A plain value stands in the place of the object.
            return cast(Made, _PLAIN[cls.name](*arguments))
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        if self.state is not None:
            raise RefusedPickle("is damaged (it gives a second state to a value)")
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[Made]:
        full = f"{module}.{name}"
        allowed = full in CLASSES or full in _TORCH or full.startswith(_BEGINNINGS)
        if not allowed and full != MEMBER:
            raise RefusedPickle(unknown(full))
        return _named(full)

    def persistent_load(self, reference: Any) -> tuple[Any, ...]:
        """Return the reference to a storage of a tensor, outside of the pickle."""
        if type(reference) is not tuple:
            raise RefusedPickle("is damaged (a tuple is missing)")
        return reference


def load(data: bytes) -> object:
    """Return the value of a pickle.

    Raises:
        RefusedPickle: the pickle is damaged, or names a class or has an opcode that is not known.
    """
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in _OPCODES:
                raise RefusedPickle(f"has the opcode {opcode.name}, which torch does not write")
            # The memo is a table with room for the largest number.
            if opcode.name == "LONG_BINPUT" and int(argument or 0) > len(data):
                raise RefusedPickle(f"is damaged (its memo has no place {argument})")
        return _Unpickler(io.BytesIO(data)).load()
    except RefusedPickle:
        raise
    except Exception as error:  # damaged bytes make both readers fail in many ways
        raise RefusedPickle(f"is damaged ({type(error).__name__})") from None


@cache
def _named(name: str) -> type[Made]:
    return type("Made", (Made,), {"name": name})


def _member(enumeration: Any, member: Any) -> Made:
    """Return a member of an enumeration, with the member's name as its argument."""
    made: Any = enumeration(str(member)) if isinstance(enumeration, type) else None
    if not isinstance(made, Made) or not made.name.startswith(_BEGINNINGS):
        raise RefusedPickle(unknown(MEMBER))
    return made


_PLAIN: dict[str, Callable[..., object]] = {
    **dict.fromkeys(
        ("collections.OrderedDict", "collections.defaultdict", "builtins.dict"), lambda *_: {}
    ),
    **dict.fromkeys(("builtins.set", "__builtin__.set", "builtins.list"), list),
    "torch.Size": tuple,
    "_codecs.encode": lambda text, *_: str(text).encode("latin-1"),
    MEMBER: _member,
}
"""Functions for the names whose calls build plain values."""


def unknown(name: str) -> str:
    """Return the reason for refusing a pickle with this name."""
    return f"names {name}, which no checkpoint of Megatron contains"
