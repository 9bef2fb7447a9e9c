"""Triton's interpreter with the same results in less time."""

from functools import partial

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

slow_dtype = interpreter._get_np_dtype
slow_reduce = interpreter.ReduceOps.generic_reduce
slow_scan = interpreter.ScanOps.generic_scan
slow_patch = interpreter._patch_lang


def combined(op, before, after):
    """Return the results of the combining function for two tuples of tiles."""
    result = op.combine_fn.fn(*before, *after)
    return result if isinstance(result, tuple) else (result,)


def slices(op, tiles):
    """Yield the tiles' slices along the axis, each as a tuple of tiles without the axis."""
    for i in range(tiles[0].handle.data.shape[op.axis]):
        yield tuple(op.to_tensor(x.handle.data.take(i, op.axis), x.dtype) for x in tiles)


def reduce(self, tiles):
    """Combine whole slices in the interpreter's order, where it combines single elements."""
    if self.axis is None or tiles[0].handle.data.ndim < 2:
        return slow_reduce(self, tiles)
    first, *rest = slices(self, tiles)
    for more in rest:
        first = combined(self, first, more)
    if self.keep_dims:
        expand = partial(np.expand_dims, axis=self.axis)
        first = tuple(self.to_tensor(expand(x.handle.data), x.dtype) for x in first)
    return list(first)


def scan(self, tiles):
    """Combine whole slices in the interpreter's order, where it combines single elements."""
    if tiles[0].handle.data.ndim < 2:
        return slow_scan(self, tiles)
    first, *rest = slices(self, tiles)
    found = [first]
    for more in rest:
        found.append(combined(self, found[-1], more))
    return [
        self.to_tensor(np.stack([part.handle.data for part in parts], self.axis), x.dtype)
        for parts, x in zip(zip(*found), tiles)
    ]


def quick_dtype():
    """Return a function that finds numpy's dtype in a table; the interpreter makes the table at each call."""
    names = {
        dtype.name: slow_dtype(dtype)
        for dtype in vars(tl).values()
        if type(dtype) is tl.dtype and dtype != tl.void
    }

    def find(dtype):
        return names[dtype.name] if type(dtype) is tl.dtype else slow_dtype(dtype)

    return find


def patch(function):
    """Patch the modules that a function uses, unless the kernel that calls it has done so."""
    modules = [
        module
        for module in (tl, tl.core)
        if any(module is value for value in function.__globals__.values())
    ]
    if any(tl.core.is_builtin(module.load) for module in modules):
        return slow_patch(function)
    return interpreter._LangPatchScope()


def install():
    """Replace the slow functions of the interpreter, for the whole process."""
    interpreter._get_np_dtype = quick_dtype()
    interpreter.ReduceOps.generic_reduce = reduce
    interpreter.ScanOps.generic_scan = scan
    interpreter._patch_lang = patch
