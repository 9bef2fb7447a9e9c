"""Triton's interpreter with the same results in less time."""

from functools import cache, partial

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

slow_dtype = interpreter._get_np_dtype
slow_reduce = interpreter.ReduceOps.generic_reduce
slow_scan = interpreter.ScanOps.generic_scan
slow_patch = interpreter._patch_lang
slow_block = tl.block_type.__init__
slow_unwrap = tl.core._unwrap_if_constexpr
slow_promotion = TritonSemantic.computation_type_impl
slow_broadcast = TritonSemantic.broadcast_impl_value
slow_operands = TritonSemantic.binary_op_type_checking_impl
slow_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
slow_check = interpreter.TensorHandle.__post_init__

PLAIN = frozenset((int, float, bool, str, type(None), tl.dtype, tl.tensor))
"""Types without a constexpr inside."""
UNCHANGED = {"int32": np.int32, "int64": np.int64, "fp32": np.float32}
"""Types whose results have the same type if the other operand has it too, or is a small number."""
SCALAR_SHAPE = tl.tuple([]), tl.constexpr(1)
blocks = {}
"""Values that the interpreter computes for a type of tiles, by its element type and its shape."""
shapes = {}
"""Shape and number of elements of a tile, by the shape as integers."""
promotions = {}
"""Types of results, by the types of the operands."""
valid = set()
"""Pairs of an element type and the size of numpy's elements that fit together."""


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


@cache
def modules_of(function):
    """Return the modules of Triton's language that a function uses."""
    used = [id(value) for value in function.__globals__.values()]
    return [module for module in (tl, tl.core) if id(module) in used]


def patch(function):
    """Patch the modules that a function uses, unless the kernel that calls it has done so."""
    if any(tl.core.is_builtin(module.load) for module in modules_of(function)):
        return slow_patch(function)
    return interpreter._LangPatchScope()


def patch_builtin(obj, name, member, builder, scope):
    """Call a function of the language without its check that a compiler calls it."""
    function = getattr(member, "__wrapped__", member)
    semantic = interpreter.interpreter_semantic

    def call(*arguments, **options):
        options["_semantic"] = semantic
        return function(*arguments, **options)

    scope.set_attr(obj, name, call)


def unwrap(value):
    """Return values without a constexpr as they are."""
    return value if type(value) in PLAIN else slow_unwrap(value)


def block(self, element_ty, shape):
    """Compute the attributes of a type of tiles once."""
    numbers = tuple([size if type(size) is int else unwrap(size) for size in shape])
    key = (type(element_ty), element_ty.name, numbers)
    if key not in blocks:
        slow_block(self, element_ty, shape)
        blocks[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = blocks[key]


def tensor(self, handle, type):
    """Make a tensor whose shape is shared with the other tensors of this shape."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = SCALAR_SHAPE
    if type.is_block():
        numbers = tuple(type.shape.values)
        if numbers not in shapes:
            sizes = tl.tuple([tl.constexpr(size) for size in numbers])
            shapes[numbers] = sizes, tl.constexpr(type.numel)
        self.shape, self.numel = shapes[numbers]


def promotion(self, a, a_is_scalar, b, b_is_scalar, div_or_mod):
    """Look the type of a result up in a table."""
    key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
    if key not in promotions:
        promotions[key] = slow_promotion(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
    return promotions[key]


def operands(self, a, b, *options):
    """Return a tile and a tile or number of its type without a search for the type of the result."""
    if type(a) is tl.tensor and a.dtype.is_ptr() and options == (True, True):  # an addition
        if type(b) is tl.tensor and b.dtype.name in UNCHANGED and not b.dtype.is_floating():
            return self.broadcast_impl_value(a, b)
    elif type(a) is tl.tensor and (numpy_type := UNCHANGED.get(a.dtype.name)):
        if type(b) is tl.tensor:
            if a.dtype.name == b.dtype.name:
                return self.broadcast_impl_value(a, b)
        elif (type(b) is int and abs(b) < 2**31) or (type(b) is float and numpy_type is np.float32):
            data = np.full(a.handle.data.shape, b, numpy_type)
            return a, tl.tensor(interpreter.TensorHandle(data, a.dtype), a.type)
    return slow_operands(self, a, b, *options)


def check(self):
    """Check the size of elements once for each pair of types."""
    key = self.dtype.name, self.data.itemsize
    if key not in valid:
        slow_check(self)
        valid.add(key)


def broadcast(self, a, b):
    """Return tiles of one shape as they are."""
    if a.type.is_block() and b.type.is_block() and a.type.shape.values == b.type.shape.values:
        return a, b
    return slow_broadcast(self, a, b)


def overflow(self, a, b, operation):
    """Compute the condition of an assertion only if assertions are on; the interpreter always does."""
    if self.builder.options.debug:
        slow_overflow(self, a, b, operation)


def install():
    """Replace the slow functions of the interpreter, for the whole process."""
    tl.core._unwrap_if_constexpr = unwrap
    tl.block_type.__init__ = block
    tl.tensor.__init__ = tensor
    TritonSemantic.computation_type_impl = promotion
    TritonSemantic.broadcast_impl_value = broadcast
    TritonSemantic.binary_op_type_checking_impl = operands
    TritonSemantic.binary_op_sanitize_overflow_impl = overflow
    interpreter._get_np_dtype = quick_dtype()
    interpreter.ReduceOps.generic_reduce = reduce
    interpreter.ScanOps.generic_scan = scan
    interpreter.TensorHandle.__post_init__ = check
    interpreter._patch_lang = patch
    interpreter._patch_attr = patch_builtin
