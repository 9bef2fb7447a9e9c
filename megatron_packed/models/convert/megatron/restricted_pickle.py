"""Interpreter of pickles that only builds plain values, and calls and imports nothing.

The names in a pickle stay names. A call in the pickle becomes a `Made` value with its arguments,
unless it builds a plain container, for example ``OrderedDict()``. Names outside of the tables below
are refused, and so are opcodes that neither torch nor Megatron writes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

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


class RefusedPickle(Exception):
    """Error for a pickle that is damaged, or that contains what no checkpoint of Megatron does."""


class Name(NamedTuple):
    """Name of a class or function in a pickle; nothing is imported."""

    name: str


class StorageReference(NamedTuple):
    """Reference to a storage of a tensor, outside of the pickle."""

    reference: tuple[Any, ...]


class Made:
    """Object that a pickle describes: the name of its class, its arguments and its state."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None


_CONSTANTS = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_TUPLE": (),
}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PASSED = {"PROTO", "FRAME"}
_MARK = object()


def load(data: bytes) -> object:
    """Return the value of a pickle.

    Raises:
        RefusedPickle: the pickle is damaged, or names a class or has an opcode that is not known.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.result()
            machine.step(opcode.name, argument)
    except RefusedPickle:
        raise
    except Exception as error:  # damaged bytes make pickletools and the steps fail in many ways
        raise RefusedPickle(f"is damaged ({type(error).__name__})") from None
    raise RefusedPickle("is damaged (it has no end)")


class _Machine:
    """Stack and memo of one pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.actions: dict[str, Callable[[], None]] = {
            "MEMOIZE": lambda: self._remember(len(self.memo)),
            "EMPTY_LIST": lambda: self.stack.append([]),
            "EMPTY_DICT": lambda: self.stack.append({}),
            "EMPTY_SET": lambda: self.stack.append([]),
            "MARK": lambda: self.stack.append(_MARK),
            "TUPLE": lambda: self.stack.append(tuple(self._marked())),
            "APPEND": lambda: self._extend([self.stack.pop()]),
            "APPENDS": lambda: self._extend(self._marked()),
            "ADDITEMS": lambda: self._extend(self._marked()),
            "SETITEM": lambda: self._set_items(self._last(2)),
            "SETITEMS": lambda: self._set_items(self._marked()),
            "STACK_GLOBAL": lambda: self._name(*self._last(2)),
            "REDUCE": self._make,
            "NEWOBJ": self._make,
            "BUILD": self._build,
            "BINPERSID": lambda: self.stack.append(StorageReference(_tuple(self.stack.pop()))),
        }

    def step(self, opcode: str, argument: Any) -> None:
        if opcode in _LITERALS:
            self.stack.append(argument)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in _SHORT_TUPLES:
            self.stack.append(tuple(self._last(_SHORT_TUPLES[opcode])))
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self._remember(argument)
        elif opcode in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif opcode == "GLOBAL":
            self._name(*argument.split(" ", 1))
        elif opcode in self.actions:
            self.actions[opcode]()
        elif opcode not in _PASSED:
            raise RefusedPickle(f"has the opcode {opcode}, which torch does not write")

    def result(self) -> object:
        (value,) = self.stack
        return value

    def _remember(self, position: int) -> None:
        self.memo[position] = self.stack[-1]

    def _last(self, count: int) -> list[Any]:
        values = self.stack[-count:]
        if len(values) < count or any(value is _MARK for value in values):
            raise RefusedPickle("is damaged (a value is missing)")
        del self.stack[-count:]
        return values

    def _marked(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise RefusedPickle("is damaged (a mark is missing)")
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values

    def _extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise RefusedPickle("is damaged (it appends to another value than a list)")
        self.stack[-1].extend(values)

    def _set_items(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not dict or len(values) % 2:
            raise RefusedPickle("is damaged (it sets keys of another value than a dictionary)")
        self.stack[-1].update(zip(values[::2], values[1::2]))

    def _name(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}"
        allowed = full in CLASSES or full in _TORCH or full.startswith(_BEGINNINGS)
        if not allowed and full != MEMBER:
            raise RefusedPickle(unknown(full))
        self.stack.append(Name(full))

    def _make(self) -> None:
        called, arguments = self._last(2)
        if not isinstance(called, Name) or type(arguments) is not tuple:
            raise RefusedPickle("is damaged (it calls a value that is no class)")
        self.stack.append(_plain(called.name, arguments))

    def _build(self) -> None:
        made, state = self._last(2)
        if not isinstance(made, Made) or made.state is not None:
            raise RefusedPickle("is damaged (it gives a state to a plain value)")
        made.state = state
        self.stack.append(made)


def _plain(name: str, arguments: tuple[Any, ...]) -> object:
    """Return the plain value that a call builds, or the call as a `Made` value."""
    if name in ("collections.OrderedDict", "collections.defaultdict", "builtins.dict"):
        return {}
    if name in ("builtins.set", "__builtin__.set", "builtins.list"):
        return list(*map(_list, arguments))
    if name == "torch.Size":
        return _tuple(*arguments)
    if name == "_codecs.encode":
        return str(arguments[0]).encode("latin-1")
    if name == MEMBER:
        return _member(*arguments)
    return Made(name, arguments)


def _member(enumeration: Any, member: Any) -> Made:
    """Return a member of an enumeration, with the member's name as its argument."""
    if not isinstance(enumeration, Name) or not enumeration.name.startswith(_BEGINNINGS):
        raise RefusedPickle(unknown(MEMBER))
    return Made(enumeration.name, (str(member),))


def unknown(name: str) -> str:
    """Return the reason for refusing a pickle with this name."""
    return f"names {name}, which no checkpoint of Megatron contains"


def _tuple(value: Any) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise RefusedPickle("is damaged (a tuple is missing)")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise RefusedPickle("is damaged (a list is missing)")
    return value
